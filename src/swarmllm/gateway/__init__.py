"""People's way into a swarm: an OpenAI-compatible HTTP API, a chat page, a picture of the swarm, and metrics.

In the order in which a request meets them:

app              the ASGI application: all routes and what they share
guard            who may ask: hosts, origins, API keys, rates
request_bodies   what may be asked, checked field by field
openai_routes    /v1/…: requests in, answers and streams out;  websocket: the same as messages of a WebSocket
engine           worker threads, a bounded queue, the model and its tokenizer
generation       one request: a session of its own, tokens out, cancellation, failover, the local fallback
sampling, text   which token is taken (grammar: JSON schemas), and what text it makes
answers          the shapes of OpenAI's answers
swarm_watch      what /api/swarm and the picture show
metrics          what /metrics shows
pages/           the chat page and the picture, as plain files

Nothing here is imported by anything but the command (`gateway/__main__`).
"""
