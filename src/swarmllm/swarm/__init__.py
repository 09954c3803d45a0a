"""Pure decisions about a swarm: no I/O, no clock, no torch; time and randomness are arguments.

routing         which servers run which blocks for a client
route_costs     what a hop costs
round_trips     how far the servers are, and whom to measure next
retry           when to try again, and whom to avoid
placement       which blocks a server should hold
stacks          how blocks are written
weight_digests  which servers hold the same ones
plausible       how much of servers' own claims counts
explain         a route in words and numbers
block_map       a swarm as text
simulator       a thousand servers in simulated time
"""
