"""The client's half of a model: embeddings, final norm and head here, blocks that only look as if they were.

loading          the Hugging Face model, read without its blocks
client_shell     what it does otherwise than a local one; which cache a call runs with
blocks_proxy     what stands in its block list
stack_forward    the forward of the module that loops over blocks: its arguments checked, and made ready to travel
playback         hidden states and attentions, as the model's own code returns them; hooks on whole blocks
remote_cache     a cache whose keys and values are on servers
hollow_blocks    the block list as others see it; one block read from the checkpoint where values are needed
hollow_modules   modules whose weights are on servers: changes that can't reach the servers are refused
hollow_adapters  changes that servers compute with at a forward, read from the blocks: adapters, dropout and the like
unseen_changes   changes that touch no block, such as those of the config
tuner_layers     layers of peft, in the forms that servers know
tuned_prompts    trained vectors, keys and values before the text
"""
