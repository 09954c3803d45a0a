"""The client's half of a model: embeddings, final norm and head here, blocks that only look as if they were.

loading          the Hugging Face model, read without its blocks
client_shell     what it does otherwise than a local one; which cache a call runs with
blocks_proxy     what stands in its block list
stack_forward    the forward of the module that loops over blocks: its arguments checked, and made ready to travel
playback         hidden states and attentions, as the model's own code returns them; hooks on whole blocks
remote_cache     a cache whose keys and values are on servers
hollow_blocks    the blocks as others see them: names and shapes, and weights where somebody looks at them
hollow_modules   what they refuse, because it couldn't reach the servers
hollow_adapters  what is in them at a forward, for servers to compute with
unseen_changes   what is changed without touching them
tuner_layers     what a layer of peft does, in the forms that servers know
tuned_prompts    trained vectors, keys and values before the text
"""
