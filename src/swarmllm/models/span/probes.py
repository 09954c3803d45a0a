"""Probes: what the blocks of a span need and can do, observed by running them when they are loaded.

There is no table of architectures. Each probe is a forward of the span over a few random positions; the caller's
random state stays as it was. `span/loading` and `small_copy` call `probe`. It observes:

    conventions   arguments and results of blocks, extra inputs, and where the model can't be cut
    lengths       lengths of a call at which its positions are computed in another way
    padding       sides on which padding can be left out without a change of the texts' results
    the cache     can it continue after several positions, and forget the last ones?

The cache: some recurrent models ignore their state when several positions come at once, others can't go back. So the
same positions run at once, in pieces, and without the positions before.

Lengths: some rotary embeddings choose the frequencies of all positions by the largest one. Modules without weights
that are given positions are called again, with the same first positions and with others up to a length that varies.
Where the result for the first positions changes is found by halving.

Padding: three texts of different lengths run as one padded batch with random values for padding, and again the two
shorter ones, cut to the longer of them. Causal attention never sees later positions. The mask must hide earlier ones,
and the blocks must take positions as they are given. Convolutions that look ahead see padding in spite of the mask,
and some encoders sum up stretches of a batch.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.block_slots import Observer
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_span import BlockSpan, KeptState
from swarmllm.models.span.span_cache import CacheSizes, RollbackUnsupportedError, SpanCache
from swarmllm.models.span.trials import (
    LENIENT,
    SOURCE_LEN,
    STRICT,
    in_float32,
    kind_of,
    parts_of_each_kind,
    random_inputs,
    rms,
)

NOTHING = 2e-6
"""Largest error, relative to the output, that counts as none: 5e-7 was measured for a block of experts in float32."""

ROWS = 5
"""Rows of the positions; the last row is far away. Unlikely to be the size of other axes."""
MOST_BORDERS = 16
TIMES_LONGER = 4
"""Lengths up to this many times the model's own are looked at: stretched frequencies begin before its end."""

Side = Literal["left", "right"]
SIDES: tuple[Side, ...] = ("left", "right")

BATCH, MOST_SEQ = 3, 13
"""Samples and positions (fewer if the model has no more); unlikely to be the sizes of other axes."""
MAX_ARITY = 6
_READS_MORE = "which needs more of the block before than its hidden states"


