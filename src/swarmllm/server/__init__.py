"""A server: holds a span of blocks, leases KV cache to sessions, and runs steps and batches through its blocks.

__main__     flags → ServerConfig → server
settings     what a server can be told
devices      several devices: a server process for each
one_device   what runs in each of them
server       start-up, the life of the process, leaving
span_life    blocks are loaded, served, and left for others
span_loader  which blocks, and how they are loaded
own_record   what the swarm is told
announcer    how often it is told
rebalancer   when to move to other blocks
metrics      what Prometheus is told
downloads    what may take minutes, beside the event loop
streams/     what peers ask for, checked and dispatched
sessions/    KV caches of clients
adapters/    what clients sent, and what is offered to all
peers/       links to other servers, and what one peer may take
device/      the one thread that touches blocks and caches, and what it computes next
"""
