"""Everything between processes: the only room that knows hivemind, sockets and bytes on a wire.

wire/   messages and the streams that carry them; no hivemind
relay/  peers that nobody can dial, reached through others; no hivemind
p2p/    this process among others: daemon, identity, DHT, who is there
"""
