"""compressed-tensors, the format of llm-compressor (Kimi-K2, RedHatAI's models): 2 to 8 bits, FP8, NVFP4, MXFP4, MXFP8.

A checkpoint may mix them, so the tensors stored for a weight say how it is stored, not the config.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.published_formats.few_bit_floats import MX_GROUP, NV_GROUP, as_numbers, by_row
from swarmllm.models.published_formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization import decoded
from swarmllm.models.quantization.decoded import E2M1, pairs, require_groups, scaled, values_of_pairs, words
from swarmllm.models.quantization.packed import Packed

PACKED = "pack-quantized"
WORDS_OF = (4, 8, 2)
"""Bits of codes that fill words; others lie across them."""
FORMS = frozenset(
    {
        None,
        PACKED,
        "dense",
        "float-quantized",
        "int-quantized",
        "mixed-precision",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
    }
)
"""The package's formats (0.20, config/base.py) that can be read."""


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

    def unread(self) -> str | None:
        if (sparsity := (self.settings.get("sparsity_config") or {}).get("format", "dense")) != "dense":
            return f"sparse weights ({sparsity})"
        for group in self._groups():
            form, bits = group.get("format") or self.settings.get("format"), group["weights"].get("num_bits")
            if form not in FORMS or (form == PACKED and bits not in WORDS_OF):
                return f"compressed-tensors' {form} with {bits} bits"
        return None

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
                return decoded.Mxfp4Pairs(packed, _scale_of_floats(parts).bfloat16(), dtype)
            _scale_of_floats(parts)  # checks their number
            divisor = parts[".weight_global_scale"].float().reshape(1).expand(len(packed)).contiguous()
            return decoded.DividedNvfp4(packed, parts[".weight_scale"], dtype, divisor)
        codes, scale, zero = self._integers(parts)
        scale = scale.contiguous()
        if codes.dtype == torch.float8_e4m3fn:
            return decoded.Published(codes, scale, dtype)
        if ".weight_packed" in parts and _bits(parts) <= 4 and codes.shape[1] % 2 == 0:
            if zero is None:
                return decoded.Int4(pairs(codes + 8), scale, dtype)
            return decoded.Uint4(pairs(codes + 8), scale, dtype, (zero + 8).to(torch.uint8))
        codes = codes.to(torch.int8)
        if zero is None:
            return decoded.Published(codes, scale, dtype)
        return decoded.ZeroedBytes(codes, scale, dtype, zero.bfloat16())

    def kept_bits(self) -> float | None:
        if any(group["weights"].get("actorder") == "group" for group in self._groups()):
            return None

        def bits(weights: Mapping[str, Any]) -> float:
            of_scale = 8 if weights.get("strategy") == "tensor_group" else 16
            of_zero = 0 if weights.get("symmetric", True) else 16
            of_codes = 4 if weights["num_bits"] <= 4 else 8
            if block := weights.get("block_structure"):
                return of_codes + 32 / float(block[1])
            return float(of_codes + (of_scale + of_zero) / (weights.get("group_size") or 128))

        return max((bits(group["weights"]) for group in self._groups()), default=8.0)

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
        scale = as_numbers(parts[".weight_scale"])
        if scale.ndim < 2 or scale.shape[1] == 1 or codes.shape[1] % scale.shape[1] or len(scale) != rows:
            scale = by_row(scale, codes.shape, self._block())
        return codes, scale, None if zero is None else zero.reshape(-1, scale.shape[1]).expand(scale.shape)

    def _block(self) -> list[int] | None:
        blocks = [group["weights"].get("block_structure") for group in self._groups()]
        return next((block for block in blocks if block), None)

    def _groups(self) -> list[Mapping[str, Any]]:
        """The groups of weights in the config: each is for linear maps that are alike."""
        return [group for group in self.settings.get("config_groups", {}).values() if group.get("weights")]


def _bits(parts: Parts) -> int:
    """Bits of a code, from how many words hold a row; the last word may be filled in part."""
    columns, num_words = int(parts[".weight_shape"][1]), parts[".weight_packed"].shape[1]
    return next(bits for bits in WORDS_OF if -(-columns * bits // 32) == num_words)


def _scale_of_floats(parts: Parts) -> Tensor:
    scale, (rows, num_bytes) = parts[".weight_scale"], parts[".weight_packed"].shape
    group = NV_GROUP if ".weight_global_scale" in parts else MX_GROUP
    require_groups((rows, 2 * num_bytes), scale, size=group)
    if ".weight_global_scale" in parts:
        return scale.float() / parts[".weight_global_scale"].float()
    return as_numbers(scale)
