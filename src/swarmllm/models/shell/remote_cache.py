"""The cache of `generate()` and `forward()` on a client: no keys and values, but a session on servers.

Each operation of transformers on its cache (length, crop, reorder, repeat, select) becomes an operation on the session,
which knows the position.

A forward runs its blocks without a session if perhaps nobody continues its cache, or if its outputs have gradients. Its
cache is `deferred`: it costs servers nothing. When it is continued after all, servers compute its positions again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Thread
from typing import Any, Never, NoReturn, Protocol, Self, SupportsIndex

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.phantom_cache import PhantomCache

_this_generate: ContextVar[object] = ContextVar("swarmllm_generate", default=None)
"""The call of `generate()` that this thread or task is in."""


@contextmanager
def one_generate() -> Iterator[None]:
    """Within, a call of `generate()` goes on, and its adapter stays as it is."""
    token = _this_generate.set(object())
    try:
        yield
    finally:
        _this_generate.reset(token)


class CacheSession(Protocol):
    """The KV caches of one batch on all servers of its route."""

    @property
    def position(self) -> int:
        """Positions that all blocks have seen."""
        ...

    @position.setter
    def position(self, value: int) -> None:
        """Roll back to a lower position."""
        ...

    @property
    def is_generating(self) -> bool:
        """True if a `generate()` is going on in this session, which the user has opened."""
        ...

    def begins(self, ids: Tensor) -> bool:
        """True if these `[batch, seq]` begin with the whole prompt of the `generate()` that goes on."""
        ...

    def select_batch(self, indices: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order; rows may repeat."""
        ...

    def record_past(self) -> None:
        """Keep what rollbacks need."""
        ...

    def run_step(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        """Run all blocks on inputs behind `position`, or only those of `part`; the blocks behind these follow later."""
        ...

    def remember(self, inputs: BlockInputs, part: Span | None = None) -> None:
        """Note that all blocks, or those of `part`, have seen `inputs` elsewhere.

        Servers compute them again before the next step. The blocks behind `part` follow in later calls.
        """
        ...

    def fork(self) -> "CacheSession":
        """Another session with the same past."""
        ...

    def close(self) -> None:
        """Free the servers' caches; harmless when done twice."""
        ...


class RemoteCache(PhantomCache):
    """A cache of transformers whose keys and values are on servers."""

    whole_masks = True

    def __init__(self, config: PreTrainedConfig, session: CacheSession, batch_size: int) -> None:
        super().__init__(config)
        self.config = config
        """The config of its model, the same object."""
        self.session = session
        self.deferred = False
        """The first forward runs its blocks without a session, which only remembers it."""
        self.has_graph = False
        """With a local model, gradients would flow through its keys and values."""
        self.num_hidden = 0
        """Positions of trained prompts at the beginning; only the stack counts them (`shell/tuned_prompts`)."""
        self.num_prefix = 0
        """Positions before the session's, with keys and values from its adapter (`shell/tuned_prompts`)."""
        self.adapter: BlockAdapter | None = None
        """The adapter of the last forward that read it from the model."""
        self.begun_in_training: bool | None = None
        """True if the model was in train mode then; None: there was no such forward yet."""
        self._read_in: object = None
        """The `generate()` in which that adapter was read."""
        self._stamp: object = None
        """Its `BlockAdapters.stamp`, if it was read outside of one."""
        self.source_mask: Tensor | None = None
        """The mask of the encoder outputs, since the session's first forward."""
        self.thread: Thread | None = None
        """The thread of the last forward of a model with vision. Not its number, which another thread may get."""
        self.offsets: Mapping[object, Any] = {}
        """The values of `rope_deltas` in that forward (`stack_forward.resume_offsets`)."""
        self._rows = batch_size

    @property
    def length(self) -> int:
        return max(0, self.session.position - self.num_hidden) + self.num_prefix

    @property
    def self_attention_cache(self) -> Self:
        """The cache that decoders with an encoder ask for lengths."""
        return self

    def keeps_adapter(self, training: bool, stamp: Callable[[], object]) -> bool:
        """True if a later step may use the last adapter: in the same `generate()`, or with the same `stamp`. Reading it
        from the model again, to compare, costs time.

        A prefix of peft is given to the first forward alone.
        """
        if self.num_prefix:
            return True
        if self.begun_in_training != training or self._read_in is not (now := _this_generate.get()):
            return False
        return now is not None or self._stamp == stamp()

    def note_adapter(self, adapter: BlockAdapter | None, training: bool, stamp: Callable[[], object]) -> None:
        """Note the adapter of a forward that read it from the model."""
        self.adapter, self.begun_in_training, self._read_in = adapter, training, _this_generate.get()
        self._stamp = stamp() if self._read_in is None else None

    def go_on_with_adapter_of(self, other: "RemoteCache") -> None:
        """Take over the adapter of the other's last forward."""
        self.adapter, self.begun_in_training = other.adapter, other.begun_in_training
        self._read_in, self._stamp = other._read_in, other._stamp

    @property
    def batch_size(self) -> int:
        return self._rows

    @property
    def is_compileable(self) -> bool:
        """False, because compileable caches get prepared masks, and the blocks need the raw one."""
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def forgets_early(self) -> bool:
        """True if some blocks drop what rollbacks need, unless the session records its past from the beginning."""
        return any(
            getattr(layer, "is_sliding", False) or isinstance(layer, LinearAttentionCacheLayerMixin)
            for layer in self.layers
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.length > 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions (transformers counts them as a negative number)."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes minus the number of positions to forget")
        if tokens_to_remove:
            self.session.position += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_batch(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select_batch([row for row in range(self._rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.select_batch(indices.tolist())

    def select_batch(self, indices: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        if not indices or not 0 <= min(indices) <= max(indices) < self._rows:
            raise ConfigurationError(f"the cache has the rows 0 to {self._rows - 1}, so {list(indices)} can't be kept")
        if list(indices) != list(range(self._rows)):
            self.session.select_batch(indices)
            self._rows = len(indices)
            if self.source_mask is not None:
                self.source_mask = self.source_mask[list(indices)]

    def activate_past_recording(self) -> None:
        self.session.record_past()

    def reset(self) -> None:
        self.session.position = 0

    def close(self) -> None:
        """Free the caches on servers now, without waiting for garbage collection."""
        self.session.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self)(self.config, self.session.fork(), self._rows)
        memo[id(self)] = twin
        twin.go_on_with_adapter_of(self)
        twin.num_hidden, twin.num_prefix = self.num_hidden, self.num_prefix
        twin.has_graph, twin.source_mask = self.has_graph, self.source_mask
        twin.thread, twin.offsets = self.thread, self.offsets
        return twin

    def __copy__(self) -> Self:
        return self  # shallow copies of transformers' caches share their layers, and so all changes

    def __iter__(self) -> Iterator[Any]:
        self.update()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Never:
        self.update()

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigurationError(
            "the keys and values of this cache are on the servers, so they can't be read or changed here"
        )
