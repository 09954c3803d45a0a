"""Peers that nobody can dial, reached through others: libp2p's circuit relay v2, in our own words. No hivemind.

A peer behind a NAT holds a *reservation* at a public one, the relay. Who wants to reach it opens a *circuit* there: the
relay asks the peer and from then on passes bytes on, both ways. They are those of a libp2p connection, encrypted and
authenticated between the two ends. https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md

service  what a relay does for others, for how many, and how many bytes a second
guest    what a peer does to be reached through relays
wire     the messages between a relay and its peers, and addresses as bytes
"""
