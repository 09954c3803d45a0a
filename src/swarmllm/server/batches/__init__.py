"""Forward and backward without KV caches.

batches  outputs, and the gradients of inputs
pushes   what servers pass on to each other for batches
"""
