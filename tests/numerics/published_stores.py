"""How each published format stores a weight: the stored tensors, and the weight that they stand for.

What packages themselves make of such tensors is tested in `test_published_weights.py`; here they are whole checkpoints.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]
"""Stored tensors of a weight by suffix (in place of ".weight"), and the weight that they stand for."""
Store = Callable[[Tensor], Stored]
F8 = torch.float8_e4m3fn


def fp8(weight: Tensor, size: int = 64, name: str = ".weight_scale_inv") -> Stored:
    """Blocks of 64×64, the last of which may be parts."""
    rows, columns = weight.shape
    scale = torch.empty(math.ceil(rows / size), math.ceil(columns / size)).fill_(weight.abs().max() / 448)
    scale *= 1 + torch.arange(scale.numel()).view_as(scale) / 7
    whole = scale.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
    codes = (weight / whole).to(F8)
    return {".weight": codes, name: scale}, codes.float() * whole


def fp8_of_one_scale(weight: Tensor) -> Stored:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(F8)
    parts = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
    return parts, codes.float() * scale


def fp8_by_rows(weight: Tensor, prefix: str = ".weight", scale_name: str = ".weight_scale") -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(F8)
    return {prefix: codes, scale_name: scale}, codes.float() * scale


def int8_by_rows(weight: Tensor, prefix: str = ".weight", scale_name: str = ".weight_scale") -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {prefix: codes, scale_name: scale}, codes.float() * scale


def _groups(weight: Tensor, size: int, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[out, in]`, scales and zeros `[out, groups]`."""
    most = 2**bits - 1
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low) / most).half()
    zero = (-low / scale.float()).round().clamp(1, most)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, most)
    return codes.flatten(1).int(), scale, zero.int()


def _whole(codes: Tensor, scale: Tensor, zero: Tensor | int) -> Tensor:
    size = codes.shape[1] // scale.shape[1]
    zeros = zero.repeat_interleave(size, 1) if isinstance(zero, Tensor) else zero
    return (codes - zeros) * scale.float().repeat_interleave(size, 1)


def _words(codes: Tensor, dim: int, bits: int = 4) -> Tensor:
    """Codes in words of 32 bits, the first lowest."""
    packed = (codes.movedim(dim, -1).long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(-1, dim).contiguous()


def int4(weight: Tensor) -> Stored:
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).int()
    parts = {
        ".weight_packed": _words(codes + 8, 1),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor(weight.shape),
    }
    return parts, _whole(codes, scale, 0)


def int4_in_order_of_use(weight: Tensor) -> Stored:
    """A group's inputs lie anywhere."""
    order = _order(weight)
    parts, whole = int4(weight[:, order])
    back = order.argsort()
    codes = (parts[".weight_packed"][..., None] >> torch.arange(0, 32, 4)).bitwise_and(15).flatten(1)
    group = (torch.arange(weight.shape[1]) // 32)[back].int()
    return {**parts, ".weight_packed": _words(codes[:, back], 1), ".weight_g_idx": group}, whole[:, back]


def _order(weight: Tensor) -> Tensor:
    return torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))


def awq(weight: Tensor) -> Stored:
    codes, scale, zero = _groups(weight, 32)

    def packed(values: Tensor) -> Tensor:
        return _words(values.T.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 1)

    parts = {".qweight": packed(codes), ".qzeros": packed(zero), ".scales": scale.T.contiguous()}
    return parts, _whole(codes, scale, zero)


