"""What a span finds out about its blocks when it is loaded, by running them on a few random positions.

No table of architectures: what a block returns, what else it reads, where the model can be cut, and what its cache can
do are all observed. Each probe is a forward of the span over a handful of positions; the caller's random state stays
untouched. Called by `BlockSpan`.
"""

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.block_inputs import BlockInputs
from swarmllm.models.block_slots import Observer
from swarmllm.models.packing_probe import find_packing
from swarmllm.models.part_probe import PartProbe
from swarmllm.models.span_cache import SpanCache

if TYPE_CHECKING:
    from swarmllm.models.block_span import BlockSpan

BATCH, MOST_SEQ = 3, 13
"""Samples and positions, fewer where the model has no more; unlikely to be the sizes of other axes."""
MAX_ARITY = 6
_READS_MORE = "which reads more of the block before than its hidden states"


@dataclass(frozen=True)
class CacheCost:
    """Bytes of the cache of a whole span, at batch 1."""

    per_token: int
    """Sliding windows count as if they grew without bound, which they do in sessions that record their past."""
    per_session: int
    """Of recurrent states."""


def probe(span: "BlockSpan") -> CacheCost:
    """Run all probes; leaves what they found in `span.traits`, `span.key_value_shapes` and `span.packer`.

    Takes about four forwards of the span, and some of one block of each kind, over a few positions.

    Raises:
        UnsupportedModelError: the span can't be run, or the model can't be cut where it begins.
    """
    probe = _Probe(span)
    try:
        with torch.no_grad():
            probe.find_conventions()
            probe.find_extra_inputs()
        with torch.inference_mode():
            probe.find_forbidden_cuts()
            if span.keeps_cache:
                probe.find_cache_abilities()
    except UnsupportedModelError:
        raise
    except Exception as error:  # model code that misses what an earlier block would have left
        raise UnsupportedModelError(f"blocks {span.span} can't run without the ones before them: {error!r}") from error
    return probe.cost


class _Probe:
    """The state of probing one span: its random inputs, and the traits found so far."""

    def __init__(self, span: "BlockSpan") -> None:
        self.span = span
        self.seq = min(MOST_SEQ, span.max_positions or MOST_SEQ)
        self.random = torch.Generator().manual_seed(0)
        self.embeds = self._normal((BATCH, self.seq, span.embedding_dim))
        self.ids = self._ids()
        self.hidden = self.embeds
        self.cost = CacheCost(0, 0)

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
        )

    def find_conventions(self) -> None:
        """What blocks take and return: tries until the model's own forward gets through the first hosted block.

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
        """Which tensors change the result although the hidden states stay the same."""
        inputs = self.inputs()
        usual = self._run(inputs)
        other_ids, other_embeds = self._ids(), self._normal(tuple(self.embeds.shape))
        if self._same_with_ids(replace(inputs, input_ids=other_ids, inputs_embeds=other_embeds), usual):
            return  # nearly all models, found in one go
        needed = list(self.traits.extra_inputs)
        if not _same(self._run(replace(inputs, inputs_embeds=other_embeds)), usual):
            needed.append("inputs_embeds")
        if "input_ids" not in needed and not self._same_with_ids(
            replace(inputs, input_ids=other_ids), self._run_with_ids(inputs)
        ):
            needed.append("input_ids")
        self.found(extra_inputs=tuple(sorted(needed)))

    def _same_with_ids(self, inputs: BlockInputs, want: Tensor | None) -> bool:
        got = self._run_with_ids(inputs)
        return got is want if got is None or want is None else _same(got, want)

    def _run_with_ids(self, inputs: BlockInputs) -> Tensor | None:
        """The result when the model sees ids; None if it can't run that way."""
        usual_traits = self.traits
        self.found(extra_inputs=("input_ids",))
        try:
            return self._run(inputs)
        except Exception:  # noqa: BLE001 - model code; without ids it ran, so it can do without
            return None
        finally:
            self.span.traits = usual_traits

    def find_forbidden_cuts(self) -> None:
        """Where the model can't be cut, because a block needs more of an earlier one than its hidden states."""
        hosted = self.span.span
        entering: dict[int, Tensor] = {}
        cache = self.span.new_cache(record_past=True) if self.span.keeps_cache else None
        entering[hosted.end] = self._run(self.inputs(), hosted, cache, entering.__setitem__)
        if cache is not None:
            self.span.key_value_shapes = cache.key_value_shapes()
            growing, fixed = cache.used_bytes()
            self.cost = CacheCost(per_token=growing // (BATCH * self.seq), per_session=fixed // BATCH)
        forbidden: set[int] = set()
        for block_idx in hosted:
            start = block_idx
            while start > hosted.start and not self._reproduces(Span(start, block_idx + 1), entering):
                start -= 1
            forbidden.update(range(start + 1, block_idx + 1))
        self.found(forbidden_cuts=tuple(sorted(forbidden)))

    def _reproduces(self, part: Span, entering: dict[int, Tensor]) -> bool:
        inputs = self.inputs().with_hidden(entering[part.start])
        try:
            cache = self.span.new_cache(part) if self.span.keeps_cache else None
            return _same(self._run(inputs, part, cache), entering[part.end])
        except Exception:  # noqa: BLE001 - model code that misses what an earlier block would have left
            return False

    def find_cache_abilities(self) -> None:
        """Whether a prompt may come in pieces, and whether the cache can forget its last positions.

        Looked at one part between two possible cuts, and one of each kind: no residual of other blocks hides an error.

        Raises:
            UnsupportedModelError: not even single steps continue what the cache holds.
        """
        hosted = self.span.span
        bounds = [idx for idx in (*hosted, hosted.end) if idx not in self.traits.forbidden_cuts]
        parts = {self._kind(part): part for part in itertools.starmap(Span, itertools.pairwise(bounds))}
        abilities = [PartProbe(self.span, part, self.inputs()).abilities() for part in parts.values()]
        self.found(
            chunked_prefill=all(chunked for chunked, _ in abilities),
            rollback=all(rollback for _, rollback in abilities),
        )
        find_packing(self.span, self.span.packer, tuple(parts.values()), self.inputs())

    def _kind(self, part: Span) -> tuple[str, ...]:
        """Equal for parts that run the same code."""
        layers = self.span.new_cache(part).layers
        return tuple(
            name
            for block_idx in part
            for name in (
                type(layers[block_idx]).__name__,
                *(type(module).__name__ for module in self.span.slots.block(block_idx).modules()),
            )
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
        return torch.randint(self.span.vocab_size, (BATCH, self.seq), generator=self.random).to(self.span.device)


def _candidates(extra_inputs: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Most models run on embeddings alone; a few can't do without ids."""
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
