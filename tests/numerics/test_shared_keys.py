"""Few positions attend with query heads as rows of one matrix: as exactly, and only where servers need not be exact."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.tiny_models import save_tiny
from torch import Tensor
from torch.nn import functional

from swarmllm import embedded_model_path
from swarmllm.data_structures import Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import FULL_PRECISION, Quantization, kernels
from swarmllm.models.span import attention
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.trials import random_inputs

STEPS = (7, 1, 20, 1, 3, 1, 16, 17, 1)


def load(path: Path, dtype: torch.dtype, quant_type: str = "none") -> BlockSpan:
    checkpoint = open_checkpoint(str(path))
    quantization = FULL_PRECISION if quant_type == "none" else Quantization(quant_type)  # type: ignore[arg-type]
    span = Span(0, checkpoint.num_blocks)
    return load_block_span(checkpoint, span, dtype=dtype, quantization=quantization, progress=False)


@settings(max_examples=150)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 16), st.integers(1, 90),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["none", "bool", "float"]),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_outputs_are_as_exact(
    rows: int, key_heads: int, group: int, seq_len: int, past: int, dtype: torch.dtype, kind: str, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    seq_len = 1 if kind == "none" else seq_len

    def drawn(heads: int, length: int) -> Tensor:
        return torch.randn(rows, length, heads, 16, generator=random).to(dtype).transpose(1, 2)  # as models make them

    query, keys, values = (
        drawn(heads, length)
        for heads, length in ((key_heads * group, seq_len), (key_heads, past + seq_len), (key_heads, past + seq_len))
    )
    seen = torch.ones(seq_len, past + seq_len).tril(past).bool().expand(rows, 1, -1, -1).clone()
    seen[..., :-1] &= torch.rand(rows, 1, 1, past + seq_len - 1, generator=random) < 0.8  # padding
    seen[..., 0] = True  # somebody to attend to
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    mask = {"none": None, "bool": seen, "float": added}[kind]
    assert attention.is_for_few(query, mask, {}) or key_heads * group == 1
    output = attention.attend_few(query, keys, values, mask, 0.3)
    wanted = functional.scaled_dot_product_attention(
        query.double(),
        keys.double().repeat_interleave(group, 1),
        values.double().repeat_interleave(group, 1),
        attn_mask=None if mask is None else seen,
        scale=0.3,
    ).transpose(1, 2)
    assert output.shape == (rows, seq_len, key_heads * group, 16)
    assert (output - wanted).abs().max() <= 16 * torch.finfo(dtype).eps * wanted.abs().max().clamp_min(1)


@pytest.mark.parametrize(
    ("options", "takes"),
    [({"scaling": 0.1}, True), ({"softcap": 30.0}, False), ({"position_bias": 1}, False), ({"dropout": 0.1}, False)],
)
def test_models_with_rules_of_their_own_keep_them(options: dict[str, float], takes: bool) -> None:
    assert attention.is_for_few(torch.zeros(1, 4, 1, 8), None, options) == takes


def test_several_positions_without_a_mask_are_causal_and_not_taken() -> None:
    assert not attention.is_for_few(torch.zeros(1, 4, 2, 8), None, {})
    assert not attention.is_for_few(torch.zeros(1, 4, 17, 8), torch.ones(1, 1, 17, 30), {})


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gpt2", "gemma2"])
def test_a_session_in_half_precision(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(model_type, tmp_path)
    blocks = load(tmp_path, torch.bfloat16)
    inputs = [random_inputs(blocks, length, batch_size=2) for length in STEPS]
    shared: list[int] = []
    attend = attention.attend_few

    def counted(query: Tensor, *more: Tensor) -> Tensor:
        shared.append(query.shape[2])
        return attend(query, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attend_few", counted)
    outputs = {}
    for blocks.shares_keys in (False, True):
        cache = blocks.new_cache()
        outputs[blocks.shares_keys] = [blocks.forward(step, cache=cache) for step in inputs]
        assert bool(shared) == (blocks.shares_keys and model_type != "gemma2"), "gemma2's scores are capped"
    assert set(shared) <= {1, 3, 7, 16}
    for usual, other in zip(outputs[False], outputs[True], strict=True):
        assert (usual - other).abs().max() <= 16 * torch.finfo(torch.bfloat16).eps * usual.abs().max()


@pytest.mark.parametrize("quant_type", ["none", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_servers_promise_to_be_exact_nothing_changes(
    dtype: torch.dtype, quant_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "float32_speedup", lambda: 1.3)  # or weights in bfloat16 are multiplied in float32
    blocks = load(embedded_model_path(), dtype, quant_type)
    assert blocks.shares_keys == (dtype != torch.float32 and quant_type != "none")
    calls = []
    monkeypatch.setattr(attention, "attend_few", lambda *_: calls.append(1) or 1 / 0)
    cache = blocks.new_cache()
    try:
        for length in (5, 1):
            blocks.forward(random_inputs(blocks, length), cache=cache)
    except ZeroDivisionError:
        assert blocks.shares_keys
    assert bool(calls) == blocks.shares_keys


def test_a_failure_leaves_nothing_switched_on(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    blocks = load(tmp_path, torch.bfloat16)
    blocks.shares_keys = True
    cache = blocks.new_cache()
    with pytest.raises(RuntimeError):
        blocks.forward(random_inputs(blocks, 3).with_hidden(torch.zeros(1, 3, 5)), cache=cache)
    assert not attention._preference.few
