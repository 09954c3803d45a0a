"""Several sessions as one forward of the model, on caches that stand for the sessions' own: ragged and padded packing.

Ragged: everything but attention treats positions alike, so the new positions of all sessions run as one row `[1,
total, hidden]` with their own position ids. Where the model attends, `_attend` takes over. It cuts the row into
segments, and calls the model's attention function once per segment, with that session's keys, values and mask. The
mask comes from the model's own rule (causal, sliding, chunked …) for the segment's true positions. In a decoder with
an encoder, a stand-in takes the place of the encoder's keys, too: each session has keys of as many positions as its
own encoder outputs. A model whose code doesn't fit (attention of its own, masks that it looks into, lengths that it
asks of its cache) raises an error here; `packing_probe` finds the models that do fit.

Padded: sessions that add equally many positions run as one batch, whose shorter rows are padded on the left. It is for
models that can't run ragged: the model's own code does everything, on a cache that is put together for each step from
the sessions' caches, block by block; also keys and values of an encoder's outputs. That copies all of them once per
step, which costs memory bandwidth. One by one, a step reads all weights once per session.

Used by `packing`.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarmllm.models.boundary.phantom_cache import PhantomCache, PhantomSource
from swarmllm.models.span import attention
from swarmllm.models.span.attention import attending, attention_configs
from swarmllm.models.span.span_cache import SpanCache

NAME = "swarmllm_ragged"
"""Name under which transformers knows the attention function below."""


class PackingUnsupportedError(NotImplementedError):
    """The model does something that has no meaning for several sessions at once."""


class Segment:
    """One session's part of the row: its batch of `rows` × `seq_len` positions, one batch row after the other."""

    def __init__(self, cache: SpanCache, rows: int, seq_len: int, start: int) -> None:
        self.cache, self.rows, self.seq_len = cache, rows, seq_len
        self.start, self.length = start, rows * seq_len
        self.past, self.end_position = cache.length, cache.length + seq_len

    def take(self, packed: Tensor) -> Tensor:
        """`[1, heads, total, head]` → this session's `[rows, heads, seq, head]`."""
        part = packed.narrow(2, self.start, self.length)
        return part if self.rows == 1 else torch.unflatten(part[0], 1, (self.rows, self.seq_len)).transpose(0, 1)


class RaggedCache(PhantomCache):
    """The model's cache while it runs a packed row; it stands for the caches of the sessions."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.segments: Sequence[Segment] = ()
        self.keys: Tensor | None = None
        """The keys that the model was given last, all of one block."""
        self.stored: list[tuple[Tensor, Tensor]] = []
        """The keys and values that these stand for: all of that block, for each segment."""
        self.is_source = False
        """True if they are those of an encoder's outputs."""

    def begin(self, segments: Sequence[Segment]) -> None:
        """Stand for the caches of these segments from now on (none: for nothing, so that they can be freed)."""
        self.segments, self.keys, self.stored = segments, None, []
        self.cross = PhantomSource(self) if segments and segments[0].cache.cross is not None else None

    @property
    def length(self) -> int:
        return 0  # only for mask sizes, which `_Rule` replaces

    @property
    def past(self) -> int:
        """Positions before the row: the most of any session, for models that compute a bias of distances."""
        return max(segment.past for segment in self.segments) if self.cross is not None else 0

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Answer the model, which asks before its blocks; it has been given positions. No block may ask.

        Blocks of a decoder with an encoder may: distances between positions are the same for any answer.
        """
        if layer_idx is not None and self.cross is None:
            raise PackingUnsupportedError("a block asks how long its cache is, which has as many answers as sessions")
        return self.past

    def source_of(self, _: object) -> dict[str, Tensor]:
        """A stand-in for the encoder's outputs: `[1, longest outputs, hidden]`."""
        outputs = [segment.cache.source["encoder_hidden_states"] for segment in self.segments]
        length = max(tensor.shape[1] for tensor in outputs)
        return {"encoder_hidden_states": outputs[0].new_zeros(1, 1, 1).expand(1, length, outputs[0].shape[2])}

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        raise PackingUnsupportedError("a block keeps more than keys and values")

    update_indexer = update_conv_state = update_recurrent_state = _unsupported
    get_conv_state = get_recurrent_state = has_previous_state = _unsupported

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append to each session's cache; `_attend` finds the results in `stored`."""
        self.stored = [
            segment.cache.layers[layer_idx].update(
                segment.take(key_states), segment.take(value_states), *args, **kwargs
            )
            for segment in self.segments
        ]
        self.keys, self.is_source = key_states, False
        if past := self.past:  # a bias has a column for each key
            self.keys = key_states.narrow(2, 0, 1).expand(-1, -1, past + key_states.shape[2], -1)
        return self.keys, value_states

    def source_part(self, name: str, layer_idx: int) -> Tensor | None:
        """A stand-in for the encoder's keys in that block; `_attend` finds all keys and values in `stored`."""
        if name == "keys":
            layers: list[Any] = [seg.cache.cross.layers[layer_idx] for seg in self.segments if seg.cache.cross]
            self.stored, self.is_source = [(layer.keys, layer.values) for layer in layers], True
            longest = max((keys for keys, _ in self.stored), key=lambda keys: keys.shape[2])
            self.keys = longest.narrow(0, 0, 1)
        return self.keys


