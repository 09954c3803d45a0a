"""Padded packing: sessions that add equally many positions, as one batch whose shorter rows are padded on the left.

For models that `packed_attention` can't run: the model's own code does everything, on a cache that is put together for
each step from the sessions' own ones, block by block, and so are keys and values of an encoder's outputs. That copies
all of them once per step, which costs memory bandwidth, where running one by one costs reading all weights once per
session. Used by `packed_forward`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from swarmllm.models.boundary.phantom_cache import PhantomCache, PhantomSource
from swarmllm.models.span.packed_attention import PackingUnsupportedError
from swarmllm.models.span.span_cache import SpanCache


class PaddedCache(PhantomCache):
    """What the model takes for its cache; the sessions' own caches are behind it, `rows[i]` rows of the i-th."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.has_attention = any(isinstance(layer, CacheLayerMixin) for layer in self.layers)
        self._caches: Sequence[SpanCache] = ()
        self._rows: list[int] = []
        self._length = 0
        self._lent: dict[tuple[str, int, int], Tensor] = {}
        """States that blocks have been given, and into which some kernels write."""

    def begin(self, caches: Sequence[SpanCache], rows: list[int]) -> None:
        """Stand for these caches from now on (none: for nothing, so that they can be freed)."""
        self._caches, self._rows = caches, rows
        self._length = max((cache.length for cache in caches), default=0)
        self._lent.clear()
        self.cross = PhantomSource(self) if caches and caches[0].cross is not None else None

    def finish(self) -> None:
        """Give to the sessions what the step has written into lent states."""
        for (kind, layer_idx, state_idx), state in self._lent.items():
            for cache, part in zip(self._caches, torch.split_with_sizes(state, self._rows), strict=True):
                getattr(cache.layers[layer_idx], kind)[state_idx].copy_(part)

    @property
    def length(self) -> int:
        return self._length

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """The longest, as for any padded batch; a block that asks for itself would take it for everybody's position.

        But those of a decoder with an encoder ask for distances between positions, which are the same for all.
        """
        if layer_idx is not None and self.cross is None and any(cache.length != self._length for cache in self._caches):
            raise PackingUnsupportedError("a block asks how long its cache is, which has as many answers as sessions")
        return self._length

    def attention_mask(self, seq_len: int, device: torch.device) -> Tensor:
        """`[rows, length + seq]`: 0 for padding."""
        mask = torch.zeros(sum(self._rows), self._length + seq_len, dtype=torch.int64, device=device)
        first = 0
        for cache, rows in zip(self._caches, self._rows, strict=True):
            mask[first : first + rows, self._length - cache.length :] = 1
            first += rows
        return mask

    def source_of(self, _: object) -> dict[str, Tensor]:
        """What the blocks attend to besides the text: its mask, and how large it is, as they have keys and values."""
        outputs = [cache.source["encoder_hidden_states"] for cache in self._caches]
        masks = [
            cache.source.get("encoder_attention_mask", given.new_ones(given.shape[:2])).long()
            for cache, given in zip(self._caches, outputs, strict=True)
        ]
        mask = _stack(masks, 1)
        hidden = outputs[0].new_zeros(1, 1, 1).expand(*mask.shape, outputs[0].shape[2])
        return {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}

    def source_part(self, name: str, layer_idx: int) -> Tensor:
        """Keys or values of all sessions' sources in that block."""
        return _stack([getattr(cache.cross.layers[layer_idx], name) for cache in self._caches if cache.cross], -2)

    # ------------------------------------------------------------------ what blocks call

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        pairs = [
            cache.layers[layer_idx].update(keys, values, *args, **kwargs)
            for cache, keys, values in zip(
                self._caches,
                torch.split_with_sizes(key_states, self._rows),
                torch.split_with_sizes(value_states, self._rows),
                strict=True,
            )
        ]
        return _stack([keys for keys, _ in pairs], -2), _stack([values for _, values in pairs], -2)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        parts = zip(self._caches, torch.split_with_sizes(indexer_key_states, self._rows), strict=True)
        return _stack([cache.update_indexer(part, layer_idx) for cache, part in parts], 1)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._lent.pop(("conv_states", layer_idx, state_idx), None)
        parts = zip(self._caches, torch.split_with_sizes(conv_states, self._rows), strict=True)
        return _stack([cache.update_conv_state(part, layer_idx, state_idx, **kwargs) for cache, part in parts], -1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._lent.pop(("recurrent_states", layer_idx, state_idx), None)
        parts = zip(self._caches, torch.split_with_sizes(recurrent_states, self._rows), strict=True)
        return torch.cat([cache.update_recurrent_state(part, layer_idx, state_idx, **kwargs) for cache, part in parts])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._lend("conv_states", layer_idx, state_idx, SpanCache.get_conv_state)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._lend("recurrent_states", layer_idx, state_idx, SpanCache.get_recurrent_state)

    def is_recording_past(self, layer_idx: int) -> bool:
        return any(cache.is_recording_past(layer_idx) for cache in self._caches)

    def _lend(
        self, kind: str, layer_idx: int, state_idx: int, get: Callable[[SpanCache, int, int], Tensor | None]
    ) -> Tensor | None:
        states = [get(cache, layer_idx, state_idx) for cache in self._caches]
        present = [state for state in states if state is not None]
        if len(present) not in (0, len(states)):
            raise PackingUnsupportedError("sessions that begin and sessions that go on can't be mixed in this model")
        if not present:
            return None
        return self._lent.setdefault((kind, layer_idx, state_idx), _stack(present, -1))


def _stack(parts: Sequence[Tensor], axis: int) -> Tensor:
    """One batch of all, shorter ones padded with zeros on the left of `axis`."""
    longest = max(part.shape[axis] for part in parts)
    if all(part.shape[axis] == longest for part in parts):
        return torch.cat(list(parts))
    shape = list(parts[0].shape)
    shape[0], shape[axis] = sum(part.shape[0] for part in parts), longest
    stacked = parts[0].new_zeros(shape)
    first = 0
    for part in parts:
        target = stacked.narrow(0, first, part.shape[0])
        target.narrow(axis, longest - part.shape[axis], part.shape[axis]).copy_(part)
        first += part.shape[0]
    return stacked
