"""Sessions: one text each, on a chain of servers that hold its KV caches.

inference_session  the session as users hold it; checks of what they hand to it
chain              steps through all servers of a chain; repairs and moves of it; noise
in_flight          requests to a chain that wait for an answer; checks of the answers
open_route         the servers of a chain, in the order of their blocks, and the messages to them
session_text       what the servers of a text have seen, and how long it may get
legs               several chains, and blocks of the client itself, in place of one chain
"""
