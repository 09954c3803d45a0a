"""Blocks on a GPU compute what they compute on the CPU, by themselves and packed with others. Skipped without CUDA."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.client.local_blocks import LocalSpan
from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import Quantization
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packed_forward import SessionCall
from swarmllm.models.span.packing import Packer
from swarmllm.models.span.packing_probe import right_ways

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")

CONFIG = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8)
SPAN = Span(0, 4)
LENGTHS = (5, 17, 40)
TOLERANCE = {"none": 2e-2, "int8": 6e-2, "nf4": 2e-1}
"""Relative error of bf16, and of weights rounded to 8 and 4 bits, through four blocks. Assumed: not yet measured."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(path)
    return path


def load(
    directory: Path, device: str, dtype: torch.dtype, quant_type: str = "none", num_offloaded: int = 0
) -> BlockSpan:
    return load_block_span(
        open_checkpoint(str(directory)),
        SPAN,
        dtype=dtype,
        device=device,
        quantization=Quantization(quant_type, smallest=0),
        progress=False,
        num_offloaded=num_offloaded,
    )


def inputs(seq_len: int, dtype: torch.dtype, device: str, seed: int = 0) -> BlockInputs:
    hidden = torch.randn(1, seq_len, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))
    return BlockInputs(hidden_states=hidden.to(device, dtype), batch_size=1, seq_len=seq_len)


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.float().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("quant_type", list(TOLERANCE))
def test_as_on_the_cpu(directory: Path, quant_type: str) -> None:
    exact = load(directory, "cpu", torch.float32)
    blocks = load(directory, "cuda", torch.bfloat16, quant_type)
    expected = exact.forward(inputs(12, torch.float32, "cpu"))
    with torch.inference_mode():
        found = blocks.forward(inputs(12, torch.bfloat16, "cuda"))
    assert found.device.type == "cuda"
    assert relative_error(found, expected) < TOLERANCE[quant_type]


@pytest.mark.parametrize("quant_type", list(TOLERANCE))
def test_gradients_as_on_the_cpu(directory: Path, quant_type: str) -> None:
    gradients = []
    for device, dtype, kind in (("cpu", torch.float32, "none"), ("cuda", torch.bfloat16, quant_type)):
        given = inputs(12, dtype, device)
        given.hidden_states.requires_grad_(True)
        load(directory, device, dtype, kind).forward(given).float().square().sum().backward()
        assert given.hidden_states.grad is not None
        gradients.append(given.hidden_states.grad.float().cpu())
    assert relative_error(gradients[1], gradients[0]) < 2 * TOLERANCE[quant_type]


@pytest.mark.parametrize("num_offloaded", [2, 4])
@pytest.mark.parametrize("quant_type", list(TOLERANCE))
def test_offloaded_blocks_are_those_that_stay(directory: Path, quant_type: str, num_offloaded: int) -> None:
    """Steps one right after the other, and a backward after forwards that have used the same slots."""
    outcomes = []
    for number in (0, num_offloaded):
        blocks = load(directory, "cuda", torch.bfloat16, quant_type, number)
        given = inputs(12, torch.bfloat16, "cuda")
        given.hidden_states.requires_grad_(True)
        output = blocks.forward(given)
        with torch.inference_mode():
            cache = blocks.new_cache()
            steps = [blocks.forward(inputs(1, torch.bfloat16, "cuda", seed), cache=cache) for seed in range(20)]
        output.float().square().sum().backward()
        assert given.hidden_states.grad is not None
        outcomes.append(torch.cat([output.detach(), given.hidden_states.grad, *steps], dim=1).cpu())
    assert torch.equal(*outcomes)


def test_packed_steps_are_those_of_each_session_alone(directory: Path) -> None:
    blocks = load(directory, "cuda", torch.float32)
    alone, caches = [], []
    with torch.inference_mode():
        for seed, length in enumerate(LENGTHS):
            cache, other = blocks.new_cache(), blocks.new_cache()
            for each in (cache, other):
                blocks.forward(inputs(length, torch.float32, "cuda", seed), SPAN, each)
            alone.append(blocks.forward(inputs(1, torch.float32, "cuda", 10 + seed), SPAN, other))
            caches.append(cache)
    calls = [SessionCall(inputs(1, torch.float32, "cuda", 10 + seed), SPAN, cache) for seed, cache in enumerate(caches)]
    for expected, found in zip(alone, Packer(blocks, right_ways(blocks)).run(calls), strict=True):
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_blocks_of_a_client_follow_its_model(directory: Path) -> None:
    """Moved to the GPU when they have been used on the CPU; what comes and goes stays where it was."""
    here = LocalSpan(load(directory, "cpu", torch.float32))
    given = inputs(12, torch.float32, "cpu")
    expected = here.forward(given)
    nn.ModuleList(here.modules().values()).to("cuda")
    for cache in (None, here.new_cache(record_past=False)):
        found = here.forward(given, cache=cache)
        assert found.device.type == "cpu"
        assert relative_error(found, expected) < TOLERANCE["none"]
    moved = here.forward(inputs(12, torch.float32, "cuda"))
    assert moved.device.type == "cuda"
    assert relative_error(moved, expected) < TOLERANCE["none"]
