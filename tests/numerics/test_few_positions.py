"""A server that starts measures no more positions than its model has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.server_properties import never_out_of_time
from tests.selection import sampled
from tiny_models import tiny_config
from transformers import AutoModel, AutoModelForCausalLM

from swarmllm.data_structures import Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.trials import random_inputs
from swarmllm.server.device.throughput import measure_throughput

POSITIONS = (1, 2, 8, 16, 64, 128)
DECODERS = ("gpt2", "opt", "gptj", "gpt_neo", "mpt", "llama")
ENCODERS = ("bert", "roberta")


def load(model_type: str, positions: int, directory: Path) -> BlockSpan:
    config: Any = tiny_config(model_type)
    padded = 0
    if model_type == "roberta":  # its positions begin behind the one for padding
        padded = config.pad_token_id + 1
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if hasattr(config, name):
            setattr(config, name, positions + padded)
    maker = AutoModel if model_type in ENCODERS else AutoModelForCausalLM
    maker.from_config(config).save_pretrained(directory)
    checkpoint = open_checkpoint(str(directory))
    return load_block_span(checkpoint, Span(0, checkpoint.num_blocks), dtype=torch.float32, progress=False)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("model_type", sampled([*DECODERS, *ENCODERS], 3))
def test_a_server_starts(model_type: str, positions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_out_of_time(monkeypatch)
    blocks = load(model_type, positions, tmp_path)
    assert blocks.max_positions == positions
    measured = measure_throughput(Packer(blocks, right_ways(blocks)))
    assert measured.forward_tokens_per_s > 0
    with torch.inference_mode():
        assert blocks.forward(random_inputs(blocks, positions)).isfinite().all()
