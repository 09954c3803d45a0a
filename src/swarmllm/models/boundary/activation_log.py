"""A log of all hidden states that a session has sent over one boundary between spans. It rebuilds a lost cache.

A server logs its outputs, which are the inputs of its successor. The client logs the inputs of the first server. When a
server is replaced, the log is replayed into the new one.

A rollback cuts the log. A change of the batch's rows is only noted, and applied at a replay. Each step has an attention
mask for all positions so far. Usually it begins with the mask of the step before, so one mask is kept for many steps.

There are two ways to replay. `replay` joins steps to long calls, but only steps that one call computes in the same way:
their masks fit together, and their positions have the same rotary frequencies. `block_inputs.arithmetic` returns a
number for these frequencies. `steps` gives the steps as they were computed, one by one. This takes longer, but long
calls round otherwise than short ones, and in 16 bits that changes the text. A step that a rollback has cut is given
whole, because its length decides how its first positions were rounded. The next step then begins before its end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.models.boundary.block_inputs import AXES, SOURCE, BlockInputs, arithmetic, pieces


@dataclass(slots=True)
class _Entry:
    """One logged step."""

    position: int
    """Positions of the text before this step."""
    inputs: BlockInputs
    """The step's inputs. Its mask is in the `_Run` instead."""
    has_mask: bool
    """True if the step came with a mask."""
    whole: BlockInputs | None = None
    """The step before rollbacks cut it. Its mask has only the columns that were cut; one with more axes is whole."""
    order: Tensor | None = None
    """Rows that were selected after this step: a replay applies it to this entry and all earlier ones, before the
    orders of later entries."""

    @property
    def end(self) -> int:
        return self.position + self.inputs.seq_len

    @property
    def is_cut_ahead(self) -> bool:
        """True if positions that are left have looked at some that a rollback has cut."""
        return self.whole is not None and self.whole.sees_from(self.end, self.inputs.seq_len)

    def take_order(self, before: "_Entry | None", traits: BlockTraits) -> None:
        """Select the rows of this step now, and leave the selection for `before`, the entry before it."""
        order, self.order = self.order, None
        if order is None:
            return
        self.inputs = self.inputs.rows_in_order(order, traits)
        self.whole = None if self.whole is None else self.whole.rows_in_order(order, traits)
        if before is not None:
            before.order = _compose(before.order, order)

    def cut(self, count: int, mask: Tensor | None, traits: BlockTraits) -> None:
        """Keep the first `count` positions of the step, and remember the whole. `mask` is its run's mask until now."""
        whole, self.whole = self.whole or self.inputs, None
        # Rows of the mask may have another order already. Caches without rollback are computed from the text again now,
        # without the positions that are cut; but not as long as they have forgotten nothing.
        if self.order is None and (traits.rollback or (mask is not None and mask.ndim > 2)):
            kept = whole.attention_mask
            if self.has_mask and mask is not None and mask.ndim == 2:
                columns = mask[:, self.position + count : self.end]
                kept = columns if kept is None else torch.cat([columns, kept], dim=-1)
            elif self.has_mask and kept is None:
                kept = mask
            self.whole = replace(whole, attention_mask=kept)
        self.inputs = self.inputs.columns(0, count, self.position, traits)


