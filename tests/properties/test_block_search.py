"""Weights in GGUF's blocks: the search is never worse than plain rounding, and finds again what came from blocks."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.block_search import MAKERS, quantize
from swarmllm.models.quantization.decoded import KINDS, dequantize
from swarmllm.models.quantization.loading import pack
from swarmllm.models.quantization.rules import QUANT_TYPES

KIND_IDS = sorted(MAKERS)
LLAMA_CPP = {6: 0.04277, 7: 0.03792, 8: 0.00534, 12: 0.07145, 13: 0.03606, 14: 0.01778}
"""Relative errors of llama.cpp's quantizer on `_normal()`, measured once (ggml-py 0.10.1, no importance matrix)."""
kinds, seeds = st.sampled_from(KIND_IDS), st.integers(0, 1 << 30)


class DividesAsOnCuda(TorchDispatchMode):
    """PyTorch on CUDA multiplies by the inverse of a divisor that isn't a tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.num_divisions = self.num_inexact = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor):
            self.num_divisions += 1
            if not isinstance(args[1], Tensor):
                self.num_inexact += abs(math.frexp(args[1])[0]) != 0.5  # not by a power of 2
                inverse = float(1 / torch.tensor(args[1], dtype=torch.float32))
                func = torch.ops.aten.mul_.Tensor if func is torch.ops.aten.div_.Tensor else torch.ops.aten.mul.Tensor
                args = args[0], inverse
        return func(*args, **(kwargs or {}))


def _by_torch(weight: Tensor, kind: int) -> Tensor:
    """What `quantize` makes without kernels."""
    return MAKERS[kind](weight.reshape(-1, KINDS[kind][1]), None).view(len(weight), -1)


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


@pytest.mark.parametrize("form", [name for name in QUANT_TYPES if name not in ("none", "nf4")])
def test_a_gpu_rounds_as_a_cpu(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on an H200: with divisions by numbers, some weights differed in all formats that are searched."""
    monkeypatch.setattr(kernels, "rounds", lambda kind: False)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 1024, generator=generator) * torch.rand(512, 1, generator=generator)
    weight = weight.bfloat16()  # more ties than in float32
    expected = pack(weight, form, torch.device("cpu")).tensors()
    with DividesAsOnCuda() as there:
        found = pack(weight, form, torch.device("cpu")).tensors()
    assert there.num_divisions > 0
    assert there.num_inexact == 0
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.skipif(kernels.library() is None, reason="there is no compiler here")
@pytest.mark.parametrize("level", [1, 3, 4])
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([8, 12, 13, 14]),
    rows=st.integers(1, 20),
    blocks=st.integers(1, 5),
    power=st.integers(-38, 17),
    shift=st.sampled_from([0.0, 0.3, -2.0]),
    seed=seeds,
    threads=st.integers(1, 3),
)
def test_the_kernels_round_as_torch_to_the_last_bit(
    level: int, kind: int, rows: int, blocks: int, power: int, shift: float, seed: int, threads: int
) -> None:
    """Or a server without a compiler would compute other tokens than the one that it takes the place of."""
    if level > kernels.level():
        pytest.skip("this processor has no such instructions")
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, 256 * blocks, generator=generator) + shift) * 10.0**power
    weight[0, :32], weight[rows // 2, ::37] = shift * 10.0**power, weight[0, 0] * 1000
    weight[-1, -256:] = 0.0
    weight = weight.clamp(-9e17, 9e17)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "level", lambda: level)
        patched.setattr(kernels, "WORTH_ROUNDING", 1)
        patched.setattr(torch, "get_num_threads", lambda: threads)
        assert torch.equal(quantize(weight, kind), _by_torch(weight, kind))


@pytest.mark.parametrize("kind", [8, 12, 13, 14])
@pytest.mark.parametrize("odd", [1e30, float("inf"), float("nan")])
def test_what_the_kernels_cannot_square_is_left_to_torch(kind: int, odd: float) -> None:
    weight = _normal()
    weight[5, 300] = odd
    assert torch.equal(quantize(weight, kind), _by_torch(weight, kind))


@given(kinds, st.integers(1, 40), seeds)
@settings(max_examples=30, deadline=None)
def test_a_block_is_rounded_alike_whatever_is_beside_it(kind: int, rows: int, seed: int) -> None:
    """Torch's own sums depend on shapes."""
    weight = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
    together = _by_torch(weight, kind)
    assert all(torch.equal(_by_torch(one[None], kind)[0], of) for one, of in zip(weight, together, strict=True))


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
