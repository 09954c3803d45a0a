"""What is on disk or on the hub: a model's config and weights, opened piece by piece.

checkpoint     config, index, tokenizer, single tensors; samples of the files, and whether they are still as they were
sources        a directory, or the hub
stored_files   config.json and weights in shards; GGUF, with both in one file
weight_files   safetensors, and pickles read safely
skeleton       a model without weights, and the tensors that it needs
mtp_layouts    heads that predict further tokens, and what their tensors are called
fingerprint    what makes two checkpoints the same
block_digests  what blocks were made of
"""
