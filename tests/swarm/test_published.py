"""Servers of checkpoints in published formats: the tokens and gradients of the same weights stored as ever."""

import sys
from pathlib import Path

import pytest
import torch
from swarm_models import OPTIONS, assert_same_tokens, load_local, prompt

from swarmllm import AutoDistributedModel, LocalSwarm

sys.path.append(str(Path(__file__).parents[1] / "numerics"))
from published_checkpoints import NUM_BLOCKS, save_published

KINDS = ("fp8", "mxfp4", "int4", "modelopt_nvfp4", "awq", "gptq", "nf4", "hqq", "ao_int8", "gguf_q4_k")
"""One of each format; `test_published_checkpoints` has the blocks of all their kinds."""


@pytest.mark.rotates(10)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_gradients(kind: str, tmp_path: Path) -> None:
    published, plain = save_published(kind, tmp_path)
    local = load_local(plain)
    with (
        LocalSwarm(published, spans=[(0, 2), (2, NUM_BLOCKS)], dtype="float32", **OPTIONS) as swarm,
        AutoDistributedModel.from_pretrained(
            str(published), initial_peers=swarm.initial_peers, dtype="float32"
        ) as model,
    ):
        assert_same_tokens(model, local, prompt(1, 20), max_new_tokens=20)
        assert_same_tokens(model, local, prompt(3, 4), max_new_tokens=12, num_beams=2)
        ids = prompt(2, 12)
        gradients = []
        for one in (model, local):
            embeds = local.get_input_embeddings()(ids).detach().requires_grad_()
            one(inputs_embeds=embeds, labels=ids).loss.backward()
            gradients.append(embeds.grad)
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
