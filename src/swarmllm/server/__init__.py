"""A server: holds a span of blocks, leases KV cache to sessions, and runs steps and sessionless requests through them.

__main__     flags → ServerConfig → server
settings     the flags: fields, defaults and checks
devices      several devices: a server process for each
server       start-up, the life of the process, leaving
span_life    blocks are loaded, served, and left for others
span_loader  which blocks, and how they are loaded
announcer    the record of this server, and when the swarm gets it
metrics      figures for Prometheus
adapters     adapters that requests name: offered here, or sent by clients
downloads    calls that may take minutes, in threads of their own
streams/     requests of peers, checked and dispatched
sessions/    clients' texts, with their KV caches
peers/       links to other servers, and limits of each peer
device/      the one thread that touches blocks and caches, and what it computes next
"""
