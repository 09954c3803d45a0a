"""Hidden states and gradients of 8 bits through real servers: near the exact ones, and the same each time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, assert_same_tokens, connected, generate_seeded, prompt
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.network.wire.liveness import LinkRate
from swarmllm.network.wire.stream import traffic

pytestmark = pytest.mark.rotates(6, whole_file=True)

BATCH = (8, 128)


@pytest.fixture(scope="module")
def packed(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """A client that wants 8 bits everywhere."""
    with connected(llama, swarm.initial_peers, compression="int8") as model:
        yield model


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def sent_bytes(model: Any, ids: Tensor) -> int:
    """The bytes that a forward batch sends."""
    before = traffic.sent_bytes
    with torch.no_grad():
        model(ids, use_cache=False)
    return traffic.sent_bytes - before


def test_logits_and_bytes_of_a_batch(packed: Any, model: Any, local: PreTrainedModel) -> None:
    ids = prompt(*BATCH)
    with torch.no_grad():
        expected = local(ids, use_cache=False).logits
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        assert 0 < relative_error(packed(ids, use_cache=False).logits, expected) < 0.03
    assert sent_bytes(packed, ids) < 0.35 * sent_bytes(model, ids)  # float32 in 8 bits, sent to each of two servers


@pytest.mark.parametrize(("num_tokens", "num_sessions"), [(192, 1), (200, 3)], ids=["whole pages", "rests"])
def test_generation_is_the_same_each_time_and_by_whatever_way(
    num_tokens: int, num_sessions: int, llama: Path, swarm: LocalSwarm, packed: Any
) -> None:
    """Relaying rounded tensors keeps their numbers, so results are the same with and without pushes.

    A prompt that goes in whole pages has the same numbers the first time. Else servers that have its pages compute the
    rests of chunks alone from the second time on, with other last bits. Where these depend on the number of tokens (as
    on Zen 2), the second server gets them only then, and keeps new pages, so all is the same from the third time on.
    """
    ids = prompt(1, num_tokens)
    for _ in range(num_sessions):
        with torch.no_grad(), packed.inference_session(max_length=250) as session:
            pushed = session.step(packed.embed(ids))
    with (
        connected(llama, swarm.initial_peers, compression="int8", push=False) as relaying,
        torch.no_grad(),
        relaying.inference_session(max_length=250) as session,
    ):
        relayed = session.step(relaying.embed(ids))
        expected = generate_seeded(relaying, ids, max_new_tokens=12)
    assert torch.equal(pushed, relayed)
    for _ in range(2):
        assert generate_seeded(packed, ids, max_new_tokens=12).tolist() == expected.tolist()


def embedding_gradient(model: Any, ids: Tensor) -> Tensor:
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds, labels=ids).loss.backward()
    return embeds.grad


def test_gradients_are_near_the_exact_ones(packed: Any, local: PreTrainedModel) -> None:
    error = relative_error(embedding_gradient(packed, prompt(4, 30)), embedding_gradient(local, prompt(4, 30)))
    assert 0 < error < 0.05


def test_training_learns_as_much(packed: Any, local: PreTrainedModel) -> None:
    ids = prompt(2, 12)

    def learn(model: Any) -> list[float]:
        """Losses while soft prompts are trained."""
        prompts = torch.zeros(1, 4, 64, requires_grad=True)
        optimizer = torch.optim.SGD([prompts], lr=0.5)
        losses = []
        for _ in range(6):
            embeds = torch.cat([prompts.expand(2, -1, -1), model.get_input_embeddings()(ids).detach()], dim=1)
            labels = torch.cat([torch.full((2, 4), -100), ids], dim=1)
            loss = model(inputs_embeds=embeds, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    losses, expected = learn(packed), learn(local)
    learnt = expected[0] - expected[-1]
    assert learnt > 0
    assert losses[0] - losses[-1] == pytest.approx(learnt, rel=0.1)


def test_auto_compresses_large_messages_over_slow_links_alone(
    llama: Path, swarm: LocalSwarm, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinkRate, "mbps", property(lambda self: 20.0))  # as this side sees its links
    with connected(llama, swarm.initial_peers, prefill_chunk_tokens=1024) as model:
        assert_same_tokens(model, local, prompt(1, 200), max_new_tokens=4)
        with torch.no_grad(), model.inference_session(max_length=1024) as session:
            before = traffic.sent_bytes
            session.step(model.embed(prompt(1, 1024)))  # 256 KiB
        assert traffic.sent_bytes - before < 0.35 * 1024 * 64 * 4


@pytest.mark.slow
def test_servers_may_want_it_and_clients_may_not(llama: Path, local: PreTrainedModel) -> None:
    ids = prompt(2, 20)
    with LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], compression="int8", **OPTIONS) as swarm, torch.no_grad():
        expected = local(ids, use_cache=False).logits
        with connected(llama, swarm.initial_peers) as model:
            assert 0 < relative_error(model(ids, use_cache=False).logits, expected) < 0.03
        with connected(llama, swarm.initial_peers, compression="none") as model:
            assert torch.equal(model(ids, use_cache=False).logits, expected)
            assert_same_tokens(model, local, ids, max_new_tokens=4)
