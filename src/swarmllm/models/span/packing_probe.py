"""The ways of packing that give the same results as running the sessions of a span one by one.

They are tried when blocks are loaded, on one part of each kind: with exact inputs, and then with rounded ones. Three
sessions of different lengths, one of them with two rows and one rolled back, take three steps each, together and alone.
With an encoder, each session has encoder outputs of another length, some of them with padding. The server calls it, and
makes a `Packer` of the result.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.quantization.packed import exact_inputs
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packed_caches import PackingUnsupportedError
from swarmllm.models.span.packing import PackedForward, Packing, SessionCall
from swarmllm.models.span.span_cache import RollbackUnsupportedError, SpanCache
from swarmllm.models.span.traced_step import why_not_traced
from swarmllm.models.span.trials import (
    LENIENT,
    STRICT,
    in_float32,
    parts_of_each_kind,
    random_inputs,
    rms,
    worthwhile_threads,
)

logger = logging.getLogger(__name__)

SEQ = 13
"""Positions of the inputs, fewer where the model has no more; unlikely to be the size of another axis."""
ROWS = ((0, 1), (1, 3), (0, 1))
"""Rows `[start, end)` of the given inputs, for each session."""
NUM_PAGES = 8
"""More than these sessions need."""
PROMPTS = (4, 2, 1)
"""New positions of each session in the first step. The last is shorter than the batch has rows, because some code takes
columns of a mask for rows (nllb-moe). The first session then forgets one position, if it can."""
NEXT_STEPS = ((1, 2, 1), (1, 1, 1))
"""The second step has single tokens together with a piece of a prompt; the third shows the state that it left."""


@torch.inference_mode()
def right_ways(span: BlockSpan) -> list[Packing]:
    """The ways of packing that are right for these blocks; first the fastest in most measurements."""
    if not span.keeps_cache:
        return [Packing.ONE_BY_ONE]
    left_out = {Packing.PAGED: span.pool is None, Packing.TRACED: bool(why_not_traced(span))}
    ways, probes = [way for way in Packing if not left_out.get(way)], _probes(span, (STRICT, LENIENT))
    with worthwhile_threads(span.slots), span.alone():
        with exact_inputs():
            ways = _agreed(ways, probes, PackingProbe.agrees)
        if span.rounds_inputs:  # where the last bit decides, another way rounds to another number: up to 0.12, measured
            rounding = _probes(span, (LENIENT,))  # new ones: steps that were recorded don't round
            ways = _agreed(ways, rounding, PackingProbe.agrees)
    if span.is_together:
        ways = _agreed(ways, probes, PackingProbe.agrees_together)
    return ways


def _probes(span: BlockSpan, limits: Sequence[float]) -> "list[PackingProbe]":
    forward, inputs = PackedForward(span), random_inputs(span, min(SEQ, span.max_positions or SEQ), batch_size=3)
    return [PackingProbe(forward, part, inputs, limits) for part in parts_of_each_kind(span)]


def _agreed(
    ways: list[Packing], probes: "list[PackingProbe]", agrees: "Callable[[PackingProbe, Packing], bool]"
) -> list[Packing]:
    return [way for way in ways if way == Packing.ONE_BY_ONE or all(agrees(probe, way) for probe in probes)]


class PackingProbe:
    """Blocks that can be cut off on both sides, run on the given inputs: 3 rows of at least 7 positions.

    `limits` of the error, relative to what comes from the cache: the first whose precision the blocks can have counts.
    """

    def __init__(self, forward: PackedForward, part: Span, inputs: BlockInputs, limits: Sequence[float]) -> None:
        self.span, self.forward, self.part, self.inputs = forward.blocks, forward, part, inputs
        self._alone: list[Tensor] | None = None
        self._visible = 0.0
        """The share of a result that comes from the cache."""
        self._limits, self._limit = limits, limits[0]

    def agrees(self, way: Packing) -> bool:
        """True if the sessions get the same results together and alone, up to rounding."""
        try:
            if self._alone is None:
                self._alone = self._run_alone()
            with self._precision(), self._pages(way):
                together = self._run(way)
        except Exception as error:  # noqa: BLE001 - model code that doesn't fit this way
            logger.info("blocks %s can't be run %s: %s: %s", self.part, way.value, type(error).__name__, error)
            return False
        return all(map(self._close, together, self._alone))

    def agrees_together(self, way: Packing) -> bool:
        """True if the sessions get the same results if all processes run the blocks this way."""
        self._limit = LENIENT  # in the dtype of the blocks: those of followers can't be changed
        try:
            with self.span.alone():
                alone = self._run(None)
            together = self._run(way)
        except Exception as error:  # noqa: BLE001 - model code that doesn't fit this way
            logger.info("processes can't run blocks %s %s: %s", self.part, way.value, error)
            return False
        return all(map(self._close, together, alone))

    def _run_alone(self) -> list[Tensor]:
        for limit in self._limits:
            self._limit = limit
            with (
                suppress(Exception),
                self._precision(),
                self._pages(None),
            ):  # model code that can't run in mixed precision
                alone = self._run(None)
                forgetful = self._step(self.span.new_cache(self.part), 0, 3, 4)
                self._visible = rms(forgetful - alone[len(ROWS)])
                return alone
        raise PackingUnsupportedError("the blocks don't run on the probe's inputs even alone")

    def _precision(self) -> AbstractContextManager[None]:
        """Within: float32 where the blocks can, because short floats would hide small errors."""
        return in_float32(self.span, self.part) if self._limit == STRICT else nullcontext()

    @contextmanager
    def _pages(self, way: Packing | None) -> Iterator[None]:
        """Within: sessions have pages of the probe's own, as floats may be longer than usual, or no pages."""
        usual = self.span.pool
        dtype = torch.float32 if self._limit == STRICT else self.span.dtype
        self.span.pool = self.span.new_pool(NUM_PAGES, self.part, dtype) if way == Packing.PAGED else None
        try:
            yield
        finally:
            self.span.pool = usual

    def _close(self, got: Tensor, want: Tensor) -> bool:
        error = rms(got - want)  # not a number if something isn't finite, and then no comparison holds
        return error <= self._limit * self._visible or error <= 4 * torch.finfo(got.dtype).eps * rms(want)

    def _run(self, way: Packing | None) -> list[Tensor]:
        """The results of all steps, session after session."""
        caches = [self.span.new_cache(self.part) for _ in ROWS]
        results = self._steps(way, caches, PROMPTS)
        if self.span.traits.rollback:
            with suppress(RollbackUnsupportedError):
                caches[0].rollback(caches[0].length - 1)
        for lengths in NEXT_STEPS:
            results += self._steps(way, caches, lengths)
        return results

    def _steps(self, way: Packing | None, caches: Sequence[SpanCache], lengths: Sequence[int]) -> list[Tensor]:
        calls = [
            SessionCall(self._inputs(session, cache.length, cache.length + length), self.part, cache)
            for session, (cache, length) in enumerate(zip(caches, lengths, strict=True))
        ]
        groups: list[list[SessionCall]] = [[call] for call in calls]
        if way in (Packing.PAGED, Packing.RAGGED):
            groups = [calls]
        elif way == Packing.TRACED:
            traced = [call for call in calls if self._may_be_traced(call)]
            groups = [[call] for call in calls if not self._may_be_traced(call)] + ([traced] if traced else [])
        elif way == Packing.PADDED:
            by_length = sorted({call.inputs.seq_len for call in calls})
            groups = [[call for call in calls if call.inputs.seq_len == length] for length in by_length]
        if any(self.forward.lacks_source(call) for call in calls):
            groups = [[call] for call in calls]
        results: dict[int, Tensor] = {}
        for group in groups:
            if way is not None and (len(group) > 1 or (way == Packing.TRACED and self._may_be_traced(group[0]))):
                outputs = self.forward.run_packed(group, way)
            else:
                outputs = [self._advance(call) for call in group]
            results.update(zip(map(id, group), outputs, strict=True))
        return [results[id(call)] for call in calls]

    def _may_be_traced(self, call: SessionCall) -> bool:  # a session's first step makes its buffers
        return call.cache.length > 0 and self.forward.traced.takes(call.inputs.seq_len)

    def _advance(self, call: SessionCall) -> Tensor:
        return self.span.forward(call.inputs, call.span, call.cache)

    def _step(self, cache: SpanCache, session: int, start: int, end: int) -> Tensor:
        return self._advance(SessionCall(self._inputs(session, start, end), self.part, cache))

    def _inputs(self, session: int, start: int, end: int) -> BlockInputs:
        traits = self.span.traits
        inputs = self.inputs.rows(*ROWS[session], traits).columns(start, end, start, traits)
        if self.span.source_dim:
            inputs = _with_source_of(inputs, session, masked=self.span.masks_source)
        return inputs.to(self.span.device, torch.float32) if self._limit == STRICT else inputs


def _with_source_of(inputs: BlockInputs, session: int, *, masked: bool) -> BlockInputs:
    """The same inputs with encoder outputs of another length for each session; the longest has no mask, all if not
    `masked`."""
    hidden = inputs.encoder_hidden_states
    assert hidden is not None  # by `trials.random_inputs`
    hidden = hidden[:, : hidden.shape[1] - 2 * session]
    mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    mask[-1, -session:] = 0
    return replace(inputs, encoder_hidden_states=hidden, encoder_attention_mask=mask if session and masked else None)
