"""Multiplying by packed weights on CUDA: what the kernel of `cuda_products` takes, and how it is launched.

Called by `packed` and its subclasses. Imports Triton only when a product on CUDA is asked for.
"""

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_INPUTS = 64
"""Inputs that the kernel takes; more are multiplied by the dequantized weight."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = 128
"""Columns that the kernel decodes at a time."""
LEAST_GROUP = 16
"""Columns with one scale. Assumed: with fewer, scales take longer than codes."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Matrix:
    """One packed matrix: row by row `(code - zero) * scale + least`, where what isn't there is left out."""

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
    """What the codes stand for, if two are in a byte."""
    high_first: bool = False
    """Whether the first of two codes is above the second."""

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
        """Whether inputs are multiplied by the codes as they are, and the outputs by the scales."""
        only_scale = self.zero is None and self.least is None and self.factor is None
        return only_scale and self.scale.shape[1] == 1 and self.values is None


def takes(inputs: Tensor, matrix: Matrix) -> bool:
    """Whether the kernel multiplies `[tokens, in]` by this matrix."""
    group = matrix.group
    known = matrix.scale.shape[1] == 1 or group % COLUMNS == 0 or (COLUMNS % group == 0 and group >= LEAST_GROUP)
    few = len(inputs) <= MOST_INPUTS and inputs.dtype in DTYPES
    return (
        few and known and _compiles_for(inputs.device, torch.float8_e4m3fn in (matrix.codes.dtype, matrix.scale.dtype))
    )


@functools.cache
def _compiles_for(device: torch.device, with_float8: bool) -> bool:
    """Whether Triton is there, and knows bfloat16 and these types on this GPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    least = (8, 9) if with_float8 else (8, 0)
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= least


def multiply(inputs: Tensor, matrix: Matrix, tile: Mapping[str, int] | None = None) -> Tensor:
    """`[tokens, in]` → `[tokens, out]` of the inputs' dtype; `tile`: another one than the usual, to compare."""
    from swarmllm.models.quantization.cuda_products import product

    (num_inputs, width), num_rows = inputs.shape, len(matrix.codes)
    tile = tile or usual_tile(num_inputs)
    first = _first_of_steps(matrix.values)
    table = None if matrix.values is None or first is not None else _table(matrix.values, inputs)
    tensors = (matrix.codes, matrix.scale, matrix.zero, matrix.least, matrix.factor)
    outputs = inputs.new_empty(num_inputs, num_rows)
    grid = (-(-num_rows // tile["some_rows"]), -(-num_inputs // tile["some_inputs"]))
    with torch.cuda.device_of(inputs):  # type: ignore[no-untyped-call]  # or Triton would take the first GPU
        product[grid](
            inputs.contiguous(),
            *(None if tensor is None else tensor.contiguous() for tensor in tensors),
            table,
            outputs,
            num_inputs,
            num_rows,
            width=width,
            group=matrix.group,
            per_byte=matrix.per_byte,
            high_first=matrix.high_first,
            has_table=table is not None,
            first=first or 0.0,
            has_zero=matrix.zero is not None,
            has_least=matrix.least is not None,
            has_factor=matrix.factor is not None,
            divides=matrix.divides,
            scales_outputs=matrix.scales_outputs,
            **tile,
        )
    return outputs


def usual_tile(num_inputs: int) -> dict[str, int]:
    """What one program computes. Columns and rows are the same for all numbers of inputs, or sums would be of another
    order. Measured on an H200 with a kernel for int8 alone (11008×4096): 18 µs for 8 inputs, 29 for 32."""
    some_inputs = 16 if num_inputs <= 16 else 32
    return {"some_inputs": some_inputs, "some_rows": 32, "columns": COLUMNS, "num_warps": 4, "num_stages": 4}


def _first_of_steps(values: tuple[float, ...] | None) -> float | None:
    """The first of values that count up by 1; None if they don't."""
    if values is None or any(value != values[0] + idx for idx, value in enumerate(values)):
        return None
    return values[0]


def _table(values: tuple[float, ...], inputs: Tensor) -> Tensor:
    """The values: in 16 bits, which Triton reads where it needs them, where 32 bits would go through shared memory.

    float16 rounds them by 2^-12; inputs in 16 bits round the weights more than that.
    """
    return _on_device(values, torch.float32 if inputs.dtype == torch.float32 else torch.float16, inputs.device)


@functools.cache
def _on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copied once and not for each product."""
    return torch.tensor(values, dtype=dtype, device=device)
