"""Calls of several sessions that run together: which calls can, and how; each session gets its own result.

    traced        calls of few new positions as a line of operations without the model's code, on CPUs (`traced_step`)
    paged         one row of all new positions, with keys and values in pages: one attention for all (`paged_attention`)
    ragged        the same row; attention for each session on its own cache (`packed_caches`)
    padded        calls of equally many new positions as one batch (`packed_caches`)
    one by one    calls that don't fit together

`packing_probe` finds the ways that give the right results for a span when it is loaded. The first of them is used
until the fastest one has been measured (`device/throughput`). Used by the server's device thread, which decides
when a call runs; this module knows no queue and no clock.
"""

import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import CacheFullError, LocalProtocolError
from swarmllm.models.boundary.block_inputs import BlockInputs, all_on_device, arithmetic
from swarmllm.models.quantization.line import Rows as StepRows
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.decode_graphs import SIZES, DecodeGraphs, DecodeStep, StaticInputs
from swarmllm.models.span.packed_caches import PackingUnsupportedError, PaddedCache, RaggedAttention, Segment
from swarmllm.models.span.page_pool import PagePool, Placed, why_no_kernels
from swarmllm.models.span.paged_attention import SHORT_TOKENS, PagedAttention
from swarmllm.models.span.span_cache import SpanCache
from swarmllm.models.span.traced_step import TracedSteps
from swarmllm.models.span.trials import parts_of_each_kind, random_inputs

logger = logging.getLogger(__name__)

MAX_PADDED_TOKENS = 16
"""New positions of one call that may be padded. Assumed: for more, copying the caches costs more than reading the
weights."""

TRIED_ROWS, TRIALS = (1, 3), 6
"""Rows of the sessions, and steps, whose bits are compared."""

OutputOrError = Tensor | Exception
"""Hidden states, or the error of the call."""


class Packing(Enum):
    """A way to run several calls; in most measurements the fastest first (docs/benchmarks.md)."""

    TRACED = "traced"
    """For few new positions only, so besides another way."""
    PAGED = "paged"
    RAGGED = "ragged"
    PADDED = "padded"
    ONE_BY_ONE = "one by one"


@dataclass(frozen=True, eq=False, slots=True)
class SessionCall:
    """One session's next positions: some of its prompt, or a token. Its tensors may be in host memory."""

    inputs: BlockInputs
    span: Span
    """Some of the hosted blocks, the same as those of `cache`."""
    cache: SpanCache

    @property
    def end_position(self) -> int:
        return self.cache.length + self.inputs.seq_len


