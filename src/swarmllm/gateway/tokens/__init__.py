"""One token after the other.

sampling  which token is taken
grammar   which tokens a JSON schema, a regular expression or a grammar allows
text      from tokens to text, as they come
middle    prompts for what stands between two texts
events    what the worker threads tell the answers of all that
"""
