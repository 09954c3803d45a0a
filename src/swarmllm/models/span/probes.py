"""What a span finds out about its blocks when it is loaded, by running them on a few random positions.

No table of architectures: what a block returns, what else it reads, where the model can be cut, and what its cache can
do are all observed. Each probe is a forward of the span over a handful of positions; the caller's random state stays
untouched. Called by `span/loading`.
"""

import inspect
import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.block_slots import Observer
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_kinds import kind_of, parts_of_each_kind
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.cache_probe import CacheProbe
from swarmllm.models.span.kept_state import KeptState
from swarmllm.models.span.length_probe import ROWS, TIMES_LONGER, find_lengths
from swarmllm.models.span.padding_probe import skippable_sides
from swarmllm.models.span.random_inputs import SOURCE_LEN, random_inputs
from swarmllm.models.span.span_cache import CacheSizes, SpanCache

BATCH, MOST_SEQ = 3, 13
"""Samples and positions, fewer where the model has no more; unlikely to be the sizes of other axes."""
MAX_ARITY = 6
_READS_MORE = "which reads more of the block before than its hidden states"


def probe(span: BlockSpan) -> None:
    """Run all probes; leaves what they found in `span`: its traits, and what its cache looks like.

    Takes a forward of the span, and some of one block of each kind, over a few positions.

    Raises:
        UnsupportedModelError: the span can't be run, or the model can't be cut where it begins.
    """
    probe = _Probe(span)
    # The memory of blocks that are offloaded holds now this block and now that one.
    fresh = KeptState.everything(span.stack, () if span.offloaded is None else span.offloaded.tensors)
    try:
        with torch.no_grad():
            probe.find_conventions()
            probe.find_extra_inputs()
        probe.found(takes_source=span.source_dim > 0 or None)
        with torch.inference_mode():
            probe.find_forbidden_cuts()
            probe.find_lengths()
            span.kept_state.add(fresh.changed(span.stack))
            if not span.hosted.role:  # what the encoder has at padding is what the decoder's mask must hide
                probe.found(skips_padding=skippable_sides(span, probe.inputs()))
            if span.keeps_cache:
                probe.find_cache_abilities()
            span.kept_state.add(fresh.changed(span.stack))
    except UnsupportedModelError:
        raise
    except Exception as error:  # model code that misses what an earlier block would have left
        raise UnsupportedModelError(f"blocks {span.span} can't run without the ones before them: {error!r}") from error


