"""Pure decisions about a swarm: no I/O, no clock, no torch. Time and randomness are arguments.

routing      choosing servers for a client's blocks
route_costs  the cost of each hop
round_trips  distances of servers, and which to measure next
retry        when to try again; which peers to avoid, and for how long (bans)
placement    which blocks a server should hold
planning     which machine holds which blocks of a model, in which format, and how fast that is
stacks       blocks in words
claims       limits on servers' claims; digests of their weights
block_map    a swarm as text; a route in words and numbers
"""
