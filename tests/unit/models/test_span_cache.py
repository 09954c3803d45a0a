"""The cache layers themselves: growth, rollback, rows of the batch."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from swarmllm.data_structures import Span
from swarmllm.models.span.span_cache import (
    CHUNK_TOKENS,
    BufferedCacheLayer,
    BufferedWindowLayer,
    RollbackUnsupportedError,
    SpanCache,
)

WINDOW = 4
Sizes = dict[str, int]
SIZES: Sizes = {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}


def _states(num_tokens: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 2, num_tokens, 4)


def _fill(cache: SpanCache, num_tokens: int, batch: int = 2) -> torch.Tensor:
    """One step of all hosted blocks; returns the keys that were written."""
    keys = _states(num_tokens, batch)
    for block_idx in cache.span or ():
        cache.update(keys, keys, block_idx)
    cache.advance(num_tokens)
    return keys


@pytest.fixture
def llama() -> Callable[..., SpanCache]:
    return lambda **options: SpanCache(LlamaConfig(**SIZES), Span(1, 3), **options)


@pytest.fixture
def gemma() -> Callable[..., SpanCache]:
    """Sliding and full attention in turn."""
    return lambda **options: SpanCache(Gemma2Config(**SIZES, sliding_window=WINDOW), Span(0, 2), **options)


def test_cache_layer_gives_what_concatenation_gives() -> None:
    grown, concatenated = BufferedCacheLayer(), DynamicLayer()
    for num_tokens in (5, 1, 1, CHUNK_TOKENS, 1):
        keys, values = _states(num_tokens), _states(num_tokens)
        for got, want in zip(grown.update(keys, values), concatenated.update(keys, values), strict=True):
            assert torch.equal(got, want)
    order = torch.tensor([1, 1, 0])
    for layer in (grown, concatenated):
        layer.reorder_cache(order)
        layer.crop(-3)
    assert grown.keys is not None
    assert torch.equal(grown.keys, concatenated.keys)
    assert grown.get_seq_length() == concatenated.get_seq_length()
    assert grown.get_mask_sizes(2) == concatenated.get_mask_sizes(2)


@pytest.mark.parametrize("records_past", [False, True])
@pytest.mark.parametrize("window", [1, 2, WINDOW, CHUNK_TOKENS + 7])
def test_window_gives_what_concatenation_gives(window: int, records_past: bool) -> None:
    grown, concatenated = BufferedWindowLayer(window), DynamicSlidingWindowLayer(window)
    for layer in (grown, concatenated):
        layer.record_past = records_past
    for num_tokens in (2, 1, CHUNK_TOKENS, 1, 1, 3, 5):
        keys, values = _states(num_tokens), _states(num_tokens)
        for got, want in zip(grown.update(keys, values), concatenated.update(keys, values), strict=True):
            assert torch.equal(got, want)
        if records_past:
            for layer in (grown, concatenated):
                layer.crop(-(num_tokens // 2))
        elif num_tokens == 3:
            for layer in (grown, concatenated):
                layer.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(grown.keys, concatenated.keys)
        assert torch.equal(grown.values, concatenated.values)
        assert grown.get_seq_length() == concatenated.get_seq_length()
        assert grown.get_mask_sizes(2) == concatenated.get_mask_sizes(2)


@pytest.mark.parametrize("layer", [BufferedCacheLayer(), BufferedWindowLayer(WINDOW)], ids=["full", "window"])
def test_others_write_what_update_would(layer: BufferedCacheLayer | BufferedWindowLayer) -> None:
    wanted = BufferedCacheLayer() if isinstance(layer, BufferedCacheLayer) else BufferedWindowLayer(WINDOW)
    first = _states(5)
    for one in (layer, wanted):
        one.update(first, first)
    for num_tokens in (1, 2, CHUNK_TOKENS, 1):
        keys = _states(num_tokens)
        wanted.update(keys, keys)
        rows = layer.extend(num_tokens)
        for buffer in (rows.keys, rows.values):
            buffer[:, :, rows.start : rows.start + num_tokens] = keys
        assert torch.equal(layer.keys, wanted.keys)
        assert torch.equal(layer.values, wanted.values)
        assert layer.get_seq_length() == wanted.get_seq_length()


def test_cache_layer_rarely_moves_its_memory() -> None:
    layer = BufferedCacheLayer()
    addresses = {layer.update(_states(1), _states(1))[0].data_ptr() for _ in range(CHUNK_TOKENS)}
    assert len(addresses) == 1


def test_blocks_elsewhere_only_count(llama: Callable[..., SpanCache]) -> None:
    cache = llama()
    _fill(cache, 5)
    assert cache.get_seq_length() == cache.get_seq_length(1) == cache.get_seq_length(3) == 5
    assert cache.get_mask_sizes(2, 0) == cache.get_mask_sizes(2, 1) == (7, 0)
    assert cache.layers[0].keys is None


@pytest.mark.parametrize("num_tokens", [1, WINDOW - 1, WINDOW, WINDOW + 3])
def test_blocks_elsewhere_report_the_window_that_real_ones_would(
    gemma: Callable[..., SpanCache], num_tokens: int
) -> None:
    cache = gemma()
    _fill(cache, num_tokens)
    for query_length in (1, 3):
        assert cache.get_mask_sizes(query_length, 2) == cache.get_mask_sizes(query_length, 0)


def test_rollback(llama: Callable[..., SpanCache]) -> None:
    cache = llama()
    keys = _fill(cache, 5)
    cache.rollback(3)
    more = _fill(cache, 2)
    assert cache.length == 5
    assert torch.equal(cache.layers[1].keys, torch.cat([keys[:, :, :3], more], dim=2))


def test_rollback_to_the_start_is_always_possible(gemma: Callable[..., SpanCache]) -> None:
    cache = gemma()
    _fill(cache, 3 * WINDOW)
    cache.rollback(0)
    assert cache.length == 0
    assert cache.used_bytes() == (0, 0)


def test_a_window_can_be_rolled_back_until_it_is_full(gemma: Callable[..., SpanCache]) -> None:
    cache = gemma()
    _fill(cache, WINDOW - 1)
    cache.rollback(1)
    assert cache.layers[0].keys.shape[-2] == 1


def test_a_full_window_has_forgotten_and_nothing_is_changed(gemma: Callable[..., SpanCache]) -> None:
    cache = gemma()
    _fill(cache, WINDOW + 2)
    with pytest.raises(RollbackUnsupportedError):
        cache.rollback(WINDOW + 1)
    assert cache.length == WINDOW + 2
    assert cache.layers[1].keys.shape[-2] == WINDOW + 2


def test_a_recorded_window_can_be_rolled_back_exactly_once(gemma: Callable[..., SpanCache]) -> None:
    cache = gemma(record_past=True)
    keys = _fill(cache, 10)
    cache.rollback(8)
    assert torch.equal(cache.layers[0].keys, keys[:, :, 8 - (WINDOW - 1) : 8])
    with pytest.raises(RollbackUnsupportedError):  # the crop has dropped everything before the window
        cache.rollback(6)


def test_rollback_outside_the_cache(llama: Callable[..., SpanCache]) -> None:
    cache = llama()
    _fill(cache, 2)
    for position in (-1, 3):
        with pytest.raises(ValueError, match="roll back"):
            cache.rollback(position)


def test_rows_are_chosen_repeated_and_dropped(gemma: Callable[..., SpanCache]) -> None:
    cache = gemma()
    keys = _fill(cache, 3)
    cache.select_batch([1, 1, 0])
    assert torch.equal(cache.layers[0].keys, keys[[1, 1, 0]])
    assert torch.equal(cache.layers[1].keys, keys[[1, 1, 0]])
    cache.select_batch([2])
    assert torch.equal(cache.layers[1].keys, keys[[0]])


def test_memory_is_counted(llama: Callable[..., SpanCache]) -> None:
    cache = llama()
    _fill(cache, 5)
    per_token = 2 * 2 * 2 * 4 * 4  # batch, keys and values, heads, head size, bytes of a float
    assert cache.used_bytes() == (len(Span(1, 3)) * 5 * per_token, 0)
    assert cache.num_bytes == len(Span(1, 3)) * CHUNK_TOKENS * per_token


def test_a_cache_is_gone_when_it_is_forgotten(llama: Callable[..., SpanCache]) -> None:
    """Not when the garbage collector comes by: a server has promised its memory to the next session."""
    gc.disable()
    try:
        cache = llama()
        _fill(cache, 3)
        forgotten = weakref.ref(cache)
        del cache
        assert forgotten() is None
    finally:
        gc.enable()
