"""Attention of one new position in bfloat16: the very bits of torch's."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.test_exact_lines import Pair, threads
from tests.numerics.test_traced import load
from tests.numerics.tiny_models import tiny_config
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from swarmllm.models.quantization import kernels, line, whole_attention
from swarmllm.models.quantization.step import Kind
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.trials import random_inputs


def is_here() -> bool:
    return not line.why_no_steps() and bool(kernels.library().swarmllm_can_attend_as_torch(kernels.level()))


def check_that_it_is_torchs(size: int) -> None:
    """Skip where torch isn't known to attend in the same way."""
    if whole_attention._is_torchs(size):
        return
    vendor = "AuthenticAMD" if kernels.level() == 3 else "GenuineIntel"
    is_known = torch.__version__.startswith("2.13.") and vendor in Path("/proc/cpuinfo").read_text()
    assert not is_known, f"other bits than torch's with heads of {size}"
    pytest.skip("torch attends in another way here")


needs_it = pytest.mark.skipif(not is_here(), reason="needs AVX2, or AVX-512 with instructions for bfloat16")


def of_torch(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Of queries `[heads, size]`, keys and values `[key heads, keys, size]`."""
    return functional.scaled_dot_product_attention(
        queries[None, :, None], keys[None], values[None], scale=scale, enable_gqa=True
    )[0, :, 0]


@needs_it
@settings(max_examples=200, deadline=None)
@given(
    length=st.one_of(st.integers(1, 70), st.sampled_from((255, 511, 512, 513, 520, 600, 1024, 1025, 2000))),
    key_heads=st.integers(1, 3),
    shared=st.integers(2, 9),
    size=st.sampled_from((16, 32, 48, 64, 80, 96, 112, 128, 240, 256)),
    magnitude=st.sampled_from((0.0, 0.01, 1.0, 4.0, 100.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_bits_are_torchs(length: int, key_heads: int, shared: int, size: int, magnitude: float, seed: int) -> None:
    check_that_it_is_torchs(size)
    generator = torch.Generator().manual_seed(seed)
    queries = (torch.randn(key_heads * shared, size, generator=generator) * magnitude).bfloat16()
    keys, values = (torch.randn(key_heads, length, size, generator=generator).bfloat16() for _ in range(2))
    outputs, _ = whole_attention.attend(queries, keys, values, 0.3)
    assert torch.equal(outputs, of_torch(queries, keys, values, 0.3))


@needs_it
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 3e38, 1e-39, -0.0])
@pytest.mark.parametrize("of", ["queries", "keys", "values"])
@pytest.mark.parametrize("length", [1, 5, 16, 40, 530])
def test_numbers_out_of_the_ordinary(number: float, of: str, length: int) -> None:
    check_that_it_is_torchs(64)
    generator = torch.Generator().manual_seed(length)
    given = {
        "queries": torch.randn(4, 64, generator=generator).bfloat16(),
        "keys": torch.randn(2, length, 64, generator=generator).bfloat16(),
        "values": torch.randn(2, length, 64, generator=generator).bfloat16(),
    }
    for places in (slice(0, 1), slice(0, 64)):
        given[of].view(-1)[places] = number
        outputs, _ = whole_attention.attend(**given, scale=0.125)
        assert torch.equal(outputs.nan_to_num(7.0), of_torch(**given, scale=0.125).nan_to_num(7.0))


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """With heads of a usual size, three of which share keys."""
    path: Path = tmp_path_factory.mktemp("wide")
    config = tiny_config("llama")
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim = 96, 6, 2, 64
    config.max_position_embeddings = 2048
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return load("llama", path, torch.bfloat16, "none")


@needs_it
@pytest.mark.parametrize("num_threads", [1, 3])
def test_lines_attend_so(num_threads: int, wide_llama: BlockSpan) -> None:
    with threads(num_threads):
        for rows, before in ((1, 3), (3, 30), (1, 505), (2, 1021)):
            pair = Pair(wide_llama, rows=rows)
            assert pair.packer.traces
            operations = pair.packer.forward.traced.line(wide_llama.span, torch.bfloat16).recorded.operations
            kinds = [one.kind for one in operations]
            check_that_it_is_torchs(64)
            assert kinds.count(Kind.ATTEND_AS_TORCH) == len(wide_llama.span)
            pair.check(before)
            for _ in range(14):
                pair.check(1)


@needs_it
@pytest.mark.parametrize("rows", [1, 3])
def test_the_models_own_code_attends_so(rows: int, wide_llama: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_it_is_torchs(64)
    results, shapes = [], []
    attend = whole_attention.attend_rows

    def counted(query: Tensor, keys: Tensor, *more: Any) -> Tensor:
        shapes.append((*query.shape[:3], keys.shape[2]))
        return attend(query, keys, *more)

    monkeypatch.setattr(whole_attention, "attend_rows", counted)
    for takes in (whole_attention.takes, lambda *_: False):
        monkeypatch.setattr(whole_attention, "takes", takes)
        cache = wide_llama.new_cache()
        steps = [random_inputs(wide_llama, length, rows) for length in (30, 1, 1, 5, 1)]
        results.append([wide_llama.forward(step, cache=cache) for step in steps])
    assert all(map(torch.equal, *results))
    assert shapes == [(rows, 6, 1, keys) for keys in (31, 32, 38) for _ in wide_llama.span]


def test_torch_attends_where_ours_has_other_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_attention, "is_exact", lambda *_: False)
    blocks = load("llama", tmp_path, torch.bfloat16, "none")
    pair = Pair(blocks)
    assert pair.packer.traces
    assert pair.packer.forward.traced.line(blocks.span, torch.bfloat16).attends_by_calls(1)
    pair.check(20)
    for _ in range(3):
        pair.check(1)


@needs_it
def test_another_attention_is_noticed() -> None:
    """As of a model that caps its scores, or scales them otherwise."""

    def scaled(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, keys, values, scale=0.2, enable_gqa=True).transpose(1, 2)

    check_that_it_is_torchs(64)
    assert whole_attention.is_exact(scaled, 2, 4, 64, 0.2)
    assert not whole_attention.is_exact(scaled, 2, 4, 64, 0.201)
    assert not whole_attention.is_exact(scaled, 1, 1, 64, 0.2), "torch's threads may compute parts of a single head"
    assert not whole_attention.is_exact(scaled, 2, 4, 72, 0.2), "not whole vectors"


@pytest.mark.parametrize("window", [40, 100])
@pytest.mark.parametrize(("quant_type", "dtype"), [("none", torch.bfloat16), ("int8", torch.float32)])
def test_a_cache_that_keeps_fewer_positions_than_masks_show(
    window: int, quant_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """transformers makes one for a config with a window that its model doesn't know."""
    config = tiny_config("llama")
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim = 96, 6, 2, 64
    config.sliding_window = window
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    pair = Pair(load("llama", tmp_path, dtype, quant_type))
    assert pair.packer.traces
    pair.step(window - 5)
    for _ in range(12):
        got, expected = pair.step(1)
        if quant_type == "none":
            assert torch.equal(got, expected)
        else:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
