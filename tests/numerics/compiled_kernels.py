"""Compiles every kernel for a GPU that needn't be there, down to machine code; `test_compiled_kernels` runs this file.

    python compiled_kernels.py CAPABILITY     90 is an H100, 80 an A100

The launchers run as they do on a GPU, on tensors of CPUs, but what they launch is only compiled: so each kernel is
compiled with the constants and types it is launched with. Triton's interpreter forgives what its compiler doesn't.
"""

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.driver import driver

from swarmllm.models.quantization import cuda
from swarmllm.models.quantization.decoded import E2M1
from swarmllm.models.quantization.nf4 import Nf4
from swarmllm.models.quantization.packed import Int8
from swarmllm.models.span import fused_kernels, page_pool
from swarmllm.models.span.page_pool import Placed

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((2, 1, 16, 16, 0), (2, 3, 24, 16, 7), (4, 1, 128, 128, 0), (2, 8, 128, 128, 0), (1, 4, 256, 256, 70))
"""Heads of keys, queries to each, sizes of keys and values, window."""
PAGE_TOKENS = 64
SHARED_BYTES = 99 << 10
"""Shared memory of a program on GPUs for games."""


class Absent:
    """Stands for the driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


OPERAND = re.compile(r"tt\.dot .*?tensor<(\d+)x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, [^>]*?kWidth = (\d+)")


def assert_operands_are_filled(code: str) -> None:
    """Each product has columns for the 4 threads that share a row: with fewer, its sums are wrong (nvfp4 of 16)."""
    for _, columns, width in OPERAND.findall(code):
        assert int(columns) >= 4 * int(width), f"{columns} columns for 4 threads with {width} each"


def without_launches(compiled: list[str]) -> Callable[..., Any]:
    """In place of `JITFunction.run`; names what was compiled."""
    run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del grid, warmup
        kernel = run(self, *args, grid=None, warmup=True, **kwargs)
        assert kernel.asm["cubin"]
        if self.fn.__name__ == "product":  # attention to large heads in float32 takes more
            assert kernel.metadata.shared <= SHARED_BYTES, f"{kernel.metadata.shared} bytes of shared memory"
        assert_operands_are_filled(kernel.asm["ttgir"])
        compiled.append(self.fn.__name__)
        return kernel

    return compile_only


def attention(dtype: torch.dtype) -> None:
    """Writing to pages and reading them: single positions, and tiles of them."""
    for heads, shared, key_dim, value_dim, window in SHAPES:
        keys, values = (torch.zeros(4, heads, PAGE_TOKENS, size, dtype=dtype) for size in (key_dim, value_dim))
        tables = torch.zeros(2, 3, dtype=torch.int32)
        placed = Placed.of([(1, place) for place in range(40)], torch.device("cpu"), 4, ((4, 36),))
        new = (torch.zeros(1, 40, heads, size, dtype=dtype).transpose(1, 2) for size in (key_dim, value_dim))
        page_pool.write_pages(keys, values, tables, placed, *new)
        query = torch.zeros(1, 40, heads * shared, key_dim, dtype=dtype).transpose(1, 2)
        page_pool.attend_pages(query, keys, values, tables, placed, 0.2, window)


def fused(dtype: torch.dtype) -> None:
    """Norms, rotations, gates and products, of tiny and of large models."""

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype)

    for hidden, inner, heads, of_queries, head in (
        (64, 96, 2, 4, 16),
        (4096, 11008, 32, 32, 128),
        (1536, 8960, 2, 12, 80),
    ):
        x = zeros(1, hidden)
        fused_kernels.normalize(x, zeros(hidden), 1e-5)
        fused_kernels.gate(*torch.split(zeros(2, 2 * inner), inner, dim=-1))
        keys = zeros(4, heads, PAGE_TOKENS, head)
        pages = keys, keys, torch.zeros(2, 3, dtype=torch.int32)
        states = torch.split(
            zeros(2, (of_queries + 2 * heads) * head), [of_queries * head, *[heads * head] * 2], dim=-1
        )
        for norms, rotated in ((None, head), ((zeros(head), zeros(head), 1e-6), head // 2)):
            angles = zeros(2, rotated), zeros(2, rotated)
            places = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
            fused_kernels.rotate(states, angles, norms, pages, places)  # type: ignore[arg-type]
        for biased, (normal, gated, added) in itertools.product(
            (False, True), ((True, False, False), (False, False, True), (True, True, False))
        ):
            bias = zeros(2 * inner) if biased else None
            fused_kernels.multiply(
                x, zeros(2 * inner, hidden), bias, norm=(x[0], 1e-5) if normal else None, gated=gated,
                residual=zeros(1, 2 * inner) if added else None,
            )  # fmt: skip


def products(dtype: torch.dtype) -> None:
    """Products of packed weights, of few and of more inputs; with tables and, where they are used, instructions."""
    weight = torch.randn(96, 512)
    codes, scale = torch.zeros(96, 256, dtype=torch.uint8), torch.ones(96, 512 // cuda.LEAST_GROUP)
    smallest = cuda.Matrix(codes=codes, scale=scale, values=E2M1)
    high = cuda.Matrix(codes=torch.zeros(cuda.MANY_ROWS, 512, dtype=torch.int8), scale=torch.ones(cuda.MANY_ROWS, 1))
    zeros = cuda.Matrix(codes=torch.zeros(96, 512, dtype=torch.int8), scale=torch.ones(96, 1), zero=torch.ones(96, 1))
    of_types = (Int8.quantize(weight).cuda_matrix(), Nf4.quantize(weight, tiled=False).cuda_matrix())
    for matrix in (*of_types, smallest, high, zeros):
        assert matrix is not None
        for number in (1, 33):
            cuda.multiply(torch.zeros(number, 512, dtype=dtype), matrix)
        for normal, gated, added in ((True, False, False), (False, False, True), (True, True, False)):
            given = torch.zeros(1, 512, dtype=dtype)
            norm, residual = (
                (given[0], 1e-5) if normal else None,
                torch.zeros(1, len(matrix.codes), dtype=dtype) if added else None,
            )
            fused_kernels.multiply(given, matrix, norm=norm, gated=gated, residual=residual)


def parts() -> Iterator[tuple[str, Callable[[], None]]]:
    for part, dtype in itertools.product((attention, fused, products), DTYPES):
        yield f"{part.__name__} {dtype}", lambda part=part, dtype=dtype: part(dtype)  # type: ignore[misc]


def main() -> int:
    driver.set_active(Absent(int(sys.argv[1])))  # type: ignore[arg-type]
    page_pool._interprets = True
    cuda._is_on_gpu = lambda _: True
    capability = divmod(int(sys.argv[1]), 10)
    cuda._capability = lambda _: capability  # type: ignore[assignment]
    compiled: list[str] = []
    jit.JITFunction.run = without_launches(compiled)  # type: ignore[method-assign]
    started = time.perf_counter()
    for name, part in parts():
        if len(sys.argv) < 3 or sys.argv[2] in name:
            compiled.clear()
            part()
            print(
                f"{name}: {len(compiled)} of {sorted(set(compiled))} ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
