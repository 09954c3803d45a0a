"""Everything between processes. Only this room knows hivemind, sockets and bytes on a wire.

wire/   messages and the streams that carry them; no hivemind
relay/  relays for peers that nobody can dial; no hivemind
p2p/    this process as a peer: daemon, identity, DHT, the other peers
"""
