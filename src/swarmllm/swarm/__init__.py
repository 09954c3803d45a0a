"""Pure decisions about a swarm: no I/O, no clock, no torch; time and randomness are arguments.

routing      which servers run which blocks for a client
route_costs  what a hop costs
round_trips  how far the servers are, and whom to measure next
retry        when to try again, and whom to avoid
placement    which blocks a server should hold
stacks       how blocks are written
claims       how much of servers' own claims counts, and which hold the same weights
block_map    a swarm as text; a route in words and numbers
simulator    a thousand servers in simulated time
"""
