"""Sessionless requests: forward and backward without KV caches.

batch_runner    a batch in micro-batches, over several routes, run again where one fails; a node of autograd's graph
padding         which rows go together, and what of them is text
hop_batches     requests to one server, or to servers that pass on to each other; answers checked
spot_checks     answers computed again elsewhere, and compared
"""
