"""Weights of blocks in 2 to 8 bits: one interface for all formats, devices and kinds of layers.

    rules        which weights of a model are quantized, and how many bytes they take then
    packed       what all formats can: multiply, multiply transposed, dequantize; and int8
    llm_int8     8 bits for weights and inputs, but for outliers
    nf4          4-bit normal floats
    decoded      formats whose rows are decoded by kernels, or by torch
    kbit         our formats of 2 to 6 bits
    published    the formats of published checkpoints, kept as they are
    gguf_blocks  the blocks of GGUF files, kept as they are
    codes        codes of a few bits into numbers
    kernels      multiplying on CPUs, in C: kernels.c chooses among products.h as compiled for three kinds of processors
    speeds       which of the ways to multiply is the fastest on this processor
    cuda         multiplying on CUDA: what is asked of the next
    cuda_products  the kernel for it, in Triton, for a few inputs and all formats
    bfloat16     weights in bfloat16 as they are, where processors multiply those slowly
    weight       a packed weight that stands where a model had a parameter
    loading      quantizes each weight as it is read, so that no more than one is in memory in full precision
    check        compares outputs and gradients with the dequantized weights when blocks are loaded

A new type has its name in `rules` and in `server/settings`, its class of `Packed` in a file of its own, its line in
`loading.pack`, and its error in `client/view/servers`. Used by `load_block_span`; knows no spans and no network.
Activations, norms, routers and biases stay as they are.
"""

from swarmllm.models.quantization.rules import (
    FULL_PRECISION,
    QUANT_TYPES,
    Quantization,
    resolve_quantization,
    stored_bytes,
)
from swarmllm.models.quantization.weight import QuantizedWeight

__all__ = ["FULL_PRECISION", "QUANT_TYPES", "Quantization", "QuantizedWeight", "resolve_quantization", "stored_bytes"]
