"""Small trained tensors that change blocks for one client's calls.

block_adapter   what travels to servers, and how they apply it
seeded_dropout  what of an adapter's inputs is left out, in train mode
adapter_files   adapters as peft stores them
"""
