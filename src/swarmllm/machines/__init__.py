"""Machines that serve models together: what each offers and holds, what the swarm was told to serve, where weights are.

agent       `swarmllm up`: looks at the swarm, plans, and serves the blocks of this machine
decisions   which blocks this machine should serve now, and which servers to start and to end; pure
offers      the memory and speed of this machine, and round trips to others
models      the models that the swarm should serve: their sizes, their servers, and the client's part
picture     what people see: JSON of machines, models, commands, and plans before they are commanded
hosting     the server processes of this machine
catalogue   models, their sizes, and their plans on some machines
membership  become a member of a swarm: by invite, on the local network, as its founder
records     what machines tell each other: signed commands, and the record of each machine
reunion     find members again after an outage, or when a split network is whole again
settings    settings of a machine
state       files that survive a restart
weights     the store of this machine's weights: gives pieces to members, fetches those that blocks need
downloads   the taking side: several givers at once, the hub, who of several machines fetches a piece from there
hub         bytes from the hub, and checks of those that other machines gave
holdings    models whose pieces are on this machine
"""
