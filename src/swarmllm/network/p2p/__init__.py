"""This process as a member of the swarm, and the other members.

peer              a daemon, a node of the DHT, streams to others: all of this together
daemon            the libp2p daemon of this process
addresses         which addresses others are told, and which of theirs make sense
dialling          streams to others, directly or through their relays
reachability      whether others can dial this peer; if not, its places at relays
incoming          streams that others open at one protocol
identity          the key behind a peer id
contribution      the proof that a client belongs to somebody who serves
dht_node          this peer's node of the DHT
address_book      peers that were met, for when the initial peers are gone
dht_protocol      what nodes of the DHT ask of each other, with bounds
record_store      which records a node keeps, when there are too many
record_validator  which records are valid
block_directory   who announces which blocks
verified_peers    who of them is there, and serves them
discovery         who else is in the local network
_hivemind         the only import of hivemind
"""
