"""Records the decode step of blocks that must compute torch's own bits.

Sums depend on the order of their additions, and functions such as `exp` on the library that computes them. So torch
computes these when the line runs, too: they become `Call`s. What is left has one right result for each number, such as
sums of two numbers, or square roots; this is most of a step, and runs in C.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarmllm.models.quantization import whole
from swarmllm.models.quantization.step import DIMS, DTYPES, Call, Kind, Operation, Seen, View
from swarmllm.models.span.paged_attention import Asked
from swarmllm.models.span.step_recorder import StepRecorder, UnsupportedStepError, name_of

_ONE_RESULT = {
    "neg", "abs", "sqrt", "rsqrt", "clone", "_to_copy", "copy", "add", "sub", "rsub", "mul", "div", "maximum",
    "minimum", "square", "reciprocal", "relu", "clamp", "cat", "stack",
}  # fmt: skip
"""Operations that C computes."""
_OF_EACH = {"exp", "sigmoid", "silu", "tanh", "gelu", "cos", "sin", "erf", "log", "softplus", "log1p", "mish", "pow"}
"""Operations on each number by itself."""


class ExactRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """Records what has one right result, and calls of torch for the rest."""

    def __init__(self, attention: str) -> None:
        """`attention`: the name of the model's own attention function."""
        super().__init__()
        self._attention = attention

    def _lower(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        before, name = len(self.operations), name_of(func)
        is_square = name == "pow" and args[1] == 2
        if is_square or (name in _ONE_RESULT and abs(float(kwargs.get("alpha", 1))) == 1):
            try:
                return super()._lower(func, args, kwargs, out)
            except UnsupportedStepError:
                del self.operations[before:]
        return self._call(func, args, kwargs, out)

    def _call(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Record that torch computes `out` by `func`."""
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedStepError(f"the operation {name_of(func)}")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [idx for idx, leaf in enumerate(leaves) if self.is_value(leaf)]
        read = [leaves[place] for place in places]

        def run(*tensors: Tensor) -> Tensor:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            some, options = pytree.tree_unflatten(given, spec)
            result = func(*some, **options)
            first: Tensor = result[0] if isinstance(result, tuple) else result
            return first

        by_name: dict[str, Callable[[], Callable[..., Tensor] | None]] = {
            **dict.fromkeys(_OF_EACH, lambda: run),
            "mean": lambda: _mean(args, kwargs),
            "mm": lambda: _product(args[0], args[1], None, read),
            "addmm": lambda: _product(args[1], args[2], args[0], read) if len(args) == 3 and not kwargs else None,
        }
        function = by_name.get(name_of(func), lambda: None)()
        self._note_call(read, out, function or _row_by_row(run))

    def _attend(self, asked: Asked, output: Tensor, sizes: tuple[int, int, int, int], block: int) -> None:
        if self._attention != "sdpa":
            raise UnsupportedStepError("the model's own attention isn't PyTorch's")
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        options = {name: value for name, value in asked.options.items() if not isinstance(value, Tensor)}

        def function(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            mask = _window_mask(asked.window, len(queries), keys.shape[-2])
            result: Tensor = attend(asked.module, queries, keys, values, mask, **options)[0]
            return result

        self._note_call([asked.query[0]], output[0], function, block)

    def _note_call(
        self, read: Sequence[Tensor], out: Tensor, function: Callable[..., Tensor], block: int | None = None
    ) -> None:
        """`block`: the block whose keys and values are attended to, if it attends."""
        reads, to = tuple(map(self._seen, read)), self._seen(out)
        call = Call(function, reads, to, attends=block is not None)
        of_one, of_out = (View(seen.view.storage, seen.view.offset) for seen in (reads[0], to))
        self.operations.append(Operation(Kind.CALL, (1,) * DIMS, of_out, of_one, block=block or 0, call=call))

    def _seen(self, tensor: Tensor) -> Seen:
        if tensor.dtype not in DTYPES and tensor.dtype != torch.int64:
            raise UnsupportedStepError(f"numbers of {tensor.dtype}")
        return Seen(self._view(tensor, tensor.stride()), tuple(tensor.shape), tensor.dtype)


def _window_mask(window: int, batch_size: int, num_keys: int) -> Tensor | None:
    """The mask that transformers makes for a new position: none, until the window is full."""
    if not window or num_keys < window:
        return None
    return torch.ones(batch_size, 1, 1, num_keys, dtype=torch.bool)


def _row_by_row(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(*tensors: Tensor) -> Tensor:
        return torch.stack([run(*(one[row] for one in tensors)) for row in range(len(tensors[0]))])

    return function


def _mean(args: Any, kwargs: Any) -> Callable[..., Tensor] | None:
    tensor, axes, *others = args
    if not axes:
        return None
    from_end = [axis % tensor.ndim - tensor.ndim for axis in axes]
    return lambda tensors: torch.ops.aten.mean.dim(tensors, from_end, *others, **kwargs)


def _product(
    inputs: Tensor, matrix: Tensor, bias: Tensor | None, read: Sequence[Tensor]
) -> Callable[..., Tensor] | None:
    """The product of `inputs` `[1, in]` with a weight of the model."""
    if len(read) != 1 or read[0] is not inputs or len(inputs) != 1:
        return None
    weight = matrix.t().detach()
    bias = None if bias is None else bias.detach()
    if weight.is_contiguous():
        return lambda tensors: whole.linear(tensors.flatten(0, 1).contiguous(), weight, bias)[:, None]
    if bias is None:
        return lambda tensors: torch.mm(tensors.flatten(0, 1), matrix)[:, None]
    return lambda tensors: torch.addmm(bias, tensors.flatten(0, 1), matrix)[:, None]
