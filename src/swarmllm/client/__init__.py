"""A client: the model without its blocks, and the swarm that runs them.

distributed_model       what users hold: the Hugging Face class, a swarm behind it
opening                 the swarm joined, and the model loaded
encoder_decoder         what is special about models with an encoder and a decoder
pictures                what is special about models that see
yielding_methods        methods that step back where an architecture has its own
remote_blocks           the stand-in for the block list; slices of it are modules of their own
activation_noise        noise on what leaves this machine, for those who want it
local_blocks            blocks of the model that run here
local_fallback          a model that goes on here when the swarm can't
inner_gradients         gradients through what passes between blocks
python_surface          copies, `print(model)`, and options of `from_pretrained` that can't work here
many_prompts            `generate()` for many texts at a time
decoding_mixin          `generate()` with ways to choose tokens that transformers lacks
speculative_generation  where `generate()` begins to guess
mtp_head                the checkpoint's own head for guesses
saving                  what a client owns of a model, on disk
text_generation         a model with its tokenizer, conversations: what commands and gateway share
session/                one text: a chain of servers with KV caches, which repairs itself
batches/                forward and backward without caches
view/                   who serves what, how to reach them, and the thread in which all of this runs
"""
