"""Servers that return plausible lies are caught by spot checks. `test_fault_matrix` has those that return NaN."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_server import Fault, program
from swarm_models import OPTIONS, connected, prompt
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer

SPANS = [(0, 2), (2, 4), (4, 6)]
MIDDLE = (2, 4)
PROMPT = prompt(length=12)
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def swarm(llama: Path) -> Iterator[LocalSwarm]:
    """Two honest servers for each span: somebody to compare with, and a third one to say who is right."""
    options = OPTIONS | {"program": program(Fault.MODEST)}
    with LocalSwarm(llama, spans=SPANS * 2, update_period=5, **options) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def liar(swarm: LocalSwarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server of the middle blocks that boasts of its speed, so that every route leads through it."""
    trigger = tmp_path_factory.mktemp("lie") / "trigger"
    trigger.touch()
    server = swarm.add_server(MIDDLE, program=program(Fault.LIE, trigger))
    yield server
    server.kill()


@contextmanager
def client(llama: Path, swarm: LocalSwarm, *others: LocalServer, **config: Any) -> Iterator[Any]:
    """A client that knows the honest servers and `others`, whom its routes go through."""
    allowed = [server.peer_id for server in (*swarm.servers[: 2 * len(SPANS)], *others)]
    with connected(llama, swarm.initial_peers, allowed_servers=allowed, **config) as model:
        for other in others:
            assert other.peer_id in {hop.server.peer_id for hop in model.swarm.route()}, "the test would prove nothing"
        yield model


def generate(model: Any) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False).tolist()
    return tokens


def logits(model: Any) -> Tensor:
    """Logits of a batch, as in training: without a cache, and with gradients."""
    embeds = model.get_input_embeddings()(prompt(batch=4, length=8)).detach().requires_grad_()
    values: Tensor = model(inputs_embeds=embeds, use_cache=False).logits
    return values.detach()


@pytest.mark.parametrize("work", [generate, logits])
@pytest.mark.rotates(3)
def test_a_liar_is_caught_and_nothing_wrong_comes_out(
    work: Callable[[Any], Any],
    llama: Path,
    local: PreTrainedModel,
    swarm: LocalSwarm,
    liar: LocalServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with client(llama, swarm, liar, verify_fraction=1.0) as model, caplog.at_level(logging.WARNING):
        torch.testing.assert_close(as_tensor(work(model)), as_tensor(work(local)), rtol=1e-4, atol=1e-5)
        assert model.swarm.health.quarantined == {liar.peer_id}
        assert model.swarm.counts["spot_checks"] > 1
        assert model.swarm.counts["spot_checks_failed"] == 1
        warnings = [record.getMessage() for record in caplog.records if "wrong hidden states" in record.getMessage()]
        assert len(warnings) == 1
        assert liar.peer_id in warnings[0]
        # It stays out, and the honest ones stay in.
        assert generate(model) == generate(local)
        assert model.swarm.counts["spot_checks_failed"] == 1
        assert liar.peer_id not in {hop.server.peer_id for hop in model.swarm.route()}


@pytest.mark.parametrize("work", [generate, logits])
@pytest.mark.rotates(3)
def test_without_checks_the_lie_passes(
    work: Callable[[Any], Any], llama: Path, local: PreTrainedModel, swarm: LocalSwarm, liar: LocalServer
) -> None:
    """A control: the test above can fail."""
    with client(llama, swarm, liar, verify_fraction=0.0) as model:
        assert not torch.equal(as_tensor(work(model)), as_tensor(work(local)))
        assert not model.swarm.health.quarantined
        assert not model.swarm.counts["spot_checks"]


def test_honest_servers_pass_every_check(llama: Path, local: PreTrainedModel, swarm: LocalSwarm) -> None:
    with client(llama, swarm, verify_fraction=1.0) as model:
        assert generate(model) == generate(local)
        assert model.swarm.counts["spot_checks"] >= NEW_TOKENS
        assert not model.swarm.counts["spot_checks_failed"]
        assert not model.swarm.health.quarantined


def as_tensor(values: Any) -> Tensor:
    return torch.as_tensor(values)
