"""Products of packed weights on CUDA: the arguments of the kernel of `cuda_products`, and how it is launched.

Called by `packed` and its subclasses. Imports Triton only when a product on CUDA is asked for.
"""

import functools
import importlib.util
import logging
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MOST_INPUTS = 64
"""Inputs that the kernel takes; more are multiplied by the dequantized weight."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = 128
"""The kernel takes groups that divide this number of columns, or are a multiple of it."""
LEAST_GROUP = 32
"""Fewest columns with one scale. With the 16 of nvfp4, products were wrong on an H200 with Triton 3.6: it lays out the
operands of such a product for 4 threads with 8 columns each (`kWidth = 8` in what it compiles), which 16 can't fill."""
EARLY_CAPABILITY = (9, 0)
"""GPUs from this on can start a kernel before the one before it has ended (programmatic dependent launch)."""
MANY_ROWS = 8192
"""From so many rows on, tiles of 64 still give each of a large GPU's 132 multiprocessors one."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Matrix:
    """One packed matrix. Row by row, a weight is `(code - zero) * scale + least`; tensors that are None are left
    out."""

    codes: Tensor
    """`[out, in]`, or `[out, in/2]` if two are in a byte."""
    scale: Tensor
    """`[out, groups]`, as are zero and least."""
    zero: Tensor | None = None
    least: Tensor | None = None
    factor: Tensor | None = None
    """`[out]`: the scales are multiplied by it, or divided."""
    divides: bool = False
    values: tuple[float, ...] | None = None
    """The 16 values of the codes, if two codes are in a byte."""
    high_first: bool = False
    """True if the first of two codes is in the upper half of the byte."""

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 1 if self.values is None else 2

    @property
    def width(self) -> int:
        """Weights of a row."""
        return self.codes.shape[1] * self.per_byte

    @property
    def group(self) -> int:
        """Columns with one scale."""
        return self.width // self.scale.shape[1]

    @property
    def scales_outputs(self) -> bool:
        """True if there is one scale for a row and nothing else: the complete sums are scaled."""
        return self.group == self.width and self.zero is None and self.least is None


def takes(inputs: Tensor, matrix: Matrix) -> bool:
    """True if the kernel multiplies `[tokens, in]` by this matrix."""
    group = matrix.group
    known = matrix.scale.shape[1] == 1 or group % COLUMNS == 0 or (COLUMNS % group == 0 and group >= LEAST_GROUP)
    few = len(inputs) <= MOST_INPUTS and inputs.dtype in DTYPES
    return (
        few and known and _compiles_for(inputs.device, torch.float8_e4m3fn in (matrix.codes.dtype, matrix.scale.dtype))
    )


@functools.cache
def _compiles_for(device: torch.device, with_float8: bool) -> bool:
    """True if Triton is there, and knows bfloat16 and these types on this GPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type != "cuda":
        return True
    least = (8, 9) if with_float8 else (8, 0)
    return torch.cuda.get_device_capability(device) >= least and _multiplies_on(device)


@functools.cache
def _multiplies_on(device: torch.device) -> bool:
    """True if a product works: Triton needs a C compiler, Python's headers, and a folder that it can write to."""
    inputs = torch.zeros(1, COLUMNS, dtype=torch.bfloat16, device=device)
    codes, scale = torch.zeros(1, COLUMNS, dtype=torch.int8, device=device), torch.ones(1, 1, device=device)
    try:
        multiply(inputs, Matrix(codes=codes, scale=scale))
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        logger.warning(
            "Triton can't compile here, so weights of few bits multiply at a fraction of the GPU's speed: install gcc "
            "and Python's headers, or set TRITON_CACHE_DIR to a folder that can be written to (%s)",
            str(error).strip().split("\n")[0],
        )
        return False
    return True