@dataclass(slots=True)
class _Run:
    """Consecutive steps that a replay can compute as one call.

    The mask of each step begins with the mask of the step before, so only the last mask is kept.
    """

    start: int
    """Position of the first step."""
    arithmetic: int
    """The steps' rotary frequencies, as a number (`block_inputs.arithmetic`)."""
    mask: Tensor | None
    """`[batch, end]`, for the present rows; None hides nothing. A mask with more axes belongs to a single step."""
    beside: frozenset[str] = frozenset()
    """Names of optional inputs (`AXES`) that all of these steps have."""

    def take_in(self, step: "_Run", seq_len: int) -> bool:
        """Add the next step, of `seq_len` positions, if it can be computed in one call with these; returns whether."""
        mask = step.mask
        if self.arithmetic != step.arithmetic or self.beside != step.beside:
            return False
        if any(known is not None and known.ndim > 2 for known in (self.mask, mask)):
            return False
        if not _same(self.mask, None if mask is None else mask[:, :-seq_len]):
            return False
        if mask is None and self.mask is not None:
            mask = torch.nn.functional.pad(self.mask, (0, seq_len), value=1)
        self.mask = mask
        return True

    def cut(self, position: int) -> None:
        """Forget the positions from `position` on."""
        if self.mask is not None:
            mask = self.mask[..., :position]
            self.mask = mask[..., : position - self.start, :] if mask.ndim > 2 else mask


