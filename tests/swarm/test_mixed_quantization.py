"""Servers that keep their weights in different ways work in one swarm, on one route, and take over from one another."""

from pathlib import Path

import pytest
import torch
from swarm_models import OPTIONS, assert_same_tokens, connected, load_local, prompt, save_llama
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.data_structures import Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import Quantization, QuantizedWeight
from swarmllm.models.quantization.decoded import KBit
from swarmllm.models.quantization.rules import BITS
from swarmllm.models.span.loading import load_block_span

PROMPT_TOKENS = 40


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.slow
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


@pytest.mark.rotates(6)
@pytest.mark.parametrize("quant_type", BITS)
def test_servers_of_few_bits_beside_one_of_8(quant_type: str, tmp_path: Path) -> None:
    """The tokens and gradients of the local model with the weights that the servers' codes stand for."""
    path = save_llama(tmp_path, num_blocks=4, hidden_size=192, intermediate_size=256)
    local, spans = load_local(path), {"int8": Span(0, 2), quant_type: Span(2, 4)}
    forms = set()
    for kind, span in spans.items():
        blocks = load_block_span(open_checkpoint(str(path)), span, quantization=Quantization(kind), progress=False)
        for block_idx in span:
            for name, module in blocks.slots.block(block_idx).named_modules():
                if isinstance(module, QuantizedWeight):
                    forms.add(type(module.packed))
                    local.get_parameter(f"model.layers.{block_idx}.{name}").data = module.dequantize()
    assert KBit in forms
    with LocalSwarm(path, spans=[(0, 2)], num_threads=1, quant_type="int8") as swarm:
        swarm.add_server((2, 4), num_threads=1, quant_type=quant_type)
        with connected(path, swarm.initial_peers) as model:
            assert {server.quant_type for server in model.swarm.servers()} == {"int8", quant_type}
            assert_same_tokens(model, local, prompt(1, 20), max_new_tokens=20)
            assert_same_tokens(model, local, prompt(3, 4), max_new_tokens=12, num_beams=2)
            ids, gradients = prompt(2, 12), []
            for one in (model, local):
                embeds = local.get_input_embeddings()(ids).detach().requires_grad_()
                one(inputs_embeds=embeds, labels=ids).loss.backward()
                gradients.append(embeds.grad)
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.rotates(4)
def test_a_server_that_rounds_activations_takes_over_from_its_like(tmp_path: Path) -> None:
    """The tokens are those of a session without a failure; the record says that they round, and forwards don't."""
    path = save_llama(tmp_path, num_blocks=4, hidden_size=192, intermediate_size=256)
    options = {"num_threads": 1, "quant_type": "int8", "activations": "int8"}
    ids = prompt(length=PROMPT_TOKENS)
    with LocalSwarm(path, spans=[(0, 4), (0, 4)], **options) as swarm, connected(path, swarm.initial_peers) as model:
        assert {server.activations for server in model.swarm.servers()} == {"int8"}
        expected = model.generate(ids, max_new_tokens=24, do_sample=False)
        with model.inference_session(max_length=128) as session:
            model.generate(ids, max_new_tokens=12, do_sample=False)
            (used,) = session.route
            next(server for server in swarm.servers if server.peer_id == used.server.peer_id).kill()
            found = model.generate(expected[:, : PROMPT_TOKENS + 12], max_new_tokens=12, do_sample=False)
            assert session.route[0].server.peer_id != used.server.peer_id
    assert torch.equal(found, expected)
