"""A client's view of the swarm, and its ways to the servers.

swarm_view  what users ask, and where the following comes together; adapters on their way to servers
servers     the servers of a model: their blocks, their round trips, which of them may be used
routes      which servers to use; which to avoid, and for how long, is decided by `swarm/retry`
connection  one stream to one server; questions about the inside of its blocks
event_loop  the client's thread, and how callers cross into it; several things at once
"""
