"""Codes of 1 to 8 bits in groups with scales: AWQ, GPTQ, HQQ, bitsandbytes.

AWQ           4 bits in words of 8 along the outputs, in an order of its own; a scale and a zero per group of inputs
GPTQ          2, 4 or 8 bits in words along the inputs; a scale and a zero per group of inputs
HQQ           1 to 8 bits; each group has a scale and a zero, which is a fraction
bitsandbytes  nf4 and fp4 in groups of a flat weight, their scales perhaps in 8 bits; int8 with a scale per row
"""

import json
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.published_formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization import decoded
from swarmllm.models.quantization.decoded import Uint4, ZeroedBytes, nibbles, pairs, scaled, words
from swarmllm.models.quantization.packed import Packed

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The places of neighbours in a word."""

HQQ_PACKINGS = {
    "8bit_u8": (8, torch.uint8),
    "4bit_u8": (4, torch.uint8),
    "3bit_32": (3, torch.int32),
    "2bit_u8": (2, torch.uint8),
    "1bit_u8": (1, torch.uint8),
}
"""Names of the package's packings → bits of a code, and the words that hold them (hqq 0.2.8, core/bitpack.py)."""

SCALE_OF_INT8 = 1 / 127
BNB_STATES = {
    ".weight.quant_state.bitsandbytes__nf4": decoded.Nf4Pairs,
    ".weight.quant_state.bitsandbytes__fp4": decoded.Fp4Pairs,
}


class Awq(StoredFormat):
    """qweight `[in, out/8]`, qzeros `[groups, out/8]`, scales `[groups, out]`."""

    parts = (".qweight", ".qzeros", ".scales")
    main = (".qweight",)

    def unread(self) -> str | None:
        bits, version = self.settings.get("bits", 4), self.settings.get("version", "gemm")
        return None if bits == 4 and version.lower() == "gemm" else f"AWQ of version {version!r} with {bits} bits"

    def dequantize(self, parts: Parts) -> Tensor:
        return scaled(*_awq_unpacked(parts))

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed:
        codes, scale, zero = _awq_unpacked(parts)
        return Uint4(pairs(codes), scale, dtype, zero.to(torch.uint8))

    def kept_bits(self) -> float:
        return 4 + (16 + 8) / float(self.settings.get("group_size", 128))


