"""Keys and values of a full-attention block in buffers that grow by whole chunks.

transformers' own layer concatenates all keys and values in every step, which for a long context costs more than the
block's attention itself; this one writes into its buffer and hands out a view. Same numbers, bit by bit.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

CHUNK_TOKENS = 128
"""Assumed: bounds the room for growth of a session to 127 tokens, and copies a long context every 128th step only."""


class BufferedCacheLayer(DynamicLayer):
    """A full-attention cache layer; `keys` and `values` are views of the filled part, `[batch, heads, seq, head]`."""

    def __init__(self) -> None:
        super().__init__()
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, new, head]`; return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.key_buffer, self.keys = _append(self.key_buffer, key_states, start, self.length)
        self.value_buffer, self.values = _append(self.value_buffer, value_states, start, self.length)
        return self.keys, self.values

    def part(self, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Copies of the keys and values of positions `[start, end)`; None if this block keeps none of its own."""
        if not self.is_initialized:
            return None
        return self.keys.narrow(-2, start, end - start).clone(), self.values.narrow(-2, start, end - start).clone()

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions (transformers counts them as a negative number)."""
        if tokens_to_remove and self.is_initialized:
            self.length += tokens_to_remove
            self._refresh_views()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx` of the batch, in that order."""
        if self.key_buffer is not None and self.value_buffer is not None:
            order = beam_idx.to(self.key_buffer.device)
            self.key_buffer = self.key_buffer.index_select(0, order)
            self.value_buffer = self.value_buffer.index_select(0, order)
            self._refresh_views()

    def _refresh_views(self) -> None:
        if self.key_buffer is not None and self.value_buffer is not None:
            self.keys = self.key_buffer.narrow(-2, 0, self.length)
            self.values = self.value_buffer.narrow(-2, 0, self.length)


def _append(buffer: Tensor | None, new: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Write `new` at `[start, end)` of the sequence axis; returns (the buffer, its filled part)."""
    if buffer is None or end > buffer.shape[-2]:
        capacity = -(-end // CHUNK_TOKENS) * CHUNK_TOKENS
        larger = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
        if buffer is not None and start:
            larger.narrow(-2, 0, start).copy_(buffer.narrow(-2, 0, start))
        buffer = larger
    buffer.narrow(-2, start, end - start).copy_(new)
    return buffer, buffer.narrow(-2, 0, end)
