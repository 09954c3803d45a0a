"""Weights of blocks in 8 or 4 bits: one interface for all formats, devices and kinds of layers.

    rules    which weights of a model are quantized, and how many bytes they take then
    packed   the formats: quantize, multiply, multiply transposed, dequantize
    weight   a packed weight that stands where a model had a parameter
    loading  quantizes each weight as it is read, so that no more than one is in memory in full precision
    heap     keeps memory from being left over
    check    compares outputs and gradients with the dequantized weights when blocks are loaded

Used by `load_block_span`; knows no spans and no network. Activations, norms, routers and biases stay as they are.
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
