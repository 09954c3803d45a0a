"""A decode step as a straight line of operations on floats, and what makes it shorter.

`models/span/traced_step` records a model's own operations and makes an `Operation` of each; `line` runs them. This
module knows neither models nor sessions.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.quantization import kernels

DIMS = 4
ALIGNED = 16
"""Each value begins at a multiple of this many floats: a vector of the widest processors."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Types of hidden states, keys and values, with their numbers in `weight.h`."""


class Kind(IntEnum):
    """The operations, in the order of `step_line.h`."""

    COPY = 0
    ADD = auto()
    MULTIPLY = auto()
    DIVIDE = auto()
    LARGEST = auto()
    SMALLEST = auto()
    NEGATE = auto()
    ABSOLUTE = auto()
    ROOT = auto()
    INVERSE_ROOT = auto()
    EXPONENTIAL = auto()
    SIGMOID = auto()
    SILU = auto()
    GELU = auto()
    GELU_TANH = auto()
    TANH = auto()
    COSINE = auto()
    SINE = auto()
    SUM = auto()
    LAYER_NORM = auto()
    PRODUCT = auto()
    APPEND_KEYS = auto()
    APPEND_VALUES = auto()
    ATTEND = auto()
    ATTEND_AS_TORCH = auto()
    CALL = auto()
    """See `Call`."""


@dataclass(frozen=True, eq=False)
class View:
    """Numbers of a value, or of a tensor that never changes, as axes of an operation see them."""

    storage: int | Tensor
    """The number of the value, or a float32 tensor."""
    offset: int = 0
    strides: tuple[int, ...] = (0,) * DIMS

    @property
    def value(self) -> int | None:
        """The number of the value; None for a tensor."""
        return None if isinstance(self.storage, Tensor) else self.storage


@dataclass(frozen=True, eq=False)
class Seen:
    """A tensor of a row. The strides of `view` are those of its axes."""

    view: View
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Call:
    """An operation that torch computes."""

    function: Callable[..., Any]
    """Takes a tensor `[rows, *shape]` for each of `reads`, and returns one. If it attends, it is called for each
    session, with the keys and values of that session besides, and returns a tuple that begins with a tensor."""
    reads: tuple[Seen, ...]
    out: Seen
    attends: bool = False
    """True for attention to the keys and values of `Operation.block`."""
    weight: Tensor | None = None
    """For a product with a weight `[out, in]` of the model, which C may compute with the same bits; and its bias."""
    bias: Tensor | None = None
    most_numbers: int = 0
    """For other operations that C computes with the same bits: for how many numbers, if torch has several threads."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation; `out` is always a value. `sizes` and the strides of views have `DIMS` entries."""

    kind: Kind
    sizes: tuple[int, ...]
    out: View
    one: View
    other: View | None = None
    _: KW_ONLY
    rounds: bool = False
    """True if the result is rounded to bfloat16."""
    number: float = 0.0
    """ADD: factor of `other`. SUM: divisor. LAYER_NORM: epsilon. ATTEND, ATTEND_AS_TORCH: factor of the scores."""
    matrix: kernels.Matrix | None = None
    """The matrix of a PRODUCT."""
    bias: Tensor | None = None
    """The bias of a LAYER_NORM, whose weights are `other`."""
    block: int = 0
    """The block whose keys and values are appended or attended to."""
    window: int = 0
    """Last positions that ATTEND sees, the new one included; 0: all."""
    call: Call | None = None
    """What a CALL does; of other kinds, what torch does in their place (`Call.most_numbers`)."""
    problem: str = ""
    """The reason why it can't be run, if it can't."""

    @property
    def inputs(self) -> list[int]:
        """The values that it reads."""
        views = (self.one, self.other) if self.call is None else [seen.view for seen in self.call.reads]
        return [view.value for view in views if view is not None and view.value is not None]

    @property
    def is_kept(self) -> bool:
        """True if it is needed although no operation reads its result: it writes to a session's cache."""
        return self.kind in (Kind.APPEND_KEYS, Kind.APPEND_VALUES)


@dataclass(frozen=True, eq=False)
class Recorded:
    """The operations of a step, and the places of its inputs and outputs."""

    operations: list[Operation]
    sizes: dict[int, int]
    """Floats of each value."""
    entries: dict[int, tuple[int, View]]
    """Block → (its first operation, its hidden states); the last entry is the end of the line and the output."""
    position: View | None
    """The position of the row, which operations before the first block may read."""


