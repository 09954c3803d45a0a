"""People's way into a swarm: an OpenAI-compatible HTTP API, a chat page, a picture of the swarm, and metrics.

In the order in which a request meets them:

connections      sockets on which nobody asks anything don't stay
app              the ASGI application: all routes and what they share
guard            who may ask: hosts, origins, API keys, rates
apis/            the APIs of OpenAI, Anthropic and Ollama: routes, and the shapes of answers
requests/        what may be asked, checked field by field
engine/          models, and the worker threads that write with them
tokens/          one token after the other: which is taken, and the text that they make
output_parsing/  what is thought, said and called in a text
swarm/           what the swarm looks like now, and did in the last hour
metrics          what /metrics shows
errors           the shapes of OpenAI's errors
page_files       the chat page and the picture, from pages/
waiting          before the swarm is complete
settings         what a gateway can be told
__main__         the command

Nothing here is imported by anything but the command (`gateway/__main__`).
"""
