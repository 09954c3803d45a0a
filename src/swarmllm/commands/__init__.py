"""The commands that have no room of their own; `swarmllm X` and `python -m swarmllm X` run `main(argv)` of one of them.

dht              a bootstrap peer; invites
generate         text in the terminal
chat             a conversation in the terminal
status           who serves what
adapters         what others have trained and shared; merges an adapter into its base model
doctor           what this machine and network lack
doctor_checks    checks of machine and network
doctor_findings  settings and findings, and the check of packages

The commands `server`, `gateway` and `demo` are the `__main__` of their rooms.
"""
