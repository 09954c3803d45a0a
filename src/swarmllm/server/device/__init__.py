"""The one thread that touches blocks and caches, and the device that it computes on.

device_thread     the thread, the calls that wait for it, and how busy it is
scheduler         what it computes next: packing, turns of accounts, precedence
forward_backward  forward and backward without a session
device            the device: its name, memory and failures
throughput        how fast blocks are on it
niceness          how it gives way to the owner's programs
"""
