"""A client's view of the swarm, and its ways to the servers.

swarm_view       what users ask, and where the following comes together
look_ups         who serves what
routes           which way to take, and whom to avoid
distances        how far the servers are
inner_answers    what passes between blocks: asked for, and answered
connection       one stream to one server
event_loop       the client's thread, and how callers cross into it
concurrency      several things at once
claimed_traits   what servers claim of the blocks, compared with what this client knows
agreed_weights   which weights are used where servers hold different ones
adapter_uploads  adapters on their way to servers
active_adapter   which version of a served adapter is used
tolerances       how much honest servers differ
this_machine     how fast this machine would be alone
"""
