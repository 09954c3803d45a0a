"""torchao: int4, int8 and float8 weights as recent releases save them, taken apart into tensors (safetensors only).

A weight `a.weight` is stored as `a._weight_qdata`, `a._weight_scale` and so on, and the header of the file says which
class they belong to (torchao 0.18, prototype/safetensors/safetensors_support.py). Some checkpoints want activations
rounded as well: here they stay as they are.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.published_formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization import decoded
from swarmllm.models.quantization.decoded import nibbles, pairs, scaled, words
from swarmllm.models.quantization.packed import Packed

CONFIGS = frozenset(
    {
        "Float8DynamicActivationFloat8WeightConfig",
        "Float8DynamicActivationInt4WeightConfig",
        "Float8WeightOnlyConfig",
        "Int4WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Int8DynamicActivationIntxWeightConfig",
        "Int8StaticActivationInt8WeightConfig",
        "Int8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
    }
)
"""Names in the config of quantizers whose weights are of the classes that can be read."""
PACKINGS = ("plain", "tile_packed_to_4d", "unpacked_to_int8")
LEAST_GROUP = 8
"""Weights of a row that share a scale: with fewer, scales would take more memory than the weights."""
_FOUR_BITS = frozenset({"int1", "int2", "int3", "int4"})
Read = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Codes `[…, out, in]`; scales, zeros and final additions `[…, out, groups]`."""


class TorchAo(StoredFormat):
    """qdata, scale, zero_point; for tinygemm scale_and_zero."""

    described = "about"
    parts = (
        "qdata",
        "scale",
        "zero_point",
        "scale_and_zero",
        "act_quant_scale",
        "act_quant_zero_point",
        "act_pre_scale",
    )
    main = ("qdata",)
    _name = re.compile(rf"(.*\.)_(\w+?)_({'|'.join(sorted(parts, key=len, reverse=True))})")

    def unread(self) -> str | None:
        for kind, data in configs(self.settings):
            if kind not in CONFIGS:
                return f"torchao's {kind}"
            packing = data.get("int4_packing_format") or data.get("intx_packing_format") or "plain"
            packing = packing.get("_data") if isinstance(packing, Mapping) else packing
            if str(packing).lower() not in PACKINGS:
                return f"torchao's {kind} packed as {packing}"
        return None

    def split(self, name: str) -> tuple[str, str]:
        found = self._name.fullmatch(name)
        return (found[1] + found[2], found[3]) if found else (name, "")

    def dequantize(self, parts: Parts) -> Tensor:
        codes, scale, zero, added = _read(parts)
        weight = scaled(codes, scale, zero)
        if added is not None:
            weight.view(*added.shape, -1).add_(added[..., None])
        return weight

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        codes, scale, zero, added = _read(parts)
        if codes.dtype not in (torch.int8, torch.float8_e4m3fn) or codes.shape[-1] < LEAST_GROUP * scale.shape[-1]:
            return None
        if added is not None:
            return decoded.ShiftedInt4(pairs(codes + 8), scale, dtype, added) if scale.itemsize == 2 else None
        few_bits = _about(parts)["_data"].get("target_dtype", {}).get("_data") in _FOUR_BITS
        if zero is None or not zero.any():
            return decoded.Int4(pairs(codes + 8), scale, dtype) if few_bits else decoded.Published(codes, scale, dtype)
        if few_bits and zero.dtype == torch.int8:
            return decoded.Uint4(pairs(codes + 8), scale, dtype, (zero + 8).to(torch.uint8))
        return decoded.ZeroedBytes(codes, scale, dtype, zero.bfloat16() if zero.dtype == torch.int8 else zero)

    def kept_bits(self) -> float:
        return max((_kept_bits(kind, data) for kind, data in configs(self.settings)), default=8.25)


