"""Servers that keep their weights in different ways work in one swarm, on one route, and take over from one another."""

import pytest
import torch
from swarm_models import OPTIONS, connected
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmllm import LocalSwarm, embedded_model_path

pytestmark = pytest.mark.slow
PROMPT_TOKENS = 40


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def test_int8_and_exact_servers_share_a_route() -> None:
    path = embedded_model_path()
    local = AutoModelForCausalLM.from_pretrained(path, dtype="auto").requires_grad_(False)
    num_blocks = local.config.num_hidden_layers
    middle = num_blocks // 2
    ids = torch.randint(10, 1000, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))

    def gradient(model: torch.nn.Module) -> Tensor:
        embeds = local.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embeds, labels=ids).loss.backward()
        return embeds.grad

    with (
        LocalSwarm(path, spans=[(0, middle)], update_period=2, **OPTIONS) as swarm,
        torch.no_grad(),
    ):
        quantized = swarm.add_server((middle, num_blocks), quant_type="int8")
        with connected(path, swarm.initial_peers) as model:
            exact = local(ids, use_cache=False).logits
            first = model(ids, use_cache=False).logits
            assert 0 < relative_error(first, exact) < 0.05
            assert sorted(server.quant_type for server in model.swarm.servers()) == ["int8", "none"]
            with torch.enable_grad():
                assert 0 < relative_error(gradient(model), gradient(local)) < 0.1

            swarm.add_server((middle, num_blocks))
            with model.inference_session(max_length=2 * PROMPT_TOKENS) as session:
                half = PROMPT_TOKENS // 2
                session.step(model.embed(ids[:, :half]))
                quantized.kill()
                logits = model.head(session.step(model.embed(ids[:, half:])))
                assert {hop.server.quant_type for hop in session.route} == {"none"}
            assert relative_error(logits, exact[:, half:]) < 0.01  # the new server's cache was rebuilt, exactly
