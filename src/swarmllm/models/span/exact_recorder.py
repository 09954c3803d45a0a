"""Records the decode step of blocks that must compute torch's own bits.

Sums depend on the order of their additions, and functions such as `exp` on the library that computes them. So torch
computes these when the line runs, too: they become `Call`s. What is left has one right result for each number, such as
sums of two numbers, or square roots, and runs in C. So do sums, `silu` and `sigmoid` of usual sizes, whose way in torch
is known (`step.h`), and attention in bfloat16 (`whole_attention`), if some results are torch's here.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from swarmllm.models.quantization import whole_attention
from swarmllm.models.quantization.line import Line, Rows
from swarmllm.models.quantization.step import DIMS, DTYPES, Call, Kind, Operation, Recorded, Seen, View
from swarmllm.models.span.attention import usual_sdpa
from swarmllm.models.span.paged_attention import Asked
from swarmllm.models.span.step_recorder import StepRecorder, UnsupportedStepError, name_of

_ONE_RESULT = {
    "neg", "abs", "sqrt", "rsqrt", "clone", "_to_copy", "copy", "add", "sub", "rsub", "mul", "div", "maximum",
    "minimum", "square", "reciprocal", "relu", "clamp", "cat", "stack",
}  # fmt: skip
"""Operations that C computes."""
_FUNCTIONS = {"silu": Kind.SILU, "sigmoid": Kind.SIGMOID}
"""Functions that C computes as torch's vectors do."""
AT_ONCE = 64
"""Numbers that torch computes at once, in two vectors. What is left over is computed by another library."""
GRAIN = 1 << 15
"""Numbers that one thread of torch computes. Of more, several compute parts, and each part has something left over."""
TRIALS = 4
_OF_EACH = {"exp", "sigmoid", "silu", "tanh", "gelu", "cos", "sin", "erf", "log", "softplus", "log1p", "mish", "pow"}
"""Operations on each number by itself."""


class ExactRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """Records what has one right result, and calls of torch for the rest."""

    def __init__(self, attention: str) -> None:
        """`attention`: the name of the model's own attention function."""
        super().__init__()
        self._attention = attention
        self._attentions: dict[Any, bool] = {}
        """True for those that C computes."""

    def _lower(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        before, name = len(self.operations), name_of(func)
        if self._is_known(name, args, kwargs, out):
            try:
                super()._lower(func, args, kwargs, out)
            except UnsupportedStepError:
                del self.operations[before:]
            else:
                if name in _FUNCTIONS:  # torch computes large batches
                    call = Call(func, (self._seen(args[0]),), self._seen(out), most_numbers=GRAIN)
                    self.operations[-1] = replace(self.operations[-1], call=call)
                return
        self._call(func, args, kwargs, out)

    def _is_known(self, name: str, args: Any, kwargs: Any, out: Tensor) -> bool:
        """True if C has the right result."""
        if name in _ONE_RESULT:
            return abs(float(kwargs.get("alpha", 1))) == 1
        if name in ("mean", "sum"):
            tensor, size = args[0], args[0].shape[-1]
            is_usual = out.dtype == tensor.dtype == torch.float32 and tensor.stride(-1) == 1
            return is_usual and size < GRAIN and _is_torchs(Kind.SUM, size)
        if name in _FUNCTIONS:
            return out.numel() % AT_ONCE == 0 and out.numel() <= GRAIN and _is_torchs(_FUNCTIONS[name])
        return name == "pow" and not isinstance(args[1], Tensor) and bool(args[1] == 2)

    def _call(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Record that torch computes `out` by `func`."""
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedStepError(f"the operation {name_of(func)}")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [idx for idx, leaf in enumerate(leaves) if self.is_value(leaf)]
        read = [leaves[place] for place in places]
        leaves = [None if idx in places else leaf for idx, leaf in enumerate(leaves)]  # or the line would keep them

        def run(*tensors: Tensor) -> Tensor:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            some, options = pytree.tree_unflatten(given, spec)
            return _first(func(*some, **options))

        name, function = name_of(func), _row_by_row(run)
        factors = {"mm": (*args, None), "addmm": (*args[1:], args[0])}.get(name, ())
        if len(factors) == 3 and not kwargs and self._note_product(*factors, read, out):
            return
        if name in _OF_EACH and places == [0]:
            names = [argument.name for argument in func._schema.arguments[1 : len(args)]]
            function = partial(func, **dict(zip(names, args[1:], strict=True)), **kwargs)
        elif name == "mean" and len(args) > 1 and args[1]:
            function = _mean(args, kwargs)
        elif name == "native_layer_norm" and places == [0]:
            function = run
        self._note_call(read, out, function)

    def _note_product(
        self, inputs: Tensor, matrix: Tensor, bias: Tensor | None, read: Sequence[Tensor], out: Tensor
    ) -> bool:
        """Record the product of `inputs` `[1, in]` with a weight that the line keeps, if it is one."""
        if len(read) != 1 or read[0] is not inputs or len(inputs) != 1:
            return False
        weight, bias = matrix.t().detach(), None if bias is None else bias.detach()
        if weight.is_contiguous():
            function = partial(functional.linear, weight=weight, bias=bias)
            in_c = self._is_whole(inputs) and self._is_whole(out)
            self._note_call(read, out, function, weight=weight if in_c else None, bias=bias)
        else:
            self._note_call(read, out, partial(_product, matrix=matrix.detach(), bias=bias))
        return True

    def _attend(self, asked: Asked, kept: int, output: Tensor, sizes: tuple[int, int, int, int], block: int) -> None:
        if self._attention != "sdpa":
            raise UnsupportedStepError("the model's own attention isn't PyTorch's")
        attend = partial(usual_sdpa(), asked.module)
        options = {name: value for name, value in asked.options.items() if not isinstance(value, Tensor)}

        def within_window(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, None]:
            mask = _window_mask(asked.window, len(queries), keys.shape[-2])
            result: tuple[Tensor, None] = attend(queries, keys, values, mask, **options)
            return result

        function = within_window if asked.window else partial(attend, attention_mask=None, **options)
        may_be_in_c = not asked.window and not kept and asked.query.dtype == torch.bfloat16
        if may_be_in_c and self._attends_as_torch(function, sizes, asked.scale, options):
            self._attend_in_c(Kind.ATTEND_AS_TORCH, asked, 0, output, sizes, block)
            call = Call(function, (self._seen(asked.query[0]),), self._seen(output[0]), True)
            self.operations[-1] = replace(self.operations[-1], call=call)
            return
        self._note_call([asked.query[0]], output[0], function, block=block)

    def _attends_as_torch(
        self, function: Callable[..., Any], sizes: tuple[int, int, int, int], scale: float, options: dict[str, Any]
    ) -> bool:
        """True if C gives the results of the model's attention, `function` with these options."""
        key_heads, shared, size, value_size = sizes
        if size != value_size:
            return False
        with _disable_current_modes():  # the trial isn't part of the step
            known = sizes, scale, repr(options)
            if known not in self._attentions:
                self._attentions[known] = whole_attention.is_exact(
                    lambda *tensors: _first(function(*tensors)), key_heads, key_heads * shared, size, scale
                )
        return self._attentions[known]

    def _note_call(
        self,
        read: Sequence[Tensor],
        out: Tensor,
        function: Callable[..., Any],
        *,
        block: int | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """`block`: the block whose keys and values are attended to, if it attends."""
        call = Call(function, tuple(map(self._seen, read)), self._seen(out), block is not None, weight, bias)
        sizes = (*(1,) * (DIMS - 1), 1 if weight is None else len(weight))
        of_one, of_out = (View(seen.view.storage, seen.view.offset) for seen in (call.reads[0], call.out))
        self.operations.append(Operation(Kind.CALL, sizes, of_out, of_one, block=block or 0, call=call))

    def _is_whole(self, tensor: Tensor) -> bool:
        """True if a tensor is all of a value, in order, and so begins in a line of the caches."""
        value = self.whole(tensor, 0).value
        return value is not None and tensor.is_contiguous() and self.sizes[value] == tensor.numel()

    def _seen(self, tensor: Tensor) -> Seen:
        if tensor.dtype not in DTYPES and tensor.dtype != torch.int64:
            raise UnsupportedStepError(f"numbers of {tensor.dtype}")
        return Seen(self._view(tensor, tensor.stride()), tuple(tensor.shape), tensor.dtype)


@functools.cache
def _is_torchs(kind: Kind, size: int = GRAIN) -> bool:
    """True if C gives the results of torch for this kind of operation, with random numbers of all sizes."""
    generator = torch.Generator().manual_seed(size)
    view = [View(value, 0, (*(0,) * (DIMS - 1), 1)) for value in range(2)]
    operation = Operation(kind, (*(1,) * (DIMS - 1), size), view[1], view[0], number=1.0)
    recorded = Recorded([operation], dict.fromkeys(range(2), size), {0: (0, view[0]), 1: (1, view[1])}, None)
    line = Line(recorded, torch.float32, size)
    usual = {Kind.SUM: lambda one: one.sum(-1, keepdim=True), Kind.SILU: functional.silu, Kind.SIGMOID: torch.sigmoid}
    for _ in range(TRIALS):
        numbers = torch.randn(1, size, generator=generator)
        numbers *= 2.0 ** torch.randint(-8, 8, (1, size), generator=generator)
        expected: Tensor = usual[kind](numbers)
        got = line.run(Rows(numbers, [0], (), 1), 0, 1)
        if not torch.equal(got[:, : expected.shape[-1]], expected):
            return False
    return True


def _first(result: Any) -> Tensor:
    first: Tensor = result[0] if isinstance(result, tuple) else result
    return first


def _window_mask(window: int, batch_size: int, num_keys: int) -> Tensor | None:
    """The mask that transformers makes for a new position: none, until the window is full."""
    if not window or num_keys < window:
        return None
    return (torch.arange(num_keys) >= num_keys - window).expand(batch_size, 1, 1, num_keys)


def _row_by_row(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(*tensors: Tensor) -> Tensor:
        return torch.stack([run(*(one[row] for one in tensors)) for row in range(len(tensors[0]))])

    return function


def _mean(args: Any, kwargs: Any) -> Callable[..., Tensor]:
    tensor, axes, *others = args
    from_end = [axis % tensor.ndim - tensor.ndim for axis in axes]
    return lambda tensors: torch.ops.aten.mean.dim(tensors, from_end, *others, **kwargs)


def _product(inputs: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """`[rows, 1, in]` → `[rows, 1, out]`, by a matrix `[in, out]`."""
    flat = inputs.flatten(0, 1)
    return (torch.mm(flat, matrix) if bias is None else torch.addmm(bias, flat, matrix))[:, None]