def simplified(recorded: Recorded) -> Recorded:
    """The same with fewer copies.

    If a value isn't written to any more, a copy of all of it is dropped, and its readers read that value. A copy that
    rounds is dropped if it is the only reader: then the operation that makes the value rounds instead.
    """
    writers, readers = Counter[int](), Counter[int]()
    last_write: dict[int, int] = {}
    for idx, operation in enumerate(recorded.operations):
        if not operation.is_kept:
            writers[operation.out.value or 0] += 1
            last_write[operation.out.value or 0] = idx
        readers.update(operation.inputs)
    readers.update(view.value or 0 for _, view in recorded.entries.values())
    same: dict[int, View] = {}  # value → the view of an earlier one that it equals
    by: dict[int, int] = {}  # value → the operation that makes all of it
    operations: list[Operation] = []
    before = [0]
    for idx, operation in enumerate(recorded.operations):
        one = _seen_as(operation, same)
        out = one.out.value
        assert out is not None
        makes_all = writers[out] == 1 and one.out.offset == 0 and math.prod(one.sizes) == recorded.sizes[out]
        source = one.one.value
        is_whole_copy = (
            one.kind == Kind.COPY
            and makes_all
            and source is not None
            and not one.problem
            and all(
                size == 1 or stride == other
                for size, stride, other in zip(one.sizes, one.out.strides, one.one.strides, strict=True)
            )
        )
        if is_whole_copy and source is not None and last_write.get(source, -1) < idx:
            maker = by.get(source)
            if not one.rounds:
                same[out] = one.one
            elif maker is not None and readers[source] == 1 and recorded.sizes[source] == recorded.sizes[out]:
                operations[maker] = replace(operations[maker], rounds=True)
                same[out] = one.one
        if out not in same:
            if makes_all and one.call is None:  # torch decides where calls round
                by[out] = len(operations)
            operations.append(one)
        elif same[out].value is not None:
            readers[source or 0] += readers[out] - 1
        before.append(len(operations))
    entries = {block: (before[idx], _through(view, same)) for block, (idx, view) in recorded.entries.items()}
    return replace(recorded, operations=operations, entries=entries)


def _seen_as(operation: Operation, same: dict[int, View]) -> Operation:
    other = None if operation.other is None else _through(operation.other, same)
    out = _through(operation.out, same) if operation.is_kept else operation.out
    call = operation.call
    if call is not None:
        call = replace(call, reads=tuple(replace(seen, view=_through(seen.view, same)) for seen in call.reads))
    return replace(operation, one=_through(operation.one, same), other=other, out=out, call=call)


def _through(view: View, same: dict[int, View]) -> View:
    found = same.get(view.value) if view.value is not None else None
    return view if found is None else replace(view, storage=found.storage, offset=view.offset + found.offset)


def needed(recorded: Recorded) -> Recorded:
    """The same without operations that nobody needs."""
    last_view = max(recorded.entries.items())[1][1]
    alive = {last_view.value}
    kept: list[bool] = []
    for operation in reversed(recorded.operations):
        kept.append(operation.is_kept or operation.out.value in alive)
        if kept[-1]:
            alive.update(operation.inputs)
    kept.reverse()
    before = [0]
    for one in kept:
        before.append(before[-1] + one)
    operations = [operation for operation, is_needed in zip(recorded.operations, kept, strict=True) if is_needed]
    entries = {block: (before[idx], view) for block, (idx, view) in recorded.entries.items()}
    return replace(recorded, operations=operations, entries=entries)


def places(recorded: Recorded) -> tuple[dict[int, int], int]:
    """Offset of each value in an arena, and the size of the arena in floats."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def used(value: int | None, at: int) -> None:
        if value is not None:
            first.setdefault(value, at)
            last[value] = at

    if recorded.position is not None:
        used(recorded.position.value, -1)
    begin = min(recorded.entries.values(), key=lambda entry: entry[0])[0]
    marks = dict(recorded.entries.values())
    for at, operation in enumerate(recorded.operations):
        if at == begin:
            used(marks[at].value, at)
        for value in (*operation.inputs, operation.out.value):
            used(value, at)
    for at, view in recorded.entries.values():
        used(view.value, max(at, last.get(view.value or 0, at)))
    taken: list[tuple[int, int, int]] = []  # (offset, end, last use) of values that are alive
    offsets: dict[int, int] = {}
    size = 0
    for value in sorted(first, key=first.__getitem__):
        taken = [one for one in taken if one[2] >= first[value]]
        floats, offset = -(-recorded.sizes[value] // ALIGNED) * ALIGNED, 0
        for start, end, _ in sorted(taken):
            if start - offset >= floats:
                break
            offset = max(offset, end)
        offsets[value] = offset
        taken.append((offset, offset + floats, last[value]))
        size = max(size, offset + floats)
    return offsets, size


def collapsed(
    sizes: Sequence[int], strides: Iterable[Sequence[int]], most: int = DIMS
) -> tuple[tuple[int, ...], list[tuple[int, ...]]] | None:
    """Merge neighbouring axes that are one axis in all views; returns `DIMS` sizes, and as many strides of each view.

    `sizes` are of the result, `strides` of each view. Axes of size 1 fill up the front. None: more than `most` axes
    are left.
    """
    kept = [axis for axis, size in enumerate(sizes) if size != 1]
    merged: list[tuple[int, ...]] = []  # (size, stride of each view)
    for axis in kept:
        here = (sizes[axis], *(one[axis] for one in strides))
        if merged and all(outer == inner * here[0] for outer, inner in zip(merged[-1][1:], here[1:], strict=True)):
            merged[-1] = (merged[-1][0] * here[0], *here[1:])
        else:
            merged.append(here)
    if len(merged) > most:
        return None
    num_views = len(tuple(strides))
    merged = [(1, *(0,) * num_views)] * (DIMS - len(merged)) + merged
    columns = list(zip(*merged, strict=True))
    return columns[0], columns[1:]