class ActivationLog:
    """The hidden states that have passed one boundary for positions [0, length), with the other inputs of the steps."""

    def __init__(self, traits: BlockTraits) -> None:
        self._traits = traits
        self._entries: list[_Entry] = []
        self._runs: list[_Run] = []

    @property
    def length(self) -> int:
        return self._entries[-1].end if self._entries else 0

    @property
    def num_steps(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return sum((entry.whole or entry.inputs).hidden_states.nbytes for entry in self._entries)

    @property
    def batch_size(self) -> int:
        """Rows of the batch now; 1 while the log is empty."""
        if not self._entries:
            return 1
        last = self._entries[-1]
        return last.inputs.batch_size if last.order is None else len(last.order)

    @property
    def has_cut_steps(self) -> bool:
        """True if a rollback has cut some step."""
        return any(entry.whole is not None for entry in self._entries)

    @property
    def is_cut_ahead(self) -> bool:
        """True if a rollback has cut a step, and positions that are left have looked at some that are gone. Then only
        `steps` gives the same states again."""
        return any(entry.is_cut_ahead for entry in self._entries)

    def append(self, position: int, inputs: BlockInputs) -> None:
        """Log a step that begins at `position`; forget what was logged from there on."""
        self.rollback(position)
        if position != self.length:
            raise ValueError(f"can't append at position {position} to a log of {self.length}")
        beside: dict[str, Any] = {name: _owned(getattr(inputs, name)) for name in (*AXES, *SOURCE)}
        has = frozenset(name for name in AXES if beside[name] is not None and name != "position_ids")
        step = _Run(position, arithmetic(inputs, position, self._traits), inputs.attention_mask, has)
        if not self._runs or not self._runs[-1].take_in(step, inputs.seq_len):
            self._runs.append(step)
        has_mask = inputs.attention_mask is not None
        self._entries.append(_Entry(position, replace(inputs, attention_mask=None, inner=None, **beside), has_mask))

    def rollback(self, position: int) -> None:
        """Forget everything from `position` on. Selections of rows are kept, even if they came after `position`."""
        dropped: Tensor | None = None
        while self._entries and self._entries[-1].position >= position:
            dropped = _compose(self._entries.pop().order, dropped)
        while self._runs and self._runs[-1].start >= position:
            self._runs.pop()
        if not self._entries:
            return
        last = self._entries[-1]
        last.order = _compose(last.order, dropped)
        if position < self.length:
            mask = self._runs[-1].mask
            if mask is not None and mask.ndim > 2:  # it has the order of the present rows, and so must the whole step
                last.take_order(self._entries[-2] if len(self._entries) > 1 else None, self._traits)
            last.cut(position - last.position, mask, self._traits)
            self._runs[-1].cut(position)
            self._note_other_arithmetic(last)
        else:
            self._runs[-1].cut(position)

    def _beginning(self, position: int) -> BlockInputs:
        """The inputs of the step around `position`, without its positions from `position` on."""
        step = next(entry for entry in reversed(self._entries) if entry.position < position)
        return step.inputs.columns(0, position - step.position, step.position, self._traits)

    def _note_other_arithmetic(self, last: _Entry) -> None:
        """Give the last step a run of its own if a rollback has made it so short that its frequencies differ."""
        run, now = self._runs[-1], arithmetic(last.inputs, last.position, self._traits)
        if now == run.arithmetic:
            return
        last.whole = None
        if run.start < last.position:
            own = replace(run, start=last.position)
            run.cut(last.position)
            self._runs.append(own)
        self._runs[-1].arithmetic = now

    def goes_back_alike(self, position: int) -> bool:
        """True if the positions before `position` were computed as they are after a rollback to it.

        It is False if the rollback shortens a step so much that it gets other rotary frequencies.
        """
        if not 0 < position < self.length or self._traits.even_length == inf:
            return True
        (run,) = [one for one in self._runs if one.start < position][-1:]
        start = max(entry.position for entry in self._entries if entry.position < position)
        return arithmetic(self._beginning(position), start, self._traits) == run.arithmetic

    def was_computed_as(self, length: int, position: int) -> bool:
        """True if all positions before `position` were computed with the rotary frequencies of a call of `length`
        positions."""
        wanted = self._traits.arithmetic(length)
        return all(one.arithmetic == wanted for one in self._runs if one.start < position)

    def select_batch(self, indices: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        if self._entries:
            last, order = self._entries[-1], torch.tensor(list(indices), dtype=torch.long)
            for run in self._runs:
                if run.mask is not None and run.mask.shape[0] == self.batch_size:
                    run.mask = run.mask.index_select(0, order.to(run.mask.device))
            last.order = _compose(last.order, order)

    def replay(self, max_tokens: int) -> Iterator[tuple[int, BlockInputs]]:
        """(position, inputs) of everything that is logged, for the present rows, in pieces of about `max_tokens`."""
        for past, call in self.calls():
            for start, end in pieces(call, past, self._traits, max_tokens):
                yield past + start, call.columns(start, end, past, self._traits)

    def calls(self) -> list[tuple[int, BlockInputs]]:
        """(position, inputs) of everything that is logged, for the present rows, in as few calls as possible.

        Usually one call is enough. There are more if a later mask contradicts an earlier one, or if rotary frequencies
        have changed because the text became long.
        """
        if not self._entries:
            return []
        inputs = self._in_order([entry.inputs for entry in self._entries])
        steps = list(zip((entry.position for entry in self._entries), inputs, strict=True))
        return [
            (run.start, self._joined([step for step in steps if run.start <= step[0] < end], run.mask))
            for run, end in self._runs_with_ends()
        ]

    def steps(self, cuts: Iterable[int] = (), *, start: int = 0, end: float = inf) -> Iterator[tuple[int, BlockInputs]]:
        """(position, inputs) of each step as it was computed, for the present rows, in the order of positions.

        A step may end behind the beginning of the next one, because a rollback has cut it.

        Args:
            cuts: positions at which steps were cut into pieces when they were computed.
            start: only steps and pieces that begin at `start` or later, and before `end`.
        """
        inputs = self._in_order([entry.whole or entry.inputs for entry in self._entries])
        runs = iter(self._runs_with_ends())
        run, run_end = None, 0
        cuts = sorted(set(cuts))
        for entry, whole in zip(self._entries, inputs, strict=True):
            if entry.position >= run_end:
                run, run_end = next(runs)
            if entry.end <= start or entry.position >= end:
                continue
            mask = None if run is None or not entry.has_mask else _mask_of(entry, whole, run)
            step = replace(whole, attention_mask=mask)
            within = cuts[bisect_right(cuts, entry.position) : bisect_left(cuts, entry.end)]
            for first, last in pairwise([entry.position, *within, entry.position + step.seq_len]):
                if start <= first < end:
                    yield first, self._piece(step, entry.position, first, last) if within else step

    def _piece(self, step: BlockInputs, position: int, start: int, end: int) -> BlockInputs:
        return step.columns(start - position, end - position, position, self._traits)

    def compute_anew(self, max_tokens: int) -> None:
        """Note that all positions are computed anew, in the calls of `replay`."""
        calls = list(self.replay(max_tokens))
        self._entries, self._runs = [], []
        for position, inputs in calls:
            self.append(position, inputs)

    def _in_order(self, inputs: Sequence[BlockInputs]) -> list[BlockInputs]:
        """The present rows of the inputs of all entries."""
        found: list[BlockInputs] = []
        order: Tensor | None = None
        for entry, step in zip(reversed(self._entries), reversed(inputs), strict=True):
            order = _compose(entry.order, order)
            found.append(step if order is None else step.rows_in_order(order, self._traits))
        return found[::-1]

    def _runs_with_ends(self) -> list[tuple[_Run, int]]:
        starts = [run.start for run in self._runs]
        return list(zip(self._runs, [*starts, self.length][1:], strict=True))

    def _joined(self, steps: Sequence[tuple[int, BlockInputs]], mask: Tensor | None) -> BlockInputs:
        """Join steps, given as (position, inputs), to the inputs of one call with the same effect."""
        inputs = [one for _, one in steps]
        last, seq_axis = inputs[-1], self._traits.batch_axis + 1
        beside: dict[str, Any] = {
            name: torch.cat([getattr(one, name) for one in inputs], dim=axis)
            for name, (_, axis) in AXES.items()
            if getattr(last, name) is not None and name != "position_ids"
        }
        return replace(
            last,
            hidden_states=torch.cat([one.hidden_states for one in inputs], dim=seq_axis),
            seq_len=sum(one.seq_len for one in inputs),
            attention_mask=mask,
            position_ids=_joined_positions(steps),
            **inputs[0].source_fields(),  # the encoder outputs come with the first step only
            **beside,
        )


def _mask_of(entry: _Entry, step: BlockInputs, run: _Run) -> Tensor | None:
    """The mask that the step of `entry` came with, for the rows of `step`. Its run's mask has the columns that no
    rollback has cut."""
    mask, cut = run.mask, step.attention_mask
    if mask is None or mask.ndim > 2:
        return mask if cut is None else cut
    mask = mask[:, : entry.end]
    return mask if cut is None else torch.cat([mask, cut], dim=-1)


def _joined_positions(steps: Sequence[tuple[int, BlockInputs]]) -> Tensor | None:
    """Join the position ids of steps, given as (position, inputs); None if no step has any.

    A step may have ids for each row, or once for all rows. For a step without ids, count on from its position.
    """
    given = [inputs.position_ids for _, inputs in steps if inputs.position_ids is not None]
    if not given:
        return None
    rows = max(tensor.shape[-2] for tensor in given)
    shape, like = given[0].shape[:-2], given[0]
    positions: list[Tensor] = []
    for position, inputs in steps:
        tensor = inputs.position_ids
        if tensor is None:
            start = position + inputs.num_prefix
            tensor = torch.arange(start, start + inputs.seq_len, dtype=like.dtype)[None]
        positions.append(tensor.to(like.device).expand(*shape, rows, inputs.seq_len))
    return torch.cat(positions, dim=-1)


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    """True if two masks hide the same positions; None hides nothing."""
    if first is None or second is None:
        given = second if first is None else first
        return given is None or bool(given.all())
    return first.dtype == second.dtype and torch.equal(first, second)


def _owned(tensor: Tensor | None) -> Tensor | None:
    """Copy a tensor that shares the memory of a larger one, such as a message. Otherwise the log would keep all of it.

    Other tensors are returned as they are.
    """
    if tensor is None or tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes:
        return tensor
    return tensor.clone()


def _compose(first: Tensor | None, then: Tensor | None) -> Tensor | None:
    """Join two selections of rows to one that has the effect of `first` and then of `then`; None selects all rows."""
    if first is None or then is None:
        return then if first is None else first
    return first[then]
