"""One text in the swarm: a chain of servers that hold its KV caches.

inference_session  the session as users hold it; what they hand to it, checked
legs               its way through all blocks, of which some may be here
session_text       what the text's servers have seen, and room for more
chain              steps through all servers, ahead of their results; repairs where one fails
in_flight          steps under way, and which answers can belong to them
open_route         the servers of a chain, in the order of their blocks
hop                one of these servers
"""
