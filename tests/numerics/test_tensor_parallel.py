"""Blocks that are spread over processes compute what they compute in one, up to the order of adding up."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.numerics.tiny_models import save_tiny
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import GroupLostError
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.parallel.exchange import Plain
from swarmllm.models.parallel.shared import Group, Place, spread
from swarmllm.models.quantization import Quantization
from swarmllm.models.quantization.loading import pack
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.trials import random_inputs, rms

CPU = torch.device("cpu")
SEQ = 12


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    group = Group([CPU, CPU])
    yield group
    group.close()


@pytest.fixture(scope="module")
def group_of_three() -> Iterator[Group]:
    group = Group([CPU] * 3)
    yield group
    group.close()


def one_and_several(
    directory: Path, group: Group, model_type: str = "llama", quant_type: str = "none", dtype: torch.dtype | None = None
) -> tuple[BlockSpan, BlockSpan]:
    """The same blocks in this process alone, and in all of the group."""
    save_tiny(model_type, directory)
    checkpoint, quantization = open_checkpoint(str(directory)), Quantization(quant_type, smallest=0)  # type: ignore[arg-type]
    one, several = (
        load_block_span(checkpoint, Span(0, 4), group=which, quantization=quantization, dtype=dtype, progress=False)
        for which in (None, group)
    )
    assert one.traits == several.traits
    assert one.is_quantized == several.is_quantized == (quant_type != "none")
    return one, several


@torch.inference_mode()
def results(blocks: BlockSpan) -> Iterator[Tensor]:
    """Outputs of all kinds of calls: whole prompts, steps, other rows, a shorter text, none, and a known page."""
    inputs = random_inputs(blocks, SEQ, batch_size=3)
    yield blocks.forward(inputs)
    yield blocks.forward(inputs, Span(1, 3))
    cache, position = blocks.new_cache(record_past=True), 0
    for end in (5, 6, 7):
        yield blocks.forward(inputs.columns(position, end, position, blocks.traits), cache=cache)
        position = end
    cache.select_batch([2, 0, 2])
    if blocks.traits.rollback:
        cache.rollback(5)
        yield blocks.forward(inputs.columns(5, 8, 5, blocks.traits), cache=cache)
        cache.rollback(0)
        yield blocks.forward(inputs.columns(0, 8, 0, blocks.traits), cache=cache)
    if cache.is_pageable:
        other = blocks.new_cache()
        other.append_page(cache.page(0, 4), skipped=1)
        yield blocks.forward(inputs.columns(4, 6, 3, blocks.traits), cache=other)
    inner = InnerStates(outputs=(1,), attentions=False)
    recorded = replace(inputs.columns(8, 9, 8, blocks.traits), inner=inner)  # for whole blocks only
    yield blocks.forward(recorded, cache=cache)
    yield inner.found[1]
    yield blocks.forward(inputs.columns(9, 10, 9, blocks.traits), cache=cache)


@torch.inference_mode()
def packed_results(blocks: BlockSpan, way: Packing) -> Iterator[Tensor]:
    """Outputs of steps of three sessions together."""
    packer, inputs = Packer(blocks, right_ways(blocks)), random_inputs(blocks, SEQ)
    caches = [blocks.new_cache() for _ in range(3)]
    for start, end in ((0, 3), (3, 4), (4, 5)):
        step = inputs.columns(start, end, start, blocks.traits)
        for output in packer.run_calls([SessionCall(step, blocks.span, cache) for cache in caches], way):
            assert isinstance(output, Tensor)
            yield output


def assert_close(got: Iterator[Tensor], wanted: Iterator[Tensor], tolerance: float = 1e-5) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert rms(one - other) <= tolerance * rms(other)


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", *(slow(name) for name in ("qwen3", "mixtral", "gpt_neox", "qwen3_next"))]
)
def test_pairs_of_many_kinds_of_blocks(model_type: str, tmp_path: Path, group: Group) -> None:
    one, two = one_and_several(tmp_path, group, model_type)
    assert two.is_together
    assert_close(results(two), results(one))
    for way in set(right_ways(one)) & {Packing.RAGGED, Packing.PADDED}:
        assert_close(packed_results(two, way), packed_results(one, way))


@pytest.mark.parametrize("model_type", ["phi3", slow("bloom"), slow("gpt2")])
def test_blocks_without_pairs_are_exact(model_type: str, tmp_path: Path, group: Group) -> None:
    """Their followers only multiply, and each output is the same sum as in one process."""
    one, two = one_and_several(tmp_path, group, model_type)
    assert not two.is_together
    for got, wanted in zip(results(two), results(one), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("quant_type", ["int8", "q4_k", *(slow(name) for name in ("nf4", "int4", "q3.5", "llm_int8"))])
def test_packed_weights_are_those_of_one_process(quant_type: str, tmp_path: Path, group: Group) -> None:
    one, two = one_and_several(tmp_path, group, quant_type=quant_type)
    assert two.is_together == (quant_type != "llm_int8")  # there, a scale is that of a whole input
    assert_close(results(two), results(one))


def test_bfloat16(tmp_path: Path, group: Group) -> None:
    one, two = one_and_several(tmp_path, group, dtype=torch.bfloat16)
    assert two.is_together
    assert_close(results(two), results(one), tolerance=2e-2)


def test_half_of_the_cache(tmp_path: Path, group: Group) -> None:
    one, two = one_and_several(tmp_path, group)
    caches = []
    for blocks in (one, two):
        caches.append(blocks.new_cache())
        blocks.forward(random_inputs(blocks, SEQ), cache=caches[-1])
    assert 2 * caches[1].num_bytes == caches[0].num_bytes
    (theirs,) = group.ask(caches[1], "key_heads")
    assert [own + other for own, other in zip(caches[1].key_heads(), theirs, strict=True)] == caches[0].key_heads()
    assert two.heads == dict.fromkeys(range(4), (1, 1))


def test_three_processes(tmp_path: Path, group_of_three: Group) -> None:
    """There are two key heads, so attention isn't cut; MLPs are."""
    one, three = one_and_several(tmp_path, group_of_three)
    assert three.is_together
    assert three.heads == {}
    assert_close(results(three), results(one))
    assert_close(packed_results(three, Packing.RAGGED), packed_results(one, Packing.RAGGED))


