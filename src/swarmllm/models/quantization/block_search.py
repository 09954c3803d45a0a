"""Round weights into the blocks of GGUF files: scales and minima are found by search.

`quantize` makes the bytes that `decoded.GgufBlocks` multiplies by. `loading.pack` calls it. It knows no models and no
files.

The error of a group is the sum of `(weight - decoded)²`. If the codes are fixed, least squares gives the best scale and
minimum. If the scale and minimum are fixed, the nearest codes are best. So some first scales are tried: each rounds the
group, the best scale for these codes is computed, and the one with the least error is kept. Kinds with blocks of 256
round their scales, too: then the neighbours of each rounded scale are tried as well, and the unit of the scales is
found in the same way.

All weights count alike, or by the mean squares of their inputs (a calibration). Measured (SmolLM2 135M, q8_0, KL in
nats per token): 0.00080, against 0.00101 if each counts by its own square, and 0.00115 with llama.cpp's quantizer; a
calibration halves it.

Groups are columns here, `[weights of a group, groups]`: PyTorch computes along the first dimension much faster. The
order of its own sums depends on shapes and processors. So they are made in pairs here, and all devices round alike.

On processors, `rounding.h` makes the same bytes some ten times as fast. It knows no importance.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.decoded import KINDS
from swarmllm.models.quantization.packed import divided, row_slices

Sums = tuple[Tensor, Tensor, Tensor]
"""Sums over the weights of each group `[groups]`: of codes, of their squares, of codes times weights."""

TRIED = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0)
"""By how many codes the range of a group exceeds the existing ones, for a first scale."""
TRIED_5 = (-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, *TRIED)
"""The same with 5 bits and a minimum, which can hold weights that were rounded to 4 or 5 bits before: the search finds
their step again. Measured (normal weights that were in Q5_0 and Q4_K, then in Q5_1): errors of 0.005 and 0.0007; 0.025
and 0.016 with `TRIED`."""
TRIED_8 = (-3.0, -2.0, -1.0, 0.0, 1.0)
"""The same with 8 bits. Measured (normal weights): an error of 0.0049; 0.0051 with -4, 0 and 4; 0.0047 with 13 of them,
which take twice as long."""
ROUNDS = 2
"""Rounds of trying neighbours and solving for the unit. Measured (normal weights, Q4_K): the second removes 0.3 % of
the error."""
LARGEST_5 = 31
LARGEST_HALF = 65504.0
LARGEST_SQUARED = 1e18
"""The kernel takes weights below this: sums of their squares are numbers."""
SMALLEST_STEP = 1e-37
"""Below, its inverse would be infinite in float32."""
LEAST_IMPORTANCE = 1e-3
"""Share of the mean. Assumed."""
SOLVABLE = 1e-6
"""Least squares whose determinant is below this share has no single solution: all codes are alike."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Weights that are rounded, and how much the error of each counts."""

    weights: Tensor
    """`[weights of a group, groups]`."""
    importance: Tensor | None
    """The same shape; None: all count alike."""

    @classmethod
    def of(cls, blocks: Tensor, importance: Tensor | None, size: int) -> "Groups":
        """Blocks `[blocks, weights of a block]`, and as many factors, in groups of `size`."""
        return cls(_columns(blocks, size), None if importance is None else _columns(importance, size))

    @functools.cached_property
    def count(self) -> Tensor | int:
        """The sum of what the weights of each group count."""
        return len(self.weights) if self.importance is None else _added_up(self.importance)

    @functools.cached_property
    def total(self) -> Tensor:
        """`[groups]`: the sum of the weights."""
        return _added_up(self._counted)

    @functools.cached_property
    def _counted(self) -> Tensor:
        return self.weights if self.importance is None else self.weights * self.importance

    def sums(self, codes: Tensor) -> Sums:
        """Sums over the weights of each group."""
        sums = codes if self.importance is None else codes * self.importance
        return _added_up(sums), *self.products(codes)

    def products(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """The last two of the sums."""
        squares = codes.square() if self.importance is None else codes.square().mul_(self.importance)
        return _added_up(squares), _added_up(codes * self._counted)

    def nearest(self, step: Tensor, minimum: Tensor | None, least: int, most: int) -> Tensor:
        """Codes whose `code * step - minimum` is the closest to the weights."""
        shifted = self.weights if minimum is None else self.weights + minimum
        return (shifted * _inverse(step)).round_().clamp_(least, most)


def _added_up(values: Tensor) -> Tensor:
    """`[power of 2, …]` → `[…]`: the sums of pairs, of pairs of pairs, and so on."""
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def quantize(weight: Tensor, kind: int, importance: Tensor | None = None) -> Tensor:
    """`[…, out, in]` → the bytes of whole blocks `[…, out, bytes of a row]`, uint8; `in` must consist of blocks.

    `importance` `[…, in]`: the square of an error in this column counts so many times.
    """
    _, size, num_bytes = KINDS[kind]
    per_matrix, columns = weight.shape[-2:]
    per_row = columns // size * num_bytes
    codes = torch.empty(*weight.shape[:-1], per_row, dtype=torch.uint8, device=weight.device)
    of_matrices = None if importance is None else _positive(importance).view(-1, columns).to(weight.device)
    for start, end, rows in row_slices(weight):
        made = codes.view(-1, per_row)[start:end]
        if of_matrices is None and kernels.rounds(kind) and rows.is_cpu and bool(rows.abs().amax() < LARGEST_SQUARED):
            kernels.round_blocks(kind, rows, made)
            continue
        counts = None if of_matrices is None else of_matrices[start // per_matrix].expand_as(rows).reshape(-1, size)
        made.copy_(MAKERS[kind](rows.reshape(-1, size), counts).view(end - start, -1))
    return codes


def _positive(importance: Tensor) -> Tensor:
    """Columns without activations count a little, so that their weights are not lost; the mean is 1."""
    mean = importance.float().mean(-1, keepdim=True)
    return torch.where(mean > 0, importance.float() / mean, 1.0).clamp_min_(LEAST_IMPORTANCE)


def _inverse(step: Tensor) -> Tensor:
    """1 / step; 0 where there is no step."""
    return torch.where(step.abs() < SMALLEST_STEP, 0.0, 1.0 / step)


def _half(numbers: Tensor) -> Tensor:
    """Rounded to float16, in float32; never -0, whose sign would depend on how zeros are added up."""
    return numbers.clamp(-LARGEST_HALF, LARGEST_HALF).half().float() + 0.0


def _bytes_of_half(numbers: Tensor) -> Tensor:
    """`[blocks]` → `[blocks, 2]`."""
    return numbers.half()[:, None].view(torch.uint8)


def _columns(blocks: Tensor, size: int) -> Tensor:
    """`[blocks, weights of a block]` → groups of this size `[size, groups]`."""
    return blocks.reshape(-1, size).T.contiguous()


def _each(of_blocks: Tensor, like: Tensor) -> Tensor:
    """`[blocks]` → `[groups]`: the number of the block that each group belongs to."""
    return of_blocks[:, None].expand(-1, len(like) // len(of_blocks)).reshape(-1)


def _farthest(numbers: Tensor, dim: int) -> Tensor:
    """Along a dimension, the number that is the farthest from 0, with its sign."""
    low, high = numbers.amin(dim), numbers.amax(dim)
    return torch.where(high > -low, high, low)


def _steps(groups: Groups, least: int, most: int, tried: Sequence[float]) -> Tensor:
    """The best `step` `[groups]` of `code * step`.

    The weight that is the farthest from 0 gets about the code `least`, which has the most room: steps may be negative.
    """
    farthest = _farthest(groups.weights, 0)
    found, gained = torch.zeros_like(farthest), torch.full_like(farthest, -1.0)
    for beyond in tried:
        squares, products = groups.products(groups.nearest(divided(farthest, least - beyond), None, least, most))
        step = products * _inverse(squares)
        gain = products * step  # what is taken off the error of all codes 0
        better = gain > gained
        found, gained = torch.where(better, step, found), torch.where(better, gain, gained)
    return found


def _lines(groups: Groups, most: int, *, below_zero: bool) -> tuple[Tensor, Tensor]:
    """The best `step` and `minimum` `[groups]` of `code * step - minimum`, with codes from 0 to `most`.

    `below_zero`: neither may be negative, as in blocks of 256.
    """
    low, high = groups.weights.amin(0), groups.weights.amax(0)
    if below_zero:
        low, high = low.clamp_max(0.0), high.clamp_min(0.0)
    found, minimum, least_error = torch.zeros_like(low), -low, torch.full_like(low, torch.inf)
    for beyond in TRIED_5 if most == LARGEST_5 else TRIED:
        of_codes = groups.sums(groups.nearest(divided(high - low, most + beyond), -low, 0, most))
        step, below = _solved(groups, of_codes, below_zero=below_zero)
        error = _error(groups, step, below, of_codes)
        better = error < least_error
        found, minimum = torch.where(better, step, found), torch.where(better, below, minimum)
        least_error = torch.where(better, error, least_error)
    return found, minimum


def _solved(groups: Groups, of_codes: Sums, *, below_zero: bool) -> tuple[Tensor, Tensor]:
    """The best step and minimum for these codes."""
    sums, squares, products = of_codes
    count, total = groups.count, groups.total
    determinant = count * squares - sums.square()
    solvable = determinant > SOLVABLE * count * squares
    step = torch.where(solvable, count * products - sums * total, 0.0) / torch.where(solvable, determinant, 1.0)
    below = (step * sums - total) / count
    if below_zero:
        step = torch.where(below < 0, products * _inverse(squares), step).clamp_min_(0.0)
        below = below.clamp_min_(0.0)
    return step, below


def _error(groups: Groups, step: Tensor, minimum: Tensor, of_codes: Sums) -> Tensor:
    """The error of each group, less the sum of the weights' squares."""
    sums, squares, products = of_codes
    by_minimum = minimum * (minimum * groups.count - 2 * step * sums + 2 * groups.total)
    return step * (step * squares - 2 * products) + by_minimum


def _q8_0(blocks: Tensor, importance: Tensor | None) -> Tensor:
    groups = Groups.of(blocks, importance, 32)
    step = _half(_steps(groups, -127, 127, TRIED_8))
    codes = groups.nearest(step, None, -127, 127).to(torch.int8).T.contiguous()
    return torch.cat([_bytes_of_half(step), codes.view(torch.uint8)], 1)


def _q5_0(blocks: Tensor, importance: Tensor | None) -> Tensor:
    groups = Groups.of(blocks, importance, 32)
    step = _half(_steps(groups, -16, 15, TRIED))
    return torch.cat([_bytes_of_half(step), _five_bits(groups.nearest(step, None, -16, 15) + 16)], 1)


def _q5_1(blocks: Tensor, importance: Tensor | None) -> Tensor:
    groups = Groups.of(blocks, importance, 32)
    step, minimum = map(_half, _lines(groups, LARGEST_5, below_zero=False))
    codes = groups.nearest(step, minimum, 0, 31)
    return torch.cat([_bytes_of_half(step), _bytes_of_half(-minimum), _five_bits(codes)], 1)


def _five_bits(codes: Tensor) -> Tensor:
    """Codes of groups of 32, as columns → `[groups, 20]`: the fifth bits in 4 bytes, then the others."""
    whole = codes.to(torch.uint8).T
    low, high = (whole & 15).chunk(2, 1)
    return torch.cat([_bits(whole >> 4), low | high << 4], 1)


def _bits(ones: Tensor) -> Tensor:
    """Numbers 0 and 1 `[…, 8n]` → bytes `[…, n]`, the first one lowest."""
    places = torch.arange(8, dtype=torch.uint8, device=ones.device)
    return (ones.view(*ones.shape[:-1], -1, 8) << places).sum(-1, dtype=torch.uint8)


def _q6_k(blocks: Tensor, importance: Tensor | None) -> Tensor:
    groups = Groups.of(blocks, importance, 16)
    steps = _steps(groups, -32, 31, TRIED)
    unit = _half(_farthest(steps.view(-1, 16), 1) / -128)
    scales = (steps * _inverse(_each(unit, steps))).round_().clamp_(-128, 127)
    best, gained = scales, torch.full_like(scales, -torch.inf)
    squares, products = torch.zeros_like(scales), torch.zeros_like(scales)
    for by in (0, -1, 1):
        scale = (scales + by).clamp_(-128, 127)
        step = scale * _each(unit, scales)
        of_squares, of_products = groups.products(groups.nearest(step, None, -32, 31))
        gain = step * (2 * of_products - step * of_squares)
        better = gain > gained
        best, gained = torch.where(better, scale, best), torch.where(better, gain, gained)
        squares, products = torch.where(better, of_squares, squares), torch.where(better, of_products, products)
    over, under = (_added_up((best * one).view(-1, 16).T) for one in (products, best * squares))
    unit = _half(over * _inverse(under))
    codes = groups.nearest(best * _each(unit, best), None, -32, 31).add_(32).to(torch.uint8)
    # In each half of a block: two times 32 codes below, two above.
    quarters = codes.T.reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    return torch.cat(
        [
            (low[:, :, :2] | low[:, :, 2:] << 4).flatten(1),
            (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).flatten(1),
            best.view(-1, 16).to(torch.int8).view(torch.uint8),
            _bytes_of_half(unit),
        ],
        1,
    )


def _q4_k(blocks: Tensor, importance: Tensor | None) -> Tensor:
    start, codes = _scales_and_codes(blocks, importance, 15)
    return torch.cat([start, _nibbles(codes)], 1)


def _q5_k(blocks: Tensor, importance: Tensor | None) -> Tensor:
    start, codes = _scales_and_codes(blocks, importance, LARGEST_5)
    fifth = _bits((codes >> 4).transpose(1, 2)).flatten(1)
    return torch.cat([start, fifth, _nibbles(codes & 15)], 1)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes of 4 bits `[blocks, groups, 32]` → bytes: of two groups, the first below."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).flatten(1)


def _scales_and_codes(blocks: Tensor, importance: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """The first 16 bytes of each block of Q4_K or Q5_K, and the codes `[blocks, 8, 32]`."""
    groups = Groups.of(blocks, importance, 32)
    steps, minima = _lines(groups, most, below_zero=True)
    unit, low_unit = (_half(divided(one.view(-1, 8).amax(1), 63)) for one in (steps, minima))
    scales, lows = _six_bits(steps, _each(unit, steps)), _six_bits(minima, _each(low_unit, minima))
    for _ in range(ROUNDS):
        scales, lows = _better_neighbours(groups, scales, lows, (unit, low_unit), most)
        unit, low_unit = _better_units(groups, scales, lows, (unit, low_unit), most)
    codes = groups.nearest(scales * _each(unit, scales), lows * _each(low_unit, lows), 0, most)
    start = torch.cat([_bytes_of_half(unit), _bytes_of_half(low_unit), _twelve_bytes(scales, lows)], 1)
    return start, codes.T.reshape(-1, 8, 32).to(torch.uint8)


def _six_bits(numbers: Tensor, unit: Tensor) -> Tensor:
    return (numbers * _inverse(unit)).round_().clamp_(0, 63)


def _better_neighbours(
    groups: Groups, scales: Tensor, lows: Tensor, units: tuple[Tensor, Tensor], most: int
) -> tuple[Tensor, Tensor]:
    """Each rounded scale, or one next to it, with the rounded minimum that goes best with it."""
    unit, low_unit = (_each(one, scales) for one in units)
    best, with_best, least_error = scales, lows, torch.full_like(scales, torch.inf)
    for by in (0, -1, 1):
        scale = (scales + by).clamp_(0, 63)
        step = scale * unit
        of_codes = groups.sums(groups.nearest(step, lows * low_unit, 0, most))
        low = _six_bits((step * of_codes[0] - groups.total) / groups.count, low_unit)
        error = _error(groups, step, low * low_unit, of_codes)
        better = error < least_error
        best, with_best = torch.where(better, scale, best), torch.where(better, low, with_best)
        least_error = torch.where(better, error, least_error)
    return best, with_best


def _better_units(
    groups: Groups, scales: Tensor, lows: Tensor, units: tuple[Tensor, Tensor], most: int
) -> tuple[Tensor, Tensor]:
    """The units of the rounded scales and minima `[blocks]`, by least squares; the given ones where they are better."""

    def tried(unit: Tensor, low_unit: Tensor) -> tuple[Tensor, Sums]:
        step, minimum = scales * _each(unit, scales), lows * _each(low_unit, lows)
        of_codes = groups.sums(groups.nearest(step, minimum, 0, most))
        return _added_up(_error(groups, step, minimum, of_codes).view(-1, 8).T), of_codes

    error, (sums, squares, products) = tried(*units)
    terms = (
        scales.square() * squares,
        -scales * lows * sums,
        lows.square() * groups.count,
        scales * products,
        -lows * groups.total,
    )
    a, b, c, x, y = (_added_up(term.view(-1, 8).T) for term in terms)
    determinant = a * c - b.square()
    solvable = determinant > SOLVABLE * a * c
    even = torch.where(solvable, determinant, 1.0)
    unit = torch.where(solvable, (x * c - y * b) / even, x * _inverse(a))
    low_unit = torch.where(solvable, (a * y - b * x) / even, 0.0)
    solved = _half(unit.clamp_min(0.0)), _half(low_unit.clamp_min(0.0))
    better = tried(*solved)[0] < error
    return torch.where(better, solved[0], units[0]), torch.where(better, solved[1], units[1])


def _twelve_bytes(scales: Tensor, lows: Tensor) -> Tensor:
    """8 scales and 8 minima of 6 bits: the first 4 of each in bytes, whose upper 2 bits belong to the others."""
    (scale, last_scale), (low, last_low) = (one.view(-1, 2, 4).to(torch.uint8).unbind(1) for one in (scales, lows))
    return torch.cat(
        [scale | last_scale >> 4 << 6, low | last_low >> 4 << 6, last_scale & 15 | (last_low & 15) << 4], 1
    )


MAKERS: dict[int, Callable[[Tensor, Tensor | None], Tensor]] = {
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
}
"""Kind of `decoded.KINDS` → blocks `[blocks, weights]`, and what each weight counts, to their bytes `[blocks,
bytes]`."""
