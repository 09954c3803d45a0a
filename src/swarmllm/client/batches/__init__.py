"""Forward and backward without KV caches.

batch_runner       a batch in micro-batches, over several routes
padding            which rows go together, and what of them is text
autograd_function  a batch as one node of autograd's graph
micro_batches      one of them from server to server, run again where one fails
hop_batches        one server's part of it, checked
pushed_batches     servers that pass on to each other
batch_requests     requests to one server
spot_checks        answers computed again elsewhere, and compared
"""
