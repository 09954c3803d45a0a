"""A log of everything that has passed one boundary between blocks in a session, so that a new server can rebuild its
cache.

A server logs its outputs for its successor, the client its inputs of the first server. The log follows the session: a
rollback cuts it; changes of the batch's rows are noted, and applied only at a replay. Every step brings a whole
attention mask. The log keeps a mask only if no later one begins with it: one mask, if the session never changes it.
Steps that were computed with different frequencies of their positions (`block_inputs.arithmetic`) are never joined.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.models.boundary.block_inputs import AXES, SOURCE, BlockInputs, arithmetic, pieces


@dataclass(slots=True)
class _Entry:
    position: int
    inputs: BlockInputs
    order: Tensor | None = None
    """Rows to take from this entry and all before it; later entries' orders come on top."""


@dataclass(slots=True)
class _Alike:
    """Steps one after the other that are computed alike, with the last one's mask: each is how the next one begins."""

    start: int
    arithmetic: int
    mask: Tensor | None
    """`[batch, end]`, for today's rows; or one with more axes, of a single step. None hides nothing."""
    beside: frozenset[str] = frozenset()
    """More fields that all of these steps have."""

    def take_in(self, step: "_Alike", seq_len: int) -> bool:
        """Add the next step, of `seq_len` positions, unless its mask shows or hides something else before it."""
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
    """The inputs of one boundary for positions [0, length)."""

    def __init__(self, traits: BlockTraits) -> None:
        self._traits = traits
        self._entries: list[_Entry] = []
        self._alike: list[_Alike] = []

    @property
    def length(self) -> int:
        return self._entries[-1].position + self._entries[-1].inputs.seq_len if self._entries else 0

    @property
    def num_bytes(self) -> int:
        return sum(entry.inputs.hidden_states.nbytes for entry in self._entries)

    @property
    def batch_size(self) -> int:
        """Rows of the batch now; 1 while the log is empty."""
        if not self._entries:
            return 1
        last = self._entries[-1]
        return last.inputs.batch_size if last.order is None else len(last.order)

    def append(self, position: int, inputs: BlockInputs) -> None:
        """Log the call that follows the first `position` positions; everything logged after them is forgotten."""
        self.rollback(position)
        if position != self.length:
            raise ValueError(f"can't append at position {position} to a log of {self.length}")
        beside: dict[str, Any] = {name: _owned(getattr(inputs, name)) for name in (*AXES, *SOURCE)}
        has = frozenset(name for name in AXES if beside[name] is not None and name != "position_ids")
        step = _Alike(position, arithmetic(inputs, position, self._traits), inputs.attention_mask, has)
        if not self._alike or not self._alike[-1].take_in(step, inputs.seq_len):
            self._alike.append(step)
        self._entries.append(_Entry(position, replace(inputs, attention_mask=None, inner=None, **beside)))

    def rollback(self, position: int) -> None:
        """Forget everything from `position` on; the rows stay as they are now."""
        dropped: Tensor | None = None
        while self._entries and self._entries[-1].position >= position:
            dropped = _compose(self._entries.pop().order, dropped)
        while self._alike and self._alike[-1].start >= position:
            self._alike.pop()
        if not self._entries:
            return
        self._alike[-1].cut(position)
        last = self._entries[-1]
        if position < self.length:
            last.inputs = self._rest(position)
            self._note_other_arithmetic(last)
        last.order = _compose(last.order, dropped)

    def _rest(self, position: int) -> BlockInputs:
        """The rest of the step that holds this position."""
        step = next(entry for entry in reversed(self._entries) if entry.position < position)
        return step.inputs.columns(0, position - step.position, step.position, self._traits)

    def _note_other_arithmetic(self, last: _Entry) -> None:
        """Note a last step whose rest may be too short to be computed as the whole step was."""
        alike, now = self._alike[-1], arithmetic(last.inputs, last.position, self._traits)
        if now == alike.arithmetic:
            return
        if alike.start < last.position:
            rest = replace(alike, start=last.position)
            alike.cut(last.position)
            self._alike.append(rest)
        self._alike[-1].arithmetic = now

    def goes_back_alike(self, position: int) -> bool:
        """True if the positions before this one have the same results when they are computed alone."""
        if not 0 < position < self.length or self._traits.even_length == inf:
            return True
        (alike,) = [one for one in self._alike if one.start < position][-1:]
        start = max(entry.position for entry in self._entries if entry.position < position)
        return arithmetic(self._rest(position), start, self._traits) == alike.arithmetic

    def was_computed_as(self, length: int, position: int) -> bool:
        """True if all positions before `position` were computed as a call of that length would compute them."""
        wanted = self._traits.arithmetic(length)
        return all(one.arithmetic == wanted for one in self._alike if one.start < position)

    def select_batch(self, indices: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        if self._entries:
            last, order = self._entries[-1], torch.tensor(list(indices), dtype=torch.long)
            for alike in self._alike:
                if alike.mask is not None and alike.mask.shape[0] == self.batch_size:
                    alike.mask = alike.mask.index_select(0, order.to(alike.mask.device))
            last.order = _compose(last.order, order)

    def replay(self, max_tokens: int) -> Iterator[tuple[int, BlockInputs]]:
        """(position, inputs) of all that is logged, with today's rows, in pieces of about `max_tokens`."""
        for past, call in self.calls():
            for start, end in pieces(call, past, self._traits, max_tokens):
                yield past + start, call.columns(start, end, past, self._traits)

    def calls(self) -> list[tuple[int, BlockInputs]]:
        """(position, inputs) of everything that is logged, with today's rows, in as few calls as possible.

        That is one call, unless a step's mask shows or hides something differently than an earlier one's, or the text
        has become so long that its later steps were computed differently.
        """
        if not self._entries:
            return []
        pieces: list[BlockInputs] = []
        order: Tensor | None = None
        for entry in reversed(self._entries):
            order = _compose(entry.order, order)
            pieces.append(entry.inputs if order is None else entry.inputs.rows_in_order(order, self._traits))
        steps = list(zip((entry.position for entry in self._entries), reversed(pieces), strict=True))
        starts = [alike.start for alike in self._alike]
        return [
            (start, self._joined([step for step in steps if start <= step[0] < end], alike.mask))
            for alike, start, end in zip(self._alike, starts, [*starts[1:], self.length], strict=True)
        ]

    def _joined(self, steps: Sequence[tuple[int, BlockInputs]], mask: Tensor | None) -> BlockInputs:
        """One call with the same effect as these (position, inputs)."""
        pieces = [piece for _, piece in steps]
        last, seq_axis = pieces[-1], self._traits.batch_axis + 1
        beside: dict[str, Any] = {
            name: torch.cat([getattr(piece, name) for piece in pieces], dim=axis)
            for name, (_, axis) in AXES.items()
            if getattr(last, name) is not None and name != "position_ids"
        }
        return replace(
            last,
            hidden_states=torch.cat([piece.hidden_states for piece in pieces], dim=seq_axis),
            seq_len=sum(piece.seq_len for piece in pieces),
            attention_mask=mask,
            position_ids=_joined_positions(steps),
            **pieces[0].source_fields(),
            **beside,
        )


def _joined_positions(steps: Sequence[tuple[int, BlockInputs]]) -> Tensor | None:
    """Steps may have left the positions to the blocks, or have given them for each row, or once for all."""
    given = [piece.position_ids for _, piece in steps if piece.position_ids is not None]
    if not given:
        return None
    rows = max(tensor.shape[-2] for tensor in given)
    shape, like = given[0].shape[:-2], given[0]
    positions: list[Tensor] = []
    for position, piece in steps:
        tensor = piece.position_ids
        if tensor is None:
            start = position + piece.num_prefix
            tensor = torch.arange(start, start + piece.seq_len, dtype=like.dtype)[None]
        positions.append(tensor.to(like.device).expand(*shape, rows, piece.seq_len))
    return torch.cat(positions, dim=-1)


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    """True if two masks hide the same; None hides nothing."""
    if first is None or second is None:
        given = second if first is None else first
        return given is None or bool(given.all())
    return first.dtype == second.dtype and torch.equal(first, second)


def _owned(tensor: Tensor | None) -> Tensor | None:
    """A copy of a tensor that is a small part of a larger memory: a message, which would live as long as the log."""
    if tensor is None or tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes:
        return tensor
    return tensor.clone()


def _compose(first: Tensor | None, then: Tensor | None) -> Tensor | None:
    """The selection of rows with the effect of `first` and then `then`."""
    if first is None or then is None:
        return then if first is None else first
    return first[then]
