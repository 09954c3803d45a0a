"""What is on disk or on the hub: a model's config and weights, opened piece by piece.

checkpoint     config, index, single tensors
sources        a directory, or the hub
stored_files   config.json and weights in shards
gguf_files     both in one file
gguf_names     which of them a name means
weight_files   safetensors, and pickles read safely
opened_files   samples of the files, and whether they are still as they were
tokenizer      of a directory, the hub or a GGUF file
skeleton       a model without weights, and the tensors that it needs
tensor_names   which of its parameters they are
mtp_layouts    heads that predict further tokens, and what their tensors are called
borrowed       parameters that blocks share with blocks that are elsewhere
fingerprint    what makes two checkpoints the same
block_digests  what blocks were made of
dtypes         names of dtypes
"""
