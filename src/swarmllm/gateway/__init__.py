"""A web server in front of a swarm: an OpenAI-compatible HTTP API, a chat page, a page of the swarm, and metrics.

It is a guest of this package: it imports `swarmllm.api` only, and nothing imports it but the command. Files in the
order in which a request meets them:

guard            limits for strangers: hosts, origins, API keys, rates, idle connections
app              the ASGI application: the list of APIs, the pages, health; also before the swarm is complete
routes           routes as a table: handlers, keys, shapes of errors, the OpenAPI document
apis/            the APIs of OpenAI, Anthropic and Ollama: checked requests, and answers in their shapes
engine/          the models, and the worker threads that generate with them
sampling         chooses tokens, within a grammar if there is one
text             turns tokens into text, and holds the events that bring it to the answers
output_parsing   splits an answer into thoughts, text and calls of tools
machines         the page and commands of a swarm of machines, and its models that come and go
monitor          watches the swarm's servers, and draws the picture for people
training_runs    common trainings, from the logs of this machine
metrics          the figures of /metrics
errors           errors of HTTP, in OpenAI's shape
settings         the settings, from which the flags are made
__main__         the command
"""
