"""Everything between processes: the only room that knows hivemind, sockets and bytes on a wire.

messages          headers of the messages, checked field by field
frames            a message as bytes and back, without I/O
tensor_codec      tensors as the payload of a message
stream            messages to and from one peer, with signs of life
patience          how long a silent peer is waited for
protocol          versions, greeting, errors on the wire; the names that client and server import
identity          the key behind a peer id
daemon            the libp2p daemon of this process
record_validator  which records of the DHT are valid
record_store      which of them a node keeps, when there are too many
dht_protocol      what nodes of the DHT ask of each other, with bounds
dht               this peer's node of the DHT
peer              all of the above as one member of the swarm
block_directory   who announces which blocks
verified_peers    who of them is there, and serves them
"""
