"""Clients' KV caches on this server.

session_table   all sessions: opened, found, handed over
session         the life of one of them, and its place in a chain
session_size    how much memory it may take
step_runner     its steps, run on its cache
inner_requests  what of their inside is wanted, and how much that is
outlet          where its outputs go
waiting_room    what its messages take while they wait
kv_cache        the byte budget that sessions lease from
shared_prefix   prompts that begin alike, computed once
prefix_cache    the pages of which these are made
"""
