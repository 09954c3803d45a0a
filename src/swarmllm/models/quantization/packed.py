"""The forms of quantized weights: packed matrices `[…, out, in]` that multiply without ever being whole in memory.

A few tokens go through a kernel that reads the packed weights (on CUDA, `cuda_products`). Many tokens, gradients, and
products that no kernel can do (above all float32 activations on a CPU) dequantize some rows at a time, which stay in
the processor's cache. Both ways use the same packed numbers, so results differ by rounding only. Used by `weight` and
`loading`.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmllm.machine_memory import reused_heap
from swarmllm.models.quantization import cuda, kernels
from swarmllm.models.quantization.kernels import (
    ROUNDED,
    SLICE_BYTES,
    STRIP,
    computing_dtype,
    into_strips,
    kernels_take,
    open_strips,
    torch_multiplies_int8_faster,
)

GPU_SLICE_BYTES = 256 << 20
"""Dequantized rows at a time (`kernels.SLICE_BYTES`) on a GPU, for which each slice is some launches: a bound of memory
only. Assumed."""
TILE = 32
"""Rows that belong together: the NF4 kernel for CPUs has them interleaved."""
PACKING_BYTES = 256 << 10
"""Rows in float32 at a time while packing: small enough for the holes that others leave on the heap."""
GPU_PACKING_BYTES = 64 << 20
"""The same on a GPU: some times as much is in use at once. Assumed."""
INT8_KERNEL_TOKENS = 14
"""Most tokens for `_weight_int8pack_mm`. Measured (5632×2048 bfloat16): 16 tokens take 4.6 ms, dequantized 4.5."""
INT8_KERNEL_COLUMNS = 16
"""Columns must be a multiple of this. Measured with 8 to 1024: every multiple of 8 that isn't ends the process."""

