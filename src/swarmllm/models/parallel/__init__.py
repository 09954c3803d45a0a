"""One server's matrices on several devices (tensor parallelism): each process has a part of each.

There are two ways. In *steps*, all processes run the same blocks, each with its own attention heads, features and KV
caches, and exchange what they have at the end of each half of a block (`span/together`). Or the server's process runs
the model's own code, with its caches and adapters, as without followers, and products by a matrix ask the followers to
multiply. That works for all architectures and calls.

shared       matrices whose parts are spread, in the place of a block's weights; the group of followers
follower     the program of a follower; the objects that it holds, such as its part of KV caches, until they are dropped
exchange     used by both ends: messages and how they are sent, weights that aren't quantized

Used by `span/loading` and `span/together`. A matrix is cut by its output features, so that each output is the same sum
as in one process; or, if it ends a half of a block, by its input features, and the processes' sums are added.
"""
