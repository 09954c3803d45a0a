"""What has passed one boundary between blocks during a session, kept so that a new server can rebuild its KV cache.

A server keeps what it sent to its successor, the client what it sent to the first server. The log follows the session:
rollbacks cut it, changes of the batch's rows are noted and applied only when somebody replays. The attention mask,
which every step brings whole, is kept once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from swarmllm.data_structures import BlockTraits
from swarmllm.models.block_inputs import BlockInputs

_AXES = {"position_ids": (-2, -1), "token_type_ids": (0, -1), "input_ids": (0, 1), "inputs_embeds": (0, 1)}
"""Batch and sequence axis of the tensors that travel beside the hidden states and the mask."""


@dataclass(slots=True)
class _Entry:
    position: int
    inputs: BlockInputs
    order: Tensor | None = None
    """Rows to take from this entry and all before it; later entries' orders come on top."""


class ActivationLog:
    """The inputs of one boundary for positions [0, length)."""

    def __init__(self, traits: BlockTraits) -> None:
        self._traits = traits
        self._entries: list[_Entry] = []
        self._mask: Tensor | None = None
        """`[batch, length]`, for today's rows; or with more axes, as the last step had it."""

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
        if mask is None and self._mask is not None and self._mask.ndim == 2:
            mask = torch.nn.functional.pad(self._mask, (0, inputs.seq_len), value=1)
        self._mask = mask
        beside: dict[str, Any] = {name: _owned(getattr(inputs, name)) for name in _AXES}
        self._entries.append(_Entry(position, replace(inputs, attention_mask=None, **beside)))

    def rollback(self, position: int) -> None:
        """Forget everything from `position` on; the rows stay as they are now."""
        dropped: Tensor | None = None
        while self._entries and self._entries[-1].position >= position:
            dropped = _compose(self._entries.pop().order, dropped)
        if not self._entries:
            self._mask = None
            return
        if self._mask is not None:
            self._mask = self._mask[..., :position]
        last = self._entries[-1]
        kept = position - last.position
        if kept < last.inputs.seq_len:
            last.inputs = last.inputs.columns(0, kept, last.position, self._traits)
        last.order = _compose(last.order, dropped)

    def select_batch(self, indices: Sequence[int]) -> None:
        """From now on the batch consists of these rows, in this order."""
        if self._entries:
            last, order = self._entries[-1], torch.tensor(list(indices), dtype=torch.long)
            if self._mask is not None and self._mask.shape[0] == self.batch_size:
                self._mask = self._mask.index_select(0, order.to(self._mask.device))
            last.order = _compose(last.order, order)

    def replay(self, max_tokens: int) -> Iterator[tuple[int, BlockInputs]]:
        """(position, inputs) of all that is logged, with today's rows, in pieces of about `max_tokens`."""
        if not self._entries:
            return
        whole = self._joined()
        step = max(1, max_tokens // whole.batch_size) if self._traits.chunked_prefill else whole.seq_len
        for start in range(0, whole.seq_len, step):
            yield start, whole.columns(start, min(start + step, whole.seq_len), 0, self._traits)

    def _joined(self) -> BlockInputs:
        pieces: list[BlockInputs] = []
        order: Tensor | None = None
        for entry in reversed(self._entries):
            order = _compose(entry.order, order)
            pieces.append(entry.inputs if order is None else _take_rows(entry.inputs, order, self._traits))
        pieces.reverse()
        last, seq_axis = pieces[-1], self._traits.batch_axis + 1
        if self._mask is not None and self._mask.ndim > 2:
            raise ValueError("attention masks with more than two axes can't be replayed")
        beside: dict[str, Any] = {
            name: torch.cat([getattr(piece, name) for piece in pieces], dim=axis)
            for name, (_, axis) in _AXES.items()
            if getattr(last, name) is not None and name != "position_ids"
        }
        return replace(
            last,
            hidden_states=torch.cat([piece.hidden_states for piece in pieces], dim=seq_axis),
            seq_len=sum(piece.seq_len for piece in pieces),
            attention_mask=self._mask,
            position_ids=self._joined_positions(pieces),
            **beside,
        )

    def _joined_positions(self, pieces: Sequence[BlockInputs]) -> Tensor | None:
        """Steps may have left the positions to the blocks, or have given them for each row, or once for all."""
        given = [piece.position_ids for piece in pieces if piece.position_ids is not None]
        if not given:
            return None
        rows = max(tensor.shape[-2] for tensor in given)
        shape, like = given[0].shape[:-2], given[0]
        positions: list[Tensor] = []
        for entry, piece in zip(self._entries, pieces, strict=True):
            tensor = piece.position_ids
            if tensor is None:
                start = entry.position + piece.num_prefix
                tensor = torch.arange(start, start + piece.seq_len, dtype=like.dtype)[None]
            positions.append(tensor.to(like.device).expand(*shape, rows, piece.seq_len))
        return torch.cat(positions, dim=-1)


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


def _take_rows(inputs: BlockInputs, order: Tensor, traits: BlockTraits) -> BlockInputs:
    def take(tensor: Tensor | None, axis: int) -> Tensor | None:
        if tensor is None or tensor.shape[axis] != inputs.batch_size:  # the same for all rows
            return tensor
        return tensor.index_select(axis, order.to(tensor.device))

    beside: dict[str, Any] = {name: take(getattr(inputs, name), axis) for name, (axis, _) in _AXES.items()}
    return replace(
        inputs,
        hidden_states=inputs.hidden_states.index_select(traits.batch_axis, order.to(inputs.hidden_states.device)),
        batch_size=len(order),
        attention_mask=take(inputs.attention_mask, 0),
        **beside,
    )
