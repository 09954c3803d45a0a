"""Which of the exact ways to multiply is the fastest on this processor: measured when it matters first, in some 50 ms
each.

Where a processor's name would have to be known otherwise, and what torch makes of it. Used by `packed`, `decoded` and
`bfloat16`.
"""

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from swarmllm.models.quantization import kernels

REPEATS = 4
"""The fastest counts: what disturbs a measurement only ever makes it slower."""
MANY = 128
"""Inputs of a product that is no longer mostly decoding."""
COLD_ROWS = 24 << 10
"""50 MB of codes: weights of which a cache has none, as in a decode step. In a cache both kernels are as fast."""
NO_LIMIT = 1 << 30


def computing_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Precision of the products of many inputs of this dtype: theirs, or float32 where it is faster."""
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        return torch.float32 if dtype == torch.float16 or float32_speedup() > 1 else dtype
    return dtype


@functools.cache
def float32_speedup() -> float:
    """How many times as fast this processor multiplies codes as float32 as it does as bfloat16.

    Measured (5632×2048, 128 tokens, one thread): 33 ms against 43 with AVX-512 and its bfloat16, against 240 with AVX2.
    """
    codes = torch.zeros(512, 1024, dtype=torch.int8)
    return _by_torch_s(codes, torch.bfloat16, 64) / _by_torch_s(codes, torch.float32, 64)


def kernels_take(inputs: Tensor) -> bool:
    """Whether inputs `[tokens, in]` go through our kernels: there are some, and they are faster."""
    if inputs.dtype == torch.float64 or kernels.library() is None:
        return False
    return inputs.shape[0] <= kernels.AT_A_TIME or inputs.shape[0] <= most_inputs(inputs.dtype)


@functools.cache
def most_inputs(dtype: torch.dtype) -> int:
    """How many inputs of this dtype our kernels multiply faster than torch does by rows that are decoded for it.

    The kernels' time grows with the inputs, torch's begins with the decoding. Measured (5632×2048, int8, one thread,
    Zen 5): with AVX-512 the kernels are faster for up to 24 inputs in bfloat16, which has instructions of its own, and
    always in float32, where 128 take 17 ms against 34; with AVX2 for up to 128, which take 30 against 32.
    """
    codes, wide = torch.zeros(1024, 2048, dtype=torch.int8), computing_dtype(dtype, torch.device("cpu"))
    matrix = kernels.Matrix(codes, torch.ones(1024, 1))
    inputs = torch.zeros(kernels.AT_A_TIME, 2048, dtype=dtype)
    few_s, many_s = _by_torch_s(codes, wide, kernels.AT_A_TIME), _by_torch_s(codes, wide, MANY)
    each_s = (many_s - few_s) / (MANY - kernels.AT_A_TIME)
    kernels_s = _least_s(lambda: matrix.multiply(inputs.float()).to(dtype))
    more_s = kernels_s / kernels.AT_A_TIME - each_s  # for each input
    decoding_s = few_s - each_s * kernels.AT_A_TIME
    return NO_LIMIT if more_s <= 0 else max(kernels.AT_A_TIME, int(decoding_s / more_s))


@functools.cache
def torch_multiplies_int8_faster() -> bool:
    """Whether `torch._weight_int8pack_mm` is faster than our kernels for a few inputs, or there are none.

    Measured (5632×2048, one thread, Zen 5; 10⁹ weights per second for 1, 4 and 8 inputs): 16, 15 and 8 against 24, 17
    and 11 with AVX-512, 15, 9 and 5 against 22, 10 and 6 with AVX2. ARM, for which torch has a kernel, wasn't tried.
    """
    if kernels.library() is None:
        return True
    codes, inputs = torch.ones(COLD_ROWS, 2048, dtype=torch.int8), torch.zeros(1, 2048, dtype=torch.bfloat16)
    matrix, scale = kernels.Matrix(codes, torch.ones(COLD_ROWS, 1)), torch.ones(COLD_ROWS, dtype=torch.bfloat16)
    ours_s = _least_s(lambda: matrix.multiply(inputs.float()).to(inputs.dtype))
    return _least_s(lambda: torch._weight_int8pack_mm(inputs, codes, scale)) < ours_s


def _by_torch_s(codes: Tensor, dtype: torch.dtype, num_inputs: int) -> float:
    """Seconds of a product by decoded rows. All is in memory that is there: while blocks are loaded, new memory has
    pages of its own, which the system takes longer to provide than this takes (`free_memory`)."""
    inputs, rows = torch.zeros(num_inputs, codes.shape[1], dtype=dtype), torch.zeros(codes.shape, dtype=dtype)
    outputs = torch.zeros(num_inputs, len(codes), dtype=dtype)
    return _least_s(lambda: torch.mm(inputs, rows.copy_(codes).T, out=outputs))


def _least_s(do: Callable[[], object]) -> float:
    """Seconds of one thread: several would wait for each other where others use the cores, all ways alike."""
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(REPEATS):
            began_at = time.thread_time()
            do()
            times.append(time.thread_time() - began_at)
    finally:
        torch.set_num_threads(threads)
    return max(min(times), 1e-9)
