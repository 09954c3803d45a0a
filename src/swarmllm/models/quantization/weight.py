"""A packed weight in the place of a parameter, so that any model code runs on it unchanged.

It looks like a tensor. `linear`, `@`, `addmm`, `bmm` and grouped products multiply by the packed numbers, indexing
takes an expert, and every other operation of torch uses the dequantized weight. So `nn.Linear` stays `nn.Linear`,
transposed layers (GPT-2) and fused experts need no modules of their own, and adapters wrap them as usual. Put in place
by `loading`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from swarmllm.models.quantization.packed import InStrips, Packed, rounding


class PackedView:
    """A packed weight, its experts, or its transposition, in the shape that model code expects: `[…, out, in]`, or `[…,
    in, out]` if the model stores it transposed."""

    requires_grad = False
    grad = None

    def __init__(self, packed: Packed, *, transposed: bool = False) -> None:
        self.packed = packed
        self.transposed = transposed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        product = _PRODUCTS.get(func)
        if product is not None:
            result = product(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map(_dequantized, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.dequantize(), name)

    @property
    def shape(self) -> torch.Size:
        shape = self.packed.shape
        return torch.Size((*shape[:-2], shape[-1], shape[-2])) if self.transposed else shape

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if self.ndim > 2 and (isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0)):
            return PackedView(self.packed[int(index)], transposed=self.transposed)
        return self.dequantize()[index]

    @property
    def mT(self) -> "PackedView":  # noqa: N802 - torch's name
        return PackedView(self.packed, transposed=not self.transposed)

    @property
    def T(self) -> Any:  # noqa: N802 - torch's name
        return self.mT if self.ndim == 2 else self.dequantize().T

    def t(self) -> Any:
        return self.T

    def transpose(self, first: int, second: int) -> Any:
        if {first % self.ndim, second % self.ndim} == {self.ndim - 2, self.ndim - 1}:
            return self.mT
        return self.dequantize().transpose(first, second)

    def contiguous(self) -> Any:
        return self

    def view(self, *shape: Any) -> Any:
        """Splitting the rows into experts keeps them packed."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        if self.ndim == 2 and not self.transposed and len(sizes) == 3 and sizes[-1] == self.shape[-1]:
            return PackedView(self.packed.split(sizes[1] if sizes[1] > 0 else len(self) // sizes[0]))
        return self.dequantize().view(*sizes)

    def dequantize(self) -> Tensor:
        """The weight in full precision."""
        weight = self.packed.dequantize()
        return weight.mT if self.transposed else weight


class QuantizedWeight(PackedView, nn.Module):
    """A `PackedView` that a module registers in place of a parameter; its buffers move with the model."""

    def __init__(self, packed: Packed, *, transposed: bool = False) -> None:
        nn.Module.__init__(self)
        self._form, self._dtype = type(packed), packed.dtype
        self.transposed = transposed
        for name, tensor in packed.tensors().items():
            self.register_buffer(name, tensor)

    @property
    def packed(self) -> Packed:  # type: ignore[override]
        tensors = cast(dict[str, Tensor], self._buffers)  # `named_buffers` takes a tenth of a product's calls
        return self._form(**tensors, dtype=self._dtype)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return PackedView.__getattr__(self, name)

    def round_inputs(self, *, if_faster: bool = False) -> bool:
        """Multiply by rounded inputs from now on, where they need no gradient; False: these codes can't, or gain
        nothing."""
        if not self.packed.can_round_inputs(faster=if_faster):
            return False
        self._form = rounding(self._form)  # type: ignore[arg-type]
        return True

    def stand_for(self, dtype: torch.dtype) -> None:
        """Be a weight of this dtype from now on, for model code that asks."""
        self._dtype = dtype

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The dequantized weight, as a tensor's `to` gives it. (Moving the model moves the buffers without this.)"""
        return self.dequantize().to(*args, **kwargs)

    def forward(self, *_: Any) -> None:
        raise NotImplementedError("a weight is multiplied with, not called")


def _dequantized(value: Any) -> Any:
    return value.dequantize() if isinstance(value, PackedView) else value


def _matmul(inputs: Any, weight: Any, bias: Any = None) -> Any:
    """`inputs @ weight + bias`, where the weight of one of these, or of each of several, is transposed as needed."""
    if not isinstance(inputs, Tensor) or not isinstance(weight, PackedView) or not weight.transposed:
        return NotImplemented
    if weight.ndim == 2:
        return weight.packed.linear(inputs, bias)
    if inputs.ndim != 3 or weight.ndim != 3 or len(inputs) != len(weight):
        return NotImplemented
    return torch.stack([weight.packed[idx].linear(part) for idx, part in enumerate(inputs)])


def _linear(inputs: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, PackedView):
        return NotImplemented
    return _matmul(inputs, weight.mT, bias)


def _addmm(bias: Any, inputs: Any, weight: Any, **scales: Any) -> Any:
    return NotImplemented if scales else _matmul(inputs, weight, bias)


def _grouped_mm(inputs: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows of `inputs` `[tokens, in]`, sorted by expert; `offs[e]` is where the rows of expert e end."""
    if offs is None or bias is not None or inputs.ndim != 2 or not isinstance(weight, PackedView):
        return NotImplemented
    outputs, start = [], 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            outputs.append(inputs[start:end] @ weight[expert])
        start = end
    if start < len(inputs):  # rows of no expert
        outputs.append(inputs.new_zeros(len(inputs) - start, weight.shape[-1]))
    return torch.cat(outputs) if outputs else inputs.new_zeros(0, weight.shape[-1])


def _joined(join: Callable[..., Tensor]) -> Callable[..., Any]:
    """Packed weights of one form joined along the experts, or along the rows of matrices, stay packed."""

    def joined(weights: Sequence[Any], dim: int = 0) -> Any:
        first = weights[0]
        if not all(isinstance(one, PackedView) and not one.transposed for one in weights):
            return NotImplemented
        packed = [one.packed for one in weights]
        along_columns = join is torch.cat and dim % first.ndim == first.ndim - 1
        among_rows = join is torch.stack and dim != 0 and any(isinstance(one, InStrips) for one in packed)
        if along_columns or among_rows or dim < 0 or len({(type(one), one.dtype, one.shape[-1]) for one in packed}) > 1:
            return NotImplemented
        try:
            tensors = [one.tensors() for one in packed]
            return replace(packed[0], **{name: join([one[name] for one in tensors], dim) for name in tensors[0]})
        except RuntimeError:  # groups of other sizes, or parts elsewhere
            return NotImplemented

    return lambda *args, **kwargs: _viewed(joined(*args, **kwargs))


def _viewed(packed: Any) -> Any:
    return packed if packed is NotImplemented else PackedView(packed)


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.grouped_mm: _grouped_mm,
    torch._grouped_mm: _grouped_mm,
    torch.addmm: _addmm,
    torch.bmm: _matmul,
    torch.cat: _joined(torch.cat),
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.stack: _joined(torch.stack),
    torch.transpose: lambda weight, dim0, dim1: weight.transpose(dim0, dim1),
    Tensor.__matmul__: _matmul,
    Tensor.matmul: _matmul,
}
"""Operations that work on the packed weight; all others work on the dequantized weight."""
