"""Formats in which models are published in few bits: what a checkpoint stores for one weight → the weight.

    stored_format       the interface, and a checkpoint as if every weight were stored as one tensor
    choice              the format of a checkpoint, from its config
    few_bits            AWQ, GPTQ, HQQ, bitsandbytes
    few_bit_floats      FP8 (DeepSeek's blocks of 128×128, rows, whole tensors), ModelOpt (NVIDIA), MXFP4 (gpt-oss)
    compressed_tensors  4 and 8 bits, FP8, NVFP4 (llm-compressor, Kimi)
    torchao             int4, int8 and float8
    gguf                a file of llama.cpp: its header, config and weights

A new format is a subclass of `StoredFormat` in a file that fits or a new one, and a line in `choice`. Used by
`checkpoint`; knows no models. How weights multiply while they are packed is the business of `models/quantization`.
"""
