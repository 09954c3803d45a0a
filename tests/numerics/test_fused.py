"""Fused steps are compared with the model's own code at load: with the kernels' work done in torch, without Triton."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.test_launches import Launches, launches
from tests.numerics.test_paged import paged
from torch import Tensor
from torch.nn import functional

from swarmllm.models.span import page_pool
from swarmllm.models.span.page_pool import Placed, write_in_torch
from swarmllm.models.span.paged_attention import PagedAttention

__all__ = ["launches"]


def normalize(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(inputs, weight.shape, weight, eps)


def rotate(states: Any, cos_sin: Any, norms: Any, pages: Any, places: Any) -> Tensor:
    keys, values, tables = pages
    query, key, value = (one.view(len(one), -1, keys.shape[-1]) for one in states)
    if norms is not None:
        query, key = (normalize(one, weight, norms[2]) for one, weight in zip((query, key), norms, strict=False))
    cos, sin = (one[:, None] for one in cos_sin)
    turned = [one * cos + torch.cat([-one.chunk(2, -1)[1], one.chunk(2, -1)[0]], -1) * sin for one in (query, key)]
    placed = Placed(*places, num_short=len(query))
    write_in_torch(keys, values, tables, placed, turned[1].transpose(0, 1)[None], value.transpose(0, 1)[None])
    return turned[0]


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    return functional.silu(gates) * ups


def multiply(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Any = None, residual: Any = None,
    gated: bool = False,
) -> Tensor:  # fmt: skip
    output = functional.linear(inputs if norm is None else normalize(inputs, *norm), weight, bias)
    if gated:
        output = gate(*output.chunk(2, -1))
    return output if residual is None else residual + output


@pytest.fixture
def kernels(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of kernels, whose work torch does."""
    from swarmllm.models.span import fused_kernels

    monkeypatch.setattr(page_pool, "_interprets", False)
    for function in (normalize, rotate, gate, multiply):
        monkeypatch.setattr(fused_kernels, function.__name__, function)
    return fused_kernels


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_right_kernels_are_used(model_type: str, tmp_path: Path, kernels: Any) -> None:
    from swarmllm.models.span.fused_step import find_fused

    blocks = paged(model_type, tmp_path)
    step = find_fused(PagedAttention(blocks))
    assert step is not None
    assert all(block.is_joined for block in step.fused.values())


@pytest.mark.parametrize("name", ["normalize", "rotate", "gate", "multiply"])
def test_each_kernel_that_is_wrong_is_found(
    name: str, tmp_path: Path, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`multiply` is for single positions with joined weights."""
    from swarmllm.models.span.fused_step import find_fused

    right = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *given, **options: right(*given, **options) * 1.01)
    assert find_fused(PagedAttention(paged("llama", tmp_path))) is None


def test_other_norms_are_another_kind_of_block(tmp_path: Path, kernels: Any, caplog: pytest.LogCaptureFixture) -> None:
    from swarmllm.models.span.fused_step import find_fused

    assert find_fused(PagedAttention(paged("gemma", tmp_path))) is None
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
