"""compressed-tensors, what llm-compressor writes (Kimi-K2, RedHatAI's models): 4 and 8 bits, FP8, NVFP4, MXFP4.

A checkpoint may mix them, so what is stored for a weight says how it is stored, not the config.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.formats.fp8 import E8M0_BIAS, by_row
from swarmllm.models.formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization import published
from swarmllm.models.quantization.codes import E2M1, pairs, scaled, values_of_pairs, words
from swarmllm.models.quantization.packed import Packed


class CompressedTensors(StoredFormat):
    """Codes in words of 32 bits along the inputs, in bytes, or one by one; scales `[out, groups]`."""

    parts = (
        ".weight_packed",
        ".weight_scale",
        ".weight_shape",
        ".weight_zero_point",
        ".weight_global_scale",
        ".weight_g_idx",
        ".input_global_scale",
        ".input_scale",
        ".input_zero_point",
        ".weight",
    )
    main = (".weight_packed", ".weight")

    def dequantize(self, parts: Parts) -> Tensor:
        if ".weight_scale" not in parts:
            return parts[".weight"].float()
        if ".weight_shape" not in parts and ".weight_packed" in parts:
            return scaled(values_of_pairs(parts[".weight_packed"], E2M1), _scale_of_floats(parts))
        codes, scale, zero = self._integers(parts)
        if ".weight_g_idx" in parts and (parts[".weight_g_idx"] >= 0).all():
            group = parts[".weight_g_idx"].long()
            return (codes.float() - (0 if zero is None else zero.float()[:, group])) * scale.float()[:, group]
        return scaled(codes, scale, zero)

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        if ".weight_scale" not in parts or ".weight_g_idx" in parts:
            return None
        if ".weight_shape" not in parts and ".weight_packed" in parts:
            packed = parts[".weight_packed"]
            if ".weight_global_scale" not in parts:
                return published.Mxfp4Pairs(packed, _scale_of_floats(parts).bfloat16(), dtype)
            divisor = parts[".weight_global_scale"].float().reshape(1).expand(len(packed)).contiguous()
            return published.DividedNvfp4(packed, parts[".weight_scale"], dtype, divisor)
        codes, scale, zero = self._integers(parts)
        scale = scale.contiguous()
        if codes.dtype == torch.float8_e4m3fn:
            return published.Published(codes, scale, dtype)
        if ".weight_packed" in parts and _bits(parts) == 4 and codes.shape[1] % 2 == 0:
            if zero is None:
                return published.Int4(pairs(codes + 8), scale, dtype)
            return published.Uint4(pairs(codes + 8), scale, dtype, (zero + 8).to(torch.uint8))
        return None if zero is not None else published.Published(codes.to(torch.int8), scale, dtype)

    def kept_bits(self) -> float:
        def bits(weights: Mapping[str, Any]) -> float:
            of_scale = 8 if weights.get("strategy") == "tensor_group" else 16
            of_zero = 0 if weights.get("symmetric", True) else 8
            return float(weights["num_bits"] + (of_scale + of_zero) / (weights.get("group_size") or 128))

        groups = self.settings.get("config_groups", {}).values()
        return max((bits(group["weights"]) for group in groups if group.get("weights")), default=8.0)

    def _integers(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes `[out, in]`, about 0; scales and zeros `[out, groups]`. Codes of FP8, too."""
        zero = parts.get(".weight_zero_point")
        if ".weight_packed" not in parts:
            codes = parts[".weight"]
            rows = codes.shape[0]
        else:
            bits = _bits(parts)
            middle = 1 << (bits - 1)
            rows, columns = parts[".weight_shape"].tolist()
            codes = words(parts[".weight_packed"], bits, 1)[:, :columns] - middle
            if zero is not None and zero.dtype == torch.int32:
                zero = words(zero, bits, 0)[:rows] - middle
        scale = parts[".weight_scale"]
        if scale.ndim < 2 or scale.shape[1] == 1:
            scale = by_row(scale, codes.shape)
        elif codes.shape[1] % scale.shape[1] or len(scale) != rows:
            scale = by_row(scale, codes.shape, self._block())
        return codes, scale, None if zero is None else zero.reshape(-1, scale.shape[1]).expand(scale.shape)

    def _block(self) -> list[int] | None:
        blocks = [group["weights"].get("block_structure") for group in self.settings.get("config_groups", {}).values()]
        return next((block for block in blocks if block), None)


def _bits(parts: Parts) -> int:
    """Bits of a code, from how many words hold a row; the last word may be filled in part."""
    columns, num_words = int(parts[".weight_shape"][1]), parts[".weight_packed"].shape[1]
    return next(bits for bits in (4, 8, 2) if -(-columns * bits // 32) == num_words)


def _scale_of_floats(parts: Parts) -> Tensor:
    scale = parts[".weight_scale"]
    if ".weight_global_scale" in parts:
        return scale.float() / parts[".weight_global_scale"].float()
    return torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale
