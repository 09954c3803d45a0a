"""Ragged packing: several sessions in one row without padding, attention for each on its own keys and values.

Everything but attention treats positions alike, so the new positions of all sessions run as one row
`[1, total, hidden]` with their own position ids. Where the model attends, `_attend` takes over: it cuts the row into
segments, and calls the attention function that the model would have called, once per segment, with that session's keys,
values and mask. The mask comes from the model's own rule (causal, sliding, chunked …), asked for the segment's true
positions.

A model whose code doesn't fit (attention of its own, masks that it looks into, lengths that it asks of its cache) fails
loudly here, and `packing_probe` finds the models that don't. Used by `packing`.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarmllm.models.boundary.phantom_cache import PhantomCache
from swarmllm.models.span import shared_keys
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
        self.end_position = cache.length + seq_len

    def take(self, packed: Tensor) -> Tensor:
        """`[1, heads, total, head]` → this session's `[rows, heads, seq, head]`."""
        part = packed.narrow(2, self.start, self.length)
        return part if self.rows == 1 else torch.unflatten(part[0], 1, (self.rows, self.seq_len)).transpose(0, 1)


class RaggedCache(PhantomCache):
    """What the model takes for its cache while it runs a packed row; the sessions' own caches are behind it."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.segments: Sequence[Segment] = ()
        self.new_keys: Tensor | None = None
        """Keys that were written last, all of one block."""
        self.stored: list[tuple[Tensor, Tensor]] = []
        """All keys and values of that block, for each segment."""

    @property
    def length(self) -> int:
        return 0  # only for mask sizes, which `_Rule` replaces

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Answers the model, which asks before its blocks for positions that it has been given; no block may ask."""
        if layer_idx is not None:
            raise PackingUnsupportedError("a block asks how long its cache is, which has as many answers as sessions")
        return 0

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        raise PackingUnsupportedError("a block keeps more than keys and values")

    update_indexer = update_conv_state = update_recurrent_state = _unsupported
    get_conv_state = get_recurrent_state = has_previous_state = _unsupported

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append to each session's cache; `_attend` finds the results in `stored`."""
        self.new_keys = key_states
        self.stored = [
            segment.cache.layers[layer_idx].update(
                segment.take(key_states), segment.take(value_states), *args, **kwargs
            )
            for segment in self.segments
        ]
        return key_states, value_states


class RaggedAttention:
    """Switches a model between its own attention and the ragged one."""

    def __init__(self, stack: nn.Module) -> None:
        """Look how the stack attends.

        Raises:
            PackingUnsupportedError: its parts do so in different ways.
        """
        configs: Iterator[Any] = (getattr(module, "config", None) for module in stack.modules())
        found = {id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}
        self._configs = list(found.values())
        usual = {config._attn_implementation_internal for config in self._configs}
        if len(usual) != 1:
            raise PackingUnsupportedError("the parts of the model attend in different ways")
        self.usual: str = usual.pop()
        self.cache = RaggedCache(stack.config)
        _register()

    @contextmanager
    def running(self, segments: Sequence[Segment]) -> Iterator[RaggedCache]:
        """Within: the model's forward on the packed row, with this cache."""
        cache = self.cache
        cache.segments = segments
        _running.pack = self
        for config in self._configs:
            config._attn_implementation_internal = NAME
        try:
            yield cache
        finally:
            for config in self._configs:
                config._attn_implementation_internal = self.usual
            _running.pack = None
            cache.segments, cache.stored, cache.new_keys = (), [], None

    def attend(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, /, **kwargs: Any
    ) -> Tensor:
        """The model's own attention: `[rows, seq, heads, head]`."""
        if self.usual == "sdpa" and shared_keys.applies(query, mask, kwargs):
            return shared_keys.attend(query, keys, values, mask, kwargs.get("scaling"))
        function: Callable[..., tuple[Tensor, Any]] = (
            ALL_ATTENTION_FUNCTIONS[self.usual]
            if self.usual in ALL_ATTENTION_FUNCTIONS
            else sys.modules[type(module).__module__].eager_attention_forward
        )
        return function(module, query, keys, values, mask, **kwargs)[0]


class _Running(threading.local):
    pack: RaggedAttention | None = None


_running = _Running()
"""The row that this thread is running: the functions that transformers calls are not told."""


class _Rule:
    """Takes the place of a mask: how the model makes it."""

    def __init__(self, pack: RaggedAttention, arguments: dict[str, Any]) -> None:
        self._make: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS[pack.usual]
        self._arguments = arguments
        self._masks: dict[tuple[int, int], Tensor | None] = {}

    def mask(self, segment: Segment, num_keys: int) -> Tensor | None:
        """`[1, 1, seq, num_keys]` or None, as the model would make it for this session alone."""
        key = segment.start, num_keys
        if key not in self._masks:
            self._masks[key] = self._make(
                **{
                    **self._arguments,
                    "batch_size": 1,  # the same for all rows
                    "q_length": segment.seq_len,
                    "kv_length": num_keys,
                    "q_offset": segment.end_position - segment.seq_len,
                    "kv_offset": segment.end_position - num_keys,
                    "attention_mask": None,
                }
            )
        return self._masks[key]


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
    if pack is None or key is not pack.cache.new_keys or not isinstance(attention_mask, _Rule):
        raise PackingUnsupportedError("the model attends to other keys than its block's, or makes a mask of its own")
    if kwargs.get("position_bias") is not None:
        raise PackingUnsupportedError("the model's attention depends on positions in the row")
    outputs = []
    for segment, (keys, values) in zip(pack.cache.segments, pack.cache.stored, strict=True):
        mask = attention_mask.mask(segment, keys.shape[-2])
        output = pack.attend(module, segment.take(query), keys, values, mask, **kwargs)
        outputs.append(output.reshape(1, segment.length, *output.shape[2:]))
    return torch.cat(outputs, dim=1), None


def _register() -> None:
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_rule)
