"""Attention of one new position in bfloat16 with the very bits of torch's (`whole_attention.h`): where it has them.

As with products (`whole.py`), the order of torch's additions depends on the libraries under it and on the processor. So
both are compared, with many lengths, on numbers of which another order gives another result.
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.whole import is_watched

LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 48, 63, 100, 131, 257, 512, 513, 527, 700, 1040)
"""Keys. Groups of 4 and 8, vectors of 8 and 16 and pieces of 512 keys, and what is left over."""
TRIALS = 6
MOST_SIZE, MULTIPLE = 256, 16
"""The largest size of a head, and a number that divides all sizes."""
Function = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention `[1, heads, 1, size]`, of keys and values `[1, key heads, keys, size]`, to `[1, 1, heads, size]`."""


class _Attended(ctypes.Structure):
    """As in `whole_weight.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("num", "count", "size")),
        ("scale", ctypes.c_float),
        ("outputs", ctypes.c_void_p),
        ("log_sums", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    )


def is_exact(function: Function, key_heads: int, num_heads: int, size: int, scale: float) -> bool:
    """True if our attention has the bits of torch's, and `function`, which a model calls, is torch's."""
    if num_heads < 2 or size % MULTIPLE or not 0 < size <= MOST_SIZE or kernels.library() is None:
        return False  # of a single head, torch's threads might compute parts
    if not kernels.library().swarmllm_can_attend_as_torch(kernels.level()) or not _is_torchs(size):
        return False
    generator = torch.Generator().manual_seed(size)
    for length in LENGTHS:
        query, keys, values = _random(generator, key_heads, num_heads, length, size)
        outputs, _ = attend(query[0, :, 0], keys[0], values[0], scale)
        if not torch.equal(function(query, keys, values)[0, 0], outputs):
            return False
    return True


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """True if `attend_rows` has the bits of torch's for a query `[rows, heads, 1, size]`, keys and values `[rows, key
    heads, keys, size]`."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if type(query) is not Tensor or keys.shape != values.shape or keys.dtype != query.dtype:
        return False
    num_heads, size = query.shape[1], query.shape[-1]
    if num_heads < 2 or size % MULTIPLE or not 0 < size <= MOST_SIZE or kernels.library() is None:
        return False  # of a single head, torch's threads might compute parts
    if is_watched(query, keys, values):
        return False
    return bool(kernels.library().swarmllm_can_attend_as_torch(kernels.level())) and _is_torchs(size)


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Attend with the bits of torch's, where `takes` is true, to outputs `[rows, 1, heads, size]`."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs = [attend(*row, scale)[0] for row in zip(query[:, :, 0], keys, values, strict=True)]
    return torch.stack(outputs)[:, None]


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries `[heads, size]`, keys and values `[key heads, keys, size]`, to outputs `[heads, size]`; and in float32
    the logarithms of the sums of exponentials `[heads]`."""
    num, (count, size) = len(queries) // len(keys), keys.shape[1:]
    queries, outputs, log_sums = queries.contiguous(), torch.empty_like(queries), torch.empty(len(queries))
    keys, values = (one if one.stride()[1:] == (size, 1) else one.contiguous() for one in (keys, values))
    addresses = [one.data_ptr() for one in (queries, keys, values, outputs, log_sums)]
    first = _Attended(*addresses[:3], num, count, size, scale, *addresses[3:])
    apart = keys.stride(0), values.stride(0)
    kernels.library().swarmllm_attend_heads(kernels.level(), ctypes.byref(first), len(keys), *apart)
    return outputs, log_sums


@functools.cache
def _is_torchs(size: int) -> bool:
    """True if our attention has the bits of torch's for heads of this size.

    Outputs in bfloat16 hardly show the order in which values are added, unless these cancel; nor that of exponentials,
    of which the logarithms of their sums show more, if the sums aren't much larger than 1.
    """
    generator = torch.Generator().manual_seed(size)
    for length, trial in itertools.product(LENGTHS, range(TRIALS)):
        query, keys, values = _random(generator, 1, 2, length, size)
        if trial % 3 == 1:  # all exponentials are together about as large as the largest
            keys[0, 0, length // 2] = query[0, 0, 0] * (math.log(length) + 2) / size**0.5
        elif trial % 3 == 2:
            query.zero_()
            _let_cancel(values, generator)
        expected, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys.expand(1, 2, -1, -1), values.expand(1, 2, -1, -1), scale=size**-0.5
        )
        outputs, our_log_sums = attend(query[0, :, 0], keys[0], values[0], size**-0.5)
        if not torch.equal(outputs, expected[0, :, 0]) or not torch.equal(our_log_sums, log_sums.flatten()):
            return False
    return True


def _random(generator: torch.Generator, key_heads: int, num_heads: int, length: int, size: int) -> tuple[Tensor, ...]:
    shapes = ((num_heads, 1), (key_heads, length), (key_heads, length))
    return tuple(torch.randn(1, *shape, size, generator=generator).bfloat16() for shape in shapes)


def _let_cancel(values: Tensor, generator: torch.Generator) -> None:
    mixed = torch.randperm(values.shape[2], generator=generator)
    third = len(mixed) // 3
    values[:, :, mixed[:third]] *= 1024
    values[:, :, mixed[third : 2 * third]] = -values[:, :, mixed[:third]]
