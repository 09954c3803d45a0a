"""The client's half of a model: embeddings, final norm and head; its blocks are stand-ins for those on servers.

loading          load the Hugging Face class without its blocks
client_shell     differences of the loaded class from transformers'; the cache of a forward
blocks_proxy     the module in its block list; the call that is under way
stack_forward    the forward of the module that loops over blocks: arguments are checked and made ready to travel
playback         hidden states and attentions, returned by the model's own code; hooks on whole blocks
remote_cache     a cache of transformers whose keys and values are on servers
hollow_blocks    the block list as others see it; the changes that servers compute with, read from it at each forward
hollow_modules   modules whose weights are on servers: changes that can't reach the servers are refused
packed_head      the head with weights in few bits, where no gradients are recorded
tuned_prompts    trained vectors, keys and values before the text
"""
