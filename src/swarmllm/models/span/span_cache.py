"""The KV cache of a span: real cache layers for the hosted blocks, phantoms for the others.

transformers' own layer of full attention concatenates all keys and values in every step, which for a long context
costs more than the block's attention. `BufferedCacheLayer` writes into a buffer that grows by whole chunks, and
returns a view: the same numbers, bit by bit. `BufferedWindowLayer` is the same for a sliding window.

`BlockSpan.new_cache` makes a cache; only the device thread touches it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from swarmllm.data_structures import Span
from swarmllm.models.boundary.phantom_cache import PhantomCache
from swarmllm.models.parallel.shared import Group
from swarmllm.models.span.page_pool import PAGE_TOKENS, PagedLayer, PagePool, PageTable, SharedPage

CHUNK_TOKENS = 128
"""Assumed: a session has room for at most 127 more tokens, and copies a long context at every 128th step only."""


class BufferedCacheLayer(DynamicLayer):
    """A full-attention cache layer; `keys` and `values` are views of the filled part, `[batch, heads, seq, head]`.

    They are made when they are asked for: recorded steps read the buffers themselves.
    """

    def __init__(self) -> None:
        self.is_initialized = False
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self.length = 0

    @property
    def keys(self) -> Tensor | None:
        return None if self.key_buffer is None else self.key_buffer.narrow(-2, 0, self.length)

    @property
    def values(self) -> Tensor | None:
        return None if self.value_buffer is None else self.value_buffer.narrow(-2, 0, self.length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, new, head]`; return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.key_buffer, keys = _append(self.key_buffer, key_states, start, self.length)
        self.value_buffer, values = _append(self.value_buffer, value_states, start, self.length)
        return keys, values

    def extend(self, num_positions: int) -> "StoredRows":
        """Make room for so many positions, which the caller writes to the buffers itself."""
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        start, end = self.length, self.length + num_positions
        if end > self.key_buffer.shape[-2]:
            self.key_buffer, self.value_buffer = (
                _larger(buffer, start, end, buffer) for buffer in (self.key_buffer, self.value_buffer)
            )
        self.length = end
        return StoredRows(self.key_buffer, self.value_buffer, start, end)

    def part(self, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Copies of the keys and values of positions `[start, end)`; None if this block keeps none of its own."""
        if self.key_buffer is None or self.value_buffer is None:
            return None
        keys, values = (one.narrow(-2, start, end - start).clone() for one in (self.key_buffer, self.value_buffer))
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions (transformers counts them as a negative number)."""
        if tokens_to_remove and self.is_initialized:
            self.length += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx` of the batch, in that order."""
        if self.key_buffer is not None and self.value_buffer is not None:
            order = beam_idx.to(self.key_buffer.device)
            self.key_buffer = self.key_buffer.index_select(0, order)
            self.value_buffer = self.value_buffer.index_select(0, order)