def configs(settings: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Class and fields of each of torchao's own configs: there may be one for all weights, or several for some each."""

    def found(one: Any) -> list[tuple[str, Mapping[str, Any]]]:
        if not isinstance(one, Mapping):
            return [] if one is None else [(str(one), {})]
        data = one.get("_data") or {}
        several = data.get("fqn_to_config", data.get("module_fqn_to_config"))
        if several is None:
            return [(str(one.get("_type")), data)]
        return [config for part in several.values() for config in found(part)]

    quant_type = settings.get("quant_type")
    return found(quant_type.get("default") if isinstance(quant_type, Mapping) else quant_type or "no quant_type")


def _kept_bits(kind: str, data: Mapping[str, Any]) -> float:
    granularity = data.get("granularity") or data.get("weight_granularity") or {}
    group = data.get("group_size") or (granularity.get("_data") or {}).get("group_size") or 128
    if "Int4" in kind:
        return 4 + 32 / group
    if "Intx" in kind:
        codes = 4 if data.get("weight_dtype", {}).get("_data") in _FOUR_BITS else 8
        return codes + (16 + 8) / group
    return 8 + 32 / float(group)


def _about(parts: Parts) -> dict[str, Any]:
    """The description of the weight in the file's header."""
    return dict(json.loads(bytes(parts["about"].tolist())))


def _read(parts: Parts) -> Read:
    """A stored weight, whatever its class.

    Raises:
        ValueError: the class isn't known.
    """
    about = _about(parts)
    kind = about["_type"]
    if "act_pre_scale" in parts or kind not in _CLASSES:
        raise ValueError(f"{kind} of {sorted(parts)}")
    return _CLASSES[kind](parts, about["_data"])


def _blocks(parts: Parts, _: Mapping[str, Any]) -> Read:
    """Codes one by one, scales and zeros of rectangles of any size."""
    codes = parts["qdata"]

    def of_rows(numbers: Tensor) -> Tensor:
        numbers = numbers.reshape(-1, 1) if numbers.ndim < codes.ndim else numbers
        rows = numbers.repeat_interleave(codes.shape[-2] // numbers.shape[-2], -2)
        return rows.expand(*codes.shape[:-1], -1).contiguous()

    zero = parts.get("zero_point")
    return codes, of_rows(parts["scale"]), None if zero is None else of_rows(zero), None


def _in_pairs(parts: Parts, _: Mapping[str, Any]) -> Read:
    """Two codes in a byte, the first below, in two's complement; the rest `[…, groups, out]`."""
    codes = (nibbles(parts["qdata"]) ^ 8).to(torch.int8) - 8
    return codes, parts["scale"].mT.contiguous(), None, parts["zero_point"].mT.contiguous()


def _in_tiles(parts: Parts, data: Mapping[str, Any]) -> Read:
    """tinygemm's layout for CUDA `[out/8, in/128, 32, 4]`, of words; the rest `[groups, out, 2]`; both may be padded.

    A word's lower half has codes of even columns, its upper half those of odd ones: 0, 8, 16 and 24 further on
    (torch 2.13, aten/src/ATen/native/cuda/int4mm.cu, `matrix_to_m16n8k16_Bint4_layout`).
    """
    (rows, columns), size = data["shape"][-2:], data["block_size"][-1]
    # [out/8, in/128, row, pair of columns, 32 of the columns, odd or even, 16 of the 32, 8 of the 16]
    codes = words(parts["qdata"], 4, -1)
    codes = codes.view(*codes.shape[:-2], 8, 4, -1, 2, 2, 2)
    before = codes.ndim - 8
    codes = codes.permute(*range(before), *(before + dim for dim in (0, 2, 1, 4, 6, 7, 3, 5)))
    codes = codes.flatten(-6).flatten(-3, -2)[..., :rows, :columns] - 8
    group = math.gcd(size, columns)
    scale, added = (
        numbers.mT[..., :rows, :].repeat_interleave(size // group, -1)[..., : columns // group].contiguous()
        for numbers in parts["scale_and_zero"].unbind(-1)
    )
    return codes.to(torch.int8).contiguous(), scale, None, added


_CLASSES: dict[str, Callable[[Parts, Mapping[str, Any]], Read]] = {
    "Float8Tensor": _blocks,
    "Int4Tensor": _in_pairs,
    "Int4TilePackedTo4dTensor": _in_tiles,
    "Int8Tensor": _blocks,
    "IntxUnpackedToInt8Tensor": _blocks,
}
