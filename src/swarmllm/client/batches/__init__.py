"""Forward and backward without KV caches.

batch_runner    a batch in micro-batches, over several routes, run again where one fails; a node of autograd's graph
padding         which rows go together, and what of them is text
hop_batches     one server's part of it, checked; requests to one server
pushed_batches  servers that pass on to each other
spot_checks     answers computed again elsewhere, and compared
"""
