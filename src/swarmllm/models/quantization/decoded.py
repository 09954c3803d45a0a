"""Packed weights whose codes are decoded row by row: our own of 2 to 6 bits, published ones, and GGUF's.

A few inputs are multiplied by `kernels.c`, many inputs by rows that are decoded a few at a time; by torch where the
kernels are missing, and on CUDA. There, a few inputs are multiplied by `cuda_products` if the form describes itself to
it.

`KBit`: 2, 3, 3.5, 4, 5 and 6 bits, linear in groups of 64 (Inferflow, section 3): `least + code * scale`. A group's
codes lie in planes of 4, 2 and 1 bits, so that no code straddles bytes: 5 bits are one plane of 4 and one of 1. With
3.5 bits a weight has 11 values, and two weights are one number of 7 bits. `bit_planes.h` decodes them, too. `loading`
makes them.

`Published`: weights as published checkpoints hold them, codes with scales for groups of a row. To round a published
weight once more would lose accuracy. Only scales take more memory than on disk. `models/published_formats`
makes them.

`GgufBlocks`: weights as GGUF files hold them, byte for byte: blocks of 32 or 256 neighbours of a row, each with its
own scales. A few inputs are multiplied by `gguf_blocks.h`, which has the kinds in `KERNELS`; torch dequantizes the
other kinds, which are rare, and all on CUDA. But there, Q4_0 and Q8_0 become codes and scales: the same numbers in as
many bytes. `models/published_formats/gguf` makes them.

`GgufStrips`: the same in strips of 16 rows, on processors that have a version of `strips.h` for the kind.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from transformers.integrations.gguf import dequant

from swarmllm.models.quantization import cuda, kernels
from swarmllm.models.quantization.kernels import Q4_0, Q8_0, kernels_take
from swarmllm.models.quantization.packed import InStrips, Packed, divided, row_slices
from swarmllm.models.quantization.rules import GROUP, SCALE_DTYPE

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

PLANES = {2: (2,), 3: (2, 1), 3.5: (4, 2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}
"""Bits of a weight → widths of its planes, from the lowest bits on. For 3.5 bits: planes of a number that is two
weights."""
PAIR = 11
"""Values of each weight of such a pair: 11 * 11 fit into 7 bits."""

WHOLE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Kinds of tensors that hold numbers, as `enum ggml_type` counts them."""


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
    """Bytes of `pairs` `[…, n]` → the values of their codes `[…, 2n]`, float32.

    One look into a table for two codes is twice as fast as cutting them apart first.
    """
    table = _pair_values(values).to(packed.device)
    return table.index_select(0, packed.int().flatten()).view(*packed.shape[:-1], -1)


def require_groups(shape: Sequence[int], *of_groups: Tensor | None, size: int | None = None) -> None:
    """Check numbers of groups `[…, out, groups]` of a weight `[…, out, in]`. `size`: inputs of a group, if it is fixed.

    Torch would repeat too few numbers, and the kernels would read beyond them.

    Raises:
        ValueError: there are more or fewer numbers than the weight has groups.
    """
    first = next((one for one in of_groups if one is not None), None)
    if first is None:
        return
    num_groups = first.shape[-1] if size is None else shape[-1] // size
    if not num_groups or shape[-1] % num_groups or (size is not None and shape[-1] % size):
        raise ValueError(f"{shape[-1]} inputs can't have {num_groups} groups")
    for one in of_groups:
        if one is not None and one.shape != (*shape[:-1], num_groups):
            raise ValueError(f"{tuple(one.shape)} are no numbers of {num_groups} groups of {tuple(shape)}")


