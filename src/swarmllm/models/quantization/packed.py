"""The formats of quantized weights: packed matrices `[…, out, in]` that multiply without ever being whole in memory.

On a CPU, few tokens go through a kernel that reads the packed weights. Many tokens, gradients and what no kernel can do
(float32 activations, above all) dequantize some rows at a time, which stay in the processor's cache. On CUDA, `cuda`
has kernels for everything. Both ways use the same packed numbers, so results differ by rounding only.
Used by `weight` and `loading`.
"""

import functools
import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from swarmllm.models.quantization import cuda
from swarmllm.models.quantization.rules import NF4_GROUP

SLICE_BYTES = 4 << 20
"""Dequantized rows at a time. Measured (5632×2048 float32, 1 token): 1.5 ms, against 1.7 with 2 MB and 23 with all."""
PACKING_BYTES = 256 << 10
"""Rows in float32 at a time while packing: small enough for the holes that others leave on the heap."""
INT8_KERNEL_TOKENS = 14
"""Most tokens for `_weight_int8pack_mm`. Measured (5632×2048 bfloat16): 16 tokens take 4.6 ms, dequantized 4.5."""
INT8_KERNEL_COLUMNS = 16
"""Columns must be a multiple of this. Measured with 8 to 1024: every multiple of 8 that isn't ends the process."""
NF4_KERNEL_TOKENS = 32
"""Most tokens for the NF4 kernel of bitsandbytes. Measured likewise: 32 tokens take 5.1 ms, dequantized 9."""
NF4_STEPS = 1 << 16
"""How finely a weight is looked at to find the nearest code."""
NF4_TILE = 32
"""Rows that the NF4 kernel for CPUs has interleaved."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed weight; the last two dimensions are a matrix, others before them count experts."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype
    """Of the weight before it was packed."""

    @property
    def shape(self) -> torch.Size:
        """`[…, out, in]`."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __getitem__(self, index: int) -> Self:
        """One expert."""
        return type(self)(self.codes[index], self.scale[index], self.dtype)

    def split(self, rows: int) -> Self:
        """A matrix as matrices of so many rows each: `[parts, rows, in]`."""
        codes, scale = (tensor.view(-1, rows, *tensor.shape[1:]) for tensor in (self.codes, self.scale))
        return type(self)(codes, scale, self.dtype)

    def linear(self, inputs: Tensor) -> Tensor:
        """`inputs @ weight.T`, `[…, in]` → `[…, out]`, with gradients with respect to the inputs."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        if torch.is_grad_enabled() and flat.requires_grad:
            outputs: Tensor = _Linear.apply(flat, self)  # type: ignore[no-untyped-call]
        else:
            outputs = self.multiply(flat)
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])

    def multiply(self, inputs: Tensor) -> Tensor:
        """`[tokens, in]` → `[tokens, out]` of the inputs' dtype."""
        if len(inputs) == 0:
            return inputs.new_zeros(0, self.shape[0])
        if inputs.device.type == "cuda":
            return self._multiply_on_cuda(inputs).to(inputs.dtype)
        if self._kernel_takes(inputs):
            return self._multiply_by_kernel(inputs.contiguous())
        dtype = _computing_dtype(inputs)
        wide = inputs.to(dtype)
        outputs = wide.new_empty(len(inputs), self.shape[0])
        for start, end in self._slices(dtype):
            outputs[:, start:end] = wide @ self._rows(start, end, dtype).T
        scale = self._output_scale()
        return (outputs if scale is None else outputs.mul_(scale)).to(inputs.dtype)

    def multiply_transposed(self, grads: Tensor) -> Tensor:
        """`[tokens, out]` → `[tokens, in]`: what gradients need."""
        dtype, scale = _computing_dtype(grads), self._output_scale()
        wide = (grads if scale is None else grads * scale).to(dtype)
        sums = torch.zeros(
            len(grads), self.shape[1], dtype=torch.promote_types(dtype, torch.float32), device=self.device
        )
        for start, end in self._slices(dtype):
            sums += wide[:, start:end] @ self._rows(start, end, dtype)
        return sums.to(grads.dtype)

    def dequantize(self) -> Tensor:
        """The whole weight in its own dtype."""
        if len(self.shape) > 2:
            return torch.stack([self[index].dequantize() for index in range(self.shape[0])])
        weight, scale = torch.empty(self.shape, dtype=self.dtype, device=self.device), self._output_scale()
        for start, end in self._slices(torch.float32):
            rows = self._rows(start, end, torch.float32)
            weight[start:end] = rows if scale is None else rows.mul_(scale[start:end, None])
        return weight

    @abstractmethod
    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Rows of a matrix, dequantized but for `_output_scale`."""

    @abstractmethod
    def _output_scale(self) -> Tensor | None:
        """`[out]`: what is cheaper to multiply with the outputs than with the weights."""

    @abstractmethod
    def _kernel_takes(self, inputs: Tensor) -> bool: ...

    @abstractmethod
    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor: ...

    @abstractmethod
    def _multiply_on_cuda(self, inputs: Tensor) -> Tensor: ...

    def _slices(self, dtype: torch.dtype) -> list[tuple[int, int]]:
        rows, columns = self.shape
        step = max(SLICE_BYTES // (columns * dtype.itemsize) // NF4_TILE, 1) * NF4_TILE
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]


class _Linear(torch.autograd.Function):
    """The weight has no gradient, and nothing is kept but the weight itself."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Packed) -> Tensor:
        ctx.weight = weight
        return weight.multiply(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.weight.multiply_transposed(grads[0]), None


def _computing_dtype(inputs: Tensor) -> torch.dtype:
    """float16 is slow on CPUs: there it is computed in float32."""
    return torch.float32 if inputs.dtype == torch.float16 and inputs.device.type == "cpu" else inputs.dtype


class Int8(Packed):
    """8 bits per weight and one scale per output channel: codes `[…, out, in]` int8, scale `[…, out]`."""

    @classmethod
    def quantize(cls, weight: Tensor) -> "Int8":
        """Round each row to multiples of 1/127 of its largest value."""
        codes = torch.empty(weight.shape, dtype=torch.int8)
        scale = torch.empty(weight.shape[:-1], dtype=_scale_dtype(weight.dtype))
        flat_codes, flat_scale = codes.view(-1, codes.shape[-1]), scale.view(-1)
        for start, end, rows in _row_slices(weight):
            # Rounded before it is used, so that the rounding of the scale is no error of its own.
            steps = (rows.abs().amax(-1) / 127).clamp_min(torch.finfo(torch.float32).tiny).to(scale.dtype)
            flat_scale[start:end] = steps
            flat_codes[start:end] = (rows / steps.float()[:, None]).round_().clamp_(-127, 127)
        return cls(codes, scale, weight.dtype)

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.codes[start:end].to(dtype)

    def _output_scale(self) -> Tensor:
        return self.scale

    def _kernel_takes(self, inputs: Tensor) -> bool:
        # For other dtypes the kernel is a plain loop, slower than everything else. Of rows that don't fill its vectors
        # it reads beyond the end.
        fits = inputs.dtype == self.scale.dtype == torch.bfloat16 and inputs.shape[1] % INT8_KERNEL_COLUMNS == 0
        return fits and len(inputs) <= INT8_KERNEL_TOKENS

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(inputs, self.codes, self.scale)

    def _multiply_on_cuda(self, inputs: Tensor) -> Tensor:
        return cuda.multiply_int8(inputs, self.codes, self.scale)


class Nf4(Packed):
    """4-bit normal floats (QLoRA, section 3): two codes per byte, `[…, out, in/2]`, and one scale per 64 of a row.

    `tiled` weights are laid out for the kernel of bitsandbytes: in each tile of 32 rows, byte j of the 32 that hold a
    pair of columns has column j % 2 of row j // 2 below, and of row 16 + j // 2 above; scales are `[…, in/64, out]`.
    The others are row by row, the first column above; scales are `[…, out, in/64]`.
    """

    @classmethod
    def quantize(cls, weight: Tensor, *, tiled: bool | None = None) -> "Nf4":
        """Round to the nearest of the 16 values; `tiled` None = if this processor has the kernel for it."""
        rows, columns = weight.shape[-2:]
        if tiled is None:
            tiled = weight.dtype == torch.bfloat16 and rows % NF4_TILE == 0 and bitsandbytes_kernel()
        codes = torch.empty(*weight.shape[:-1], columns // 2, dtype=torch.uint8)
        scale = torch.empty(*weight.shape[:-1], columns // NF4_GROUP, dtype=_scale_dtype(weight.dtype))
        flat_codes, flat_scale = codes.view(-1, codes.shape[-1]), scale.view(-1, scale.shape[-1])
        for start, end, part in _row_slices(weight):
            groups = part.view(-1, NF4_GROUP)
            largest = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny).to(scale.dtype)
            steps = (groups / largest).add_(1).mul_(NF4_STEPS / 2).round_().clamp_(0, NF4_STEPS).to(torch.int32)
            nearest = _nearest_nf4().index_select(0, steps.flatten()).view(end - start, -1, 2)
            flat_codes[start:end] = (nearest[..., 0] << 4) | nearest[..., 1]
            flat_scale[start:end] = largest.view(end - start, -1)
        if not tiled:
            return cls(codes, scale, weight.dtype)
        for start, end, _ in _row_slices(weight):
            flat_codes[start:end] = _tile(flat_codes[start:end])
        return TiledNf4(codes, scale.mT.contiguous(), weight.dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self._dequantize_rows(self.codes[start:end], self.scale[start:end], dtype)

    def _dequantize_rows(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        import bitsandbytes  # noqa: F401 - registers the operator

        shape = (len(codes), codes.shape[1] * 2)
        dequantize = torch.ops.bitsandbytes.dequantize_4bit
        rows: Tensor = dequantize(codes.contiguous(), scale.float().contiguous(), NF4_GROUP, "nf4", shape, dtype)
        return rows

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return False

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def _multiply_on_cuda(self, inputs: Tensor) -> Tensor:
        return cuda.multiply_nf4(inputs, self.codes, self.scale, NF4_GROUP)


class TiledNf4(Nf4):
    """`Nf4` as the kernel for CPUs wants it."""

    def split(self, rows: int) -> Nf4:  # type: ignore[override]
        if rows % NF4_TILE:  # the kernel would end the process
            return Nf4(_untile(self.codes), self.scale.T.contiguous(), self.dtype).split(rows)
        codes = self.codes.view(-1, rows, self.codes.shape[-1])
        scale = self.scale.view(self.scale.shape[0], -1, rows).transpose(0, 1)
        return TiledNf4(codes, scale, self.dtype)

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self._dequantize_rows(_untile(self.codes[start:end]), self.scale[:, start:end].T, dtype)

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return inputs.dtype == torch.bfloat16 and len(inputs) <= NF4_KERNEL_TOKENS

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.bitsandbytes.gemv_4bit(
            inputs, self.codes, tuple(self.shape), self.scale.contiguous(), _nf4_values(), NF4_GROUP
        )
        return outputs


def _tile(codes: Tensor) -> Tensor:
    """Row by row → tiled, both `[out, in/2]`."""
    rows, half = codes.shape
    first, second = codes.view(-1, 2, 16, half).unbind(1)  # [tiles, 16, in/2]: below, above
    even = (first >> 4) | (second & 0xF0)  # the even columns of both rows
    odd = (first & 0xF) | ((second & 0xF) << 4)
    return torch.stack([even, odd], dim=-1).transpose(1, 2).reshape(rows, half)


def _untile(codes: Tensor) -> Tensor:
    """Tiled → row by row, both `[out, in/2]`."""
    rows, half = codes.shape
    even, odd = codes.view(-1, half, 16, 2).transpose(1, 2).unbind(-1)
    first = ((even & 0xF) << 4) | (odd & 0xF)
    second = (even & 0xF0) | (odd >> 4)
    return torch.stack([first, second], dim=1).view(rows, half)


def _row_slices(weight: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(start, end, rows in float32), some rows at a time: a whole copy would double the memory of loading."""
    per_matrix, columns = weight.shape[-2:]
    step = max(PACKING_BYTES // (columns * 4) // NF4_TILE, 1) * NF4_TILE
    matrices = weight.reshape(-1, *weight.shape[-2:])  # a view, also where the matrices are transposed
    for matrix_idx, matrix in enumerate(matrices):
        for start in range(0, per_matrix, step):
            end = min(start + step, per_matrix)
            offset = matrix_idx * per_matrix
            yield offset + start, offset + end, matrix[start:end].float()


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """As the kernels want it; other scales are small enough to be kept in float32."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@functools.cache
def _functional() -> Any:
    """bitsandbytes costs seconds to import, and logs a line for each matrix."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional


def bitsandbytes_kernel() -> bool:
    """Whether bitsandbytes has its NF4 kernel for this processor (AVX512 with bfloat16)."""
    return bool(_functional().has_avx512bf16())


@functools.cache
def _nearest_nf4() -> Tensor:
    """The code nearest to each of `NF4_STEPS + 1` numbers from -1 to 1: six times as fast as bitsandbytes finds it."""
    values, steps = _nf4_values(), torch.linspace(-1, 1, NF4_STEPS + 1)
    return torch.bucketize(steps, (values[1:] + values[:-1]) / 2).to(torch.uint8)


@functools.cache
def _nf4_values() -> Tensor:
    values: Tensor = _functional().get_4bit_type("nf4", device="cpu")
    return values
