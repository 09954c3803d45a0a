"""HQQ: 1 to 8 bits; each group has a scale and a zero, which is a fraction."""

import torch
from torch import Tensor

from swarmllm.models.published_formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization.codes import pairs
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.published import Uint4, ZeroedBytes

PACKINGS = {
    "8bit_u8": (8, torch.uint8),
    "4bit_u8": (4, torch.uint8),
    "3bit_32": (3, torch.int32),
    "2bit_u8": (2, torch.uint8),
    "1bit_u8": (1, torch.uint8),
}
"""Names of the package's packings → bits of a code, and the words that hold them (hqq 0.2.8, core/bitpack.py)."""


class Hqq(StoredFormat):
    """What the package's `HQQLinear.state_dict` gives and transformers saves: W_q, scale, zero, and numbers about them.

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
        codes = _codes(parts)[0].float()
        return ((codes - parts[".zero"].float()) * parts[".scale"].float()).view(parts[".shape"].tolist())

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        (codes, bits), (rows, columns) = _codes(parts), parts[".shape"].tolist()
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


def _codes(parts: Parts) -> tuple[Tensor, int]:
    """The unpacked W_q, and bits of a code."""
    bits, word = PACKINGS[bytes(parts[".packing"].tolist()).decode()]
    packed = parts[".W_q"].view(word)  # with `view_as_float` it is stored as if it were floats
    highest = (30 if bits == 3 else 8) - bits
    codes = torch.cat([packed >> shift & ((1 << bits) - 1) for shift in range(highest, -1, -bits)]).to(torch.uint8)
    num_codes = int(parts[".shape"].prod())
    return codes[: num_codes // codes.shape[1]], bits
