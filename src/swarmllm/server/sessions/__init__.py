"""Sessions: clients' texts on this server, with their KV caches.

session       one session: its messages in order, its place in a chain, where its outputs go; the table of all sessions
step_runner   its steps, run on its cache
kv_cache      memory that sessions lease, and that their messages take while they wait
prefix_cache  pages of prompts that several sessions share
"""
