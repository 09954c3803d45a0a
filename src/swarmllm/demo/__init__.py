"""A whole swarm on this machine.

__main__     the command: a chat during which a server is killed
local_swarm  real servers on 127.0.0.1, also for notebooks and tests; two models without a hub, one in embedded/
"""
