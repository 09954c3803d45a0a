"""Circuit relay v2 of libp2p: peers that nobody can dial are reached through other peers. No hivemind.

A peer behind a NAT holds a *reservation* at a public peer, the relay. To reach it, another peer opens a *circuit* at
the relay. The relay asks the hidden peer, and from then on passes bytes on in both directions. The bytes are a libp2p
connection, encrypted and authenticated between the two ends.
https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md

service   the relay: keeps reservations, opens circuits, limits their number and their bytes a second
messages  messages between a relay and its peers, and addresses as bytes

`p2p/reachability` is the other side: it asks for reservations.
"""
