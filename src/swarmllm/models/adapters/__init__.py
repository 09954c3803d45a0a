"""Small trained tensors that change blocks for one client's calls.

block_adapter   patches of blocks: how they travel to servers, their forms, the hooks that apply them
peft_layers     peft's layers and settings, in these forms
dropout         dropout by seeds: of an adapter's inputs, and within blocks in train mode
adapter_files   adapters as peft stores them
merging         adapters merged into their base, block by block
"""
