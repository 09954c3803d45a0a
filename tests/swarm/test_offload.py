"""Servers with more blocks than memory: the same tokens and gradients, and what is asked for is done or refused."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, connected, generate_seeded, prompt
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.errors import SwarmError
from swarmllm.server.__main__ import parse_config

HALF = NUM_BLOCKS // 2


@pytest.fixture(scope="module")
def swarm(llama: Path) -> Iterator[LocalSwarm]:
    """All blocks of one server are offloaded, two of another, none of the third and of the fourth."""
    with LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], offload=NUM_BLOCKS, **OPTIONS) as swarm:
        swarm.add_server(block_indices=(HALF, NUM_BLOCKS), offload=2, **OPTIONS)
        yield swarm


def test_tokens_of_several_texts(llama: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    with connected(llama, swarm.initial_peers) as model:
        for rows, options in ((1, {}), (3, {"num_beams": 3}), (2, {"do_sample": True})):
            ids = prompt(rows, 9)
            expected = generate_seeded(local, ids, max_new_tokens=8, **options)
            assert generate_seeded(model, ids, max_new_tokens=8, **options).tolist() == expected.tolist()


def test_gradients_of_an_adapter(llama: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    ids = prompt(3, 12)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config)
        adapted(input_ids=ids, labels=ids).loss.backward()
        return {name: one.grad for name, one in adapted.named_parameters() if one.requires_grad}

    with connected(llama, swarm.initial_peers) as model:
        found = gradients(model)
    expected = gradients(local)
    assert len(found) == len(expected) > 0
    try:
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)
    finally:
        local.unload() if hasattr(local, "unload") else None
