"""Weights of 2, 3, 3.5, 4, 5 and 6 bits, linear in groups of 64 (Inferflow, section 3): `least + code * scale`.

A group's codes lie in planes of 4, 2 and 1 bits, so that none straddles bytes: 5 bits are one plane of 4 and one of 1.
With 3.5 bits a weight has 11 values, and two weights are one number of 7 bits. `bit_planes.h` decodes them, too.
Used by `loading`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.decoded import Decoded
from swarmllm.models.quantization.packed import row_slices
from swarmllm.models.quantization.rules import GROUP, SCALE_DTYPE

PLANES = {2: (2,), 3: (2, 1), 3.5: (4, 2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}
"""Bits of a weight → widths of its planes, from the lowest bits on; for 3.5 those of a number that is two weights."""
PAIR = 11
"""Values of each weight of such a pair: 11 * 11 fit into 7 bits."""


@dataclass(frozen=True, eq=False)
class KBit(Decoded):
    """Codes `[…, out, bytes of a row]`, uint8; scale and least values `[…, out, groups]`.

    Both are bfloat16 whatever the weight is. Their range is that of any weight, and the product of a code with a scale
    is exact in float32: so all processors decode the same numbers, however they add them up.
    """

    least: Tensor
    """The least value of each group. (`minimum` is a method of tensors, whose names `QuantizedWeight` keeps free.)"""

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
            steps = (parts.amax(-1, keepdim=True) - low) / largest
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
    """How many values a weight can have."""
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
    """What `pack` has packed."""
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
    """Each of the words with its bits above those of the one before."""
    return functools.reduce(torch.bitwise_or, [part << idx * width for idx, part in enumerate(parts)])


def _each_byte(width: int) -> int:
    """The mask of the lowest bits of each byte of a word."""
    return 0x01010101 * ((1 << width) - 1)
