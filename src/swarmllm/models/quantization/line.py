"""Runs a recorded decode step on CPUs: lays out its values in memory, and hands its operations to `step.h`.

A line is for one new position. It runs for several rows at a time, each in an *arena* of its own. A result's place in
the arena is used again after the result's last use.

Blocks that aren't quantized must compute torch's own bits. Their lines have `Call`s, which torch computes on tensors of
the arenas; the operations between two calls run in C.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.quantization import kernels, whole
from swarmllm.models.quantization.kernels import TILE_ROWS
from swarmllm.models.quantization.step import DIMS, DTYPES, Kind, Operation, Recorded, Seen, View, places

QUERIES = 4
"""Heads of queries that attention computes at once, the same number as in `step.h`: each needs a row of scores."""
MOST_KEPT = 32
"""Numbers of rows for which a line keeps its plans and calls. Sessions step in groups of all sizes: with room for 8,
every second step of 32 sessions made its plan anew."""
FEW_ROWS = 4
"""Without products and attention, these take some microseconds, so that Python's lock needn't be let go."""


class _Place(ctypes.Structure):
    """`place` of `step_line.h`, with the fields in the same order; so are the next two."""

    _fields_ = (("fixed", ctypes.c_void_p), ("offset", ctypes.c_int64), ("strides", ctypes.c_int64 * DIMS))


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("rounds", ctypes.c_int32),
        ("block", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * DIMS),
        ("out", _Place),
        ("one", _Place),
        ("other", _Place),
        ("matrix", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("number", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("line",)),
        *((name, ctypes.c_int64) for name in ("preamble", "start", "end", "num_rows", "first_block")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_blocks",
                "hidden_size",
                "kept_kind",
                "arena_floats",
                "hidden_at",
                "output_at",
                "position_at",
            )
        ),
        *((name, ctypes.c_void_p) for name in ("arena", "inputs", "scores", "queries")),
        *((name, ctypes.c_void_p) for name in ("stored", "positions", "hidden", "outputs", "wholes", "products")),
        *((name, ctypes.c_int64) for name in ("num_threads", "scores_floats")),
        ("shared", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("parts", "done", "ended", "in_tiles")),
    )


class _WholeProduct(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


@functools.cache
def why_no_steps() -> str:
    """The reason why steps can't be run as straight lines; "" if they can."""
    library = kernels.library()
    if library is None:
        return "swarmllm was installed without gcc"
    written_for = {"swarmllm_instruction_bytes": _Instruction, "swarmllm_step_bytes": _Step}
    if any(getattr(library, name, int)() != ctypes.sizeof(of) for name, of in written_for.items()):
        return "the compiled kernels are of another version: install swarmllm anew"
    return ""


