"""A whole swarm on this machine.

__main__     the command: a story, and a server that is lost on the way
local_swarm  real servers on 127.0.0.1, for notebooks and tests as well; the small trained model from embedded/
"""
