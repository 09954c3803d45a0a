"""Formats in which models are published in few bits: what a checkpoint stores for one weight → the weight.

    stored_format       the interface: which stored tensors belong to a weight, what it is, and how it stays packed
    choice              which format a checkpoint has, from its config
    logical_view        a checkpoint as if every weight were stored as one tensor
    fp8                 DeepSeek's blocks of 128×128, rows (fbgemm), whole tensors
    mxfp4               gpt-oss
    compressed_tensors  4 and 8 bits, FP8, NVFP4 (llm-compressor, Kimi)
    modelopt            FP8 and NVFP4 (NVIDIA)
    awq                 4 bits
    gptq                2 to 8 bits
    bitsandbytes        nf4, fp4, int8
    hqq                 1 to 8 bits
    torchao             int4, int8 and float8
    gguf/               llama.cpp's files, which have a config and names of their own

A new format is a new file with a subclass of `StoredFormat`, and a line in `choice`. Used by `checkpoint`; knows no
models. How weights multiply while they are packed is the business of `models/quantization`.
"""