@functools.cache
def _functions() -> tuple[Any, Any, Any]:
    """The compiled functions that run a step, help to, and run some of its operations."""
    library = kernels.library()
    run, assist, some = library.swarmllm_step, library.swarmllm_help, library.swarmllm_step_part
    run.argtypes, assist.argtypes = (ctypes.c_int64, ctypes.c_void_p), (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    some.argtypes = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    run.restype = assist.restype = some.restype = None
    return run, assist, some


@functools.cache
def _run_holding_lock() -> Any:
    """The last of them, keeping Python's lock."""
    run = ctypes.PyDLL(None, handle=kernels.library()._handle).swarmllm_step_part
    run.argtypes, run.restype = _functions()[2].argtypes, None
    return run


def _help(step: _Step, thread: int) -> None:
    """Take parts of a step until it ends; `step` lives at least as long."""
    _functions()[1](kernels.level(), ctypes.addressof(step), thread)


def _ask_for_help(step: _Step) -> None:
    for thread in range(1, step.num_threads):
        kernels.threads().submit(_help, step, thread)


@dataclass(eq=False)
class Rows:
    """The rows of one run."""

    hidden: Tensor
    """`[rows, hidden]`, contiguous."""
    positions: Sequence[int]
    stored: Sequence[int]
    """For each row and block: addresses of its keys and values, positions that each has room for, and the place of the
    new position."""
    most_seen: int
    """Most positions that a row attends to."""
    sessions: Sequence[tuple[int, Sequence[tuple[Tensor, Tensor]]]] = ()
    """If the line `attends_by_calls`: the number of rows of each session, and of each block its keys and values
    `[rows, heads, positions, head]`, those of the new position included."""


@dataclass(frozen=True, eq=False)
class _Plan:
    """What C computes of a line, for a number of rows."""

    wholes: Any
    """Of each operation, a `_WholeProduct`."""
    in_c: frozenset[int]
    """The operations with a call that C computes nevertheless."""
    kept: tuple[Any, ...]
    """What has to stay in memory."""


@dataclass(eq=False)
class Line:
    """A recorded step that can be run."""

    recorded: Recorded
    dtype: torch.dtype
    hidden_size: int
    _places: tuple[dict[int, int], int] = field(init=False)
    _hidden_at: dict[int, int] = field(init=False)
    """By block: the place of its inputs in an arena."""
    _position_at: int = field(init=False)
    _code: Any = field(init=False)
    _arena: Tensor = field(init=False, default_factory=lambda: torch.empty(0))
    _inputs: Tensor = field(init=False, default_factory=lambda: torch.empty(0))
    _scores: Tensor = field(init=False, default_factory=lambda: torch.empty(0))
    _queries: Tensor = field(init=False, default_factory=lambda: torch.empty(0))
    _products: Tensor = field(init=False, default_factory=lambda: torch.empty(0))
    _calls: dict[int, dict[int, Callable[[Rows, int], None]]] = field(init=False, default_factory=dict)
    """By number of rows and operation: a call that torch has computed, with the tensors in the arena that it reads and
    writes."""
    _plans: dict[tuple[Any, ...], _Plan] = field(init=False, default_factory=dict)
    """By number of rows, and torch's threads and settings."""
    _biases: dict[int, Tensor] = field(init=False, default_factory=dict)
    """In float32, by operation."""
    _parts: dict[tuple[int, int, frozenset[int]], list[tuple[int, int, int | None]]] = field(
        init=False, default_factory=dict
    )
    """By first operation, end, and the calls that C computes: operations `[start, end)` that run in C, and the call
    that follows."""

    def __post_init__(self) -> None:
        self._places = places(self.recorded)
        position = self.recorded.position
        self._hidden_at = {block: self._offset(view) for block, (_, view) in self.recorded.entries.items()}
        self._position_at = -1 if position is None else self._offset(position)
        operations = self.recorded.operations
        self._code = (_Instruction * len(operations))(*map(self._instruction, operations))
        weights = [one.call.weight for one in operations if one.call is not None and one.call.weight is not None]
        widths = [one.matrix.floats_of_input for one in operations if one.matrix is not None]
        self._widest = max(widths + [weight.shape[1] for weight in weights], default=0)
        rows = [one.matrix.rows for one in operations if one.matrix is not None]
        self._most_outputs = max(rows + [len(weight) for weight in weights], default=0)
        heads = [one.sizes[2] for one in operations if one.kind == Kind.ATTEND]
        self._largest_head = max(heads, default=0)
        products = [one.matrix.rows * one.matrix.columns for one in operations if one.matrix is not None]
        sizes = products + [weight.nbytes for weight in weights]
        self._most_threads = max(1, max(sizes, default=0) // kernels.WORTH_A_THREAD)

    @property
    def blocks(self) -> list[int]:
        """The blocks, in order."""
        return sorted(self.recorded.entries)[:-1]

    def run(self, rows: Rows, start: int, end: int) -> Tensor:
        """Run the blocks `[start, end)`: hidden states `[rows, hidden]` of their output."""
        entries, num_rows = self.recorded.entries, len(rows.positions)
        outputs = torch.empty_like(rows.hidden)
        arena_floats = self._places[1]
        if self._arena.numel() < num_rows * arena_floats:
            self._arena = torch.empty(num_rows * arena_floats)
            self._calls.clear()
        num_threads = min(torch.get_num_threads(), self._most_threads)
        self._inputs = _room(self._inputs, -(-num_rows // TILE_ROWS) * TILE_ROWS * self._widest)
        self._products = _room(self._products, num_rows * self._most_outputs)
        self._scores = _room(self._scores, num_threads * QUERIES * rows.most_seen)
        self._queries = _room(self._queries, num_threads * QUERIES * self._largest_head)
        stored = (ctypes.c_int64 * len(rows.stored))(*rows.stored)
        positions = (ctypes.c_int64 * num_rows)(*rows.positions)
        step = _Step(
            line=ctypes.addressof(self._code), preamble=min(idx for idx, _ in entries.values()),
            start=entries[start][0], end=entries[end][0], num_rows=num_rows, first_block=start, num_blocks=end - start,
            hidden_size=self.hidden_size, kept_kind=DTYPES[self.dtype], arena_floats=arena_floats,
            hidden_at=self._hidden_at[start], output_at=self._hidden_at[end],
            position_at=self._position_at, arena=self._arena.data_ptr(), inputs=self._inputs.data_ptr(),
            scores=self._scores.data_ptr(), queries=self._queries.data_ptr(), stored=ctypes.addressof(stored),
            positions=ctypes.addressof(positions), hidden=rows.hidden.data_ptr(), outputs=outputs.data_ptr(),
            products=self._products.data_ptr(), num_threads=num_threads, scores_floats=QUERIES * rows.most_seen,
        )  # fmt: skip
        if self.has_calls:
            self._run_in_parts(step, rows, outputs)
            return outputs
        _ask_for_help(step)
        _functions()[0](kernels.level(), ctypes.addressof(step))
        return outputs

    @functools.cached_property
    def has_calls(self) -> bool:
        """True if torch computes some of the operations."""
        return any(one.call is not None for one in self.recorded.operations)

    @functools.cached_property
    def _attending(self) -> set[int]:
        """The operations by which torch attends, or could."""
        calls = ((idx, one.call) for idx, one in enumerate(self.recorded.operations))
        return {idx for idx, call in calls if call is not None and call.attends}

    def attends_by_calls(self, num_rows: int) -> bool:
        """True if torch attends in some blocks."""
        return bool(self._attending) and not self._plan(num_rows).in_c >= self._attending

    def _run_in_parts(self, step: _Step, rows: Rows, outputs: Tensor) -> None:
        """Run in turns what C and what torch computes; `step` says where and for which rows."""
        num_rows, plan = step.num_rows, self._plan(step.num_rows)
        arenas = self._arena[: num_rows * step.arena_floats].view(num_rows, -1)
        step.wholes = ctypes.addressof(plan.wholes)
        if plan.kept:
            _ask_for_help(step)
        try:
            if step.position_at >= 0:
                arenas[:, step.position_at].copy_(torch.tensor(rows.positions))
            self._run_some(step, rows, plan, 0, step.preamble)
            arenas.narrow(1, step.hidden_at, self.hidden_size).copy_(rows.hidden)
            self._run_some(step, rows, plan, step.start, step.end)
            outputs.copy_(arenas.narrow(1, step.output_at, self.hidden_size))
        finally:
            step.ended = 1

    def _run_some(self, step: _Step, rows: Rows, plan: _Plan, first: int, end: int) -> None:
        level, at_step = kernels.level(), ctypes.addressof(step)
        takes_long = plan.kept or step.num_rows > FEW_ROWS or not plan.in_c.isdisjoint(self._attending)
        run = _functions()[2] if takes_long else _run_holding_lock()
        for start, stop, called in self._split(first, end, plan.in_c):
            if start < stop:
                run(level, at_step, start, stop)
            if called is not None:
                self._call(called, step)(rows, step.first_block)

    def _plan(self, num_rows: int) -> _Plan:
        """What C computes for so many rows: products with weights as they are, where it knows torch's order, and
        functions of so many numbers."""
        num_threads = torch.get_num_threads()
        key = num_rows, num_threads, *(get() for get in whole.SETTINGS)
        if key not in self._plans:
            operations = self.recorded.operations
            wholes, kept, in_c = (_WholeProduct * len(operations))(), [], set()
            for idx, operation in enumerate(operations):
                call = operation.call
                if call is None:
                    continue
                if operation.kind != Kind.CALL:
                    if num_threads == 1 or num_rows * math.prod(operation.sizes) <= call.most_numbers:
                        in_c.add(idx)
                    continue
                found = None
                if call.weight is not None:
                    found = whole.of_inputs(call.weight, num_rows, has_bias=call.bias is not None)
                if found is not None:
                    bias = self._wide_bias(idx)
                    wholes[idx] = _WholeProduct(ctypes.addressof(found), None if bias is None else bias.data_ptr())
                    kept.append(found)
                    in_c.add(idx)
            if kept:  # otherwise no other thread helps
                in_c.update(idx for idx in self._attending if operations[idx].kind != Kind.CALL)
            _forget_oldest(self._plans)
            self._plans[key] = _Plan(wholes, frozenset(in_c), tuple(kept))
        return self._plans[key]

    def _wide_bias(self, idx: int) -> Tensor | None:
        call = self.recorded.operations[idx].call
        if call is not None and call.bias is not None and idx not in self._biases:
            self._biases[idx] = call.bias.float().contiguous()
        return self._biases.get(idx)

    def _split(self, first: int, end: int, in_c: frozenset[int]) -> list[tuple[int, int, int | None]]:
        """Operations `[start, end)` that run in C, and the call that follows, if one does."""
        key = first, end, in_c
        if key not in self._parts:
            parts: list[tuple[int, int, int | None]] = []
            start = first
            for idx in range(first, end):
                if self.recorded.operations[idx].call is not None and idx not in in_c:
                    parts.append((start, idx, idx))
                    start = idx + 1
            self._parts[key] = [*parts, (start, end, None)]
        return self._parts[key]

    def _call(self, idx: int, step: _Step) -> Callable[[Rows, int], None]:
        """The operation that torch computes: a function of the rows and the first block of a run."""
        if step.num_rows not in self._calls:
            _forget_oldest(self._calls)
            self._calls[step.num_rows] = {}
        calls = self._calls[step.num_rows]
        if idx not in calls:
            arenas = self._arena[: step.num_rows * step.arena_floats].view(step.num_rows, -1)
            calls[idx] = self._ready(self.recorded.operations[idx], arenas)
        return calls[idx]

    def _ready(self, operation: Operation, arenas: Tensor) -> Callable[[Rows, int], None]:
        """A call with what it reads and writes in the arenas `[rows, floats]`."""
        call = operation.call
        assert call is not None
        function, reads, out = call.function, [self._reader(one, arenas) for one in call.reads], call.out
        to = arenas.as_strided((len(arenas), *out.shape), (arenas.stride(0), *out.view.strides), self._offset(out.view))

        def run(rows: Rows, first_block: int) -> None:
            to.copy_(function(*(read() for read in reads)))

        def attend(rows: Rows, first_block: int) -> None:
            """Session after session."""
            start, queries = 0, reads[0]()
            for num_rows, blocks in rows.sessions:
                some = slice(start, start + num_rows)
                to[some].copy_(function(queries[some], *blocks[operation.block - first_block])[0])
                start += num_rows

        return attend if call.attends else run

    def _reader(self, seen: Seen, arenas: Tensor) -> Callable[[], Tensor]:
        """A function that returns a tensor `[rows, …]`, with the strides that a batch of so many rows would have: torch
        may compute others in another way."""
        value = seen.view.value
        assert value is not None
        size, start = self.recorded.sizes[value], self._places[0][value]
        values = arenas.narrow(1, start, size)
        num_ones = next((axis for axis, length in enumerate(seen.shape) if length != 1), len(seen.shape))
        shape, strides = (len(arenas), *seen.shape), (size, *(size,) * num_ones, *seen.view.strides[num_ones:])
        if values.is_contiguous() and seen.dtype == torch.float32:
            ready = arenas.as_strided(shape, strides, start + seen.view.offset)
            return lambda: ready
        offset = seen.view.offset
        return lambda: values.to(seen.dtype).contiguous().as_strided(shape, strides, offset)

    def _offset(self, view: View) -> int:
        assert view.value is not None
        return self._places[0][view.value] + view.offset  # a KeyError is better than a place outside the arena

    def _instruction(self, operation: Operation) -> _Instruction:
        matrix, bias, sizes = operation.matrix, operation.bias, (ctypes.c_int64 * DIMS)(*operation.sizes)
        return _Instruction(
            operation.kind, operation.rounds, operation.block, operation.window, sizes,
            self._place(operation.out), self._place(operation.one), self._place(operation.other or operation.one),
            None if matrix is None else matrix.address, None if bias is None else bias.data_ptr(), operation.number,
        )  # fmt: skip

    def _place(self, view: View) -> _Place:
        strides = (ctypes.c_int64 * DIMS)(*view.strides)
        if isinstance(view.storage, Tensor):
            return _Place(view.storage.data_ptr() + 4 * view.offset, 0, strides)
        return _Place(None, self._offset(view), strides)


def _forget_oldest(kept: dict[Any, Any]) -> None:
    """Make room for one more; the lines of large spans take 1 MB for each number of rows."""
    while len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]


def _room(tensor: Tensor, num_floats: int) -> Tensor:
    """This tensor if it is large enough, or a new one. Its content doesn't matter."""
    return tensor if tensor.numel() >= num_floats else torch.empty(num_floats)
