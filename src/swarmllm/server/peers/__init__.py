"""This server's dealings with other peers.

links          streams to successors, which clients name
pushes         tensors that servers pass on for requests without a session
other_servers  the swarm as this server sees it
peer_limits    streams and bytes that one peer may have, and which clients come first
"""
