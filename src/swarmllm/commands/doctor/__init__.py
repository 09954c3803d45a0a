"""`swarmllm doctor`: looks at what a server or client of this machine needs, and names what to mend.

command   its flags, its report, the exit status
findings  what a check is told, and what it says
packages  checks of Python and what is installed
machine   checks of this machine: GPU, memory for the model, disk, identity
network   checks of the network: the port, the swarm and its servers
"""