def gptq(weight: Tensor, bits: int = 4, version: int = 1, in_order: bool = True) -> Stored:
    order = torch.arange(weight.shape[1]) if in_order else _order(weight)
    codes, scale, zero = _groups(weight[:, order], 32, bits)
    back = order.argsort()
    parts = {
        ".qweight": _words(codes[:, back].T, 0, bits),
        ".qzeros": _words(zero.T - (1 if version == 1 else 0), 1, bits),
        ".scales": scale.T.contiguous(),
        ".g_idx": (torch.arange(weight.shape[1]) // 32)[back].int(),
    }
    return parts, _whole(codes, scale, zero)[:, back]


def bitsandbytes_4bit(weight: Tensor, kind: str, nested: bool = False) -> Stored:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    parts = {f".weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    return {".weight": codes, **parts}, functional.dequantize_4bit(codes, state)


def bitsandbytes_int8(weight: Tensor) -> Stored:
    from bitsandbytes import functional

    codes, scale, _ = functional.int8_vectorwise_quant(weight.half())
    parts = {".weight": codes, ".SCB": scale, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, functional.int8_vectorwise_dequant(codes, scale).float()


def hqq(weight: Tensor, bits: int = 4) -> Stored:
    """As hqq 0.2.8 saves it (`HQQLinear.state_dict`): groups of 32 in a row, which may lie across bytes."""
    most, groups = 2**bits - 1, weight.view(-1, 32)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = ((high - low) / most).half()
    zero = (-low / scale.float()).half()
    codes = (groups / scale.float() + zero.float()).round().clamp(0, most)
    numbers = {"nbits": bits, "group_size": 32, "axis": 1}
    flags = {"channel_wise": 1, "optimize": 1, "round_zero": 0, "view_as_float": 0, "quant_scale": 0, "quant_zero": 0}
    flags |= {"encoded_state_dict": 1, "stores_quant_config": 1, "offload_meta": 0}
    packing, word, per_word = ("3bit_32", torch.int32, 10) if bits == 3 else (f"{bits}bit_u8", torch.uint8, 8 // bits)
    rows = -(-len(codes) // per_word)
    padded = torch.zeros(rows * per_word, 32, dtype=torch.int32)
    padded[: len(codes)] = codes
    shifts = torch.arange(per_word - 1, -1, -1)[:, None, None] * bits
    texts = {"packing": packing, "unpack_view_dtype": "torch.uint8", "compute_dtype": "torch.float16"}
    parts = {
        ".W_q": (padded.view(per_word, rows, 32) << shifts).sum(0).to(word),
        ".scale": scale,
        ".zero": zero,
        ".shape": torch.tensor(weight.shape),
    }
    parts |= {f".{name}": torch.tensor(number, dtype=torch.int32) for name, number in numbers.items()}
    parts |= {f".{name}": torch.tensor(flag, dtype=torch.uint8) for name, flag in flags.items()}
    parts |= {f".{name}": torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in texts.items()}
    return parts, ((codes - zero.float()) * scale.float()).view(weight.shape)


def torchao(weight: Tensor) -> Stored:
    """torchao 0.18's `Int4Tensor`: bytes of two neighbours in two's complement, the rest `[groups, out]`."""
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).bfloat16()
    added = (low + 8 * scale.float()).bfloat16()
    codes = ((groups - added.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
    packed = codes.flatten(1).to(torch.int8)
    parts = {
        "._weight_qdata": (packed[:, 0::2] & 15) | (packed[:, 1::2] << 4),
        "._weight_scale": scale.T.contiguous(),
        "._weight_zero_point": added.T.contiguous(),
    }
    return parts, (codes * scale.float()[..., None] + added.float()[..., None]).flatten(1)


def _e2m1(groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest 4-bit floats of groups `[…, groups, in a group]`: bytes of two, and what they stand for."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = ((groups / scale)[..., None] - values).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (values[codes.long()] * scale).flatten(-2)


def mxfp4(weight: Tensor) -> Stored:
    """Experts `[experts, in, out]`; they are stored the other way round."""
    groups = weight.mT.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    blocks, whole = _e2m1(groups, torch.exp2(exponents)[..., None])
    parts = {"_blocks": blocks.contiguous(), "_scales": (exponents + 127).to(torch.uint8)}
    return parts, whole.mT.contiguous()


def mxfp4_in_rows(weight: Tensor) -> Stored:
    parts, whole = mxfp4(weight.T)
    return {".weight_packed": parts["_blocks"].flatten(1), ".weight_scale": parts["_scales"]}, whole.T.contiguous()


def nvfp4(weight: Tensor, divides: bool) -> Stored:
    """The factor of the whole weight divides (compressed-tensors), or multiplies (ModelOpt)."""
    groups = weight.unflatten(1, (-1, 16))
    factor = weight.abs().max() / (448 * 6)
    factor = 1 / factor if divides else factor
    scale = (groups.abs().amax(-1) / 6 * (factor if divides else 1 / factor)).to(F8)
    by_group = scale.float() / factor if divides else scale.float() * factor
    packed, whole = _e2m1(groups, by_group[..., None])
    packed = packed.flatten(1)
    if divides:
        parts = {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": factor.reshape(1)}
    else:
        parts = {".weight": packed, ".weight_scale": scale, ".weight_scale_2": factor}
    return parts, whole
