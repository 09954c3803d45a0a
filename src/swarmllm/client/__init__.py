"""A client: the model without its blocks, and the swarm that runs them.

distributed_model       what users hold: the Hugging Face class, a swarm behind it; how it is opened, shown and copied
generation              `generate()` for many texts at a time, and with ways to choose tokens that transformers lacks
speculative_generation  where `generate()` begins to guess, and the checkpoint's own head for guesses
local_fallback          a model that goes on here when the swarm can't
remote_blocks           the stand-in for the block list; slices of it are modules of their own
local_blocks            blocks of the model that run here
saving                  what a client owns of a model, on disk
text_generation         a model with its tokenizer, conversations: what commands and gateway share
session/                one text: a chain of servers with KV caches, which repairs itself
batches/                forward and backward without caches
view/                   who serves what, how to reach them, and the thread in which all of this runs
"""
