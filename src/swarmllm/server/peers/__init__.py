"""This server's dealings with other peers.

links          streams to successors
other_servers  the swarm as this server sees it
twins          other processes with the identity of this server
targets        whom it dials because a client says so
peer_limits    what one peer may have at a time
standing       who comes first
"""
