"""A server: holds a span of blocks, leases KV cache to sessions, and runs steps and batches through its blocks.

__main__   flags → ServerConfig → server
server     start-up, the life of the process, leaving
handler    one stream: what a peer asks for, checked and dispatched
sessions   one client's KV cache on this server, and its place in a chain
links      persistent streams to successors
pushes     what servers pass on to each other for batches
kv_cache   the byte budget that sessions lease from
executor   the one thread that touches blocks and caches
announcer  what the swarm is told, and how often
throughput how fast the blocks are
courtesy   giving way to the owner's programs
"""
