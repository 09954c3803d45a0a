"""What has passed one boundary between blocks during a session, kept so that a new server can rebuild its KV cache.

A server keeps what it sent to its successor, the client what it sent to the first server. The log follows the session:
rollbacks cut it, changes of the batch's rows are noted and applied only when somebody replays. Of the attention masks,
which every step brings whole, those are kept that no later one begins with: one, as long as nobody changes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.models.boundary.block_inputs import AXES, SOURCE, BlockInputs


@dataclass(slots=True)
class _Entry:
    position: int
    inputs: BlockInputs
    order: Tensor | None = None
    """Rows to take from this entry and all before it; later entries' orders come on top."""


@dataclass(slots=True)
class _Masked:
    """Steps one after the other that the last one's mask does for: each mask is how the next one begins."""

    start: int
    mask: Tensor | None
    """`[batch, end]`, for today's rows; or one with more axes, of a single step. None hides nothing."""
    beside: frozenset[str] = frozenset()
    """What else all of these steps have."""

    def take_in(self, mask: Tensor | None, seq_len: int) -> bool:
        """Add the next step, of `seq_len` positions, unless its mask shows or hides something else before it."""
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
        self._masked: list[_Masked] = []

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
        """Note what followed the first `position` positions; whatever the log had behind them is forgotten."""
        self.rollback(position)
        if position != self.length:
            raise ValueError(f"can't append at position {position} to a log of {self.length}")
        mask = inputs.attention_mask
        beside: dict[str, Any] = {name: _owned(getattr(inputs, name)) for name in (*AXES, *SOURCE)}
        has = frozenset(name for name in AXES if beside[name] is not None and name != "position_ids")
        before = self._masked[-1] if self._masked else None
        if before is None or before.beside != has or not before.take_in(mask, inputs.seq_len):
            self._masked.append(_Masked(position, mask, has))
        self._entries.append(_Entry(position, replace(inputs, attention_mask=None, inner=None, **beside)))

    def rollback(self, position: int) -> None:
        """Forget everything from `position` on; the rows stay as they are now."""
        dropped: Tensor | None = None
        while self._entries and self._entries[-1].position >= position:
            dropped = _compose(self._entries.pop().order, dropped)
        while self._masked and self._masked[-1].start >= position:
            self._masked.pop()
        if not self._entries:
            return
        self._masked[-1].cut(position)
        last = self._entries[-1]
        kept = position - last.position
        if kept < last.inputs.seq_len:
            last.inputs = last.inputs.columns(0, kept, last.position, self._traits)
        last.order = _compose(last.order, dropped)

    def select_batch(self, indices: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        if self._entries:
            last, order = self._entries[-1], torch.tensor(list(indices), dtype=torch.long)
            for masked in self._masked:
                if masked.mask is not None and masked.mask.shape[0] == self.batch_size:
                    masked.mask = masked.mask.index_select(0, order.to(masked.mask.device))
            last.order = _compose(last.order, order)

    def replay(self, max_tokens: int) -> Iterator[tuple[int, BlockInputs]]:
        """(position, inputs) of all that is logged, with today's rows, in pieces of about `max_tokens`."""
        for past, call in self.calls():
            can_be_cut = self._traits.chunked_prefill and not call.looks_ahead(past)
            stride = max(1, max_tokens // call.batch_size) if can_be_cut else call.seq_len
            for start in range(0, call.seq_len, stride):
                end = min(start + stride, call.seq_len)
                yield past + start, call.columns(start, end, past, self._traits)

    def calls(self) -> list[tuple[int, BlockInputs]]:
        """(position, inputs) of all that is logged, with today's rows, in as few calls as it can be computed with.

        That is one, unless a step's mask showed or hid something that an earlier one's didn't.
        """
        if not self._entries:
            return []
        pieces: list[BlockInputs] = []
        order: Tensor | None = None
        for entry in reversed(self._entries):
            order = _compose(entry.order, order)
            pieces.append(entry.inputs if order is None else entry.inputs.rows_in_order(order, self._traits))
        steps = list(zip((entry.position for entry in self._entries), reversed(pieces), strict=True))
        starts = [masked.start for masked in self._masked]
        return [
            (start, self._joined([step for step in steps if start <= step[0] < end], masked.mask))
            for masked, start, end in zip(self._masked, starts, [*starts[1:], self.length], strict=True)
        ]

    def _joined(self, steps: Sequence[tuple[int, BlockInputs]], mask: Tensor | None) -> BlockInputs:
        """One call that does what these (position, inputs) did."""
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
    """Whether two masks hide the same; None hides nothing."""
    if first is None or second is None:
        given = second if first is None else first
        return given is None or bool(given.all())
    return first.dtype == second.dtype and torch.equal(first, second)


def _owned(tensor: Tensor | None) -> Tensor | None:
    """A copy of what is a small part of a larger memory: a message's, which would live as long as the log."""
    if tensor is None or tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes:
        return tensor
    return tensor.clone()


def _compose(first: Tensor | None, then: Tensor | None) -> Tensor | None:
    """The one selection of rows that does what `first` and `then` do one after the other."""
    if first is None or then is None:
        return then if first is None else first
    return first[then]
