"""Commands without a room of their own. `swarmllm X` and `python -m swarmllm X` run `main(argv)` of one of them.

up               this machine in a swarm that plans itself
use              tells the machines which models to serve
dht              a bootstrap peer; invites
generate         text in the terminal
chat             a conversation in the terminal
status           the swarm's servers, and missing blocks
models           models that fit this machine, or a swarm's machines
calibrate        notes how large the inputs of a model's weights are, for servers that round them
runs             trainings that several homes share, by their logs
adapters         adapters that others shared; merging an adapter into its base model
doctor           the command that checks this machine and network
doctor_checks    the checks of machine and network
doctor_findings  its settings and findings, and the check of packages

The commands `server`, `gateway` and `demo` are the `__main__` of their rooms.
"""
