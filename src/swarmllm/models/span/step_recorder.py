"""Records the operations of a decode step while the model's own code runs it.

Views (`view`, `transpose`, `chunk`) cost nothing when the line runs. The kernels report their products
(`record_product`); keys, values and attention are reported by the cache of `traced_step`.

To add an operation, name it in `SIMPLE`, in `OF_TWO`, or in `_SPECIAL` with a method of `StepRecorder`. If no `Kind`
computes it yet, add one in the same place of `step.Kind` and `step_line.h`, and its loop to `step.h`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.step import DIMS, DTYPES, Kind, Operation, View, collapsed
from swarmllm.models.span.paged_attention import Asked

_SIMPLE = {
    "neg": Kind.NEGATE, "abs": Kind.ABSOLUTE, "sqrt": Kind.ROOT, "rsqrt": Kind.INVERSE_ROOT,
    "exp": Kind.EXPONENTIAL, "sigmoid": Kind.SIGMOID, "silu": Kind.SILU, "tanh": Kind.TANH, "cos": Kind.COSINE,
    "sin": Kind.SINE, "clone": Kind.COPY, "_to_copy": Kind.COPY, "copy": Kind.COPY,
}  # fmt: skip
"""Operations on one tensor."""
_OF_TWO = {
    "add": Kind.ADD, "sub": Kind.ADD, "mul": Kind.MULTIPLY, "div": Kind.DIVIDE, "maximum": Kind.LARGEST,
    "minimum": Kind.SMALLEST,
}  # fmt: skip
"""Operations on two tensors, or on a tensor and a number."""
_EXACT = {Kind.COPY, Kind.NEGATE, Kind.ABSOLUTE, Kind.LARGEST, Kind.SMALLEST}
"""Operations whose result is a bfloat16 if all that they read are."""
_UNKNOWN_CONTENT = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Operations that make a tensor without content. It becomes a value when a value is written to it."""
_OF_SHAPE = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
"""Operations that read nothing of a tensor but its shape."""


