"""One server's matrices on several devices (tensor parallelism): each process has some rows of each.

The server's process runs the model's own code, with its caches, sessions and adapters, as without them. Only products
by a matrix ask the *followers*, processes that hold rows of matrices and nothing else. So no state of a session is kept
in several places, in any architecture, and an error between two products doesn't concern them.

shared       matrices whose rows are spread, in the place of a block's weights; the group of followers
follower     the program of a follower
exchange     shared by both ends: messages and their way, weights as they are

Used by `span/loading`. A matrix is cut by its output features. So each output is the same sum as in one process, and
the outputs are put side by side.
"""
