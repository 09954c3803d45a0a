"""The client's half of a model: embeddings, final norm and head here, blocks that only look as if they were.

loading           the Hugging Face model, read without its blocks
client_shell      what it does otherwise than a local one
blocks_proxy      what stands in its block list
stack_forward     what is done before the forward of the module that loops over blocks
playback          hidden states and attentions, as the model's own code returns them
read_positions    whether a head or a loss looks at padding
split_forward     its forward in two halves: up to the blocks, and from them on
vision_inputs     what a model that sees gives its text model besides embeddings
source            what a decoder attends to besides its text
call_cache        which cache a call runs with
remote_cache      a cache whose keys and values are on servers
hollow_blocks     the blocks as others see them: names and shapes
hollow_modules    what they refuse, because it couldn't reach the servers
block_hooks       hooks on whole blocks, which work
hollow_adapters   what is in them at a forward, for servers to compute with
unseen_changes    what is changed without touching them
tuner_layers      what a layer of peft does, in the forms that servers know
read_blocks       their weights, where somebody looks at them
tuned_prompts     trained vectors before the text
tuned_prefix      trained keys and values before the text
training_notices  what somebody who trains is told once
"""
