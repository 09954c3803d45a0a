"""GGUF, the files of llama.cpp: config, tokenizer and weights in one.

    header         what a file says about itself, and where its tensors are
    architectures  the models that are read, and the names of their weights
    config         settings of llama.cpp → transformers' config
    rope           what of it concerns positions
    weights        the tensors as weights of transformers' names, put back into its order

How blocks of weights multiply is the business of `models/quantization/gguf_blocks`. Used by `checkpoint/gguf_files`.
"""
