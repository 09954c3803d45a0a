"""Small trained tensors that change blocks for one client's calls.

block_adapter   what travels to servers, and how they apply it
patch_forms     how linear modules are changed
dropout         what of an adapter's inputs, and within blocks, is left out in train mode
adapter_files   adapters as peft stores them
merging         adapters merged into their base, block by block
"""
