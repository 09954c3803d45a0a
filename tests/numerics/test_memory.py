"""Loading half of a model takes half of its memory, at the end and at the peak."""

from pathlib import Path

import pytest
import torch
from tests.numerics.loading_memory import OVERHEAD_BYTES, PRODUCT_BYTES, measure
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.models.quantization import whole as whole_weights

CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16
)
SHARD_BYTES = 60_000_000
NUM_SHAPES = 3
"""Of the weights of a block."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("memory")
    tiny = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(tiny).save_pretrained(root / "tiny")
    model = LlamaForCausalLM(CONFIG)
    model.save_pretrained(root / "large", max_shard_size=SHARD_BYTES)
    return root / "large", root / "tiny"


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_half_of_a_model(directories: tuple[Path, Path], dtype: torch.dtype) -> None:
    large, tiny = directories
    whole = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert whole > 300_000_000
    used = measure(large, tiny, dtype, "none", num_blocks=4)
    assert used.blocks == pytest.approx(whole * dtype.itemsize / 4 / 2, rel=0.1)
    num_products = NUM_SHAPES * whole_weights.MOST_INPUTS * len(whole_weights.likely_threads())
    overhead = OVERHEAD_BYTES + (num_products * PRODUCT_BYTES if dtype == torch.bfloat16 else 0)
    assert used.end <= used.blocks + overhead
    assert used.peak <= used.blocks + SHARD_BYTES + overhead


@pytest.mark.rotates(3)
@pytest.mark.parametrize("num_offloaded", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_offloaded_blocks_are_not_in_memory(directories: tuple[Path, Path], num_offloaded: int) -> None:
    """Neither at the end nor while they are loaded."""
    large, tiny = directories
    one = sum(file.stat().st_size for file in large.glob("*.safetensors")) / CONFIG.num_hidden_layers
    used = measure(large, tiny, torch.float32, "none", num_blocks=8, num_offloaded=num_offloaded)
    in_memory = {2: 7, 8: 2}[num_offloaded]
    assert used.blocks == pytest.approx(in_memory * one, rel=0.1)
    assert used.end <= used.blocks + OVERHEAD_BYTES
    assert used.peak <= used.blocks + one + SHARD_BYTES + OVERHEAD_BYTES