class CacheProbe:
    """Blocks that can be cut off on both sides, run on the given inputs."""

    def __init__(self, span: BlockSpan, part: Span, inputs: BlockInputs) -> None:
        self.span, self.part, self.inputs = span, part, inputs

    def abilities(self) -> tuple[bool, bool]:
        """(may a prompt come in pieces, can the cache be rolled back)

        Raises:
            UnsupportedModelError: not even single steps continue what the cache holds.
        """
        length = self.inputs.seq_len
        if length == 1:
            return True, True  # the model takes no second position, so there is nothing to continue
        if not self._try(lambda: self._continues(length - 1, LENIENT)):
            raise UnsupportedModelError(
                f"blocks {self.part} compute something else step by step than at once, so no cache fits them"
            )
        middle, given = length // 2, self.inputs
        try:
            with in_float32(self.span, self.part):  # short floats would hide whether a state was used
                self.inputs = given.with_hidden(given.hidden_states.float())
                return self._continues(middle, STRICT), self._rolls_back(middle, STRICT)
        except Exception:  # noqa: BLE001 - model code that can't do it at all, or not in mixed precision
            self.inputs = given
        if self.span.new_cache(self.part).is_recurrent:
            return False, False
        return self._try(lambda: self._continues(middle, LENIENT)), self._try(lambda: self._rolls_back(middle, LENIENT))

    def _try(self, probe: Callable[[], bool]) -> bool:
        try:
            return probe()
        except Exception:  # noqa: BLE001 - model code that expects whole prompts or single steps
            return False

    def _continues(self, position: int, limit: float) -> bool:
        """True if the positions from `position` on come out right after the others have been cached."""
        cache = self.span.new_cache(self.part)
        self._step(cache, 0, position)
        return self._agrees(self._step(cache, position, self.inputs.seq_len), position, limit)

    def _rolls_back(self, position: int, limit: float) -> bool:
        """True if the cache can forget the positions from `position` on, and see them again."""
        cache = self.span.new_cache(self.part, record_past=True)
        self._step(cache, 0, self.inputs.seq_len)
        try:
            cache.rollback(position)
        except RollbackUnsupportedError:
            return False
        return self._agrees(self._step(cache, position, self.inputs.seq_len), position, limit)

    def _agrees(self, got: Tensor, position: int, limit: float) -> bool:
        """True if `got` is right up to rounding, and is clearly not the result without the cached positions.

        Where these change nothing (experts without attention), both differ by how products of other rows add up.
        """
        axis = self.span.traits.batch_axis + 1
        at_once = self._step(self.span.new_cache(self.part), 0, self.inputs.seq_len)
        want = at_once.narrow(axis, position, self.inputs.seq_len - position)
        error = rms(got - want)
        ignoring = rms(self._step(self.span.new_cache(self.part), position, self.inputs.seq_len) - want)
        rounding = 4 * torch.finfo(got.dtype).eps * rms(want)
        return error <= max(limit * ignoring, rounding) or max(error, ignoring) <= NOTHING * rms(want)

    def _step(self, cache: SpanCache, start: int, end: int) -> Tensor:
        inputs = self.inputs.columns(start, end, start, self.span.traits)
        output = self.span.run_blocks(inputs, self.part, cache)
        cache.advance(inputs.seq_len)
        return output


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths that make a difference to some modules; see `BlockTraits`."""

    borders: tuple[int, ...] = ()
    own_beyond: int | None = None


def find_lengths(stack: nn.Module, positions: Tensor, run: Callable[[], object], longest: int) -> Lengths:
    """Find the lengths, up to `longest`, at which modules of the stack change what they compute from `positions`.

    `run` is a forward with those positions, `[ROWS, seq]`. Afterwards, the modules keep the state of the longest call.
    """
    borders: set[int] = set()
    own: list[int] = []
    calls = _calls(stack, positions, run)
    for call in calls:
        found = call.find(longest)
        borders.update(found.borders)
        own += [] if found.own_beyond is None else [found.own_beyond]
    for call in calls:
        call.near(longest)
    beyond = min(own, default=None)
    return Lengths(tuple(sorted(one for one in borders if beyond is None or one < beyond)), beyond)


class _Call:
    """A module, and how the stack has called it."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, positions: Tensor) -> None:
        self._module, self._args, self._kwargs, self._positions = module, args, kwargs, positions
        self._before = KeptState.everything(module)

    def find(self, longest: int) -> Lengths:
        start = self._positions.shape[1]
        borders: list[int] = []
        while start < longest and not self._same(start, longest):
            low, high = start, longest
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._same(start, middle) else (low, middle)
            if (high < longest and not self._same(high, high + 1)) or len(borders) == MOST_BORDERS:
                return Lengths(tuple(borders), low)
            borders.append(low)
            start = high
        return Lengths(tuple(borders))

    def _same(self, one: int, other: int) -> bool:
        return all(torch.equal(*pair) for pair in zip(self._alone(one), self._alone(other), strict=True))

    def _alone(self, length: int) -> list[Tensor]:
        self._before.changed(self._module).put_back()
        return self.near(length)

    def near(self, length: int) -> list[Tensor]:
        """The module's results for the first rows, in a call of that length."""
        far = self._positions.clone()
        far[-1] += length - far.shape[1]

        def moved(value: Any) -> Any:
            if _is_positions(value, self._positions):
                return far.expand_as(value)
            # In short floats a small difference of frequencies would vanish.
            return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = tree_map(moved, (self._args, self._kwargs))
        return list(_first_rows(self._module(*args, **kwargs)))


