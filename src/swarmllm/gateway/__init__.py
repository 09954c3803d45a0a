"""People's way into a swarm: an OpenAI-compatible HTTP API, a chat page, a picture of the swarm, and metrics.

In the order in which a request meets them:

connections       sockets on which nobody asks anything don't stay
app               the ASGI application: all routes and what they share
guard             who may ask: hosts, origins, API keys, rates
request_bodies    what may be asked, checked field by field
chat_request      the same of a chat
decoding_fields   ways to choose tokens in it
chat_messages     messages and tools in it
unknown_fields    what of a request is not honoured, and refused
serving           from a request to its answer, whole or as a stream
openai_routes     /v1/…: what OpenAI's clients ask
other_routes      what Anthropic's and Ollama's clients ask, and /v1/responses: translations to chats
anthropic_messages  Anthropic's requests and answers
ollama            Ollama's
responses         OpenAI's items
stored_responses  those that are kept for the next request
token_routes      /tokenize and /detokenize
websocket         the same as messages of a WebSocket
engine            worker threads and a bounded queue
model_choice      the models that are offered, by name
language_model    one of them: its client in the swarm, its tokenizer, perhaps a local copy
generation        one request: a session of its own, tokens out, cancellation, failover, the local fallback
events            what happens meanwhile, from the worker threads to the answers
sampling          which token is taken
grammar           which tokens a JSON schema, a regular expression or a grammar allows
readers           what is thought, said and called in an answer
reasoning         what a thinking model writes before its answer
tool_calls        calls of tools in answers
call_forms        how each family of models writes them
harmony           how gpt-oss writes all of that
text              from tokens to text, as they come
answers           what the answers of all APIs share
openai_answers    the shapes of OpenAI's
errors            the shapes of OpenAI's errors
trace             where the time of a request went
swarm_watch       what /api/swarm knows
swarm_picture     what the picture of the swarm shows
metrics           what /metrics shows
openapi           the OpenAPI document, which /docs shows
page_files        the chat page and the picture, from pages/
waiting           before the swarm is complete
settings          what a gateway can be told
__main__          the command

Nothing here is imported by anything but the command (`gateway/__main__`).
"""
