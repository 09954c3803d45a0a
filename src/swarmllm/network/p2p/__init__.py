"""This process as a peer of the swarm, and the other peers.

peer             one object for all of this: a daemon, a node of the DHT, streams to and from others
daemon           the libp2p daemon of this process
addresses        choosing, checking and encoding addresses
direct           connections without the daemon, to which streams move; their tickets
reachability     whether others can dial this peer; if not, its reservations at relays
identity         the key behind a peer id; the proof that a client belongs to a contributor
dht_node         this peer's node of the DHT; a file with peers to rejoin when the initial peers are gone
dht_protocol     calls between nodes of the DHT, with limits
records          which records are valid, and which a node keeps when there are too many
block_directory  the servers' announcements in the DHT
verified_peers   servers that were greeted and serve what they announce
discovery        peers on the local network
_hivemind        the only import of hivemind
"""
