"""People's way into a swarm: an OpenAI-compatible HTTP API, a chat page, a picture of the swarm, and metrics.

In the order in which a request meets them:

connections       sockets on which nobody asks anything don't stay
app               the ASGI application: all routes and what they share
guard             who may ask: hosts, origins, API keys, rates
request_bodies    what may be asked, checked field by field
decoding_fields   ways to choose tokens in it
chat_messages     messages and tools in it
unknown_fields    what of a request is not honoured, and refused
openai_routes     /v1/…: requests in, answers and streams out
token_routes      /tokenize and /detokenize
websocket         the same as messages of a WebSocket
engine            worker threads and a bounded queue
model_choice      the models that are offered, by name
language_model    one of them: its client in the swarm, its tokenizer, perhaps a local copy
generation        one request: a session of its own, tokens out, cancellation, failover, the local fallback
events            what happens meanwhile, from the worker threads to the answers
sampling          which token is taken
grammar           which tokens a JSON schema, a regular expression or a grammar allows
reasoning         what a thinking model writes before its answer
tool_calls        calls of tools in answers
text              from tokens to text, as they come
answers           the shapes of OpenAI's answers
errors            the shapes of OpenAI's errors
trace             where the time of a request went
swarm_watch       what /api/swarm knows
swarm_picture     what the picture of the swarm shows
metrics           what /metrics shows
openapi           the OpenAPI document
page_files        the chat page and the picture, from pages/
settings          what a gateway can be told
__main__          the command

Nothing here is imported by anything but the command (`gateway/__main__`).
"""