class RaggedAttention:
    """Switches a model between its own attention and the ragged one."""

    def __init__(self, stack: nn.Module) -> None:
        """Look how the stack attends.

        Raises:
            PackingUnsupportedError: its parts do so in different ways.
        """
        self._configs = attention_configs(stack)
        self.usual = only_way(self._configs)
        self.cache = RaggedCache(stack.config)
        _register()

    @contextmanager
    def running(self, segments: Sequence[Segment]) -> Iterator[RaggedCache]:
        """Within: the model's forward on the packed row, with this cache."""
        cache = self.cache
        cache.begin(segments)
        _running.pack = self
        try:
            with attending(self._configs, NAME):
                yield cache
        finally:
            _running.pack = None
            cache.begin(())

    def attend(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, /, **kwargs: Any
    ) -> Tensor:
        """The model's own attention: `[rows, seq, heads, head]`."""
        if self.usual == "sdpa" and attention.is_for_few(query, mask, kwargs):
            return attention.attend_few(query, keys, values, mask, kwargs.get("scaling"))
        function: Callable[..., tuple[Tensor, Any]] = (
            ALL_ATTENTION_FUNCTIONS[self.usual]
            if self.usual in ALL_ATTENTION_FUNCTIONS
            else sys.modules[type(module).__module__].eager_attention_forward
        )
        return function(module, query, keys, values, mask, **kwargs)[0]


def only_way(configs: Sequence[Any]) -> str:
    """The name of the attention function that all parts of a model use.

    Raises:
        PackingUnsupportedError: they use different ones.
    """
    usual: set[str] = {config._attn_implementation_internal for config in configs}
    if len(usual) != 1:
        raise PackingUnsupportedError("the parts of the model attend in different ways")
    return usual.pop()


class _Running(threading.local):
    pack: RaggedAttention | None = None


_running = _Running()
"""The row that this thread is running: the functions that transformers calls are not told."""


class _Rule:
    """A stand-in for a mask: the model's arguments to make one."""

    def __init__(self, pack: RaggedAttention, arguments: dict[str, Any]) -> None:
        self._make: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[pack.usual]
        self._arguments = arguments
        self._masks: dict[tuple[int, int], Tensor | None] = {}

    def mask(self, segment: Segment, num_keys: int, of_source: bool) -> Tensor | None:
        """`[rows or 1, 1, seq, num_keys]` or None, as the model would make it for this session alone."""
        key = segment.start, num_keys
        if key not in self._masks:
            given = _of_source(segment) if of_source else _of_text(segment, num_keys)
            self._masks[key] = self._make(
                **{**self._arguments, "q_length": segment.seq_len, "kv_length": num_keys, **given}
            )
        return self._masks[key]


def _of_text(segment: Segment, num_keys: int) -> dict[str, Any]:
    """Arguments of a mask for the session's own text; the same for all of its rows."""
    offsets = {"q_offset": segment.past, "kv_offset": segment.end_position - num_keys}
    return {**offsets, "batch_size": 1, "attention_mask": None}


