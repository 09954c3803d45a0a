"""The client's half of a model: embeddings, final norm and head; its blocks are stand-ins for those on servers.

loading          load the Hugging Face class without its blocks
client_shell     differences of the loaded class from transformers'; the cache of a forward
blocks_proxy     the module in its block list; the call that is under way
stack_forward    the forward of the module that loops over blocks: arguments are checked and made ready to travel
playback         hidden states and attentions, returned by the model's own code; hooks on whole blocks
remote_cache     a cache of transformers whose keys and values are on servers
hollow_blocks    the blocks as others see them: names and shapes, and weights where somebody looks at them
hollow_modules   what they refuse, because it couldn't reach the servers
hollow_adapters  what is in them at a forward, for servers to compute with
unseen_changes   what is changed without touching them
tuner_layers     what a layer of peft does, in the forms that servers know
tuned_prompts    trained vectors, keys and values before the text
"""