def scaled(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """`(weight - zero) * scale` in float32; each scale is that of a group of neighbours in a row.

    `weight` `[…, out, in]`, the others `[…, out, groups]`.

    Raises:
        ValueError: their sizes don't fit together.
    """
    require_groups(weight.shape, scale, zero)
    groups = weight.float().view(*weight.shape[:-1], scale.shape[-1], -1)
    if zero is not None:
        groups = groups - zero.float()[..., None]
    weights: Tensor = groups * scale.float()[..., None]
    return weights.flatten(-2)


class Decoded(Packed):
    """A form that can decode its codes; this class multiplies by them."""

    @property
    def _in_kernels(self) -> bool:
        """True if the kernels know these codes."""
        return True

    @abstractmethod
    def _matrix(self) -> kernels.Matrix:
        """This matrix, as the kernels want it."""

    def can_round_inputs(self, *, faster: bool = False) -> bool:
        return self._in_kernels and super().can_round_inputs(faster=faster)

    @abstractmethod
    def _decoded(self, rows: dict[str, Tensor]) -> Tensor:
        """The float32 values that the kernels would decode from these rows of `tensors()`."""

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        if self._in_kernels and self.device.type == "cpu" and kernels.library() is not None:
            return self._matrix().dequantize(start, end).to(dtype)
        return self._decoded({name: tensor[start:end] for name, tensor in self.tensors().items()}).to(dtype)

    def _output_scale(self) -> None:
        return None

    def _row_bytes(self, dtype: torch.dtype) -> int:
        """Rows are decoded to float32 first. Measured (5632×2048, q8_0, 128 inputs, bfloat16): 11 ms if both fit into
        the cache, 13 to 18 if not."""
        first = 0 if dtype.itemsize >= torch.float32.itemsize else torch.float32.itemsize
        return super()._row_bytes(dtype) + self.shape[1] * first

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return self._in_kernels and kernels_take(inputs)

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        return self._matrix().multiply(inputs.float()).to(inputs.dtype)


@dataclass(frozen=True, eq=False)
class KBit(Decoded):
    """Codes `[…, out, bytes of a row]`, uint8; scale and least values `[…, out, groups]`.

    Both are bfloat16 whatever the weight is. Their range is that of any weight, and the product of a code with a scale
    is exact in float32: so all processors decode the same numbers, however they add them up.
    """

    least: Tensor
    """The least value of each group. (`minimum` is a method of tensors, and `QuantizedWeight` keeps such names
    free.)"""

    @classmethod
    def quantize(cls, weight: Tensor, bits: float) -> "KBit":
        """Round `[…, out, in]` to even steps from the least to the largest of a group; `in` must consist of groups."""
        groups, largest = weight.shape[-1] // GROUP, num_values(bits) - 1
        rows, device = weight.shape[:-1], weight.device
        codes = torch.empty(*rows, int(groups * GROUP * bits) // 8, dtype=torch.uint8, device=device)
        scale, least = (torch.empty(*rows, groups, dtype=SCALE_DTYPE, device=device) for _ in range(2))
        for start, end, some in row_slices(weight):
            parts = some.reshape(end - start, -1, GROUP)
            # Rounded before they are used, so that their rounding is no error of its own.
            low = parts.amin(-1, keepdim=True).to(SCALE_DTYPE)
            steps = divided(parts.amax(-1, keepdim=True) - low, largest)
            steps = steps.clamp_min_(torch.finfo(torch.float32).tiny).to(SCALE_DTYPE)
            rounded = parts.sub_(low).div_(steps).round_().clamp_(0, largest).int()
            codes.view(-1, codes.shape[-1])[start:end] = pack(rounded, bits).flatten(1)
            scale.view(-1, groups)[start:end] = steps.squeeze(-1)
            least.view(-1, groups)[start:end] = low.squeeze(-1)
        return cls(codes, scale, weight.dtype, least)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.scale.shape[-1] * GROUP))

    @property
    def _columns_together(self) -> int:
        return GROUP

    @property
    def bits(self) -> float:
        """Bits of a weight, without its share of scales."""
        return self.codes.shape[-1] * 8 / self.shape[-1]

    def _matrix(self) -> kernels.Matrix:
        return kernels.Matrix(self.codes, self.scale, least=self.least)

    def _decoded(self, rows: dict[str, Tensor]) -> Tensor:
        scale = rows["scale"].float()
        codes = unpack(rows["codes"].view(*scale.shape, -1), self.bits)
        return (codes * scale[..., None]).add_(rows["least"][..., None]).flatten(-2)


def num_values(bits: float) -> int:
    """The number of values that a weight can have."""
    return PAIR if bits == 3.5 else 1 << int(bits)


