"""A cache for blocks that are elsewhere: phantoms, which know the length of the text and hold nothing.

A model's own forward asks its cache for lengths and mask sizes of *any* block (mostly of block 0, or of the first one
of a kind), so blocks that live elsewhere get phantoms which answer from the length that the cache keeps. All blocks of
a client are elsewhere (`shell/remote_cache`), and all but its own of a server (`span/span_cache`).
"""

import weakref
from collections.abc import Container
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from swarmllm.models.architecture import text_config


class PhantomCache(DynamicCache):
    """A cache without keys and values; subclasses say how long it is, and which blocks have real layers after all."""

    num_prefix = 0
    """Positions at its beginning that no text has filled (`adapters/block_adapter`, prefix)."""
    whole_masks = False
    """True if masks have a column for each position, also outside of a sliding window: servers cut them."""
    cross: DynamicCache | None = None
    """Keys and values of an encoder's outputs, in a decoder that has an encoder."""

    def __init__(self, config: PreTrainedConfig, real: Container[int] = ()) -> None:
        """`real`: blocks that keep the layers which transformers has made for them."""
        super().__init__(config=text_config(config))
        # A proxy: a cycle would keep keys, values and sessions until the garbage collector comes by.
        owner: Any = weakref.proxy(self)
        for block_idx, layer in enumerate(self.layers):
            if block_idx not in real and isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin):
                self.layers[block_idx] = _phantom_of(layer, owner)

    @property
    def length(self) -> int:
        """Positions that all blocks of this cache have seen, a prefix included; the model's code counts these."""
        raise NotImplementedError

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length


class PhantomSource(DynamicCache):
    """Keys and values of an encoder's outputs that are in the caches of several sessions: for their one forward."""

    def __init__(self, owner: Any) -> None:
        """`owner.source_part(name, layer_idx)` returns the "keys" or "values" for a block."""
        super().__init__()
        self.layers: list[Any] = [_SourceLayer(owner, layer_idx) for layer_idx in range(len(owner.layers))]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Answers the model that they have been computed."""
        return 1


class _SourceLayer:
    """The encoder's keys and values of one block."""

    def __init__(self, owner: Any, layer_idx: int) -> None:
        self._owner, self._layer_idx = weakref.proxy(owner), layer_idx

    def __getattr__(self, name: str) -> Any:
        if name not in ("keys", "values"):
            raise AttributeError(name)
        return self._owner.source_part(name, self._layer_idx)


class _Phantom:
    """Mixed into a cache layer's class for blocks that live elsewhere: knows the length, holds nothing."""

    owner: PhantomCache

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset), as the real layer would report after `owner.length` positions."""
        length = self.owner.length
        if self.owner.whole_masks or not getattr(self, "is_sliding", False):
            return length + query_length, 0
        window: int = self.sliding_window  # type: ignore[attr-defined]
        return min(length, window - 1) + query_length, max(length - window + 1, 0)

    def crop(self, *_: Any) -> None: ...
    def reset(self) -> None: ...
    def reorder_cache(self, *_: Any) -> None: ...
    def batch_repeat_interleave(self, *_: Any) -> None: ...
    def batch_select_indices(self, *_: Any) -> None: ...
    def activate_past_recording(self) -> None: ...


class _PhantomStates(dict[int, bool]):
    """`has_previous_state` of a linear-attention layer that lives elsewhere."""

    def __init__(self, owner: PhantomCache, number_of_states: int) -> None:
        super().__init__(dict.fromkeys(range(number_of_states), False))
        self.owner = owner

    def __getitem__(self, state_idx: int) -> bool:
        return self.owner.length > 0

    def values(self) -> list[bool]:  # type: ignore[override]
        return [self.owner.length > 0] * len(self)


_phantom_classes: dict[type, type] = {}


def _phantom_of(layer: Any, owner: PhantomCache) -> Any:
    """A phantom that is also an instance of the layer's class, because model code asks with isinstance."""
    kind = type(layer)
    if kind not in _phantom_classes:
        # _layer_type None: the class must not register itself as transformers' implementation of that kind
        _phantom_classes[kind] = type(f"Phantom{kind.__name__}", (_Phantom, kind), {"_layer_type": None})
    phantom: Any = object.__new__(_phantom_classes[kind])
    phantom.__dict__.update(layer.__dict__)
    phantom.owner = owner
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        phantom.has_previous_state = _PhantomStates(owner, layer.number_of_states)
    return phantom
