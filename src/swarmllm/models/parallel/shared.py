"""Matrices whose rows are spread over processes, in the place of a block's weights. Called by `span/loading`."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarmllm.models.architecture import find_blocks
from swarmllm.models.parallel.exchange import Plain, SharedPart, own_copy
from swarmllm.models.parallel.group import Group
from swarmllm.models.quantization.bfloat16 import Whole
from swarmllm.models.quantization.nf4 import TiledNf4
from swarmllm.models.quantization.packed import TILE, Packed
from swarmllm.models.quantization.rules import is_transposed, may_be_packed
from swarmllm.models.quantization.weight import QuantizedWeight


@dataclass(frozen=True, eq=False)
class SharedMatrix(Packed):
    """`[…, out, in]`, of which this process has the first rows."""

    codes: None = field(init=False, default=None)  # type: ignore[assignment]
    scale: None = field(init=False, default=None)  # type: ignore[assignment]
    dtype: torch.dtype
    part: SharedPart
    own: Packed
    own_bias: Tensor | None
    sizes: tuple[int, ...]
    bias: Tensor | None
    """The whole bias that followers have, too."""
    group: Group

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.own.shape[:-2], sum(self.sizes), self.own.shape[-1]))

    @property
    def device(self) -> torch.device:
        return self.own.device

    def tensors(self) -> dict[str, Tensor]:
        raise RuntimeError("the tensors of this matrix are in several processes")

    def __getitem__(self, index: int) -> "SharedMatrix":
        return replace(self, part=SharedPart(self.part.number, range(self.shape[0])[index]), own=self.own[index])

    def split(self, rows: int) -> Packed:  # type: ignore[override]
        return Plain(self.dequantize(), self.dtype).split(rows)

    def linear(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        if inputs.shape[-1] != self.shape[-1]:
            raise RuntimeError(f"inputs {list(inputs.shape)} don't fit a matrix {list(self.shape)}")
        flat = inputs.reshape(-1, inputs.shape[-1])
        is_biased = bias is not None and bias is self.bias
        if torch.is_grad_enabled() and flat.requires_grad:
            outputs: Tensor = _Product.apply(flat, self, is_biased)  # type: ignore[no-untyped-call]
        else:
            outputs = self.multiply(flat, is_biased)
        outputs = outputs.view(*inputs.shape[:-1], outputs.shape[-1])
        return outputs if bias is None or is_biased else outputs + bias

    def multiply(self, inputs: Tensor, is_biased: bool = False) -> Tensor:
        if len(inputs) == 0:
            return inputs.new_zeros(0, self.shape[-2])
        return self.group.multiply(self, inputs, is_biased=is_biased or self.bias is None)

    def multiply_transposed(self, grads: Tensor) -> Tensor:
        return self.group.multiply_transposed(self, grads) if len(grads) else grads.new_zeros(0, self.shape[-1])

    def dequantize(self) -> Tensor:
        if len(self.shape) > 2:
            return torch.stack([self[index].dequantize() for index in range(self.shape[0])])
        return self.group.dequantize(self, self.dtype)

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.dequantize()[start:end].to(dtype)

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return False

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        return self.multiply(inputs)


class _Product(torch.autograd.Function):
    """Neither the weight nor its bias has a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, matrix: SharedMatrix, is_biased: bool) -> Tensor:
        ctx.matrix = matrix
        return matrix.multiply(inputs, is_biased)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.matrix.multiply_transposed(grads[0]), None, None


class SharedWeight(QuantizedWeight):
    """A `SharedMatrix` that a module registers in place of a parameter."""

    def __init__(self, matrix: SharedMatrix, *, transposed: bool) -> None:
        nn.Module.__init__(self)
        self._matrix, self._dtype = matrix, matrix.dtype
        self.transposed = transposed

    @property
    def packed(self) -> Packed:  # type: ignore[override]
        return self._matrix if self._dtype == self._matrix.dtype else replace(self._matrix, dtype=self._dtype)


def is_rounded(packed: Packed) -> bool:
    """Whether a weight was made smaller when it was loaded, or before."""
    return not isinstance(packed.own if isinstance(packed, SharedMatrix) else packed, Whole | Plain)


@torch.no_grad()
def share(model: PreTrainedModel, group: Group) -> None:
    """Spread the rows of all large matrices of the blocks; the followers' leave this process.

    Raises:
        GroupLostError: a follower has gone.
    """
    blocks = find_blocks(model).blocks
    prefix = next(f"{name}." for name, module in model.named_modules() if module is blocks)
    for path, module in list(model.named_modules()):
        if not f"{path}.".startswith(prefix):
            continue
        for leaf, weight in [*module._parameters.items()]:
            if weight is not None and may_be_packed(model, f"{path}.{leaf}"):
                transposed = is_transposed(module)
                whole = Plain(weight.data.mT if transposed else weight.data, weight.dtype)
                _install(module, leaf, whole, group, transposed=transposed)
        for leaf, part in [*module._modules.items()]:
            if isinstance(part, QuantizedWeight) and not isinstance(part, SharedWeight):
                _install(module, leaf, part.packed, group, transposed=part.transposed)


def _install(module: nn.Module, leaf: str, packed: Packed, group: Group, *, transposed: bool) -> None:
    if not all(_sizes(packed, group.size)):
        return
    bias = module._parameters.get("bias") if isinstance(module, nn.Linear | Conv1D) else None
    if not isinstance(packed, Plain):
        bias = None  # it is added to the product, here as in one process
    matrix = spread(packed, bias, group)
    module._parameters.pop(leaf, None)
    module._modules.pop(leaf, None)
    module.add_module(leaf, SharedWeight(matrix, transposed=transposed))


def spread(packed: Packed, bias: Tensor | None, group: Group) -> SharedMatrix:
    """The same matrix, of which each process of the group has some rows.

    Raises:
        GroupLostError: a follower has gone.
    """
    sizes = _sizes(packed, group.size)
    part = group.keep(packed, sizes, None if bias is None else bias.detach())
    own = packed.rows(0, sizes[0])
    own = type(own)(**{name: own_copy(tensor) for name, tensor in own.tensors().items()}, dtype=own.dtype)
    own_bias = None if bias is None else bias.detach()[: sizes[0]].clone()
    return SharedMatrix(packed.dtype, part, own, own_bias, sizes, bias, group)


def _sizes(packed: Packed, num_processes: int) -> tuple[int, ...]:
    """Rows of each process: as equal as can be, in whole tiles where kernels want them."""
    rows = packed.shape[-2]
    unit = TILE if isinstance(packed, TiledNf4) or (rows % TILE == 0 and rows >= TILE * num_processes) else 1
    return tuple(_counts(rows // unit, num_processes, unit))


def _counts(units: int, num_processes: int, unit: int) -> Sequence[int]:
    ends = [rank * units // num_processes for rank in range(num_processes + 1)]
    return [(end - start) * unit for start, end in itertools.pairwise(ends)]
