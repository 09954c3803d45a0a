"""Fused steps are compared with the model's own code at load: with the kernels' work done in torch, without Triton."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.numerics.sessions_together import RELATIVE, PagedSessions, some_inputs
from tests.numerics.test_launches import Launches, launches
from tests.numerics.test_paged import paged
from torch import Tensor
from torch.nn import functional

from swarmllm.data_structures import Span
from swarmllm.models.span import page_pool
from swarmllm.models.span.packing import Packer, Packing, SessionCall
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


STEPS = ((200, 0), (0, 70), (5, 0), (0, 33), (17, 90), (1, 1), (130, 0))
"""New positions of a session of one row and one of three: prompts alone, longer than a page, in parts, together."""


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_prompts_are_fused_alone_and_together(model_type: str, tmp_path: Path, kernels: Any) -> None:
    from swarmllm.models.span.fused_step import find_fused

    sessions = PagedSessions(paged(model_type, tmp_path), rows=(1, 3))
    forward = sessions.packer.forward
    step = forward.fused = find_fused(forward.paged)
    assert step is not None
    sizes: list[int] = []
    forward.fused = lambda hidden, *rest: (sizes.append(hidden.shape[1]), step(hidden, *rest))[1]
    assert max(sessions.step(lengths) for lengths in STEPS) <= RELATIVE
    assert sizes == [200, 210, 5, 99, 17 + 3 * 90, 4, 130]


def test_what_is_not_usual_is_not_fused(tmp_path: Path, kernels: Any) -> None:
    """A session through some of the blocks, with its own mask, or with an adapter."""
    from swarmllm.models.span.fused_step import find_fused

    blocks = paged("llama", tmp_path)
    packer = Packer(blocks, [Packing.PAGED])
    packer.forward.fused = find_fused(packer.forward.paged)
    random = torch.Generator().manual_seed(1)
    given = some_inputs(blocks, 2, 40, random)
    call = SessionCall(given, blocks.span, blocks.new_cache())
    assert packer.forward.may_be_fused([call])
    part = Span(0, 1)
    assert not packer.forward.may_be_fused([replace(call, span=part, cache=blocks.new_cache(part))])
    adapter: Any = SimpleNamespace(name="", num_prompts=0)
    assert not packer.forward.may_be_fused([replace(call, inputs=replace(given, adapter=adapter))])
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :7] = 0
    padded = replace(given, attention_mask=mask)
    (output,) = packer.run_calls([replace(call, inputs=padded)])
    expected = blocks.forward(padded, cache=blocks.new_cache())
    assert isinstance(output, Tensor)
    torch.testing.assert_close(output[mask == 1], expected[mask == 1])


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
