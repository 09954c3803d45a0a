"""Blocks whose matrices are spread over processes: what they compute is what they compute in one."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tests.numerics.tiny_models import save_tiny

from swarmllm.data_structures import Span
from swarmllm.errors import GroupLostError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.parallel.exchange import Plain
from swarmllm.models.parallel.shared import Group, spread
from swarmllm.models.quantization import Quantization
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.trials import random_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    group = Group([CPU, CPU])
    yield group
    group.close()


@pytest.mark.parametrize("quant_type", ["int8", "nf4", "int4", "q3.5"])
def test_packed_rows_are_those_of_one_process(quant_type: str, tmp_path: Path, group: Group) -> None:
    save_tiny("llama", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    options = {"quantization": Quantization(quant_type, smallest=0), "progress": False}  # type: ignore[arg-type]
    one, two = (load_block_span(checkpoint, Span(0, 4), group=which, **options) for which in (None, group))
    assert one.traits == two.traits
    assert one.is_quantized == two.is_quantized is True
    for seq_len in (1, 40):
        inputs = random_inputs(one, seq_len)
        assert torch.equal(one.forward(inputs), two.forward(inputs))


def test_a_matrix_in_three_parts() -> None:
    """Sizes that nothing divides, with a bias, and gradients; experts as well."""
    group = Group([CPU] * 3)
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
    group.close()


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
