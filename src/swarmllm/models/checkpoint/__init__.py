"""Checkpoints on disk or on the hub: a model's config and weights, opened piece by piece.

checkpoint     config, index, tokenizer, single tensors; samples of the files, to notice changes
sources        a directory, or the hub
stored_files   config.json and weights in shards; GGUF, with both in one file
weight_files   safetensors, and pickles read safely
skeleton       a model without weights, and the tensors that it needs; digests of the stored bytes of blocks
calibration    how large the inputs of weights are, for servers that round them
manifest       the list of a model's files in pieces with digests, and directories that have only some of the pieces
pieces         manifests of checkpoints here and on the hub; the pieces that blocks or a client need
fingerprint    the name by which a swarm knows a checkpoint
"""