def pack(codes: Tensor, bits: float) -> Tensor:
    """Codes of groups `[…, 64]`, int32 → bytes `[…, 8 * bits]`, uint8."""
    if bits == 3.5:
        first, second = codes.chunk(2, -1)
        codes = first * PAIR + second
    words = _one_above_another(codes.chunk(4, -1), 8)  # four codes in one word, to be shifted at once
    planes, below = [], 0
    for width in PLANES[bits]:
        parts = (words >> below & _each_byte(width)).chunk(8 // width, -1)
        planes.append(_one_above_another(parts, width))
        below += width
    return torch.cat(planes, -1).view(torch.uint8)


def unpack(packed: Tensor, bits: float) -> Tensor:
    """The inverse of `pack`."""
    packed_words = packed.contiguous().view(torch.int32)
    words, start, below = packed_words.new_zeros(()), 0, 0
    for width in PLANES[bits]:
        end = start + width * (1 if bits == 3.5 else 2)
        parts = [packed_words[..., start:end] >> shift & _each_byte(width) for shift in range(0, 8, width)]
        words = words | torch.cat(parts, -1) << below
        start, below = end, below + width
    codes = torch.cat([words >> shift & 255 for shift in range(0, 32, 8)], -1)
    if bits == 3.5:
        first = codes * 373 >> 12  # divided by 11, exactly, as they are less than 128
        codes = torch.cat([first, codes - first * PAIR], -1)
    return codes


def _one_above_another(parts: Sequence[Tensor], width: int) -> Tensor:
    """One word made of several, each with its bits above those of the one before."""
    return functools.reduce(torch.bitwise_or, [part << idx * width for idx, part in enumerate(parts)])


def _each_byte(width: int) -> int:
    """The mask of the lowest bits of each byte of a word."""
    return 0x01010101 * ((1 << width) - 1)


OF_GROUPS = ("scale", "zero", "least")
"""Tensors of a packed weight with a number for each group."""


class Published(Decoded):
    """Codes that are numbers, `[…, out, in]` (float8_e4m3fn, int8 or uint8), with scales `[…, out, groups]`."""

    values: ClassVar[tuple[float, ...] | None] = None
    """The values of the codes, if two are in a byte, `[…, out, in/2]`, the first of two below."""
    divides: ClassVar[bool] = False
    """True if `factor` divides the scales: its inverse would be rounded."""

    @property
    def shape(self) -> torch.Size:
        per_byte = 1 if self.values is None else 2
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * per_byte))

    def require_sizes(self) -> None:
        factor = self.tensors().get("factor")
        require_groups(self.shape, *(tensor for name, tensor in self.tensors().items() if name in OF_GROUPS))
        if factor is not None and factor.shape != self.shape[:-1]:
            raise ValueError(f"{tuple(factor.shape)} are no factors of the rows of {tuple(self.shape)}")

    def _decoded(self, rows: dict[str, Tensor]) -> Tensor:
        codes, scale, zero, factor, least = (rows.get(name) for name in ("codes", "scale", "zero", "factor", "least"))
        assert codes is not None
        assert scale is not None
        if factor is not None:
            scale = scale.float() / factor[:, None] if self.divides else scale.float() * factor[:, None]
        weights = scaled(codes if self.values is None else values_of_pairs(codes, self.values), scale, zero)
        if least is not None:
            weights.view(*least.shape, -1).add_(least[..., None])
        return weights

    def cuda_matrix(self) -> cuda.Matrix:
        return cuda.Matrix(**self.tensors(), divides=self.divides, values=self.values)  # type: ignore[arg-type]

    def _matrix(self) -> kernels.Matrix:
        return kernels.Matrix(**self.tensors(), divides=self.divides, values=self.values)  # type: ignore[arg-type]


class Int4(Published):
    """Whole numbers from -8 to 7."""

    values = INT4


class Nf4Pairs(Published):
    """4-bit normal floats in groups of any size."""

    values = NF4


class Fp4Pairs(Published):
    """bitsandbytes' 4-bit floats."""

    values = FP4


class Mxfp4Pairs(Published):
    """4-bit floats with powers of two as scales."""

    values = E2M1


@dataclass(frozen=True, eq=False)
class Uint4(Published):
    """Whole numbers from 0 to 15, minus each group's zero `[…, out, groups]`: uint8, or fractions."""

    zero: Tensor
    values = UINT4


@dataclass(frozen=True, eq=False)
class ZeroedBytes(Published):
    """The same with whole numbers of 8 bits, int8 or uint8."""

    zero: Tensor


@dataclass(frozen=True, eq=False)
class ShiftedInt4(Published):
    """Whole numbers from -8 to 7, times the scales, plus `least` `[…, out, groups]`. Both have the same 16-bit dtype:
    kernels round the products only if they aren't exact."""

    least: Tensor
    values = INT4


@dataclass(frozen=True, eq=False)
class Nvfp4(Published):
    """4-bit floats with scales in 8-bit floats, and a factor of the whole matrix, for each of its rows: `[…, out]`."""

    factor: Tensor
    values = E2M1


class DividedNvfp4(Nvfp4):
    """The same, but the factor is divided by."""

    divides = True


def _q5(blocks: Tensor, start: int) -> Tensor:
    """Codes of 5 bits `[blocks, 32]`: the fifth ones in 4 bytes, then the others."""
    high = (blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)) & 1
    low = blocks[:, start + 4 :]
    return torch.cat([low & 15, low >> 4], 1) | (high.flatten(1) << 4)


