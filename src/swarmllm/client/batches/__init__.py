"""Forward and backward without KV caches.

batch_runner    a batch in micro-batches, over several routes, as one node of autograd's graph
padding         which rows go together, and what of them is text
micro_batches   one of them from server to server, run again where one fails
hop_batches     one server's part of it, checked; requests to one server
pushed_batches  servers that pass on to each other
spot_checks     answers computed again elsewhere, and compared
"""
