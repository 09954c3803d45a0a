"""This process as a member of the swarm, and the other members.

peer             a daemon, a node of the DHT, streams to and from others: all of this together
daemon           the libp2p daemon of this process
addresses        which addresses others are told, and which of theirs make sense
reachability     whether others can dial this peer; if not, its places at relays
identity         the key behind a peer id; the proof that a client belongs to somebody who serves
dht_node         this peer's node of the DHT; peers that were met, for when the initial peers are gone
dht_protocol     what nodes of the DHT ask of each other, with bounds
records          which records are valid, and which a node keeps when there are too many
block_directory  who announces which blocks
verified_peers   who of them is there, and serves them
discovery        who else is in the local network
_hivemind        the only import of hivemind
"""
