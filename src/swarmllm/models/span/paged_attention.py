"""Paged packing: several sessions in one row, attention for all of them in one call on pages of keys and values.

As in `packed_caches`, the new positions of all sessions run as one row `[1, total, hidden]`. Their keys and values are
in the pages of a `page_pool`, and the device knows the places. So no call depends on numbers that only the host has,
and a step can be recorded once and repeated (`decode_graphs`).

A position's result depends on its own session alone, not on the other sessions in the row. A model that wants more of
its attention than a causal mask and a sliding window, such as softcaps or sinks, fails here, and the span runs in
another way.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from swarmllm.data_structures import Span
from swarmllm.models.block_slots import Recorder
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.attention import OTHER_RULES, attending, attention_configs
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packed_caches import PackingUnsupportedError, RaggedCache, only_way
from swarmllm.models.span.page_pool import PagePool, Placed, attend_pages, write_pages

NAME = "swarmllm_paged"
"""Name under which transformers knows the attention function below."""
SHORT_TOKENS = 16
"""Most new positions of a call that attend one by one: so guessed tokens get the same results as single tokens."""
FARTHEST = 1 << 18
"""The position at which a mask is looked at: larger than any sliding window that we know."""


class PagedBatch(RaggedCache):
    """The model's cache while it runs a packed row; keys and values are in the pool."""

    def __init__(self, config: PreTrainedConfig, first: int) -> None:
        """`first` is the number of the stack's first block."""
        super().__init__(config)
        self._first = first
        self.pool: PagePool | None = None
        self.placed: Placed | None = None
        self.block_idx = -1
        """The block whose keys were given last."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write to the pool; `_attend` finds the place."""
        pool, placed = self.pool, self.placed
        self.block_idx = layer_idx + self._first
        if pool is None or placed is None or self.block_idx not in pool.keys:
            raise PackingUnsupportedError("a block keeps keys that have no pages")
        write_pages(
            pool.keys[self.block_idx], pool.values[self.block_idx], pool.tables, placed, key_states, value_states
        )
        self.keys = key_states
        return key_states, value_states

    def attend(self, asked: "Asked") -> Tensor:
        """Attention to the keys of the block that was updated last: `[1, total, heads, head]`."""
        assert self.pool is not None
        assert self.placed is not None
        keys, values = self.pool.keys[self.block_idx], self.pool.values[self.block_idx]
        return attend_pages(asked.query, keys, values, self.pool.tables, self.placed, asked.scale, asked.window)


class PagedAttention:
    """Switches a model between its own attention and the paged one."""

    def __init__(self, blocks: BlockSpan) -> None:
        """Look how the stack of `blocks` attends.

        Raises:
            PackingUnsupportedError: its parts do so in different ways.
        """
        self.blocks = blocks
        self._configs = attention_configs(blocks.stack)
        self.usual = only_way(self._configs)
        """The name of the model's own attention function."""
        self.cache = PagedBatch(blocks.stack.config, blocks.slots.first)
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _make_rule)

    @contextmanager
    def running(self, pool: PagePool, placed: Placed) -> Iterator[PagedBatch]:
        """Within: the model's forward on the packed row, with this cache."""
        cache = self.cache
        cache.pool, cache.placed = pool, placed
        try:
            with self.attending(cache):
                yield cache
        finally:
            cache.pool = cache.placed = None

    @contextmanager
    def attending(self, cache: PagedBatch) -> Iterator[None]:
        """Within: the model attends by this cache."""
        _running.batch = cache
        try:
            with attending(self._configs, NAME):
                yield
        finally:
            _running.batch = cache.keys = None

    def step(
        self,
        hidden: Tensor,
        placed: Placed,
        position_ids: Tensor,
        span: Span | None = None,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """Run a `DecodeStep` by the model's own code; `recorder` may run blocks in another way."""
        blocks = self.blocks
        assert blocks.pool is not None
        inputs = BlockInputs(hidden_states=hidden, batch_size=1, seq_len=hidden.shape[1], position_ids=position_ids)
        with torch.inference_mode(), self.running(blocks.pool, placed) as cache:
            return blocks.run_blocks(inputs, span or blocks.span, cache, recorder=recorder)


class _Running(threading.local):
    batch: PagedBatch | None = None


_running = _Running()
"""The row that this thread is running: the functions that transformers calls are not told."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stand-in for a mask: the number of positions back that a position sees, itself included; 0: all."""

    length: int


@dataclass(frozen=True, eq=False, slots=True)
class Asked:
    """A call of an attention function."""

    module: nn.Module
    query: Tensor
    """`[1, heads, total, head]`."""
    scale: float
    window: int
    """Last positions that are seen; 0: all."""
    options: dict[str, Any]
    """Its other arguments."""


def _make_rule(**arguments: Any) -> Window:
    given = arguments.get("attention_mask")
    if _running.batch is None or "mask_function" not in arguments or given is not None:
        raise PackingUnsupportedError("a mask is made in an unknown way")
    return Window(window_of(arguments["mask_function"]))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    batch = _running.batch
    if batch is None or key is not batch.keys:
        raise PackingUnsupportedError("the model attends to other keys than its block's")
    if not isinstance(attention_mask, Window):
        raise PackingUnsupportedError("the model makes a mask of its own")
    if any(isinstance(kwargs.get(name), Tensor) or kwargs.get(name) for name in OTHER_RULES):
        raise PackingUnsupportedError("the model's attention has rules besides its mask")
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return batch.attend(Asked(module, query, scale, attention_mask.length, kwargs)), None


# ---------------------------------------------------------------------- what a mask shows

_windows: dict[Any, int] = {}


def window_of(mask_function: Callable[..., Any]) -> int:
    """The number of positions back that a mask shows, the position itself included; 0: all of them.

    It is observed at some positions. transformers makes a function for each mask, but of a few kinds only, so results
    are kept.

    Raises:
        PackingUnsupportedError: it shows anything else, or depends on a tensor.
    """
    key = _content(mask_function)
    if key not in _windows:
        _windows[key] = _find_window(mask_function)
    return _windows[key]


def _content(value: Any) -> Any:
    """A key that is equal for functions of the same code with the same values in it."""
    if isinstance(value, tuple):
        return tuple(map(_content, value))
    if isinstance(value, int | float | str | None):
        return value
    code, cells = getattr(value, "__code__", None), getattr(value, "__closure__", None)
    if code is None or getattr(value, "__defaults__", None):
        raise PackingUnsupportedError("a mask is made of something unknown")
    return code, tuple(_content(cell.cell_contents) for cell in cells or ())


def _find_window(mask_function: Callable[..., Any]) -> int:
    def shown(position: int) -> Tensor:
        at, zero = torch.arange(position + 2), torch.zeros((), dtype=torch.long)
        visible = mask_function(zero, zero, torch.tensor(position), at)
        return torch.broadcast_to(torch.as_tensor(visible), at.shape)

    number = int(shown(FARTHEST).sum())
    window = number if number <= FARTHEST else 0
    for position in (0, 1, 2, 7, 100, 4097, window, window + 1, 2 * window + 1, FARTHEST):
        at = torch.arange(position + 2)
        expected = (at <= position) & ((at > position - window) if window else torch.ones_like(at, dtype=torch.bool))
        if not torch.equal(shown(position), expected):
            raise PackingUnsupportedError("a mask shows something else than earlier positions")
    return window
