"""Servers of models with few positions: what is measured and tried at the start takes no more than there are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics import tiny_encoder_decoders, tiny_hearing_models
from tests.numerics.test_encoder_decoders import EXACT
from tests.selection import sampled
from tiny_models import tiny_config
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from swarmllm.data_structures import Span
from swarmllm.models.architecture import stacks
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.trials import random_inputs
from swarmllm.server.device import throughput
from swarmllm.server.device.throughput import measure_throughput

POSITIONS = (1, 2, 8, 16, 64, 128)
DECODERS = ("gpt2", "opt", "gptj", "gpt_neo", "mpt", "llama")
ENCODERS = ("bert", "roberta")
LENGTHS = {
    "max_position_embeddings": 96,
    "max_source_positions": 96,
    "max_encoder_position_embeddings": 96,
    "max_target_positions": 40,
    "max_decoder_position_embeddings": 40,
}


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


@pytest.fixture
def nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    for name in ("BUDGET_S", "PACKING_BUDGET_S", "CONTEXT_BUDGET_S"):
        monkeypatch.setattr(throughput, name, 1e9)


@pytest.mark.usefixtures("nothing_is_left_out")
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("model_type", sampled([*DECODERS, *ENCODERS], 3))
def test_a_server_starts(model_type: str, positions: int, tmp_path: Path) -> None:
    blocks = load(model_type, positions, tmp_path)
    assert blocks.max_positions == positions
    measured = measure_throughput(Packer(blocks, right_ways(blocks)))
    assert measured.forward_tokens_per_s > 0
    with torch.inference_mode():
        assert blocks.forward(random_inputs(blocks, positions)).isfinite().all()


@pytest.mark.usefixtures("nothing_is_left_out")
@pytest.mark.parametrize("name", sampled([*EXACT, "whisper"], 6))
def test_both_stacks_of_an_encoder_decoder(name: str, tmp_path: Path) -> None:
    """With fewer positions for what is written than for what is read, by whatever names, and one that no stack has."""
    tiny = tiny_hearing_models if name == "whisper" else tiny_encoder_decoders
    config: Any = tiny.tiny_config(name)
    for field, positions in LENGTHS.items():
        if getattr(config, field, None):
            setattr(config, field, positions)
    maker = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    maker.from_config(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    for stack in stacks(checkpoint.config):
        blocks = load_block_span(checkpoint, stack.span, dtype=torch.float32, progress=False)
        assert measure_throughput(Packer(blocks, right_ways(blocks))).forward_tokens_per_s > 0
