"""Floats of 8 and 4 bits: FP8, NVIDIA's ModelOpt, MXFP4.

    FP8       DeepSeek-V3, Qwen3-FP8, GLM, MiniMax (a scale per 128×128), fbgemm (per row), vLLM (per tensor)
    ModelOpt  FP8 with scales per tensor or row; NVFP4 with 8-bit scales per 16 and one of the tensor
    MXFP4     gpt-oss: a power of two as the scale of each 32

Weights that ModelOpt has smoothed (AWQ) expect inputs multiplied by `pre_quant_scale`: it is multiplied into them
here.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from swarmllm.errors import CorruptWeightsError
from swarmllm.models.published_formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization.decoded import (
    E2M1,
    Mxfp4Pairs,
    Nvfp4,
    Published,
    require_groups,
    scaled,
    values_of_pairs,
)
from swarmllm.models.quantization.packed import Packed

E8M0_BIAS = 127
"""A scale that is stored as a byte is a power of two (OCP Microscaling formats, section 5.4.1)."""

MX_GROUP = 32
"""Weights of MXFP4 that share a scale (the same specification)."""
NV_GROUP = 16
"""The same of NVFP4."""

ALGORITHMS = frozenset(
    {
        "FP8",
        "FP8_PER_CHANNEL_PER_TOKEN",
        "MIXED_PRECISION",
        "NVFP4",
        "NVFP4_AWQ",
        "W4A16_NVFP4",
    }
)
"""ModelOpt's names of the formats that can be read (0.47, torch/export/convert_hf_config.py)."""


class Fp8(StoredFormat):
    """A weight in float8_e4m3fn, and scales in float32, bfloat16 or as bytes."""

    parts: ClassVar[tuple[str, ...]] = (
        ".weight_scale_inv",
        ".weight_scale",
        ".input_scale",
        ".input_scale_ub",
        ".activation_scale",
        ".weight",
    )
    main = (".weight",)

    def dequantize(self, parts: Parts) -> Tensor:
        scale = self._scale(parts)
        return parts[".weight"].float() if scale is None else scaled(parts[".weight"], scale)

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        codes, scale = parts[".weight"], self._scale(parts)
        if scale is None or codes.dtype != torch.float8_e4m3fn:
            return None
        return Published(codes, scale, dtype)

    def kept_bits(self) -> float:
        block = self.settings.get("weight_block_size") or (128, 128)
        return 8 + 32 / float(block[1])

    def _scale(self, parts: Parts) -> Tensor | None:
        """As `by_row`; None of a weight that is stored whole."""
        scale = parts.get(".weight_scale_inv", parts.get(".weight_scale"))
        if scale is None:
            return None
        return by_row(as_numbers(scale).float(), parts[".weight"].shape, self.settings.get("weight_block_size"))


def as_numbers(scale: Tensor) -> Tensor:
    """Scales as they are; scales that are stored as bytes are powers of two."""
    return torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale


def by_row(scale: Tensor, shape: Sequence[int], block: Sequence[int] | None = None) -> Tensor:
    """Scales of a matrix `[out, in]`, one for a row or block → `[out, groups]` of equal groups. Groups are smaller than
    blocks if the last block of a row is cut.

    The size of blocks must be known: if the last block is cut, it doesn't follow from the number of scales.
    transformers 5.23 takes it from there, and so computes other weights. The number of scales doesn't show their use
    either: there may be as many blocks as rows (DeepSeek-V3's o_proj, of 7168×16384).

    Raises:
        CorruptWeightsError: there are more or fewer scales than such a matrix has.
    """
    rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous()
    if block:
        height, width = block
        if scale.shape == (-(-rows // height), -(-columns // width)):
            group = math.gcd(columns, width)
            by_group = scale.repeat_interleave(width // group, 1)[:, : columns // group]
            return by_group.repeat_interleave(height, 0)[:rows]
    if scale.shape not in ((rows,), (rows, 1)):
        raise CorruptWeightsError(f"a weight of {rows}×{columns} has scales of the shape {tuple(scale.shape)}")
    return scale.reshape(rows, 1)


class ModelOpt(Fp8):
    """Weights with a `weight_scale_2` are NVFP4: bytes `[out, in/2]`, scales `[out, in/16]`."""

    parts = (".weight_scale_2", ".k_scale", ".v_scale", ".pre_quant_scale", *Fp8.parts)

    def unread(self) -> str | None:
        """A checkpoint of several algorithms says which one each of its linear maps has."""
        layers = self.settings.get("quantized_layers") or {}
        for found in (self.settings, *layers.values()):
            algorithm = str(found.get("quant_algo") or "FP8").upper()
            if algorithm not in ALGORITHMS:
                return f"ModelOpt's {algorithm}"
        return None

    def dequantize(self, parts: Parts) -> Tensor:
        if ".weight_scale_2" not in parts:
            weight = super().dequantize(parts)
        else:
            scale = parts[".weight_scale"].float() * parts[".weight_scale_2"].float().reshape(())
            self._require_groups(parts)
            weight = scaled(values_of_pairs(parts[".weight"], E2M1), scale)
        smoothed = parts.get(".pre_quant_scale")
        return weight if smoothed is None else weight * smoothed.float()

    def kept_bits(self) -> float:
        return 4 + 8 / 16 if "NVFP4" in str(self.settings).upper() else super().kept_bits()

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        if ".pre_quant_scale" in parts:
            return None
        if ".weight_scale_2" not in parts:
            return super().keep(parts, dtype)
        self._require_groups(parts)
        codes = parts[".weight"]
        factor = parts[".weight_scale_2"].float().reshape(1).expand(len(codes)).contiguous()
        return Nvfp4(codes, parts[".weight_scale"], dtype, factor)

    def _require_groups(self, parts: Parts) -> None:
        rows, num_bytes = parts[".weight"].shape
        require_groups((rows, 2 * num_bytes), parts[".weight_scale"], size=NV_GROUP)


class Mxfp4(StoredFormat):
    """Experts: blocks `[experts, out, in/32, 16]`, scales `[experts, out, in/32]`; models hold `[experts, in, out]`."""

    parts = ("_blocks", "_scales")
    main = ("_blocks",)
    target = ""
    transposed = True

    def dequantize(self, parts: Parts) -> Tensor:
        codes, scale = self._codes_and_scale(parts)
        return scaled(values_of_pairs(codes, E2M1), scale)

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed:
        codes, scale = self._codes_and_scale(parts)
        return Mxfp4Pairs(codes, scale.bfloat16(), dtype)

    def _codes_and_scale(self, parts: Parts) -> tuple[Tensor, Tensor]:
        codes, scale = parts["_blocks"].flatten(-2), as_numbers(parts["_scales"])
        require_groups((*codes.shape[:-1], 2 * codes.shape[-1]), scale, size=MX_GROUP)
        return codes, scale

    def kept_bits(self) -> float:
        return 4 + 16 / 32