class _Probe:
    """The state of probing one span: its random inputs, and the traits found so far."""

    def __init__(self, span: BlockSpan) -> None:
        self.span = span
        self.random = torch.Generator().manual_seed(0)
        self._take(min(MOST_SEQ, span.max_positions or MOST_SEQ))
        self.source = self._normal((BATCH, SOURCE_LEN, span.source_dim)) if span.source_dim else None

    def _take(self, seq: int) -> None:
        """Probe with that many positions."""
        self.seq = seq
        self.embeds = self._normal((BATCH, seq, self.span.embedding_dim))
        self.ids = self._ids()
        self.hidden = self.embeds

    @property
    def traits(self) -> BlockTraits:
        return self.span.traits

    def found(self, **traits: Any) -> None:
        """Note a result; `BlockSpan.run` uses it from now on."""
        self.span.traits = self.traits.model_copy(update=traits)

    def inputs(self) -> BlockInputs:
        return BlockInputs(
            hidden_states=self.hidden,
            batch_size=BATCH,
            seq_len=self.seq,
            input_ids=self.ids,
            inputs_embeds=self.embeds,
            encoder_hidden_states=self.source,
        )

    def find_conventions(self) -> None:
        """Find what blocks take and return: try until the model's own forward gets through the first hosted block.

        Placeholders before that block have to return what the model's loop expects, which only a real block shows: a
        wrong guess either fails, or arrives at the block with axes missing.
        """
        span, slots = self.span, self.span.slots
        failure: Exception | None = None
        for extra_inputs, arity in itertools.product(_candidates(self.traits.extra_inputs), range(MAX_ARITY + 1)):
            slots.block_output = arity
            self.found(extra_inputs=extra_inputs)
            try:
                arriving = span.preamble(self.inputs())
                if span.is_of_encoder and arriving.shape[1] > self.seq:  # the stack pads the text, but not this length
                    self._take(arriving.shape[1])
                    arriving = span.preamble(self.inputs())
                axis = _batch_axis(arriving, self.seq)
                if axis is None:
                    continue
                self.hidden = self._normal(tuple(arriving.shape))
                returned = span.first_block(self.inputs())
            except Exception as error:  # noqa: BLE001 - model code, and most guesses are wrong
                failure = error
                continue
            slots.block_output = len(returned) if isinstance(returned, tuple) else 0
            self.found(block_output=slots.block_output, batch_axis=axis)
            if slots.block_output > 1 and self._first_block_reads(returned[1:]):
                raise UnsupportedModelError(f"the model can't be cut before block {span.span.start}, {_READS_MORE}")
            return
        raise UnsupportedModelError(f"the model can't be cut before block {span.span.start}") from failure

    def _first_block_reads(self, extras: tuple[Any, ...]) -> bool:
        """Whether it matters what else the block before the span would have returned."""
        slots = self.span.slots
        usual = self.span.first_block(self.inputs())[0]
        slots.extras = extras
        try:
            return not _same(self.span.first_block(self.inputs())[0], usual)
        finally:
            slots.extras = None

    def find_extra_inputs(self) -> None:
        """Find which tensors change the result although the hidden states stay the same."""
        for part in self._samples():
            self._find_extra_inputs(part)

    def _samples(self) -> list[Span]:
        """One block of each kind, if they run alone; otherwise the whole span."""
        blocks = [Span(one, one + 1) for one in {kind_of(self.span, one): one for one in self.span.span}.values()]
        try:
            for part in blocks:
                self._run(self.inputs(), part)
        except Exception:  # noqa: BLE001 - model code that misses what an earlier block would have left
            return [self.span.span]
        return blocks

    def _find_extra_inputs(self, part: Span) -> None:
        inputs = self.inputs()
        usual = self._run(inputs, part)
        other_ids, other_embeds = self._ids(), self._normal(tuple(self.embeds.shape))
        if self._same_with_ids(replace(inputs, input_ids=other_ids, inputs_embeds=other_embeds), part, usual):
            return  # nearly all models, found in one go
        needed = list(self.traits.extra_inputs)
        if "inputs_embeds" not in needed and not _same(
            self._run(replace(inputs, inputs_embeds=other_embeds), part), usual
        ):
            needed.append("inputs_embeds")
        if "input_ids" not in needed and not self._same_with_ids(
            replace(inputs, input_ids=other_ids), part, self._run_with_ids(inputs, part)
        ):
            needed.append("input_ids")
        self.found(extra_inputs=tuple(sorted(needed)))

    def _same_with_ids(self, inputs: BlockInputs, part: Span, want: Tensor | None) -> bool:
        got = self._run_with_ids(inputs, part)
        return got is want if got is None or want is None else _same(got, want)

    def _run_with_ids(self, inputs: BlockInputs, part: Span) -> Tensor | None:
        """The result when the model sees ids; None if it can't run that way."""
        usual_traits = self.traits
        self.found(extra_inputs=("input_ids",))
        try:
            return self._run(inputs, part)
        except Exception:  # noqa: BLE001 - model code; without ids it ran, so it can do without
            return None
        finally:
            self.span.traits = usual_traits

    def find_forbidden_cuts(self) -> None:
        """Find where the model can't be cut, because a block needs more of an earlier one than its hidden states."""
        hosted = self.span.span
        entering: dict[int, Tensor] = {}
        cache = self.span.new_cache(record_past=True) if self.span.keeps_cache else None
        entering[hosted.end] = self._run(self.inputs(), hosted, cache, entering.__setitem__)
        if cache is not None:
            growing, fixed = cache.used_bytes()
            self.span.cache_sizes = CacheSizes(
                key_value_shapes=cache.key_value_shapes(),
                bytes_per_token=growing // (BATCH * self.seq),
                bytes_per_session=fixed // BATCH,
                cross_bytes_per_token=cache.cross_bytes // (BATCH * SOURCE_LEN),
            )
        forbidden: set[int] = set()
        independent: set[object] = set()
        for block_idx in hosted:
            start, kind = block_idx, kind_of(self.span, block_idx)
            if kind in independent:
                continue
            while start > hosted.start and not self._reproduces(Span(start, block_idx + 1), entering):
                start -= 1
                while start in forbidden:  # which is known, so nothing is learned by beginning there
                    start -= 1
            forbidden.update(range(start + 1, block_idx + 1))
            if start == block_idx > hosted.start:  # before the first one, nothing was left that it could have read
                independent.add(kind)
        self.found(forbidden_cuts=tuple(sorted(forbidden)))

    def _reproduces(self, part: Span, entering: dict[int, Tensor]) -> bool:
        inputs = self.inputs().with_hidden(entering[part.start])
        try:
            cache = self.span.new_cache(part) if self.span.keeps_cache else None
            return _same(self._run(inputs, part, cache), entering[part.end])
        except Exception:  # noqa: BLE001 - model code that misses what an earlier block would have left
            return False

    def find_lengths(self) -> None:
        """Find the lengths of calls at which their positions are computed otherwise."""
        span = self.span
        if "position_ids" not in inspect.signature(span.stack.forward).parameters:
            return
        table = span.table_positions
        longest = TIMES_LONGER * (span.max_positions or 0) if table is None else table.stop
        positions = torch.arange(self.seq, device=span.device).repeat(ROWS, 1)
        inputs = replace(random_inputs(span, self.seq, ROWS), position_ids=positions)

        def run() -> None:
            for part in parts_of_each_kind(span):
                self._run(inputs, part)

        with suppress(Exception):  # model code that takes no such positions
            found = find_lengths(span.stack, positions, run, longest)
            self.found(length_borders=found.borders, own_length_beyond=found.own_beyond)

    def find_cache_abilities(self) -> None:
        """Find whether a prompt may come in pieces, and whether the cache can forget its last positions.

        Looked at one part between two possible cuts, and one of each kind: no residual of other blocks hides an error.

        Raises:
            UnsupportedModelError: not even single steps continue what the cache holds.
        """
        abilities = [CacheProbe(self.span, part, self.inputs()).abilities() for part in parts_of_each_kind(self.span)]
        self.found(
            chunked_prefill=all(chunked for chunked, _ in abilities),
            rollback=all(rollback for _, rollback in abilities),
        )

    def _run(
        self,
        inputs: BlockInputs,
        part: Span | None = None,
        cache: SpanCache | None = None,
        observer: Observer | None = None,
    ) -> Tensor:
        return self.span.run(inputs, part or self.span.span, cache, observer)

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.span.device, self.span.dtype)

    def _ids(self) -> Tensor:
        """Random words, and no padding: some models make a mask of the ids if they are given none."""
        vocab_size, padding = self.span.vocab_size, getattr(self.span.stack.config, "pad_token_id", None)
        ids = torch.randint(vocab_size, (BATCH, self.seq), generator=self.random)
        ids[ids == padding] = 0 if padding else min(1, vocab_size - 1)
        return ids.to(self.span.device)


def _candidates(extra_inputs: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Extra inputs to try: most models run on embeddings alone, a few can't do without ids."""
    return (extra_inputs,) if extra_inputs else ((), ("input_ids",))


def _batch_axis(hidden: Tensor, seq: int) -> int | None:
    """The axis that is followed by the sequence; None if the tensor has no such axes."""
    for axis in range(hidden.ndim - 2):
        if hidden.shape[axis : axis + 2] == (BATCH, seq):
            return axis
    return None


def _same(got: Tensor, want: Tensor) -> bool:
    """Equal; on an accelerator, whose kernels may add up in any order, nearly so."""
    if got.shape != want.shape:
        return False
    if got.device.type == "cpu":
        return torch.equal(got, want)
    return bool((got - want).abs().max() <= 16 * torch.finfo(got.dtype).eps * want.abs().max())
