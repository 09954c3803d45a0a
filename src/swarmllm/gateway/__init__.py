"""People's way into a swarm: an OpenAI-compatible HTTP API, a chat page, a picture of the swarm, and metrics.

In the order in which a request meets them:

guard            limits for strangers: hosts, origins, API keys, rates, idle connections
app              the ASGI application: the list of APIs, the pages, health; before the swarm is complete too
routes           routes as a table: handlers, keys, shapes of errors, the OpenAPI document
apis/            the APIs of OpenAI, Anthropic and Ollama: requests, checked field by field, and the shapes of answers
engine/          models, and the worker threads that write with them
sampling         which token is taken, which a grammar allows
text             from tokens to text, and the events that bring it to the answers
output_parsing   thoughts, text and calls of tools in an answer
monitor          keeps in touch with the swarm's servers, and draws the picture that people see
metrics          what /metrics shows
errors           the shapes of OpenAI's errors
settings         what a gateway can be told
__main__         the command

Nothing here is imported by anything but the command (`gateway/__main__`).
"""