class UnsupportedStepError(Exception):
    """A step can't be a straight line."""


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations on values. A value is the storage of tensors that depend on the step's inputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.sizes: dict[int, int] = {}
        self.entries: dict[int, tuple[int, View]] = {}
        self._values: dict[int, int] = {}
        """Storage → value."""
        self._empty: set[int] = set()
        """Storages that are made in this step and not written to yet."""
        self._alive: list[Tensor] = []
        """All tensors of the step. If one were freed, another could get its address and be mistaken for it."""

    # ------------------------------------------------------------------ values

    def new_value(self, tensor: Tensor) -> None:
        """The storage of this tensor is a value from now on."""
        storage = tensor.untyped_storage()
        value = self._values.setdefault(storage._cdata, len(self._values))
        self.sizes[value] = storage.nbytes() // tensor.itemsize
        self._alive.append(tensor)

    def is_value(self, tensor: Any) -> bool:
        """True for a tensor that depends on the step's inputs; others are the same in each step."""
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._values

    def whole(self, tensor: Tensor, axes: int) -> View:
        """A view of a value, with the strides of its last `axes` axes."""
        strides = tensor.stride()[-axes:] if axes else ()
        return self._view(tensor, (*(0,) * (DIMS - axes), *strides))

    def _view(self, tensor: Tensor, strides: Sequence[int]) -> View:
        if not self.is_value(tensor):
            return View(tensor.detach().float().contiguous(), 0, tuple(strides))
        if tensor.dtype not in DTYPES and tensor.dtype != torch.int64:
            raise UnsupportedStepError(f"numbers of {tensor.dtype}")
        return View(self._values[tensor.untyped_storage()._cdata], int(tensor.storage_offset()), tuple(strides))

    def _rounds(self, kind: Kind, out: Tensor, read: Sequence[Tensor]) -> bool:
        """True if the line must round the result, because torch keeps it in bfloat16."""
        if out.dtype not in DTYPES:
            raise UnsupportedStepError(f"results of {out.dtype}")
        is_exact = kind in _EXACT and all(one.dtype == torch.bfloat16 for one in read)
        return out.dtype == torch.bfloat16 and not is_exact

    # ------------------------------------------------------------------ the operations of torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._alive += _tensors(result)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation that torch has run, if it is on values."""
        name, given = func.overloadpacket.__name__, _tensors((args, tuple(kwargs.values())))
        if name in _UNKNOWN_CONTENT:
            self._empty.add(result.untyped_storage()._cdata)
        if name in _UNKNOWN_CONTENT or name in _OF_SHAPE or not any(map(self.is_value, given)):
            return
        outputs = _tensors(result)
        if not outputs:
            raise UnsupportedStepError(f"{name} reads numbers on the host")
        storages = {one.untyped_storage()._cdata for one in given}
        if not func._schema.is_mutable and all(one.untyped_storage()._cdata in storages for one in outputs):
            if any(one.dtype != given[0].dtype for one in outputs):
                raise UnsupportedStepError("the same numbers of another type")
            return  # another view
        is_mutable = func._schema.is_mutable
        if is_mutable and not self.is_value(outputs[0]) and outputs[0].untyped_storage()._cdata not in self._empty:
            raise UnsupportedStepError(f"{name} writes to a tensor of the model")
        for one in outputs:
            self.new_value(one)
        try:
            self._lower(func, args, kwargs, outputs[0])
        except UnsupportedStepError as error:
            self._refuse(outputs[0], str(error))
        for one in outputs[1:]:
            self._refuse(one, f"more than one result of {name}")

    def _refuse(self, out: Tensor, problem: str) -> None:
        """Note that `out` can't be computed, which matters only if something reads it."""
        view = View(self._values[out.untyped_storage()._cdata])
        self.operations.append(Operation(Kind.COPY, (1,) * DIMS, view, view, problem=problem))

    def _lower(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Record the operations that compute `out`."""
        name = name_of(func)
        if name in _SIMPLE:
            self._add(_SIMPLE[name], out, [args[1] if name == "copy" else args[0]])
        elif name in _OF_TWO:
            self._of_two(name, args, kwargs, out)
        elif (special := _SPECIAL.get(name)) is not None:
            special(self, args, kwargs, out)
        else:
            raise UnsupportedStepError(f"the operation {name}")

    def _add(self, kind: Kind, out: Tensor, read: Sequence[Tensor], number: float = 0.0) -> None:
        """Record an operation that computes each number of `out` from those of `read` in the same place."""
        read = [one.expand(out.shape) for one in read]
        fixed = [one if self.is_value(one) else _compact(one) for one in read]
        found = collapsed(out.shape, [one.stride() for one in (out, *fixed)])
        if found is None:
            raise UnsupportedStepError("too many axes")
        sizes, strides = found
        of_out, of_one, *others = (self._view(one, each) for one, each in zip((out, *fixed), strides, strict=True))
        rounds = self._rounds(kind, out, read)
        self.operations.append(Operation(kind, sizes, of_out, of_one, *others, rounds=rounds, number=number))

    def _of_two(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        one, other = (torch.tensor(float(each)) if isinstance(each, int | float) else each for each in args[:2])
        if kwargs.get("rounding_mode") is not None:
            raise UnsupportedStepError("division of whole numbers")
        alpha = float(kwargs.get("alpha", 1)) * (-1.0 if name == "sub" else 1.0)
        if not self.is_value(one) and alpha == 1.0 and name != "div":
            one, other = other, one  # numbers that never change are read faster as the second
        self._add(_OF_TWO[name], out, [one, other], alpha)

    def rsub(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._of_two("sub", (args[1], args[0]), kwargs, out)

    def pow(self, args: Any, kwargs: Any, out: Tensor) -> None:
        base, exponent = args[:2]
        if not isinstance(exponent, int | float) or exponent not in (2, 3, 0.5, -0.5):
            raise UnsupportedStepError(f"the power {exponent}")
        if exponent >= 2:
            self._add(Kind.MULTIPLY, out, [base, base])
            if exponent == 3:
                self.operations[-1] = replace(self.operations[-1], rounds=False)
                self._add(Kind.MULTIPLY, out, [out, base])
        else:
            self._add(Kind.ROOT if exponent > 0 else Kind.INVERSE_ROOT, out, [base])

    def square(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._add(Kind.MULTIPLY, out, [args[0], args[0]])

    def reciprocal(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._add(Kind.DIVIDE, out, [torch.tensor(1.0), args[0]])

    def relu(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._add(Kind.LARGEST, out, [args[0], torch.tensor(0.0)])

    def gelu(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._add(Kind.GELU_TANH if kwargs.get("approximate") == "tanh" else Kind.GELU, out, [args[0]])

    def clamp(self, args: Any, kwargs: Any, out: Tensor) -> None:
        read, bounds = args[0], (*args[1:], None, None)
        low, high = kwargs.get("min", bounds[0]), kwargs.get("max", bounds[1])
        for kind, bound in ((Kind.LARGEST, low), (Kind.SMALLEST, high)):
            if self.is_value(bound):
                raise UnsupportedStepError("bounds that depend on the step")
            if bound is not None:
                self._add(kind, out, [read, torch.tensor(float(bound))])
                read = out

    def cat(self, args: Any, kwargs: Any, out: Tensor) -> None:
        axis, start = (args[1] if len(args) > 1 else kwargs.get("dim", 0)), 0
        for part in args[0]:
            if part.ndim == out.ndim:  # torch leaves out empty ones of one axis
                self._add(Kind.COPY, out.narrow(axis, start, part.shape[axis]), [part])
                start += part.shape[axis]

    def stack(self, args: Any, kwargs: Any, out: Tensor) -> None:
        axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        for idx, part in enumerate(args[0]):
            self._add(Kind.COPY, out.select(axis, idx), [part])

    def mean(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._sum(args, kwargs, out, float(args[0].shape[-1]))

    def sum(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._sum(args, kwargs, out, 1.0)

    def _sum(self, args: Any, kwargs: Any, out: Tensor, divisor: float) -> None:
        tensor, axes = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
        if axes is None or [axis % tensor.ndim for axis in axes] != [tensor.ndim - 1]:
            raise UnsupportedStepError("sums of other axes than the last one")
        if out.ndim < tensor.ndim:
            out = out.unsqueeze(-1)
        found = collapsed(out.shape[:-1], [one.stride()[:-1] for one in (out, tensor)], DIMS - 1)
        if found is None:
            raise UnsupportedStepError("too many axes")
        sizes, (of_out, of_one) = found
        views = self._view(out, (*of_out[1:], 0)), self._view(tensor, (*of_one[1:], tensor.stride(-1)))
        rounds = self._rounds(Kind.SUM, out, [tensor])
        self.operations.append(
            Operation(Kind.SUM, (*sizes[1:], tensor.shape[-1]), *views, rounds=rounds, number=divisor)
        )

    def layer_norm(self, args: Any, kwargs: Any, out: Tensor) -> None:
        tensor, shape, weight, bias, eps = args[:5]
        if len(shape) != 1 or tensor.stride(-1) != 1 or any(map(self.is_value, (weight, bias))):
            raise UnsupportedStepError("a norm of another kind")
        found = collapsed(out.shape[:-1], [one.stride()[:-1] for one in (out, tensor)], DIMS - 1)
        if found is None:
            raise UnsupportedStepError("too many axes")
        sizes, (of_out, of_one) = found
        fixed = [torch.ones(shape) if weight is None else weight, torch.zeros(shape) if bias is None else bias]
        scale, shift = (one.detach().float().contiguous() for one in fixed)
        self.operations.append(
            Operation(
                Kind.LAYER_NORM, (*sizes[1:], tensor.shape[-1]), self._view(out, (*of_out[1:], 1)),
                self._view(tensor, (*of_one[1:], 1)), View(scale), rounds=self._rounds(Kind.LAYER_NORM, out, [tensor]),
                number=float(eps), bias=shift,
            )
        )  # fmt: skip

    def product_of_one(self, args: Any, kwargs: Any, out: Tensor) -> None:
        """A matrix product whose inner axis has size 1, such as frequencies times position in rotary embeddings."""
        one, other = args[:2]
        if one.shape[-1] != 1:
            raise UnsupportedStepError("a product with a weight that isn't packed")
        self._add(Kind.MULTIPLY, out, [one, other] if self.is_value(one) else [other, one])

    # ------------------------------------------------------------------ products, keys and values

    def record_product(self, matrix: kernels.Matrix, inputs: Tensor, outputs: Tensor) -> None:
        """Called by the kernels: `outputs` `[1, out]` = `inputs` `[1, in]` @ matrix."""
        if not self.is_value(inputs):
            return
        if not inputs.is_contiguous() or len(inputs) != 1:
            raise UnsupportedStepError("a product of several positions")
        self.new_value(outputs)
        sizes = (*(1,) * (DIMS - 1), matrix.rows)
        self.operations.append(
            Operation(Kind.PRODUCT, sizes, self.whole(outputs, 2), self.whole(inputs, 2), matrix=matrix)
        )

    def record_append(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Called by the cache, which appends these keys and values `[1, heads, 1, head]`."""
        for kind, tensor in ((Kind.APPEND_KEYS, keys), (Kind.APPEND_VALUES, values)):
            if not self.is_value(tensor):
                raise UnsupportedStepError("keys that don't depend on the step")
            rows = tensor[0, :, 0]
            view = self.whole(rows, 2)
            self.operations.append(Operation(kind, (1, 1, *rows.shape), view, view, block=block))

    def record_attention(self, asked: Asked, shapes: tuple[int, int, int], block: int, kept: int) -> Tensor:
        """Called by the cache; returns zeros `[1, 1, heads, head]` as the output for a query of one position.

        `shapes`: heads of keys, and the sizes of a head of keys and of values. `kept`: the last positions that the
        block's cache keeps; 0: all.
        """
        key_heads, key_size, value_size = shapes
        num_heads = asked.query.shape[1]
        if num_heads % key_heads or asked.query.shape[-1] != key_size:
            raise UnsupportedStepError("queries and keys of unlike sizes")
        output = asked.query.new_zeros(1, 1, num_heads, value_size)
        self.new_value(output)
        self._attend(asked, kept, output, (key_heads, num_heads // key_heads, key_size, value_size), block)
        return output

    def _attend(self, asked: Asked, kept: int, output: Tensor, sizes: tuple[int, int, int, int], block: int) -> None:
        window = min((one for one in (asked.window, kept) if one), default=0)
        self._attend_in_c(Kind.ATTEND, asked, window, output, sizes, block)

    def _attend_in_c(
        self, kind: Kind, asked: Asked, window: int, output: Tensor, sizes: tuple[int, int, int, int], block: int
    ) -> None:
        one = self.whole(asked.query[0, :, 0], 2)
        one = View(one.storage, one.offset, (0, *one.strides[2:], 0))
        self.operations.append(
            Operation(
                kind, sizes, self.whole(output, 2), one, rounds=output.dtype == torch.bfloat16,
                number=asked.scale, block=block, window=window,
            )
        )  # fmt: skip

    def enter_block(self, block_idx: int, hidden: Tensor) -> None:
        """Called with the hidden states that enter a block, and at the end with the output."""
        if not self.is_value(hidden) or not hidden.is_contiguous():
            raise UnsupportedStepError("hidden states of another kind")
        self.entries[block_idx] = len(self.operations), self.whole(hidden, 1)


def name_of(func: Any) -> str:
    """The name of an operation, the same if it writes to its first tensor."""
    name: str = func.overloadpacket.__name__
    return name.removesuffix("_") if func._schema.is_mutable else name


_SPECIAL: dict[str, Callable[..., None]] = {
    **{name: getattr(StepRecorder, name) for name in (
        "rsub", "pow", "square", "reciprocal", "relu", "gelu", "clamp", "cat", "stack", "mean", "sum",
    )},
    "native_layer_norm": StepRecorder.layer_norm, "mm": StepRecorder.product_of_one, "bmm": StepRecorder.product_of_one,
}  # fmt: skip


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


def _compact(tensor: Tensor) -> Tensor:
    """A tensor without the memory of its repeated axes, in the same shape."""
    one = tensor
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0:
            one = one.narrow(axis, 0, 1)
    return one.contiguous().expand(tensor.shape)
