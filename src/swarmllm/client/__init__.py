"""A client: the model without its blocks, and the swarm that runs them.

distributed_model       the model class that users hold; opening it
generation              its `generate()`: sessions, loops, logits processors; many texts at once
speculative_generation  where `generate()` begins to guess, and the checkpoint's own head for guesses
local_fallback          a model that finishes texts here when the swarm fails
remote_blocks           the stand-in for the block list; slices of it are modules of their own
local_blocks            blocks of the model that run here
saving                  the client's part of a model, on disk
text_generation         a model with its tokenizer, conversations: for commands and the gateway
session/                one text: a chain of servers with KV caches, which repairs itself
batches/                forward and backward without caches
view/                   who serves what, how to reach them, and the thread in which all of this runs
"""
