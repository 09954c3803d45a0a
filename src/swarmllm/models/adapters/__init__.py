"""Small trained tensors that change blocks for one client's calls.

block_adapter  what travels to servers, and how they apply it
adapter_files  adapters as peft stores them
"""
