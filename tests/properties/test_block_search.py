"""Weights in GGUF's blocks: the search is never worse than plain rounding, and finds again what came from blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmllm.models.quantization.block_search import MAKERS, quantize
from swarmllm.models.quantization.decoded import KINDS, dequantize

KIND_IDS = sorted(MAKERS)
LLAMA_CPP = {6: 0.04277, 7: 0.03792, 8: 0.00534, 12: 0.07145, 13: 0.03606, 14: 0.01778}
"""Relative errors of llama.cpp's quantizer on `_normal()`, measured once (ggml-py 0.10.1, no importance matrix)."""
kinds, seeds = st.sampled_from(KIND_IDS), st.integers(0, 1 << 30)


def _normal() -> Tensor:
    return torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)) * 0.02


def _error(found: Tensor, weight: Tensor) -> float:
    return float((found - weight).norm() / weight.norm())


def _again(weight: Tensor, kind: int) -> Tensor:
    return dequantize(kind, quantize(weight, kind))


@pytest.mark.parametrize("kind", KIND_IDS, ids=[KINDS[kind][0] for kind in KIND_IDS])
def test_errors_are_below_those_of_llama_cpp(kind: int) -> None:
    assert _error(_again(_normal(), kind), _normal()) < LLAMA_CPP[kind]


@settings(max_examples=40, deadline=None)
@given(kinds, st.integers(-2, 2), st.sampled_from([0.0, 0.3, -2.0]), seeds)
def test_no_group_is_off_by_more_than_its_range_allows(kind: int, power: int, shift: float, seed: int) -> None:
    """Of any spread around any middle, within what float16 holds of a scale; some groups are all one number, or 0."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(6, 512, generator=generator) + shift) * 10.0**power
    weight[0, :32], weight[1, :256], weight[2] = shift, 0.0, 0.0
    found = _again(weight, kind)
    assert found.isfinite().all()
    codes = {6: 31, 7: 31, 8: 254, 12: 15, 13: 31, 14: 63}[kind]
    # The root mean square of a block: single weights may be cut off at the ends of the range.
    blocks, wrong = weight.view(-1, KINDS[kind][1]), (found - weight).view(-1, KINDS[kind][1])
    spread = 2 * blocks.abs().amax(1)
    assert (wrong.square().mean(1).sqrt() <= spread / codes / 2 + 1e-30).all()


@given(kinds, seeds)
@settings(max_examples=30, deadline=None)
def test_zeros_stay_zeros_and_experts_are_packed_like_matrices(kind: int, seed: int) -> None:
    weight = torch.randn(2, 512, 24, generator=torch.Generator().manual_seed(seed)).mT.bfloat16()
    together = quantize(weight, kind)
    assert torch.equal(together, torch.stack([quantize(one.contiguous(), kind) for one in weight]))
    assert not _again(torch.zeros(3, 512), kind).any()


@pytest.mark.parametrize("kind", KIND_IDS, ids=[KINDS[kind][0] for kind in KIND_IDS])
def test_weights_that_come_from_such_blocks_are_found_again(kind: int) -> None:
    """But for what the rounded scales of two searches differ by."""
    once = _again(_normal(), kind)
    lost = _error(_again(once, kind), once)
    assert lost < 0.1 * _error(once, _normal())


@pytest.mark.parametrize("kind", KIND_IDS, ids=[KINDS[kind][0] for kind in KIND_IDS])
def test_columns_that_count_more_have_smaller_errors(kind: int) -> None:
    weight, importance = _normal(), torch.rand(1024, generator=torch.Generator().manual_seed(1)).square() * 4
    importance[::50] = 100.0
    wrong = [
        float(((dequantize(kind, quantize(weight, kind, one)) - weight).square() * importance).sum())
        for one in (None, importance)
    ]
    assert wrong[1] < 0.75 * wrong[0]
    assert torch.equal(quantize(weight, kind, torch.full((1024,), 3.0)), quantize(weight, kind))
    assert torch.equal(quantize(weight, kind, torch.zeros(1024)), quantize(weight, kind))  # no inputs have been seen


def test_each_expert_has_its_own_importance() -> None:
    weight = _normal().view(2, 64, 1024)
    importance = torch.rand(2, 1024, generator=torch.Generator().manual_seed(1))
    for kind in KIND_IDS:
        apart = [quantize(one, kind, counts) for one, counts in zip(weight, importance, strict=True)]
        assert torch.equal(quantize(weight, kind, importance), torch.stack(apart))


@pytest.mark.parametrize(("kind", "limit"), [(7, 0.01), (13, 0.02)], ids=["Q5_1", "Q5_K"])
@pytest.mark.parametrize("before", [6, 12], ids=["Q5_0", "Q4_K"])
def test_steps_of_fewer_bits_are_found_again(before: int, kind: int, limit: float) -> None:
    """Many checkpoints in 16 bits were in fewer bits before. Rounding never rounded weights gives 0.034."""
    once = _again(_normal(), before)
    assert _error(_again(once, kind), once) < limit


def test_a_weight_beyond_float16_is_no_infinity() -> None:
    for kind in KIND_IDS:
        assert _again(torch.full((1, 256), 1e30), kind).isfinite().all()