def test_steps_are_the_same_each_time(tmp_path: Path, group: Group) -> None:
    """Products are added up in the order of the processes, whoever is first."""
    _, two = one_and_several(tmp_path, group)
    first = list(results(two))
    for _ in range(3):
        assert all(map(torch.equal, results(two), first))


def test_a_step_that_fails_here_or_there(tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step finds all processes ready, and other sessions as they were."""
    one, two = one_and_several(tmp_path, group)
    prompt, token = random_inputs(one, 4), random_inputs(one, 1)
    wanted, got = one.new_cache(), two.new_cache()
    for blocks, cache in ((one, wanted), (two, got)):
        blocks.forward(prompt, cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(two.slots.block(2), "forward", _raise_memory_error)
        with pytest.raises(MemoryError):
            two.forward(prompt, cache=two.new_cache())
    broken = two.new_cache()
    two.forward(prompt, cache=broken)
    group.call(broken, "__setattr__", "layers", None)
    with pytest.raises(RuntimeError, match="follower 1: TypeError"):
        two.forward(token, cache=broken)
    assert two.forward(token, cache=got).allclose(one.forward(token, cache=wanted), atol=1e-5)


def _raise_memory_error(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("state", [{"stack": lambda: None}, {}])
def test_blocks_that_cannot_be_copied(
    state: dict[str, object], tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail before they are sent, or in the follower; it multiplies then."""
    monkeypatch.setattr(BlockSpan, "for_followers", lambda _: state)
    one, two = one_and_several(tmp_path, group)
    assert not two.is_together
    assert_close(results(two), results(one))


def test_gradients_of_pairs(tmp_path: Path, group: Group) -> None:
    grads = []
    for blocks in one_and_several(tmp_path, group):
        inputs = random_inputs(blocks, SEQ)
        hidden = inputs.hidden_states.clone().requires_grad_()
        (grad,) = torch.autograd.grad(blocks.forward(inputs.with_hidden(hidden)).square().sum(), hidden)
        grads.append(grad)
    assert grads[1].allclose(grads[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quant_type", ["int8", "nf4", "int4", "q3.5", "q8_0", "q4_k"])
def test_columns_of_packed_weights(quant_type: str) -> None:
    packed = pack(torch.randn(64, 512, dtype=torch.bfloat16), quant_type, CPU)  # type: ignore[arg-type]
    assert torch.equal(packed.columns(256, 512).dequantize(), packed.dequantize()[:, 256:])
    if quant_type != "int8":
        with pytest.raises(ValueError, match="whole groups"):
            packed.columns(16, 272)


def test_a_matrix_in_three_parts(group_of_three: Group) -> None:
    """Sizes that nothing divides, with a bias, and gradients; experts as well."""
    group = group_of_three
    weight, bias, inputs = torch.randn(50, 7), torch.randn(50), torch.randn(5, 7, requires_grad=True)
    matrix = spread(Plain(weight, torch.float32), bias, group)
    assert matrix.sizes == (16, 17, 17)
    outputs, expected = matrix.linear(inputs, bias), torch.nn.functional.linear(inputs, weight, bias)
    assert outputs.allclose(expected, atol=1e-6)
    grads = torch.randn(5, 50)
    (got,), (wanted,) = (torch.autograd.grad(one, inputs, grads) for one in (outputs, expected))
    assert got.allclose(wanted, atol=1e-5)
    assert torch.equal(matrix.dequantize(), weight)
    experts = spread(Plain(torch.stack([weight, -weight]), torch.float32), None, group)
    assert experts[-1].linear(inputs).allclose(-inputs @ weight.T, atol=1e-6)
    assert torch.equal(experts.dequantize()[1], -weight)
    by_columns = spread(Plain(weight, torch.float32), bias, group, Place((4, 1, 2), "columns"))
    outputs = by_columns.linear(inputs, bias)
    assert outputs.allclose(expected, atol=1e-5)
    (got,) = torch.autograd.grad(outputs, inputs, grads)
    assert got.allclose(wanted, atol=1e-5)
    assert torch.equal(by_columns.dequantize(), weight)


@torch.inference_mode()
def test_inputs_that_change_in_place_are_other_inputs(group: Group) -> None:
    """Products with the same inputs are asked for beforehand; wrong guesses make no difference."""
    first, second = torch.randn(64, 32), torch.randn(64, 32)
    matrices = [spread(Plain(weight, torch.float32), None, group) for weight in (first, second)]
    inputs = torch.randn(3, 32)
    for change in (False, False, True, False, True):
        for matrix, weight in zip(matrices, (first, second), strict=True):
            assert torch.equal(matrix.linear(inputs), inputs @ weight.T)
            if change:
                inputs.mul_(-2)


@pytest.mark.rotates(3)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_goes_ends_the_group(signum: int) -> None:
    group = Group([CPU, CPU], timeout_s=5.0)
    matrix, inputs = spread(Plain(torch.randn(64, 32), torch.float32), None, group), torch.randn(2, 32)
    matrix.linear(inputs)
    os.kill(group.process_ids[0], signum)
    for _ in range(2):
        with pytest.raises(GroupLostError, match="which has a part of this server's matrices"):
            matrix.linear(inputs + 1)
    assert not psutil.pid_exists(group.process_ids[0])
    group.close()