class PackedForward:
    """Runs calls that fit together on one `BlockSpan`."""

    def __init__(self, blocks: BlockSpan) -> None:
        self.blocks = blocks
        self.takes_positions = "position_ids" in inspect.signature(blocks.stack.forward).parameters
        self._padded = PaddedCache(blocks.stack.config)
        self.fused: DecodeStep | None = None
        """A step of all hosted blocks in few kernels, if there is one."""
        self.graphs: DecodeGraphs | None = None
        """Recorded steps of all hosted blocks, if they are in use."""

    @cached_property
    def _ragged(self) -> RaggedAttention:
        return RaggedAttention(self.blocks.stack)

    @cached_property
    def paged(self) -> PagedAttention:
        return PagedAttention(self.blocks)

    @cached_property
    def traced(self) -> TracedSteps:
        return TracedSteps(self.paged)

    def lacks_source(self, call: SessionCall) -> bool:
        """True for the first call of a session with an encoder: it computes keys and values of the encoder's outputs,
        alone."""
        return self.blocks.source_dim > 0 and not call.cache.source

    def run_packed(self, calls: Sequence[SessionCall], way: Packing) -> list[Tensor]:
        """The outputs of each call.

        Raises:
            PackingUnsupportedError: the blocks can't run this way.
            Exception: any error of the model's code. The caches are in an undefined state then.
        """
        past, blocks = min(call.cache.position for call in calls), self.blocks
        if blocks.is_together and blocks.group is not None and not blocks.group.is_held(self):
            blocks.group.hold(self, PackedForward, "__call__", blocks)
        step = blocks.step(calls[0].inputs, [call.cache for call in calls], (self, "follow", calls, way))
        with step, torch.inference_mode(), blocks.adapted(calls[0].inputs, calls[0].span, past):
            run = {
                Packing.TRACED: self._run_traced,
                Packing.PAGED: self._run_paged,
                Packing.RAGGED: self._run_ragged,
                Packing.PADDED: self._run_padded,
            }
            outputs = run[way](calls)
            for call in calls:
                call.cache.advance(call.inputs.seq_len)
        return outputs

    def follow(self, calls: Sequence[SessionCall], way: Packing) -> None:
        """Take part in `run_packed` of another process; its caches can go back to their state before."""
        for call in calls:
            call.cache.remember()
        self.run_packed(calls, way)

    def _run_traced(self, calls: Sequence[SessionCall]) -> list[Tensor]:
        span, shapes = calls[0].span, [call.inputs.hidden_states.shape for call in calls]
        line = self.traced.line(span, calls[0].inputs.hidden_states.dtype)
        stored: list[int] = []
        positions: list[int] = []
        sessions: list[tuple[int, list[tuple[Tensor, Tensor]]]] = []
        most_seen = 0
        num_rows = sum(shape[0] * shape[1] for shape in shapes)
        by_calls = line.attends_by_calls(num_rows)
        for call in calls:
            seq_len, rows = call.inputs.seq_len, call.inputs.batch_size
            of_blocks = call.cache.extend(seq_len)
            most_seen = max(most_seen, *(one.start + seq_len for one in of_blocks))
            if by_calls:
                sessions.append((rows, [one.seen() for one in of_blocks]))
            for row in range(rows):
                places = [(one.addresses(row), one.start) for one in of_blocks]
                for idx in range(seq_len):
                    for addresses, start in places:
                        stored += addresses
                        stored.append(start + idx)
            given = _positions(call).flatten().tolist() if call.inputs.position_ids is not None else None
            positions += given or rows * list(range(call.cache.length, call.end_position))
        hidden = _in_one_row([call.inputs.hidden_states for call in calls], 0)[0]
        output = line.run(StepRows(hidden, positions, stored, most_seen, sessions), span.start, span.end)
        if len(calls) == 1:
            return [output.view(shapes[0])]
        parts = torch.split(output[None], [shape[0] * shape[1] for shape in shapes], dim=1)
        return [
            part.clone() if shape[0] == 1 else part.clone().view(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _run_paged(self, calls: Sequence[SessionCall]) -> list[Tensor]:
        calls_in_row = sorted(calls, key=lambda call: call.inputs.seq_len > SHORT_TOKENS)
        pool, row = place(calls_in_row)
        axis = self.blocks.traits.batch_axis
        size = self._size_of_graph(calls, len(row.pairs))
        if self.graphs is not None and size is not None:
            hidden = [call.inputs.hidden_states for call in calls_in_row]
            output = self.graphs.replay(size, hidden, row.pairs, _given_positions(calls_in_row))
        elif self.fused is not None and self.may_be_fused(calls):
            placed, position_ids = row.placed(pool.device), _given_positions(calls_in_row)
            at = placed.positions[None] if position_ids is None else position_ids.to(pool.device)
            output = self.fused(_in_one_row([call.inputs.hidden_states for call in calls_in_row], 0), placed, at)[0]
        else:
            with self.paged.running(pool, row.placed(pool.device)) as cache:
                output = self.blocks.run_blocks(self._one_row(calls_in_row), calls[0].span, cache).squeeze(axis).clone()
        parts, start = {}, 0
        for call in calls_in_row:
            parts[id(call)] = _part(output, axis, start, call)
            start += call.inputs.batch_size * call.inputs.seq_len
        return [parts[id(call)] for call in calls]

    def _size_of_graph(self, calls: Sequence[SessionCall], num_positions: int) -> int | None:
        """The size of the recorded step that these calls fit in; None: they run without one."""
        is_long = any(call.inputs.seq_len > SHORT_TOKENS for call in calls)
        if self.graphs is None or is_long or not self._are_usual(calls):
            return None
        return self.graphs.size_for(num_positions)

    def may_be_fused(self, calls: Sequence[SessionCall]) -> bool:
        """True if these calls, on pages, may run in few kernels: also the prompt of a single session."""
        return self.fused is not None and self._are_usual(calls)

    def _are_usual(self, calls: Sequence[SessionCall]) -> bool:
        """True if the blocks take nothing but hidden states and positions, and all of them run."""
        inputs, traits = calls[0].inputs, self.blocks.traits
        if calls[0].span != self.blocks.span or inputs.adapter is not None:
            return False
        if traits.batch_axis or traits.extra_inputs or inputs.hidden_states.ndim != 3:
            return False
        return inputs.position_ids is None or inputs.position_ids.ndim <= 2

    def _run_ragged(self, calls: Sequence[SessionCall]) -> list[Tensor]:
        segments: list[Segment] = []
        start = 0
        for call in calls:
            segments.append(Segment(call.cache, call.inputs.batch_size, call.inputs.seq_len, start))
            start += segments[-1].length
        self._check_positions(calls, start)
        axis = self.blocks.traits.batch_axis
        with self._ragged.running(segments) as cache:
            output = self.blocks.run_blocks(self._one_row(calls), calls[0].span, cache).squeeze(axis)
        # Copies: a view would keep the whole row in memory for as long as one session needs its part.
        return [_part(output, axis, segment.start, call).clone() for segment, call in zip(segments, calls, strict=True)]

    def _one_row(self, calls: Sequence[SessionCall]) -> BlockInputs:
        """All new positions, row after row."""
        axis = self.blocks.traits.batch_axis
        return replace(
            calls[0].inputs,
            hidden_states=_in_one_row([call.inputs.hidden_states for call in calls], axis),
            batch_size=1,
            seq_len=sum(call.inputs.batch_size * call.inputs.seq_len for call in calls),
            attention_mask=None,
            position_ids=_in_one_row(_all_positions(calls), -2).to(self.blocks.device),
            **self._extra_inputs(calls, lambda tensors: _in_one_row(tensors, 0)),
        )

    def _check_positions(self, calls: Sequence[SessionCall], total: int) -> None:
        """Refuse a row that is too long: a decoder with an encoder looks up positions by its own count, along the
        row."""
        longest = self.blocks.longest_text if self.blocks.source_dim else None
        if longest is not None and max(call.cache.length for call in calls) + total > longest:
            raise PackingUnsupportedError("the row would be longer than the model's table of positions")

    def _run_padded(self, calls: Sequence[SessionCall]) -> list[Tensor]:
        rows, seq_len = [call.inputs.batch_size for call in calls], calls[0].inputs.seq_len
        axis, cache, device = self.blocks.traits.batch_axis, self._padded, self.blocks.device
        cache.begin([call.cache for call in calls], rows)
        try:
            inputs = replace(
                calls[0].inputs,
                hidden_states=torch.cat([call.inputs.hidden_states for call in calls], dim=axis),
                batch_size=sum(rows),
                seq_len=seq_len,
                attention_mask=cache.attention_mask(seq_len, device) if cache.has_attention else None,
                position_ids=torch.cat(_all_positions(calls), -2).to(device) if self.takes_positions else None,
                **self._extra_inputs(calls, torch.cat),
            )
            output = self.blocks.run_blocks(inputs, calls[0].span, cache)
            cache.finish()
        finally:
            cache.begin((), [])
        return [part.clone() for part in torch.split_with_sizes(output, rows, dim=axis)]

    def _extra_inputs(self, calls: Sequence[SessionCall], join: Callable[[list[Tensor]], Tensor]) -> dict[str, Any]:
        needed = self.blocks.traits.extra_inputs
        return {
            name: join([getattr(call.inputs, name) for call in calls]) if name in needed else None
            for name in ("input_ids", "inputs_embeds")
        }


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """The places of all new positions of some calls, on the host."""

    pairs: list[tuple[int, int]]
    """(row of the pool's table, position) of each."""
    num_short: int
    long_calls: tuple[tuple[int, int], ...]

    def placed(self, device: torch.device) -> Placed:
        """The same on the device."""
        return Placed.of(self.pairs, device, self.num_short, self.long_calls)


def place(calls: Sequence[SessionCall]) -> tuple[PagePool, PlacedRow]:
    """Make room for these calls in the pages that all of them use; calls with few positions come first.

    Raises:
        PackingUnsupportedError: some have no pages there.
        CacheFullError: there is no room.
    """
    pool = None if calls[0].cache.table is None else calls[0].cache.table.pool
    pairs: list[tuple[int, int]] = []
    long_calls: list[tuple[int, int]] = []
    num_short = 0
    for call in calls:
        table, seq_len = call.cache.table, call.inputs.seq_len
        if pool is None or table is None or table.pool is not pool:
            raise PackingUnsupportedError("keys and values are not in one pool")
        positions = range(call.cache.length, call.end_position)
        table.prepare(call.inputs.batch_size, positions.stop)
        for row in table.rows:
            if seq_len > SHORT_TOKENS:
                long_calls.append((len(pairs), seq_len))
            pairs += zip(itertools.repeat(row), positions, strict=False)
        if seq_len <= SHORT_TOKENS:
            num_short = len(pairs)
    assert pool is not None
    return pool, PlacedRow(pairs, num_short, tuple(long_calls))


def _part(output: Tensor, axis: int, start: int, call: SessionCall) -> Tensor:
    """One call's outputs, cut from those of a whole row."""
    rows, seq_len = call.inputs.batch_size, call.inputs.seq_len
    return torch.unflatten(output.narrow(axis, start, rows * seq_len), axis, (rows, seq_len))


def _in_one_row(tensors: Iterable[Tensor], axis: int) -> Tensor:
    """Concatenates `[…, batch, seq, …]` of several sessions, row after row: `[…, 1, total, …]`."""
    rows = list(tensors)
    if all(tensor.shape[axis] == 1 for tensor in rows):  # each of torch's functions lets Python's lock go
        return torch.cat(rows, dim=axis + 1)
    flat = [tensor.flatten(axis, axis + 1) for tensor in rows]
    axis %= flat[0].ndim + 1
    return torch.cat(flat, dim=axis).unsqueeze(axis)


def _all_positions(calls: Sequence[SessionCall]) -> list[Tensor]:
    """The positions of each call, on one device: where clients' own positions are, if some have sent them."""
    sent = [call.inputs.position_ids for call in calls if call.inputs.position_ids is not None]
    device = sent[0].device if sent else torch.device("cpu")
    return [_positions(call).to(device) for call in calls]


def _given_positions(calls: Sequence[SessionCall]) -> Tensor | None:
    """The positions of all calls in one row, if clients have sent some; None: they are those in the caches."""
    if all(call.inputs.position_ids is None for call in calls):
        return None
    return _in_one_row(_all_positions(calls), -2)


def _positions(call: SessionCall) -> Tensor:
    """The positions of a call: `[batch, seq]`, or `[axes, batch, seq]` if pictures have more than one axis."""
    inputs, given = call.inputs, call.inputs.position_ids
    if given is None:
        given = torch.arange(call.cache.length, call.end_position)[None]
    return given.expand(*given.shape[:-2], inputs.batch_size, inputs.seq_len)


def _num_rows(call: SessionCall) -> int:
    """Rows of a call's matrices of inputs."""
    return call.inputs.batch_size * call.inputs.seq_len


class Packer:
    """Runs calls of several sessions on one `BlockSpan`."""

    def __init__(self, blocks: BlockSpan, ways: Sequence[Packing]) -> None:
        """`ways` give the right results for these blocks; the usually fastest comes first."""
        self.blocks = blocks
        self.ways = tuple(ways)
        self.way: Packing = next(way for way in self.ways if way != Packing.TRACED)
        """The way in use."""
        self.traces = Packing.TRACED in self.ways
        """True if calls of few new positions run traced, whatever the way is."""
        self.traced_at_once = 0
        """How many of many sessions with one new position each run traced at once; 0: many don't run traced."""
        self.moves_inputs = blocks.device.type != "cpu"
        """True if inputs may be in other memory than the blocks."""
        self.forward = PackedForward(blocks)
        self._failed: set[Packing] = set()
        """Ways whose failure has been logged."""

    @property
    def has_own_step(self) -> bool:
        """True if a step of all hosted blocks is another than the steps of some of them: recorded or fused."""
        return self.forward.graphs is not None or self.forward.fused is not None

    def use(self, way: Packing) -> None:
        """Use the way that was measured to be fastest, if it is right for these blocks."""
        if way in self.ways:
            self.way = way

    @torch.inference_mode()
    def record(self, sizes: Sequence[int] = SIZES, *, fused: bool = True) -> None:
        """Record decode steps of all hosted blocks, if they run on pages of a CUDA device.

        With `fused`, a step consists of few kernels if the blocks are of a known kind.
        """
        blocks, forward = self.blocks, self.forward
        forward.graphs = forward.fused = None
        if self.way != Packing.PAGED or blocks.pool is None or why_no_kernels(blocks.pool.device):
            logger.info("decode steps aren't recorded: sessions aren't on pages of a GPU")
            return
        hidden = random_inputs(blocks, 1).hidden_states
        if hidden.ndim != 3 or blocks.traits.batch_axis or blocks.traits.extra_inputs:
            logger.info("decode steps aren't recorded: the blocks take more than hidden states")
            return
        forward.fused = _fused_step(forward.paged) if fused else None
        step = forward.fused or forward.paged.step
        graphs = DecodeGraphs(step, blocks.pool, StaticInputs(hidden.shape[-1], blocks.dtype, blocks.device))
        graphs.record(sizes)
        forward.graphs = graphs if graphs.sizes else None

    def trace(self) -> None:
        """Record the step of all hosted blocks, if it is right for these blocks to run traced."""
        if not self.traces:
            return
        began_at = time.perf_counter()
        try:
            self.forward.traced.line(self.blocks.span, self.blocks.dtype)
            self._check_exactness()
        except Exception as error:  # noqa: BLE001 - model code that doesn't fit this way; its own code still runs
            self.traces = False
            logger.info("decode steps are run by the model's own code: %s", error)
            return
        logger.info("decode steps run as lines of operations, recorded in %.1f s", time.perf_counter() - began_at)

    def _check_exactness(self) -> None:
        """Check that steps of blocks that aren't quantized have the same bits by their line as by the model's own code.

        Raises:
            PackingUnsupportedError: they have others.
        """
        blocks = self.blocks
        parts = parts_of_each_kind(blocks) if self.forward.traced.is_exact else ()
        for part, rows in itertools.product(parts, TRIED_ROWS):
            caches = blocks.new_cache(part), blocks.new_cache(part)
            for cache in caches:
                blocks.forward(random_inputs(blocks, 3, rows), part, cache)
            inputs = random_inputs(blocks, 1, rows)
            for _ in range(TRIALS):
                (traced,) = self.forward.run_packed([SessionCall(inputs, part, caches[0])], Packing.TRACED)
                expected = blocks.forward(inputs, part, caches[1])
                if not torch.equal(traced, expected):
                    raise PackingUnsupportedError("other bits than by the model's own code")
                inputs = inputs.with_hidden(expected)

    def run_calls(self, calls: Sequence[SessionCall], way: Packing | None = None) -> list[OutputOrError]:
        """Run the calls; returns for each, in order, the result of `BlockSpan.forward` or its exception.

        The cache of a call that fails is in an undefined state, the others are untouched by it. Each cache may occur
        once. `way` None: the one in use.
        """
        ways = [way or self.way] * len(calls)
        if way is None and self.traces:
            for idx in self._traceable(calls):
                ways[idx] = Packing.TRACED
        outcomes: dict[int, OutputOrError] = {}
        for group, way_of_group in self._groups(calls, ways):
            for part in self._parts(group, calls) if way_of_group == Packing.TRACED else [group]:
                members = [calls[idx] for idx in part]
                outcomes.update(zip(part, self._run_group(members, way_of_group), strict=True))
        return [outcomes[idx] for idx in range(len(calls))]

    def _parts(self, group: list[int], calls: Sequence[SessionCall]) -> list[list[int]]:
        """Parts of calls that run traced, of about as many rows each."""
        most = max(self.traced_at_once, self.forward.traced.most_rows)
        rows = {idx: _num_rows(calls[idx]) for idx in group}
        total = sum(rows.values())
        size = -(-total // max(1, -(-total // most)))
        parts: list[list[int]] = []
        filled = most
        for idx in group:
            if filled >= size or filled + rows[idx] > most:
                parts.append([])
                filled = 0
            parts[-1].append(idx)
            filled += rows[idx]
        return parts

    def _run_group(self, calls: Sequence[SessionCall], way: Packing) -> list[OutputOrError]:
        # Without fused kernels, PyTorch's own attention is the fastest for a prompt.
        on_pages = calls[0].inputs.seq_len <= SHORT_TOKENS or self.forward.may_be_fused(calls)
        works_alone = way == Packing.TRACED or (way == Packing.PAGED and on_pages)
        if way == Packing.ONE_BY_ONE or (len(calls) == 1 and not works_alone):
            return self._one_by_one(calls)
        undo = [call.cache.keep_state() for call in calls]
        try:
            return list(self.forward.run_packed(self._on_device(calls, masks=False), way))
        except Exception as error:  # noqa: BLE001 - perhaps one call is to blame: running each alone shows which
            if way not in self._failed and not isinstance(error, CacheFullError):
                self._failed.add(way)
                said = f"{type(error).__name__}: {error}"
                logger.warning("a step of %d sessions failed %s; each runs alone: %s", len(calls), way.value, said)
        # Not above: the error keeps the memory of the step that failed.
        for restore in undo:
            restore()
        return self._one_by_one(calls)

    def _one_by_one(self, calls: Sequence[SessionCall]) -> list[OutputOrError]:
        outcomes: list[OutputOrError] = []
        for call in calls:
            try:
                (call_there,) = self._on_device([call])
                outcomes.append(self.blocks.forward(call_there.inputs, call.span, call.cache))
            except Exception as error:  # noqa: BLE001 - model code on a stranger's inputs: it ends this session alone
                outcomes.append(error)
        return outcomes

    def _on_device(self, calls: Sequence[SessionCall], *, masks: bool = True) -> Sequence[SessionCall]:
        """The calls with their tensors on the blocks' device. `masks` False: without masks, as those of plain calls
        hide nothing."""
        if not self.moves_inputs:
            return calls
        inputs = [call.inputs if masks else replace(call.inputs, attention_mask=None) for call in calls]
        moved = all_on_device(inputs, self.blocks.device)
        return [replace(call, inputs=one) for call, one in zip(calls, moved, strict=True)]

    # ------------------------------------------------------------------ calls that run together

    def _traceable(self, calls: Sequence[SessionCall]) -> list[int]:
        """The calls of few new positions that can run traced; none if they have so many rows that torch is faster.

        Weights that aren't quantized are multiplied by tokens and prompts at once, as that reads them once. Where lines
        are split, each call runs as it would alone: another way has other last bits.
        """
        traced = self.forward.traced
        found = [idx for idx, call in enumerate(calls) if self._is_traceable(call)]
        if traced.are_split:
            return [idx for idx in found if _num_rows(calls[idx]) <= traced.most_rows]
        if len(found) < len(calls) and traced.is_exact:
            return []
        num_rows = sum(_num_rows(calls[idx]) for idx in found)
        if num_rows <= traced.most_rows:
            return found
        return found if num_rows == len(found) and self.traced_at_once else []

    def _is_traceable(self, call: SessionCall) -> bool:
        inputs, cache = call.inputs, call.cache
        if inputs.seq_len > SHORT_TOKENS or not cache.length or cache.span != call.span or inputs.adapter is not None:
            return False
        if not self.forward.traced.takes(inputs.seq_len):
            return False
        if inputs.hidden_states.ndim != 3 or _num_axes(inputs.position_ids):
            return False
        return cache.can_extend(inputs.batch_size)

    def _groups(self, calls: Sequence[SessionCall], ways: Sequence[Packing]) -> list[tuple[list[int], Packing]]:
        """(indices of its calls, the way that they run) for each group; `ways` are those that the calls should run."""
        groups: dict[tuple[Any, ...], tuple[list[int], Packing]] = {}
        seen: set[int] = set()
        for idx, call in enumerate(calls):
            if id(call.cache) in seen:
                raise LocalProtocolError("two calls of one session can't run together")
            seen.add(id(call.cache))
            way = ways[idx]
            key = self._key(call, way)
            run = Packing.ONE_BY_ONE if key is None else way
            groups.setdefault((run, *(key or (idx,))), ([], run))[0].append(idx)
        return list(groups.values())

    def _key(self, call: SessionCall, way: Packing) -> tuple[Any, ...] | None:
        """A key that is equal for calls that fit together; None for a call that has to run alone."""
        inputs, blocks = call.inputs, self.blocks
        if way == Packing.ONE_BY_ONE or not self._is_plain(call):
            return None
        axis = blocks.traits.batch_axis
        shape = list(inputs.hidden_states.shape)
        if shape[axis : axis + 2] != [inputs.batch_size, inputs.seq_len]:
            return None
        shape[axis : axis + 2] = []
        # An adapter is applied to a whole forward, so calls with different ones take turns.
        # One axis of positions isn't always the same as three equal ones: models may count a fourth, of the text.
        how = arithmetic(inputs, call.cache.position, blocks.traits)
        is_shared = call.cache.elsewhere is not None and inputs.adapter is None
        same = call.span, inputs.adapter, is_shared, _num_axes(inputs.position_ids), how, *shape
        if way == Packing.PAGED and call.cache.table is None:
            return None
        if way in (Packing.TRACED, Packing.PAGED, Packing.RAGGED):
            return same
        if inputs.seq_len > MAX_PADDED_TOKENS:
            return None
        return inputs.seq_len, call.cache.records_past, call.cache.length > 0, *same

    def _is_plain(self, call: SessionCall) -> bool:
        """True for a usual call: no padding of its own, no special positions."""
        inputs, traits = call.inputs, self.blocks.traits
        if inputs.inner is not None:
            return False  # `BlockSpan.forward` records it
        if inputs.adapter is not None and inputs.adapter.num_prompts > call.cache.position:
            return False
        if inputs.dropout_seeds is not None or inputs.adapter_numbers is not None:
            return False  # an adapter is applied to a whole forward with one call's
        if inputs.deepstack is not None or inputs.per_layer_inputs is not None or self.forward.lacks_source(call):
            return False
        if inputs.num_prefix != call.cache.num_prefix:
            return False  # alone, `BlockSpan.forward` begins with it
        if call.span not in self.blocks.span or inputs.token_type_ids is not None:
            return False
        if call.span.start in traits.forbidden_cuts or call.span.end in traits.forbidden_cuts:
            return False
        if traits.extra_inputs and any(getattr(inputs, name) is None for name in traits.extra_inputs):
            return False
        if inputs.hidden_states.dtype != self.blocks.dtype:
            return False
        if inputs.position_ids is not None and not self.forward.takes_positions:
            return False
        mask = inputs.attention_mask
        return mask is None or (
            mask.shape == (inputs.batch_size, call.end_position - call.cache.num_prefix) and bool(mask.all())
        )


def _fused_step(paged: PagedAttention) -> DecodeStep | None:
    from swarmllm.models.span.fused_step import find_fused

    return find_fused(paged)


def _num_axes(positions: Tensor | None) -> int:
    """The number of positions of each token in `[axes, batch, seq]`; 0 if a token has a single position."""
    return positions.shape[0] if positions is not None and positions.ndim > 2 else 0