OUTLIER_THRESHOLD = 6.0
"""Inputs beyond this are multiplied as they are (section 3.2)."""
LARGEST = 127
WHOLE_BYTES = 8
"""The sides of matrices of whole numbers must be multiples of this for cuBLAS."""
PADDED_ROWS = 32
"""And it wants more than 16 inputs."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed weight; the last two dimensions are a matrix, others before them count experts."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype
    """The weight's dtype before it was packed."""
    rounds_inputs: ClassVar[bool] = False
    """True if inputs without gradients are rounded to 8 bits, for `rounding` has made this class."""
    changes_inputs: ClassVar[bool] = False
    """True if `multiply` does more than multiply by the codes."""

    @property
    def shape(self) -> torch.Size:
        """`[…, out, in]`."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def require_sizes(self) -> None:
        """Check tensors that come from a file: kernels rely on their sizes.

        Raises:
            ValueError: they don't fit together.
        """

    def tensors(self) -> dict[str, Tensor]:
        """All that it consists of."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "dtype"}

    def __getitem__(self, index: int) -> Self:
        """One expert."""
        return self.mapped(lambda tensor: tensor[index])

    def split(self, rows: int) -> Self:
        """A matrix as matrices of this many rows each: `[parts, rows, in]`."""
        return self.mapped(lambda tensor: tensor.view(-1, rows, *tensor.shape[1:]))

    def rows(self, start: int, end: int) -> Self:
        """Rows `[start, end)` of each matrix, in the same memory."""
        axis = len(self.shape) - 2
        return self.mapped(lambda tensor: tensor.narrow(axis, start, end - start))

    def columns(self, start: int, end: int) -> Self:
        """Columns `[start, end)` of each matrix, in the same memory where a format allows it.

        Raises:
            ValueError: they share scales or bytes with other columns.
        """
        whole, ndim = self.shape[-1], len(self.shape)

        def cut(tensor: Tensor) -> Tensor:
            size = tensor.shape[-1]
            if tensor.ndim < ndim or size == 1:  # for whole rows
                return tensor
            if start * size % whole or end * size % whole:
                raise ValueError(f"columns {start} to {end} of {whole} aren't whole groups")
            return tensor.narrow(-1, start * size // whole, (end - start) * size // whole)

        if start % self._columns_together or end % self._columns_together:
            raise ValueError(f"columns {start} to {end} aren't whole groups of {self._columns_together}")
        return self.mapped(cut)

    @property
    def _columns_together(self) -> int:
        """Columns whose codes share bytes."""
        return 1

    def mapped(self, do: Callable[[Tensor], Tensor]) -> Self:
        """The same form of what `do` makes of each of its tensors."""
        return type(self)(**{name: do(tensor) for name, tensor in self.tensors().items()}, dtype=self.dtype)

    def as_rounding(self) -> "Packed":
        """The same, which rounds its inputs."""
        form: Any = rounding(type(self))  # type: ignore[arg-type]
        return cast(Packed, form(**self.tensors(), dtype=self.dtype))

    def for_device(self, device: torch.device) -> "Packed":
        """The same weights as they are multiplied best on such a device; they stay where they are."""
        return self

    def linear(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """`inputs @ weight.T + bias`, `[…, in]` → `[…, out]`, with gradients with respect to the inputs."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        added = None
        if inputs.ndim > 2 and not inputs.is_contiguous():  # torch adds it afterwards, too
            bias, added = None, bias
        is_trained = flat.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and is_trained:
            outputs: Tensor = _Linear.apply(flat, self, bias)  # type: ignore[no-untyped-call]
        elif self.rounds_inputs and flat.shape[0] and not _exact.get():
            outputs = _plus(self._multiply_rounded(flat), bias)
        else:
            outputs = self.multiply_and_add(flat, bias)
        return _plus(outputs.view(*inputs.shape[:-1], outputs.shape[-1]), added)

    def multiply_and_add(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """`[tokens, in]` → `[tokens, out]` of the inputs' dtype, plus the bias `[out]`."""
        return _plus(self.multiply(inputs), bias)

    def multiply(self, inputs: Tensor) -> Tensor:
        """`[tokens, in]` → `[tokens, out]` of the inputs' dtype."""
        if inputs.shape[0] == 0:  # `len` would call Python
            return inputs.new_zeros(0, self.shape[0])
        if inputs.device.type == "cuda":
            matrix = self.cuda_matrix()
            if matrix is not None and cuda.takes(inputs, matrix):
                return cuda.multiply(inputs, matrix)
        elif self._kernel_takes(inputs):
            return self._multiply_by_kernel(inputs.contiguous())
        return self._multiply_by_rows(inputs)

    def _multiply_by_rows(self, inputs: Tensor) -> Tensor:
        dtype, scale = computing_dtype(inputs.dtype, inputs.device), self._output_scale()
        wide = inputs.to(dtype)
        outputs = wide.new_empty(len(inputs), self.shape[0])
        for start, end in self._slices(dtype):
            if scale is not None and dtype == torch.float16:  # sums of codes would be infinite in it
                rows = self._rows(start, end, torch.float32).mul_(scale[start:end, None]).to(dtype)
            else:
                rows = self._rows(start, end, dtype)
            outputs[:, start:end] = wide @ rows.T
        if scale is not None and dtype != torch.float16:
            outputs.mul_(scale)
        return outputs.to(inputs.dtype)

    def multiply_transposed(self, grads: Tensor) -> Tensor:
        """`[tokens, out]` → `[tokens, in]`, for gradients."""
        dtype, scale = computing_dtype(grads.dtype, grads.device), self._output_scale()
        wide = grads.to(dtype) if scale is None else grads.to(dtype) * scale
        slices = self._slices(dtype)
        if len(slices) == 1:
            return (wide @ self._rows(0, self.shape[0], dtype)).to(grads.dtype)
        sums = torch.zeros(
            len(grads), self.shape[1], dtype=torch.promote_types(dtype, torch.float32), device=self.device
        )
        for start, end in slices:
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

    def can_round_inputs(self, *, faster: bool = False) -> bool:
        """True if the kernels multiply these codes by rounded inputs, here; `faster`: and gain by it."""
        if len(self.shape) > 2:
            return self[0].can_round_inputs(faster=faster)
        matrix = self._matrix() if self.device.type == "cpu" and kernels.library() is not None else None
        return matrix is not None and (matrix.is_faster_rounded if faster else matrix.takes_rounded)

    def _multiply_rounded(self, inputs: Tensor) -> Tensor:
        """`multiply` with each input rounded by itself: no input has an effect on another."""
        matrix = self._matrix()
        assert matrix is not None
        return matrix.multiply_rounded(inputs.float()).to(inputs.dtype)

    def _matrix(self) -> kernels.Matrix | None:
        """This matrix for the kernels on CPUs; None if they don't know this format."""
        return None

    @abstractmethod
    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Rows of a matrix, dequantized but for `_output_scale`."""

    @abstractmethod
    def _output_scale(self) -> Tensor | None:
        """`[out]`: scales that are cheaper to multiply with the outputs than with the weights."""

    @abstractmethod
    def _kernel_takes(self, inputs: Tensor) -> bool: ...

    @abstractmethod
    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor: ...

    def cuda_matrix(self) -> cuda.Matrix | None:
        """This matrix for the kernel on CUDA; None if it has none for this format."""
        return None

    def _slices(self, dtype: torch.dtype) -> list[tuple[int, int]]:
        rows, num_bytes = self.shape[0], SLICE_BYTES if self.device.type == "cpu" else GPU_SLICE_BYTES
        step = max(num_bytes // self._row_bytes(dtype) // TILE, 1) * TILE
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _row_bytes(self, dtype: torch.dtype) -> int:
        """Memory that a row takes while it is dequantized."""
        return self.shape[1] * dtype.itemsize


_exact: ContextVar[bool] = ContextVar("exact", default=False)


@contextmanager
def exact_inputs() -> Iterator[None]:
    """Within: no product rounds its inputs, as without `--activations`: for training, whose backward doesn't round, and
    for strict comparisons."""
    token = _exact.set(True)
    try:
        yield
    finally:
        _exact.reset(token)


@functools.cache
def rounding(form: type[Packed]) -> type[Packed]:
    """The same form, which rounds its inputs."""
    return type(form.__name__, (form,), {"rounds_inputs": True, "__module__": form.__module__})


def _plus(outputs: Tensor, bias: Tensor | None) -> Tensor:
    return outputs if bias is None else outputs + bias


class _Linear(torch.autograd.Function):
    """The weight has no gradient, and nothing is kept but the weight itself.

    Its tensors are saved as autograd saves all others, so that hooks for these see them (`span/offload`).
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
        tensors = weight.tensors()
        ctx.rebuilt = functools.partial(_rebuilt, type(weight), tuple(tensors), weight.dtype)
        ctx.save_for_backward(*tensors.values())
        return weight.multiply_and_add(inputs, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        of_inputs, _, of_bias = ctx.needs_input_grad
        return (
            ctx.rebuilt(ctx.saved_tensors).multiply_transposed(grads[0]) if of_inputs else None,
            None,
            grads[0].sum(0) if of_bias else None,
        )


def _rebuilt(form: type[Packed], names: Sequence[str], dtype: torch.dtype, tensors: Sequence[Tensor]) -> Packed:
    return form(**dict(zip(names, tensors, strict=True)), dtype=dtype)


class Int8(Packed):
    """8 bits per weight and one scale per output channel: codes `[…, out, in]` int8, scale `[…, out]`."""

    @classmethod
    def quantize(cls, weight: Tensor) -> "Int8":
        """Round each row to multiples of 1/127 of its largest value."""
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(weight.shape[:-1], dtype=scale_dtype(weight.dtype), device=weight.device)
        flat_codes, flat_scale = codes.view(-1, codes.shape[-1]), scale.view(-1)
        for start, end, rows in row_slices(weight):
            # Rounded before it is used, so that the rounding of the scale is no error of its own.
            largest = torch.maximum(rows.amax(-1), rows.amin(-1).neg_())
            steps = divided(largest, 127).clamp_min(torch.finfo(torch.float32).tiny).to(scale.dtype)
            flat_scale[start:end] = steps
            flat_codes[start:end] = rows.div_(steps.float()[:, None]).round_().clamp_(-127, 127)
        return cls(codes, scale, weight.dtype)

    def for_device(self, device: torch.device) -> Packed:
        rows, columns = self.shape[-2:]
        if device.type != "cpu" or rows % STRIP or columns % ROUNDED or not kernels.has_strips():
            return self
        return Int8Strips(into_strips(self.codes), self.scale, self.dtype)

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.codes[start:end].to(dtype)

    def _output_scale(self) -> Tensor:
        return self.scale

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return self._by_torch(inputs) or kernels_take(inputs)

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        if self._by_torch(inputs):
            return torch._weight_int8pack_mm(inputs, self.codes, self.scale)
        return self._matrix().multiply(inputs.float()).to(inputs.dtype)

    def _matrix(self) -> kernels.Matrix:
        return kernels.Matrix(self.codes, self.scale[:, None])

    def _by_torch(self, inputs: Tensor) -> bool:
        """True if torch's kernel is the fastest, and can take such inputs: for other dtypes it is a plain loop, and it
        reads beyond the end of rows that don't fill its vectors."""
        fits = inputs.dtype == self.scale.dtype == torch.bfloat16 and inputs.shape[1] % INT8_KERNEL_COLUMNS == 0
        return fits and inputs.shape[0] <= INT8_KERNEL_TOKENS and torch_multiplies_int8_faster()

    def cuda_matrix(self) -> cuda.Matrix:
        return cuda.Matrix(codes=self.codes, scale=self.scale[:, None])


class InStrips(Packed):
    """A form whose codes are in strips (`strips.h`): those of 16 rows side by side, as some processors multiply best.

    It comes before the form of rows among the bases of a class. Only whole strips can be taken without a copy.
    """

    @abstractmethod
    def _as_rows(self) -> Packed:
        """The same weights, row by row."""

    def for_device(self, device: torch.device) -> Packed:
        return self if device.type == "cpu" else self._as_rows().for_device(device)

    def split(self, rows: int) -> Any:
        return self._as_rows().split(rows) if rows % STRIP else super().split(rows)

    def rows(self, start: int, end: int) -> Any:
        return self._as_rows().rows(start, end) if start % STRIP or end % STRIP else super().rows(start, end)

    def columns(self, start: int, end: int) -> Any:
        strips = self._as_rows().columns(start, end).for_device(self.device)
        return strips.as_rounding() if self.rounds_inputs else strips

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return kernels_take(inputs, in_strips=True)

    def can_round_inputs(self, *, faster: bool = False) -> bool:
        """With tiles, prompts are faster exact, and steps of a few sessions rounded: so nothing is gained for sure."""
        return super().can_round_inputs() and not (faster and self._has_tiles(self.dtype))

    def _multiply_by_rows(self, inputs: Tensor) -> Tensor:
        if inputs.is_cpu and self._has_tiles(inputs.dtype):
            return self._matrix().multiply_many(inputs)
        return super()._multiply_by_rows(inputs)

    def _has_tiles(self, dtype: torch.dtype) -> bool:
        """True if tiles multiply this matrix, or each of these, by many inputs of this dtype."""
        return kernels.has_tiles(dtype) and self.shape[-2] >= 2 * STRIP

    @abstractmethod
    def _matrix(self) -> kernels.MatrixInStrips: ...


class Int8Strips(InStrips, Int8):
    """`Int8` in strips."""

    def _as_rows(self) -> Packed:
        rows = Int8(into_strips(self.codes, back=True), self.scale, self.dtype)
        return rows.as_rounding() if self.rounds_inputs else rows

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        first, last = start // STRIP * STRIP, -(-end // STRIP) * STRIP
        codes = self.codes[first:last]
        if codes.is_cpu and dtype in (torch.float32, torch.bfloat16):
            rows = open_strips(codes, dtype)
        else:
            rows = into_strips(codes, back=True).to(dtype)
        return rows[start - first : end - first]

    def _by_torch(self, inputs: Tensor) -> bool:
        return False

    def _matrix(self) -> kernels.MatrixInStrips:
        return kernels.MatrixInStrips(self.codes, self.scale[:, None])

    def cuda_matrix(self) -> None:  # type: ignore[override]
        return None  # made for a CPU; the model was moved since


def row_slices(weight: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(start, end, rows in float32), some rows at a time: a whole copy would double the memory of loading.

    The rows are always in the same memory, which the caller may overwrite. Callers allocate their results first: during
    the loop, tensors share memory that is freed soon (`reused_heap`).
    """
    per_matrix, columns = weight.shape[-2:]
    num_bytes = PACKING_BYTES if weight.device.type == "cpu" else GPU_PACKING_BYTES
    step = max(num_bytes // (columns * 4) // TILE, 1) * TILE
    matrices = weight.reshape(-1, *weight.shape[-2:])  # a view, also where the matrices are transposed
    rows = torch.empty(min(step, per_matrix), columns, device=weight.device)
    with reused_heap():
        for matrix_idx, matrix in enumerate(matrices):
            for start in range(0, per_matrix, step):
                end = min(start + step, per_matrix)
                offset = matrix_idx * per_matrix
                yield offset + start, offset + end, rows[: end - start].copy_(matrix[start:end])


def divided(numbers: Tensor, by: float) -> Tensor:
    """The same quotients on all devices: on CUDA, PyTorch multiplies by the inverse of a number that isn't a tensor."""
    return numbers / numbers.new_full((), by)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales that the kernels want; other scales are small enough to be kept in float32."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class LlmInt8(Int8):
    """Codes and scales of `Int8`; each input has a scale of its own, as each row of the weight has."""

    changes_inputs = True

    def for_device(self, device: torch.device) -> Packed:
        return self

    def can_round_inputs(self, *, faster: bool = False) -> bool:
        """No: it rounds them in its own way."""
        return False

    def multiply(self, inputs: Tensor) -> Tensor:
        wide = inputs.float()
        is_outlier = ~(wide.abs() <= OUTLIER_THRESHOLD)  # NaN goes the exact way, and stays NaN
        usual = wide.masked_fill(is_outlier, 0.0)
        steps = (usual.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        products = _product(usual.div_(steps).round_().to(torch.int8), self.codes)
        outputs = products.mul_(steps).mul_(self.scale.float())
        # Their columns differ from input to input, and to find them, the GPU would have to be waited for.
        return outputs.add_(super().multiply(inputs.masked_fill(~is_outlier, 0.0))).to(inputs.dtype)


def _product(inputs: Tensor, codes: Tensor) -> Tensor:
    """`[tokens, in]`, `[out, in]`, both int8 → `[tokens, out]` in float32."""
    if not len(inputs) or any(size % WHOLE_BYTES for size in codes.shape):
        return inputs.float() @ codes.float().T
    padded = F.pad(inputs, (0, 0, 0, -len(inputs) % PADDED_ROWS))
    return torch._int_mm(padded, codes.T)[: len(inputs)].float()
