"""A client: the model without its blocks, and the swarm that runs them.

distributed_model   what users hold: the HF class, a swarm behind it
remote_blocks       the block list's stand-in; slices of it are modules of their own
inference_session   one chain of servers with KV caches; repairs itself
remote_autograd     batches without caches, forward and backward
pushed_batches      batches whose hidden states go from server to server
swarm_view          who serves what; routes; whom to avoid
connection          one stream to one server
event_loop          the thread in which all of this runs
"""
