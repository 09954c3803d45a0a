"""Weights of blocks in 2 to 8 bits: one interface for all formats, devices and kinds of layers.

    rules        which weights of a model are quantized, and how many bytes they take then
    packed       the interface of all forms: multiply, multiply transposed, dequantize; int8, LLM.int8()
    nf4          4-bit normal floats
    decoded      forms whose rows are decoded: our own of 2 to 6 bits, those of published checkpoints and of GGUF files
    block_search  rounds weights into blocks of GGUF: q8_0, q6_k, q5_k, q4_k
    kernels      products on CPUs, in C: kernels.c chooses among products.h as compiled for three kinds of processors,
                 int8_kernels.c among int8_products.h, whose inputs are rounded to 8 bits (`--activations`), strips.c
                 among strips.h, for weights that are arranged for it (`packed.InStrips`), and calls strips_tiles.h for
                 many inputs; the fastest way to multiply on this processor
    whole        products with weights as they are, with torch's bits but faster, by whole.h
    whole_attention  attention of one position, with torch's bits but faster, by whole_attention.h
    step         a decode step as a line of operations
    line         runs it on CPUs, by step.h
    cuda         products on CUDA: the matrices that the next one takes
    cuda_products  their kernel in Triton, for a few inputs and all forms
    weight       a packed weight in place of a model's parameter
    loading      quantizes each weight as it is read, and compares its products with those of the dequantized weight

A new type has its name in `rules` and in `server/settings`, its class of `Packed` in a file of its own, its line in
`loading.pack`, and its error in `client/view/servers`. Used by `load_block_span`; knows no spans and no network.
A new type of `--activations` begins at `loading.resolve_activations`. Norms, routers and biases stay as they are.
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
