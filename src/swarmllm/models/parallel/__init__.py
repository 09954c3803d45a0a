"""One server's matrices on several devices (tensor parallelism): each process has some rows of each.

The server's process runs the model's own code, with its caches, sessions and adapters, as ever. Only what multiplies
by a matrix asks the *followers*, processes that hold nothing but rows of matrices: so nothing about a session has to be
kept alike in several places, whatever the architecture, and what fails between two products is no concern of theirs.

shared       matrices whose rows are spread, in the place of a block's weights; the group of followers
follower     what runs in each of them
exchange     what both ends have to know: tensors on their way, the group of processes, weights as they are

Used by `span/loading`. A matrix is cut by its output features, so that each output is the same sum as in one process,
and the outputs are put side by side.
"""