def _calls(stack: nn.Module, positions: Tensor, run: Callable[[], object]) -> list[_Call]:
    """Modules without weights that get the positions in such a forward."""
    found: list[_Call] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if any(_is_positions(value, positions) for value in tree_leaves((args, kwargs))):
            found.append(_Call(module, args, kwargs, positions))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in stack.modules()
        if next(module.parameters(), None) is None and not type(module).__module__.startswith("swarmllm.")
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _is_positions(value: Any, positions: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.shape[-2:] != positions.shape:
        return False
    return bool((value == positions).all())


def _first_rows(outputs: Any) -> Iterator[Tensor]:
    """All rows but the last of each tensor that has rows."""
    for tensor in tree_leaves(outputs):
        if isinstance(tensor, Tensor) and ROWS in tensor.shape:
            yield tensor.narrow(list(tensor.shape).index(ROWS), 0, ROWS - 1)


def skippable_sides(span: BlockSpan, inputs: BlockInputs) -> tuple[Side, ...]:
    """The sides on which padding makes no difference; `inputs` are 3 random rows, as long as `probes` takes them."""
    if inputs.seq_len < 6 or span.traits.even_length < inf:  # the latter choose frequencies by the longest row
        return ()
    if any("Indexer" in type(module).__name__ for module in span.slots.modules()):
        return ()  # they attend to the best keys; among equally good ones, the width of the batch decides
    parts = parts_of_each_kind(span)
    return tuple(side for side in SIDES if all(_makes_no_difference(span, part, inputs, side) for part in parts))


def _makes_no_difference(span: BlockSpan, part: Span, inputs: BlockInputs, side: Side) -> bool:
    with suppress(Exception), in_float32(span, part):  # model code that takes no such mask, or no such positions
        inputs = inputs.with_hidden(inputs.hidden_states.float())
        return _PaddedTexts(span, part, inputs, side).are_the_same_alone()
    return False


class _PaddedTexts:
    """Three texts, padded to the length of the first on one side."""

    def __init__(self, span: BlockSpan, part: Span, inputs: BlockInputs, side: Side) -> None:
        length = inputs.seq_len
        texts = torch.tensor([length, 2 * length // 3, length // 2], device=inputs.hidden_states.device)[:, None]
        places = torch.arange(length, device=texts.device)
        mask = places >= length - texts if side == "left" else places < texts
        self.inputs = replace(inputs, attention_mask=mask.long(), position_ids=None)
        second = int(texts[1])
        self.columns = (length - second, length) if side == "left" else (0, second)
        self.run: Callable[[BlockInputs], Tensor] = lambda inputs: span.run_blocks(inputs, part)
        self.traits = span.traits

    def are_the_same_alone(self) -> bool:
        """True if the two shorter texts come out as in the batch of three, up to rounding."""
        (first, end), axis = self.columns, self.traits.batch_axis
        whole = self.run(self.inputs)
        cut = self.inputs.rows(1, 3, self.traits).cut_to(first, end, self.traits)
        shown = cut.attention_mask != 0
        hidden = cut.hidden_states.movedim((axis, axis + 1), (0, 1)).clone()
        hidden[~shown] = 0.0
        cut = cut.with_hidden(hidden.movedim((0, 1), (axis, axis + 1)))
        want = whole.narrow(axis, 1, 2).narrow(axis + 1, first, end - first)
        got, want = (one.movedim((axis, axis + 1), (0, 1))[shown] for one in (self.run(cut), want))
        error = rms(got - want)
        return error <= STRICT * self._visible(whole) or error <= 4 * torch.finfo(want.dtype).eps * rms(want)

    def _visible(self, whole: Tensor) -> float:
        """The share of a result that comes from other positions."""
        last, axis = self.inputs.seq_len - 1, self.traits.batch_axis
        alone = self.inputs.rows(0, 1, self.traits).columns(last, last + 1, 0, self.traits)
        return rms(self.run(replace(alone, attention_mask=None)) - whole.narrow(axis, 0, 1).narrow(axis + 1, last, 1))


def probe(span: BlockSpan) -> None:
    """Run all probes, and put their results into `span`: its traits, its cache sizes, its kept state.

    Takes a forward of the span, and some of one block of each kind, over a few positions.

    Raises:
        UnsupportedModelError: the span can't be run, or the model can't be cut where it begins.
    """
    probe = _Probe(span)
    # The memory of offloaded blocks holds different blocks in turn.
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
            if not span.hosted.role:  # a decoder's mask must hide the encoder's padding
                probe.found(skips_padding=skippable_sides(span, probe.inputs()))
            if span.keeps_cache:
                probe.find_cache_abilities()
            span.kept_state.add(fresh.changed(span.stack))
    except UnsupportedModelError:
        raise
    except Exception as error:  # model code that lacks something from an earlier block
        raise UnsupportedModelError(f"blocks {span.span} can't run without the ones before them: {error!r}") from error


class _Probe:
    """The probing of one span: its random inputs, and the traits found so far."""

    def __init__(self, span: BlockSpan) -> None:
        self.span = span
        self.random = torch.Generator().manual_seed(0)
        self._take(min(MOST_SEQ, span.max_positions or MOST_SEQ))
        self.source = self._normal((BATCH, SOURCE_LEN, span.source_dim)) if span.source_dim else None

    def _take(self, seq: int) -> None:
        """Use inputs of that many positions."""
        self.seq = seq
        self.embeds = self._normal((BATCH, seq, self.span.embedding_dim))
        self.ids = self._ids()
        self.hidden = self.embeds

    @property
    def traits(self) -> BlockTraits:
        return self.span.traits

    def found(self, **traits: Any) -> None:
        """Note a result; `BlockSpan.run_blocks` uses it from now on."""
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

        Placeholders before that block must return what the model's loop expects, and only a real block shows it. A
        wrong guess either fails, or reaches the block with axes missing.
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
        """True if other results of the block before the span change the first block's output."""
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
        """The result if the model gets ids; None if it can't run that way."""
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
                while start in forbidden:  # known already
                    start -= 1
            forbidden.update(range(start + 1, block_idx + 1))
            if start == block_idx > hosted.start:  # the first block has no earlier block to read from
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
        """Find the lengths of calls at which their positions are computed in another way."""
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
        """Find out if a prompt may come in pieces, and if the cache can forget its last positions.

        It runs one part between two possible cuts, of each kind, so that no residual of other blocks hides an error.

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
        return self.span.run_blocks(inputs, part or self.span.span, cache, observer)

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
    """True if both are equal; on an accelerator, whose kernels may add up in any order, nearly equal."""
    if got.shape != want.shape:
        return False
    if got.device.type == "cpu":
        return torch.equal(got, want)
    return bool((got - want).abs().max() <= 16 * torch.finfo(got.dtype).eps * want.abs().max())