def _awq_unpacked(parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[out, in]`, scales and zeros `[out, groups]`."""

    def codes(packed: Tensor) -> Tensor:
        neighbours = words(packed, 4, 1).view(len(packed), -1, 8)[..., AWQ_ORDER]
        return neighbours.flatten(-2).T.contiguous()

    return codes(parts[".qweight"]), parts[".scales"].T.contiguous(), codes(parts[".qzeros"])


class Gptq(StoredFormat):
    """qweight `[in·bits/32, out]`, qzeros `[groups, out·bits/32]`, scales `[groups, out]`, g_idx `[in]`.

    Format 1 stores zeros less 1. g_idx says which group an input belongs to: neighbours are together unless the
    checkpoint was made with `desc_act`.
    """

    parts = (".qweight", ".qzeros", ".scales", ".g_idx")
    main = (".qweight",)

    def unread(self) -> str | None:
        bits = self.settings.get("bits")
        return None if bits in (2, 4, 8) else f"GPTQ with {bits} bits"

    def dequantize(self, parts: Parts) -> Tensor:
        codes, scale, zero = self._unpacked(parts)
        group = self._groups(parts, codes.shape[1], scale.shape[1])
        return (codes - zero[:, group]).float() * scale.float()[:, group]

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        codes, scale, zero = self._unpacked(parts)
        num_inputs, num_groups = codes.shape[1], scale.shape[1]
        in_order = torch.arange(num_inputs) * num_groups // num_inputs
        if not torch.equal(self._groups(parts, num_inputs, num_groups), in_order):
            return None
        if self.settings["bits"] == 8:
            return ZeroedBytes(codes.to(torch.uint8), scale, dtype, zero.bfloat16())
        return Uint4(pairs(codes), scale, dtype, zero.to(torch.uint8))

    def kept_bits(self) -> float | None:
        """The codes of 2 bits are kept in 4."""
        if self.settings.get("desc_act"):
            return None
        codes, zero = (8, 16) if self.settings["bits"] == 8 else (4, 8)
        group = self.settings.get("group_size", 128)
        return codes + (16 + zero) / group if group > 0 else float(codes)

    def _unpacked(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
        """Codes `[out, in]`, scales and zeros `[out, groups]`."""
        bits: int = self.settings["bits"]
        codes, scale = words(parts[".qweight"], bits, 0), parts[".scales"]
        zero = words(parts[".qzeros"], bits, 1)[:, : scale.shape[1]]
        if zero.shape != scale.shape or scale.shape[1:] != codes.shape[1:]:  # the last group may be smaller
            raise ValueError(f"scales {tuple(scale.shape)} and zeros {tuple(zero.shape)} of {tuple(codes.shape)} codes")
        if self.settings.get("checkpoint_format", "gptq") != "gptq_v2":
            zero = (zero + 1) & ((1 << bits) - 1)
        return codes.T.contiguous(), scale.T.contiguous(), zero.T.contiguous()

    def _groups(self, parts: Parts, num_inputs: int, num_groups: int) -> Tensor:
        """The group of each input."""
        if ".g_idx" in parts:
            group = parts[".g_idx"].long()
            if group.shape != (num_inputs,) or group.min() < 0:
                raise ValueError(f"groups {tuple(group.shape)} of {num_inputs} inputs")
            return group
        size: int = self.settings.get("group_size", -1)
        if size < 1 or -(-num_inputs // size) != num_groups:  # settings of some weights are their own
            if num_inputs % num_groups:
                raise ValueError(f"{num_inputs} inputs can't have {num_groups} groups")
            size = num_inputs // num_groups
        return torch.arange(num_inputs) // size


class Hqq(StoredFormat):
    """The result of the package's `HQQLinear.state_dict`, as transformers saves it: W_q, scale, zero, and numbers about
    them.

    Groups are the rows of W_q before it was packed, neighbours in a row of the weight (axis 1, transformers' default),
    or its columns, which lie across the weight's rows (axis 0). Packing puts the first rows into the highest bits.
    """

    parts = (
        ".W_q",
        ".scale",
        ".zero",
        ".axis",
        ".channel_wise",
        ".compute_dtype",
        ".encoded_state_dict",
        ".group_size",
        ".nbits",
        ".offload_meta",
        ".optimize",
        ".packing",
        ".quant_scale",
        ".quant_zero",
        ".round_zero",
        ".shape",
        ".stores_quant_config",
        ".unpack_view_dtype",
        ".view_as_float",
    )
    main = (".W_q",)

    def dequantize(self, parts: Parts) -> Tensor:
        codes = _hqq_codes(parts)[0].float()
        return ((codes - parts[".zero"].float()) * parts[".scale"].float()).view(parts[".shape"].tolist())

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        (codes, bits), (rows, columns) = _hqq_codes(parts), parts[".shape"].tolist()
        scale, zero, size = parts[".scale"], parts[".zero"], codes.shape[1]
        if int(parts[".axis"]) != 1 or columns % size or columns % 2 or scale.numel() * size != codes.numel():
            return None
        codes, scale, zero = (tensor.view(rows, -1) for tensor in (codes, scale, zero))
        if bits == 8:
            return ZeroedBytes(codes, scale, dtype, zero)
        return Uint4(pairs(codes), scale, dtype, zero)

    def kept_bits(self) -> float | None:
        found = self.settings.get("quant_config", {})
        alike = [found] if "weight_quant_params" in found else found.values()
        weights = [one["weight_quant_params"] for one in alike if one]
        if not weights or any(one.get("axis") != 1 for one in weights):
            return None
        return max((8 if one["nbits"] > 4 else 4) + 2 * 16 / (one.get("group_size") or 128) for one in weights)


def _hqq_codes(parts: Parts) -> tuple[Tensor, int]:
    """The unpacked W_q, and bits of a code."""
    bits, word = HQQ_PACKINGS[bytes(parts[".packing"].tolist()).decode()]
    packed = parts[".W_q"].view(word)  # with `view_as_float` it is stored as if it were floats
    highest = (30 if bits == 3 else 8) - bits
    codes = torch.cat([packed >> shift & ((1 << bits) - 1) for shift in range(highest, -1, -bits)]).to(torch.uint8)
    num_codes = int(parts[".shape"].prod())
    if not num_codes <= codes.numel() < num_codes + len(range(highest, -1, -bits)) * codes.shape[1]:
        raise ValueError(f"{codes.numel()} codes of {num_codes} weights")
    return codes[: num_codes // codes.shape[1]], bits


class BitsAndBytes(StoredFormat):
    """Bytes `[out·in/2, 1]` with the first code above; or int8 `[out, in]`."""

    parts = (
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *BNB_STATES,
        ".SCB",
        ".weight_format",
        ".weight",
    )
    main = (".weight",)

    def dequantize(self, parts: Parts) -> Tensor:
        if ".SCB" in parts:
            return parts[".weight"].float() * parts[".SCB"].float()[:, None] * SCALE_OF_INT8
        state = _bnb_state(parts)
        if state is None:
            return parts[".weight"].float()
        rows, columns = state["shape"]
        codes = nibbles(parts[".weight"].flatten(), low_first=False)[: rows * columns]  # a last byte of one code
        values = parts[".weight.quant_map"].float()[codes.int()]
        scale = _bnb_scale(parts, state).repeat_interleave(state["blocksize"])  # the last group may be smaller
        return (values * scale[: rows * columns]).view(rows, columns)

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        if ".SCB" in parts:
            scale = parts[".SCB"].float()[:, None] * SCALE_OF_INT8
            return decoded.Published(parts[".weight"], scale, dtype)
        state = _bnb_state(parts)
        if state is None:
            return None
        form = next(form for part, form in BNB_STATES.items() if part in parts)
        rows, columns = state["shape"]
        values = torch.tensor(form.values)
        if columns % state["blocksize"] or not torch.equal(parts[".weight.quant_map"].float(), values):
            return None
        codes = pairs(nibbles(parts[".weight"].flatten(), low_first=False).view(rows, columns))
        return form(codes, _bnb_scale(parts, state).view(rows, -1), dtype)

    def kept_bits(self) -> float:
        return 8.25 if self.settings.get("load_in_8bit") else 4 + 32 / 64


def _bnb_state(parts: Parts) -> dict[str, Any] | None:
    """The checkpoint's description of a weight in 4 bits."""
    packed = next((parts[part] for part in BNB_STATES if part in parts), None)
    return None if packed is None else dict(json.loads(bytes(packed.tolist())))


def _bnb_scale(parts: Parts, state: dict[str, Any]) -> Tensor:
    """The scale of each group of the flat weight; float32."""
    scale = parts[".weight.absmax"]
    rows, columns = state["shape"]
    if scale.numel() != -(-rows * columns // state["blocksize"]):
        raise ValueError(f"{scale.numel()} scales of {rows}×{columns} weights in groups of {state['blocksize']}")
    if ".weight.nested_absmax" not in parts:
        return scale.float()
    group = torch.arange(scale.numel()) // state["nested_blocksize"]
    nested: Tensor = (
        parts[".weight.nested_quant_map"].float()[scale.int()] * parts[".weight.nested_absmax"].float()[group]
    )
    return nested + float(state["nested_offset"])