def _q5_0(blocks: Tensor) -> Tensor:
    return blocks[:, :2].view(torch.float16).float() * (_q5(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, minimum = (blocks[:, at : at + 2].view(torch.float16).float() for at in (0, 2))
    return scale * _q5(blocks, 4).float() + minimum


_OWN: dict[int, tuple[str, int, int, Callable[[Tensor], Tensor]]] = {
    6: ("Q5_0", 32, 22, _q5_0),
    7: ("Q5_1", 32, 24, _q5_1),
}
"""Kinds that transformers lacks: number → (name, weights of a block, its bytes, function that decodes it)."""


KINDS: dict[int, tuple[str, int, int]] = {
    **{number: (dequant.GGML_NAME[number], *sizes) for number, sizes in dequant.GGML_BLOCK.items()},
    **{number: own[:3] for number, own in _OWN.items()},
}
"""Number of a kind → (its name, weights of a block, its bytes)."""


KERNELS = frozenset({2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23})
"""Kinds that `gguf_blocks.h` knows: Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL and IQ4_XS."""


def dequantize(kind: int, codes: Tensor) -> Tensor:
    """Bytes of whole blocks `[…, bytes]` → weights `[…, in]` in float32, bit for bit those of package gguf."""
    _, _, size = KINDS[kind]
    blocks = codes.reshape(-1, size)
    weights: Tensor = _OWN[kind][3](blocks) if kind in _OWN else dequant.dequantize(blocks, kind, torch.float32)
    return weights.reshape(*codes.shape[:-1], -1)


@dataclass(frozen=True, eq=False)
class GgufBlocks(Decoded):
    """Codes `[…, out, bytes of a row]`, uint8, with everything that belongs to them."""

    kind: ClassVar[int]
    scale: None = field(init=False, default=None)  # type: ignore[assignment]

    @property
    def shape(self) -> torch.Size:
        _, weights, size = KINDS[self.kind]
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] // size * weights))

    @property
    def _columns_together(self) -> int:
        return KINDS[self.kind][1]

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes}

    def for_device(self, device: torch.device) -> Packed:
        if (
            device.type == "cpu"
            and self.kind in STRIPS
            and self.shape[-2] % kernels.STRIP == 0
            and kernels.has_strips(self.kind)
        ):
            return STRIPS[self.kind](kernels.into_strips(self.codes, self.kind), self.dtype)
        if device.type != "cuda" or self.kind not in (Q4_0, Q8_0):
            return self
        size = KINDS[self.kind][2]
        blocks = self.codes.view(*self.codes.shape[:-1], -1, size)
        scale, codes = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1), blocks[..., 2:]
        if self.kind == Q8_0:
            return Published(codes.contiguous().view(torch.int8).flatten(-2), scale, self.dtype)
        # Of a block's 32 weights, the first half lies below.
        return Int4(pairs(torch.cat([codes & 15, codes >> 4], -1).flatten(-2)), scale, self.dtype)

    @property
    def _in_kernels(self) -> bool:
        return self.kind in KERNELS

    def _decoded(self, rows: dict[str, Tensor]) -> Tensor:
        return dequantize(self.kind, rows["codes"])

    def _matrix(self) -> kernels.Matrix:
        return kernels.Matrix(self.codes, gguf=(self.kind, self.shape[1]))


FORMS: dict[int, type[GgufBlocks]] = {
    number: type(f"Gguf{name}", (GgufBlocks,), {"kind": number, "__module__": __name__})
    for number, (name, *_) in KINDS.items()
}
"""A class for each kind, so that only weights of one kind are joined."""


class GgufStrips(InStrips, GgufBlocks):
    """The same in strips."""

    def _as_rows(self) -> Packed:
        codes = kernels.into_strips(self.codes, self.kind, back=True)
        rows = FORMS[self.kind](codes, self.dtype)
        return rows.as_rounding() if self.rounds_inputs else rows

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        if self.device.type != "cpu":  # moved since
            return self._as_rows()._rows(start, end, dtype)
        return super()._rows(start, end, dtype)

    def _matrix(self) -> kernels.MatrixInStrips:
        return kernels.MatrixInStrips(self.codes, gguf=(self.kind, self.shape[1]))


STRIPS: dict[int, type[GgufStrips]] = {
    number: type(f"Strips{KINDS[number][0]}", (GgufStrips,), {"kind": number, "__module__": __name__})
    for number in kernels.IN_STRIPS
}