def multiply(
    inputs: Tensor, matrix: Matrix, tile: Mapping[str, int] | None = None, residual: Tensor | None = None
) -> Tensor:
    """`[tokens, in]` → `[tokens, out]` of the inputs' dtype, added to `residual` if there is one.

    `tile`: another one than the usual, to compare.
    """
    from swarmllm.models.quantization.cuda_products import product

    (num_inputs, width), num_rows, group = inputs.shape, len(matrix.codes), matrix.group
    tile = dict(tile or usual_tile(num_inputs, matrix, inputs.dtype))
    at_once = tile.pop("columns")
    columns = at_once if group == width else min(at_once, group & -group)  # a power of 2 that divides the group
    tensors = (matrix.codes, matrix.scale, matrix.zero, matrix.least, matrix.factor)
    outputs = inputs.new_empty(num_inputs, num_rows)
    grid = (-(-num_rows // tile["some_rows"]), -(-num_inputs // tile["some_inputs"]))
    with torch.cuda.device_of(inputs):  # type: ignore[no-untyped-call]  # or Triton would take the first GPU
        product[grid](
            inputs.contiguous(),
            *(None if tensor is None else tensor.contiguous() for tensor in tensors),
            table_of(matrix, inputs),
            None if residual is None else residual.contiguous(),
            outputs,
            num_inputs,
            num_rows,
            width=width,
            group=group,
            per_byte=matrix.per_byte,
            high_first=matrix.high_first,
            decode=instructions_for(matrix, inputs),
            has_zero=matrix.zero is not None,
            has_least=matrix.least is not None,
            has_factor=matrix.factor is not None,
            divides=matrix.divides,
            columns=columns,
            unroll=max(1, at_once // columns),
            adds=residual is not None,
            **tile,
            **starts_early(inputs),
        )
    return outputs


def _is_on_gpu(inputs: Tensor) -> bool:
    """True where NVIDIA's instructions can be used; tests that only compile replace it."""
    return inputs.is_cuda and torch.version.hip is None


def starts_early(inputs: Tensor) -> dict[str, Any]:
    """Options of a kernel that calls `wait_for_inputs`: GPUs that can start it before the one before it has ended."""
    early = _is_on_gpu(inputs) and _capability(inputs.device) >= EARLY_CAPABILITY
    return {"starts_early": True, "launch_pdl": True} if early else {"starts_early": False}


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def instructions_for(matrix: Matrix, inputs: Tensor) -> str:
    """Instructions that decode a matrix with two codes in a byte for these inputs; "": a table is read (`table_of`)."""
    if matrix.values is None or not _is_on_gpu(inputs) or inputs.dtype == torch.float32:
        return ""
    return decoding(matrix.values, inputs.dtype, matrix.high_first)


def table_of(matrix: Matrix, inputs: Tensor) -> Tensor | None:
    """The values of the codes on the inputs' device, where no instructions decode them."""
    if matrix.values is None or instructions_for(matrix, inputs):
        return None
    return _table(matrix.values, inputs.device)


def usual_tile(num_inputs: int, matrix: Matrix, dtype: torch.dtype) -> dict[str, int]:
    """The tile that one program computes.

    For 16 bits, the best of some 20 on an H200 for 8 and 32 inputs of 22016×4096, 4096×11008 and 4096×4096; it fits the
    96 KB of shared memory that GPUs for games have, and so does that for float32. With groups, columns are the same for
    all numbers of few inputs; otherwise sums would have another order.
    """
    if num_inputs > MOST_INPUTS:  # to compare
        return {"some_inputs": 128, "some_rows": 128, "columns": 64, "num_warps": 8, "num_stages": 3}
    some_inputs = 16 if num_inputs <= 16 else 32
    if dtype == torch.float32:
        return {"some_inputs": some_inputs, "some_rows": 32, "columns": 128, "num_warps": 4, "num_stages": 3}
    is_tall = num_inputs > 16 and (len(matrix.codes) >= MANY_ROWS or not matrix.scales_outputs)
    rows, stages = 64 if is_tall else 32, 4 if matrix.scales_outputs else 3
    return {"some_inputs": some_inputs, "some_rows": rows, "columns": 256, "num_warps": 4, "num_stages": stages}


def bytes_to_floats(codes: Tensor) -> str:
    """Instructions that make the 4 bytes of `$4` float32: `$0` to `$3`; "" for codes that aren't whole numbers.

    A byte as the lowest bits of 2^23 is that number and the byte. The GPU's own conversion has a quarter of this speed,
    less than memory has.
    """
    if not _is_on_gpu(codes) or codes.dtype not in (torch.int8, torch.uint8):
        return ""
    is_signed = codes.dtype == torch.int8
    lines = ["{", ".reg .b32 bytes;", f"xor.b32 bytes, $4, 0x{0x80808080 if is_signed else 0:x};"]
    for place in range(4):
        lines += [f"prmt.b32 ${place}, bytes, 0x4B000000, 0x754{place};"]
        lines += [f"sub.f32 ${place}, ${place}, 0f4B0000{80 if is_signed else '00'};"]
    return "\n".join([*lines, "}"])


@functools.cache
def decoding(values: tuple[float, ...], dtype: torch.dtype, high_first: bool) -> str:
    """Instructions that make the 8 codes of `$4` into pairs of values in 16 bits, the first one below: `$0` to `$3`.

    `prmt` takes the bytes of a value from 8 bytes by the lowest 3 bits of a code. So it looks up the code among the
    first and among the last 8 values, and the highest bit chooses one of the two. Reading a table in memory takes as
    many accesses as there are weights, more than a GPU has time for.
    """
    numbers = torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.int16).tolist()
    lines = [
        "{",
        ".reg .b32 low, high, first, last, below, above;",
        "and.b32 low, $4, 0x77777777;",
        "shr.b32 high, $4, 1;",
        "and.b32 high, high, 0x44444444;",
        "or.b32 high, high, 0x32103210;",  # of 4 values each, from the first or the last 8
    ]
    for half, pairs in enumerate((("$0", "$1"), ("$2", "$3"))):
        if half:
            lines += ["shr.b32 low, low, 16;", "shr.b32 high, high, 16;"]
        for shift, name in ((0, "below"), (8, "above")):
            table = [
                sum((number >> shift & 255) << 8 * place for place, number in enumerate(numbers[start : start + 4]))
                for start in range(0, 16, 4)
            ]
            lines += [
                f"prmt.b32 first, 0x{table[0]:x}, 0x{table[1]:x}, low;",
                f"prmt.b32 last, 0x{table[2]:x}, 0x{table[3]:x}, low;",
                f"prmt.b32 {name}, first, last, high;",
            ]
        orders = ("0x4051", "0x6273") if high_first else ("0x5140", "0x7362")
        lines += [f"prmt.b32 {pair}, below, above, {order};" for pair, order in zip(pairs, orders, strict=True)]
    return "\n".join([*lines, "}"])


@functools.cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Copied once and not for each product."""
    return torch.tensor(values, device=device)
