"""Measurements that are kept for the next start: found again, and not believed when damaged, old or of another kind."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmllm.data_structures import Span
from swarmllm.models.packing import NEVER, Packing
from swarmllm.server import throughput, throughput_cache
from swarmllm.server.throughput import Throughput, ThroughputCache, measure_throughput, prefill_tokens_beside_decode

KNOWN = Throughput(forward_tokens_per_s=100.0, decode_ms_per_block=2.0, packing="padded")


def blocks_of(span: Span, dtype: torch.dtype = torch.float32) -> Any:
    """As much of a BlockSpan as a measurement's name and its use need."""
    used: list[Any] = []
    packer = SimpleNamespace(use=lambda way, ragged_alone_from: used.append((way, ragged_alone_from)), used=used)
    device = torch.device("cpu")
    return SimpleNamespace(span=span, cache_bytes_per_token=64, device=device, dtype=dtype, packer=packer)


@pytest.fixture
def cache(tmp_path: Path) -> ThroughputCache:
    return ThroughputCache(tmp_path, "f" * 16, "none", num_threads=1)


def the_file(cache: ThroughputCache) -> Path:
    (path,) = [path for path in cache.directory.rglob("*") if path.is_file()]
    return path


def test_what_was_measured_is_found_again(cache: ThroughputCache, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(Span(0, 4))
    assert cache.load(blocks) is None
    cache.save(blocks, KNOWN)
    monkeypatch.setattr(throughput, "_measure", lambda *_, **__: pytest.fail("measured again"))
    assert measure_throughput(blocks, cache).decode_ms_per_block == 2.0
    assert blocks.packer.used == [(Packing.PADDED, NEVER)]
    assert cache.load(blocks_of(Span(4, 8))) is not None  # as many blocks of the same kind


def test_how_sessions_are_packed_is_kept_too(cache: ThroughputCache, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = KNOWN.model_copy(update={"packing": "ragged", "ragged_alone_from": 300})
    monkeypatch.setattr(throughput, "_measure", lambda *_, **__: measured)
    first, second = blocks_of(Span(0, 4)), blocks_of(Span(4, 8))
    measure_throughput(first, cache)
    cache.save(first, measured)  # what a busy machine disturbed isn't kept
    monkeypatch.setattr(throughput, "_measure", lambda *_, **__: pytest.fail("measured again"))
    measure_throughput(second, cache)
    assert first.packer.used == second.packer.used == [(Packing.RAGGED, 300)]


def test_other_kinds_are_measured_themselves(cache: ThroughputCache) -> None:
    cache.save(blocks_of(Span(0, 4)), KNOWN)
    assert cache.load(blocks_of(Span(0, 5))) is None
    assert cache.load(blocks_of(Span(0, 4), torch.bfloat16)) is None
    for other in ({"fingerprint": "e" * 16}, {"quant_type": "int8"}, {"num_threads": None}):
        assert replace(cache, **other).load(blocks_of(Span(0, 4))) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"forward_tokens_per_s": "fast"}', '{"forward_tokens_per_s": -1}'])
def test_a_damaged_file_counts_as_none(cache: ThroughputCache, content: str) -> None:
    blocks = blocks_of(Span(0, 4))
    cache.save(blocks, KNOWN)
    the_file(cache).write_text(content)
    assert cache.load(blocks) is None


def test_an_old_file_counts_as_none(cache: ThroughputCache, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(Span(0, 4))
    cache.save(blocks, KNOWN)
    assert cache.load(blocks) is not None
    monkeypatch.setattr(throughput_cache, "MAX_AGE_S", 0.0)
    assert cache.load(blocks) is None


def test_a_cache_that_cannot_be_written_is_no_error(cache: ThroughputCache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    replace(cache, directory=tmp_path / "file").save(blocks_of(Span(0, 4)), KNOWN)


def test_a_prompt_gets_a_share_of_the_time_of_a_decode_step() -> None:
    step_s = 4 * 2.0 / 1e3
    fast = Throughput(forward_tokens_per_s=50_000.0, decode_ms_per_block=2.0, packing="ragged")
    tokens = prefill_tokens_beside_decode(fast, num_blocks=4)
    assert tokens / fast.forward_tokens_per_s == pytest.approx(throughput.PREFILL_SHARE * step_s)
    assert prefill_tokens_beside_decode(KNOWN, num_blocks=4) == throughput.MIN_PREFILL_TOKENS
