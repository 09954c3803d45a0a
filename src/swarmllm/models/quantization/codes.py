"""Codes of a few bits: out of the bytes and words that hold them, and into numbers by the scales of their groups."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

INT4 = tuple(float(value) for value in range(-8, 8))
"""Values of a signed code that is stored with 8 added."""
UINT4 = tuple(float(value) for value in range(16))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of a 4-bit float: 2 bits of exponent, 1 of mantissa (OCP Microscaling formats, section 5.3.3)."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of a 4-bit normal float (QLoRA, appendix E)."""
FP4 = tuple(
    sign * value for sign in (1.0, -1.0) for value in (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
)
"""Values of bitsandbytes' own 4-bit float."""


def nibbles(packed: Tensor, *, low_first: bool = True) -> Tensor:
    """Bytes `[…, n]` → codes of 4 bits `[…, 2n]`, uint8."""
    packed = packed.view(torch.uint8)
    low, high = packed & 0xF, packed >> 4
    return torch.stack((low, high) if low_first else (high, low), -1).flatten(-2)


def pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits `[…, 2n]` → bytes `[…, n]`, the first of two below."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def words(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Words of 32 bits → codes of `bits` each along `dim`, the lowest bits first; int32.

    `bits` must divide 32.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    packed = packed.movedim(dim, -1)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2).movedim(-1, dim)


@functools.cache
def _pair_values(values: Sequence[float]) -> Tensor:
    codes = nibbles(torch.arange(256, dtype=torch.uint8)[:, None])
    return torch.tensor(values)[codes.int()]


def values_of_pairs(packed: Tensor, values: Sequence[float]) -> Tensor:
    """Bytes of `pairs` `[…, n]` → what their codes stand for `[…, 2n]`, float32.

    One look into a table for two codes is twice as fast as cutting them apart first.
    """
    table = _pair_values(values).to(packed.device)
    return table.index_select(0, packed.int().flatten()).view(*packed.shape[:-1], -1)


def scaled(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """`(weight - zero) * scale` in float32; each scale is that of a group of neighbours in a row.

    `weight` `[…, out, in]`, the others `[…, out, groups]`.
    """
    groups = weight.float().view(*weight.shape[:-1], scale.shape[-1], -1)
    if zero is not None:
        groups = groups - zero.float()[..., None]
    weights: Tensor = groups * scale.float()[..., None]
    return weights.flatten(-2)
