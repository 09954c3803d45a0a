"""MXFP4, in which gpt-oss is published: 4-bit floats, and a power of two as the scale of each 32."""

import torch
from torch import Tensor

from swarmllm.models.published_formats.fp8 import as_numbers
from swarmllm.models.published_formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization.codes import E2M1, scaled, values_of_pairs
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.published import Mxfp4Pairs


class Mxfp4(StoredFormat):
    """Experts: blocks `[experts, out, in/32, 16]`, scales `[experts, out, in/32]`; models hold `[experts, in, out]`."""

    parts = ("_blocks", "_scales")
    main = ("_blocks",)
    target = ""
    transposed = True

    def dequantize(self, parts: Parts) -> Tensor:
        return scaled(values_of_pairs(parts["_blocks"].flatten(-2), E2M1), as_numbers(parts["_scales"]))

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed:
        return Mxfp4Pairs(parts["_blocks"].flatten(-2), as_numbers(parts["_scales"]).bfloat16(), dtype)

    def kept_bits(self) -> float:
        return 4 + 16 / 32