class BufferedWindowLayer(DynamicSlidingWindowLayer):
    """A cache layer with a sliding window; `keys` and `values` are views of the last positions in the buffers."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self.end = 0
        """Positions in the buffers, those before the window included."""

    @property
    def num_kept(self) -> int:
        """Positions in `keys`, the last ones of the buffers."""
        return self.keys.shape[-2] if self.is_initialized and self.keys.ndim > 1 else 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, new, head]`; return all keys and values that these may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kept, new = self.num_kept, key_states.shape[-2]
        start = self._make_room(key_states, value_states, new)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.narrow(-2, start, new).copy_(states)
        self._advance(new)
        return self._last(self._num_seen(kept, new))

    def extend(self, num_positions: int) -> "StoredRows":
        """Make room for so many positions, which the caller writes to the buffers itself."""
        keys, values = self._buffers
        kept = self.num_kept
        start = self._make_room(keys, values, num_positions)
        self._advance(num_positions)
        return StoredRows(*self._buffers, start, self._num_seen(kept, num_positions))

    def _num_seen(self, kept: int, new: int) -> int:
        """Positions that new ones attend to, themselves included."""
        return min(kept, self.sliding_window - 1) + new if self.record_past else kept + new

    @property
    def _buffers(self) -> tuple[Tensor, Tensor]:
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        return self.key_buffer, self.value_buffer

    def _make_room(self, keys: Tensor, values: Tensor, new: int) -> int:
        """The place of the next positions in the buffers, whose first two and last axes are those of these tensors."""
        if self.key_buffer is None or self.end + new > self.key_buffer.shape[-2]:
            kept = self.num_kept
            self.key_buffer = _larger(self.keys if kept else None, kept, kept + new, keys)
            self.value_buffer = _larger(self.values if kept else None, kept, kept + new, values)
            self.end = kept
        return self.end

    def _advance(self, new: int) -> None:
        kept = self.num_kept
        self.end += new
        self.cumulative_length += new
        if not self.record_past and self.sliding_window > 1:
            self.keys, self.values = self._last(min(kept + new, self.sliding_window - 1))
        else:
            self.keys, self.values = self._last(kept + new)

    def look_again(self) -> None:
        """Make `keys` and `values` views of new buffers."""
        self.keys, self.values = self._last(self.num_kept)

    def _last(self, number: int) -> tuple[Tensor, Tensor]:
        """Views of the last positions."""
        keys, values = self._buffers
        return keys.narrow(-2, self.end - number, number), values.narrow(-2, self.end - number, number)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions (transformers counts them as a negative number)."""
        if self.is_initialized:
            super().crop(tokens_to_remove)
            self.end -= abs(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx` of the batch, in that order."""
        if self.key_buffer is not None:
            order, kept = beam_idx.to(self.key_buffer.device), self.num_kept
            self.key_buffer, self.value_buffer = (buffer.index_select(0, order) for buffer in self._buffers)
            self.keys, self.values = self._last(kept)


BUFFERED = (BufferedCacheLayer, BufferedWindowLayer)
"""The layers whose keys and values others may write."""


def _append(buffer: Tensor | None, new: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Write `new` at `[start, end)` of the sequence axis; returns (the buffer, its filled part)."""
    if buffer is None or end > buffer.shape[-2]:
        buffer = _larger(buffer, start, end, new)
    buffer.narrow(-2, start, end - start).copy_(new)
    return buffer, buffer.narrow(-2, 0, end)


def _larger(buffer: Tensor | None, start: int, end: int, like: Tensor) -> Tensor:
    """A buffer with room for `end` positions and the first `start` of the old one."""
    capacity = -(-end // CHUNK_TOKENS) * CHUNK_TOKENS
    larger = like.new_empty((*like.shape[:-2], capacity, like.shape[-1]))
    if buffer is not None and start:
        larger.narrow(-2, 0, start).copy_(buffer.narrow(-2, 0, start))
    return larger


@dataclass(frozen=True, eq=False, slots=True)
class StoredRows:
    """A block's buffers of a session, `[batch, heads, positions, head]`, and the place of the first new position."""

    keys: Tensor
    values: Tensor
    start: int
    num_seen: int
    """Positions that the new ones attend to, themselves included."""

    def seen(self) -> tuple[Tensor, Tensor]:
        """Views of what a single new position attends to, as the layer's `update` returns them."""
        first = self.start + 1 - self.num_seen
        return self.keys.narrow(-2, first, self.num_seen), self.values.narrow(-2, first, self.num_seen)

    def addresses(self, row: int) -> tuple[int, int, int, int]:
        """Addresses of a row's keys and values, and the number of positions that each has room for."""
        keys, values = self.keys, self.values
        of_row = row and row * keys.stride(0) * keys.itemsize, row and row * values.stride(0) * values.itemsize
        return keys.data_ptr() + of_row[0], values.data_ptr() + of_row[1], keys.shape[2], values.shape[2]


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of what hosted blocks keep of a session; the probes find them."""

    key_value_shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)
    """(heads, head size) of keys and of values, for the blocks that can have a prefix."""
    bytes_per_token: int = 0
    """Cache of all hosted blocks, for one row of the batch. Sliding windows count as if they grew without bound,
    which they do in sessions that record their past."""
    bytes_per_session: int = 0
    """Recurrent states of all hosted blocks, for one row of the batch."""
    cross_bytes_per_token: int = 0
    """Keys and values of one position of an encoder's outputs in all hosted blocks."""


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """The caches of one session in the other processes of a group; see `together`."""

    group: Group
    blocks: Any
    """The `BlockSpan`."""
    heads: Mapping[int, tuple[int, ...]]
    """Key heads of each process, by block, for blocks whose heads are spread."""

    def hold(self, cache: "SpanCache") -> None:
        """Have the others make their caches, if they have none yet; for the device thread."""
        if not self.group.is_held(cache):
            self.group.hold(cache, self.blocks, "new_cache", cache.span, record_past=cache.records_past)

    def heads_of(self, block_idx: int, pair: tuple[Tensor, Tensor] | None, rank: int) -> tuple[Tensor, Tensor] | None:
        """A process's part of all keys and values of a block."""
        counts = self.heads.get(block_idx)
        if pair is None or counts is None:
            return pair
        keys, values = (tensor.narrow(1, sum(counts[:rank]), counts[rank]) for tensor in pair)
        return keys, values


class RollbackUnsupportedError(ValueError):
    """Some cache layer has already dropped what the rollback needs; replaying the inputs restores it."""


class SpanCache(PhantomCache):
    """The cache that a server keeps for one session."""

    def __init__(
        self,
        config: PreTrainedConfig,
        span: Span,
        *,
        record_past: bool = False,
        first: int = 0,
        has_source: bool = False,
        pool: PagePool | None = None,
    ) -> None:
        """`first` is the number of the stack's first block; `has_source`: the blocks attend to an encoder's outputs.

        With a `pool`, which has pages for all blocks of `span`, keys and values are kept there.
        """
        super().__init__(config, real=[block_idx - first for block_idx in span])
        self.table = None if pool is None else PageTable(pool)
        """The pages of its keys and values, if they are in pages."""
        for block_idx in span:
            layer = self.layers[block_idx - first]
            if self.table is not None:
                self.layers[block_idx - first] = PagedLayer(self.table, block_idx, _window_of(layer))
            elif type(layer) is DynamicLayer:
                self.layers[block_idx - first] = BufferedCacheLayer()
            elif type(layer) is DynamicSlidingWindowLayer:
                self.layers[block_idx - first] = BufferedWindowLayer(layer.sliding_window)
        self.elsewhere: Elsewhere | None = None
        """The caches of other processes for other heads; None: this cache is whole."""
        self.span, self._first = span, first
        self.cross = DynamicCache() if has_source else None
        """Keys and values of the encoder's outputs, which never grow."""
        self.source: dict[str, Tensor] = {}
        """The encoder's outputs and their mask, which came with the first call."""
        self._config = config
        self._length = self.num_prefix = 0
        self._restore: Callable[[], None] = lambda: None
        self._records_past = False
        if record_past:
            self.record_past()

    @property
    def length(self) -> int:
        return self._length

    @property
    def position(self) -> int:
        """Positions of the text; sessions count these."""
        return self._length - self.num_prefix

    def begin_with(self, prefix: Mapping[int, tuple[Tensor, Tensor]], batch_size: int) -> None:
        """Begin with keys and values `[heads, prefix, head]` by block, the same for all rows; called before the first
        step.

        Gradients flow to them, if the cache serves one forward only.
        """
        for block_idx, pair in prefix.items():
            self.layers[block_idx - self._first].update(*(tensor.expand(batch_size, -1, -1, -1) for tensor in pair))
            self.num_prefix = pair[0].shape[-2]
        self.advance(self.num_prefix)

    def key_value_shapes(self) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
        """(heads, head size) of the keys and of the values in each hosted block, if it keeps nothing else."""
        return {
            block_idx: ((layer.keys.shape[1], layer.keys.shape[3]), (layer.values.shape[1], layer.values.shape[3]))
            for block_idx in self.span
            if type(layer := self.layers[block_idx - self._first]) in BUFFERED and layer.is_initialized
        }

    def advance(self, num_tokens: int) -> None:
        """Called after all hosted blocks have seen `num_tokens` more."""
        self._length += num_tokens
        if self.table is not None:
            self.table.advance(num_tokens)

    def record_past(self) -> None:
        """Let sliding and convolutional layers keep what a rollback may need, from now on."""
        self._records_past = True
        for layer in self._hosted_layers():
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        self._tell("record_past")

    @torch.inference_mode()
    def rollback(self, position: int) -> None:
        """Forget everything from `position` of the text on; if nothing of the text is left, forget the prefix, too.

        Raises:
            RollbackUnsupportedError: some layer can't; nothing has been changed then.
            ValueError: the position lies outside the cache.
        """
        if not 0 <= position <= self.position:
            raise ValueError(f"can't roll back to {position} in a cache of {self.position} positions")
        surplus = self.position - position
        if surplus == 0:
            return
        if position == 0:  # always possible, also for recurrent states
            elsewhere = self.elsewhere
            self.__init__(  # type: ignore[misc]
                self._config,
                self.span,
                record_past=self._records_past,
                first=self._first,
                has_source=self.cross is not None,
                pool=None if self.table is None else self.table.pool,
            )
            self.elsewhere = elsewhere
            self._tell("rollback", position)
            return
        for layer in self._hosted_layers():
            _check_rollback(layer, self._length, surplus)
        for layer in self._hosted_layers():
            layer.crop(-surplus)
        self.advance(-surplus)
        self._tell("rollback", position)

    @torch.inference_mode()
    def select_batch(self, indices: Sequence[int]) -> None:
        """Keep the given rows of the batch, in the given order; rows may repeat (beam search, num_return_sequences)."""
        if self.table is not None:
            self.table.select(indices)
        order = torch.tensor(list(indices), dtype=torch.long)
        for layer in self._hosted_layers():
            layer.reorder_cache(order)
        if self.cross is not None:
            self.cross.reorder_cache(order)
        self.source = {name: tensor.index_select(0, order.to(tensor.device)) for name, tensor in self.source.items()}
        self._tell("select_batch", list(indices))

    def can_extend(self, batch_size: int) -> bool:
        """True if `extend` works: each block has buffers for so many rows."""
        return all(
            type(layer) in BUFFERED and layer.key_buffer is not None and layer.key_buffer.size(0) == batch_size
            for layer in self._hosted_layers()
        )

    @property
    def windows(self) -> dict[int, int]:
        """The last positions that each block's keys and values are of; 0: all of them. Masks may hide more."""
        windows = [getattr(layer, "sliding_window", 0) or 0 for layer in self._hosted_layers()]
        return dict(zip(self.span, windows, strict=True))

    @torch.inference_mode()
    def extend(self, num_positions: int) -> list[StoredRows]:
        """Make room for new positions in all hosted blocks; the caller writes their keys and values, then calls
        `advance`."""
        return [layer.extend(num_positions) for layer in self._hosted_layers()]

    def source_of(self, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The encoder's outputs that the blocks attend to: those of the first call, kept for the later ones."""
        if not self.source:
            self.source = dict(given)
        return self.source

    def keep_state(self) -> Callable[[], None]:
        """Returns a function that restores the cache's present state, after a step that failed in the middle."""
        if self.table is not None:
            return self.table.forget_step
        layers = [(layer, _state_of(layer)) for layer in self._hosted_layers()]

        def restore() -> None:
            for layer, state in layers:
                vars(layer).clear()
                vars(layer).update(state)
            self._tell("go_back")

        return restore

    def remember(self) -> None:
        """Keep the present state for `go_back`; in a follower, before a step of several sessions."""
        self._restore = self.keep_state()

    def go_back(self) -> None:
        """Restore the state that was kept last."""
        self._restore()

    @property
    def is_pageable(self) -> bool:
        """True if the cache holds only keys and values of all positions, as `page` and `append_page` need it."""
        if self.table is not None:
            return True
        return self.cross is None and all(type(layer) is BufferedCacheLayer for layer in self._hosted_layers())

    def page(self, start: int, end: int) -> SharedPage | tuple[tuple[Tensor, Tensor] | None, ...]:
        """The keys and values of positions `[start, end)` of each block: a page of the pool, or copies.

        None for a block that has none.
        """
        if self.table is not None and start % PAGE_TOKENS == 0 and end - start == PAGE_TOKENS:
            return self.table.shared_page(start // PAGE_TOKENS)
        own = tuple(layer.part(start, end) for layer in self._hosted_layers())
        if self.elsewhere is None:
            return own
        others = self.elsewhere.group.ask(self, "page", start, end)
        return tuple(self._joined(*parts) for parts in zip(self.span, own, *others, strict=True))

    @torch.inference_mode()
    def append_page(self, page: SharedPage | Sequence[tuple[Tensor, Tensor] | None], skipped: int = 0) -> None:
        """Append a result of `page`, from its position `skipped` on."""
        if isinstance(page, SharedPage):
            assert self.table is not None
            self.table.append_shared(page)
            self.advance(PAGE_TOKENS - skipped)
            return
        if self.elsewhere is not None:
            elsewhere = self.elsewhere
            page, *others = (
                [elsewhere.heads_of(*one, rank) for one in zip(self.span, page, strict=True)]
                for rank in range(elsewhere.group.size)
            )
            elsewhere.hold(self)
            elsewhere.group.call_each(self, "append_page", [(parts, skipped) for parts in others])
        length = next(pair[0].shape[-2] for pair in page if pair is not None) - skipped
        for layer, pair in zip(self._hosted_layers(), page, strict=True):
            if pair is not None:
                layer.update(*(tensor.narrow(-2, skipped, length) for tensor in pair))
        self.advance(length)

    @torch.inference_mode()
    def make_whole(self) -> None:
        """Take over the heads of other processes, for calls in which they don't take part."""
        elsewhere = self.elsewhere
        if elsewhere is not None and self._length:
            others: list[list[dict[str, Tensor]]] = elsewhere.group.ask(self, "keys_and_values")
            for block_idx, own, *theirs in zip(self.span, self.keys_and_values(), *others, strict=True):
                layer = self.layers[block_idx - self._first]
                if block_idx in elsewhere.heads:
                    for name, tensor in own.items():
                        setattr(layer, name, torch.cat([tensor, *(one[name] for one in theirs)], dim=1))
                    if type(layer) is BufferedWindowLayer:
                        layer.look_again()
        self.elsewhere = None

    def keys_and_values(self) -> list[dict[str, Tensor]]:
        """The attributes of each block's layer that have heads, without views of them."""
        found = [
            {name: tensor for name, tensor in vars(layer).items() if isinstance(tensor, Tensor) and tensor.ndim == 4}
            for layer in self._hosted_layers()
        ]
        for attributes in found:
            if "key_buffer" in attributes:
                attributes.pop("keys", None), attributes.pop("values", None)
        return found

    def key_heads(self) -> list[int]:
        """The number of heads that this process keeps of each block; 0: the block keeps something else, or nothing."""
        return [next((one.shape[1] for one in found.values()), 0) for found in self.keys_and_values()]

    def _joined(self, block_idx: int, *parts: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """Keys and values of all heads, of those of all processes."""
        assert self.elsewhere is not None
        if block_idx not in self.elsewhere.heads:
            return parts[0]
        keys, values = (torch.cat(tensors, dim=1) for tensors in zip(*(pair for pair in parts if pair), strict=True))
        return keys, values

    def _tell(self, method: str, *args: object) -> None:
        """Have the other processes do the same with their heads."""
        if self.elsewhere is not None:
            self.elsewhere.hold(self)
            self.elsewhere.group.call(self, method, *args)

    @property
    def cross_bytes(self) -> int:
        """Memory of the keys and values of an encoder's outputs."""
        layers = [] if self.cross is None else [layer for layer in self.cross.layers if layer.is_initialized]
        return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))

    @property
    def records_past(self) -> bool:
        """True if `record_past` was called."""
        return self._records_past

    @property
    def is_recurrent(self) -> bool:
        """True if some hosted block keeps a state instead of (or besides) keys and values."""
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._hosted_layers())

    @property
    def num_bytes(self) -> int:
        """Memory that the cache holds now."""
        if self.table is not None:
            return self.table.num_bytes
        storages = [tensor.untyped_storage() for _, tensor in self._tensors()]
        of_source = sum(tensor.nbytes for tensor in self.source.values())
        own = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return own + self.cross_bytes + of_source

    def used_bytes(self) -> tuple[int, int]:
        """Memory of the positions seen so far, without room for growth: (bytes that grow with them, bytes that
        don't)."""
        growing = fixed = 0
        for name, tensor in self._tensors():
            if name.endswith("_states"):
                fixed += tensor.nbytes
            elif not name.endswith("_buffer"):
                growing += tensor.nbytes
        return growing, fixed

    def _hosted_layers(self) -> list[Any]:
        return [self.layers[block_idx - self._first] for block_idx in self.span]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(attribute, tensor) of all hosted layers; an attribute with several states comes once for each."""
        for layer in self._hosted_layers():
            views = {"keys": layer.keys, "values": layer.values} if type(layer) is BufferedCacheLayer else {}
            for name, value in (vars(layer) | views).items():
                for tensor in value.values() if isinstance(value, dict) else (value,):
                    if isinstance(tensor, Tensor) and tensor.numel() > 1:
                        yield name, tensor


def can_be_paged(layer: Any) -> bool:
    """True if keys and values of such a layer can be kept in pages."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, PagedLayer, *BUFFERED)


def _window_of(layer: Any) -> int:
    return int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else 0


def _state_of(layer: Any) -> dict[str, Any]:
    """The attributes of a cache layer. Keys and values are only ever appended or replaced, states are overwritten."""
    if type(layer) in BUFFERED:
        return dict(vars(layer))
    return {
        name: {key: part.clone() if isinstance(part, Tensor) else part for key, part in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in vars(layer).items()
    }


def _check_rollback(layer: Any, length: int, surplus: int) -> None:
    """Check that `layer`, which has seen `length` positions, can forget the last `surplus` and go on exactly."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if any(layer.is_recurrent_states_initialized.values()):
            raise RollbackUnsupportedError("recurrent states can't be rolled back")
        for state_idx, state in layer.conv_states.items():
            if state is not None and not (
                layer.record_past and state.shape[-1] - surplus >= layer.conv_kernel_size[state_idx]
            ):
                raise RollbackUnsupportedError("a convolution has dropped the positions before the rollback")
    if isinstance(layer, DynamicSlidingWindowLayer):
        kept = layer.keys.shape[-2] if layer.is_initialized else 0
        if kept - surplus < min(length - surplus, layer.sliding_window - 1):
            raise RollbackUnsupportedError("a sliding window has dropped the positions before the rollback")
    if not getattr(layer, "is_croppable", False):
        raise RollbackUnsupportedError(f"{type(layer).__name__} can't be rolled back")