def _of_source(segment: Segment) -> dict[str, Any]:
    """Arguments of a mask for an encoder's outputs, some of which may be padding."""
    mask = _mask_of_source(segment)
    return {"batch_size": segment.rows, "attention_mask": None if mask is None else mask.bool()}


def _mask_of_source(segment: Segment) -> Tensor | None:
    return segment.cache.source.get("encoder_attention_mask")


def _make_rule(**arguments: Any) -> _Rule:
    pack = _running.pack
    given = arguments.get("attention_mask")  # some models make one of ones
    if pack is None or "mask_function" not in arguments or not (given is None or bool(given.all())):
        raise PackingUnsupportedError("a mask is made in an unknown way")
    return _Rule(pack, arguments)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    pack = _running.pack
    if pack is None or key is not pack.cache.keys:
        raise PackingUnsupportedError("the model attends to other keys than its block's")
    bias, of_source = kwargs.pop("position_bias", None), pack.cache.is_source
    sees_all = of_source and attention_mask is None and all(_mask_of_source(one) is None for one in pack.cache.segments)
    if not sees_all and not isinstance(attention_mask, _Rule):
        raise PackingUnsupportedError("the model makes a mask of its own")
    if bias is not None and pack.cache.cross is None:
        raise PackingUnsupportedError("the model's attention depends on positions in the row")
    outputs = []
    for segment, (keys, values) in zip(pack.cache.segments, pack.cache.stored, strict=True):
        num_keys = keys.shape[-2]
        if bias is not None:  # the row's begins as if each session had the longest past
            first = 0 if of_source else pack.cache.past - segment.past
            kwargs["position_bias"] = bias[:, :, : segment.seq_len, first : first + num_keys]
        mask = None if sees_all else attention_mask.mask(segment, num_keys, of_source)
        output = pack.attend(module, segment.take(query), keys, values, mask, **kwargs)
        outputs.append(output.reshape(1, segment.length, *output.shape[2:]))
    return torch.cat(outputs, dim=1), None


def _register() -> None:
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_rule)


class PaddedCache(PhantomCache):
    """The model's cache for a padded batch; it stands for the sessions' caches, `rows[i]` rows for the i-th."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.has_attention = any(isinstance(layer, CacheLayerMixin) for layer in self.layers)
        self._caches: Sequence[SpanCache] = ()
        self._rows: list[int] = []
        self._length = 0
        self._lent: dict[tuple[str, int, int], Tensor] = {}
        """States lent to blocks; some kernels write into them."""

    def begin(self, caches: Sequence[SpanCache], rows: list[int]) -> None:
        """Stand for these caches from now on (none: for nothing, so that they can be freed)."""
        self._caches, self._rows = caches, rows
        self._length = max((cache.length for cache in caches), default=0)
        self._lent.clear()
        self.cross = PhantomSource(self) if caches and caches[0].cross is not None else None

    def finish(self) -> None:
        """Copy states that the step has written back to the sessions."""
        for (kind, layer_idx, state_idx), state in self._lent.items():
            for cache, part in zip(self._caches, torch.split_with_sizes(state, self._rows), strict=True):
                getattr(cache.layers[layer_idx], kind)[state_idx].copy_(part)

    @property
    def length(self) -> int:
        return self._length

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """The longest length, as for any padded batch; a block that asks would take it for the position of all rows.

        Blocks of a decoder with an encoder ask for distances between positions, which are the same for all.
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
        """The mask of the encoder's outputs, and a stand-in with their shape: the blocks have their keys and values."""
        outputs = [cache.source["encoder_hidden_states"] for cache in self._caches]
        masks = [
            cache.source.get("encoder_attention_mask", given.new_ones(given.shape[:2])).long()
            for cache, given in zip(self._caches, outputs, strict=True)
        ]
        mask = _stack(masks, 1)
        hidden = outputs[0].new_zeros(1, 1, 1).expand(*mask.shape, outputs[0].shape[2])
        return {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}

    def source_part(self, name: str, layer_idx: int) -> Tensor:
        """Keys or values of all sessions' encoder outputs in that block."""
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
