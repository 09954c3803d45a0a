"""Batches whose hidden states and gradients go from server to server: the same numbers as by way of the client."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, connected, prompt
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.client.batches import hop_batches
from swarmllm.client.batches.hop_batches import ALONE, Neighbours, PushedBatches
from swarmllm.network.wire.messages import Predecessor, Target
from swarmllm.network.wire.stream import traffic

pytestmark = pytest.mark.rotates(3, whole_file=True)

WRONG_SECRET = "f" * 32
NOBODY = "12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"


@pytest.fixture(scope="module")
def swarm(llama: Path) -> Iterator[LocalSwarm]:
    """Three servers in a row."""
    with LocalSwarm(llama, spans=[(0, 3), (3, 5), (5, NUM_BLOCKS)], **OPTIONS) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    with connected(llama, swarm.initial_peers) as model:
        yield model


@pytest.fixture(scope="module")
def relaying(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    with connected(llama, swarm.initial_peers, push=False) as model:
        yield model


def gradients(model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, labels=ids, **inputs).loss
    loss.backward()
    return loss.detach(), embeds.grad


def num_pushed(model: Any) -> int:
    return int(model.remote_blocks.batches.pushed.num_pushed)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    result: Tensor = model(ids, use_cache=False, **inputs).logits
    return result


def assert_nobody_is_avoided(model: Any) -> None:
    assert not model.swarm.health.avoided(now=0.0)


def test_a_forward_takes_the_short_way(model: Any, relaying: Any) -> None:
    ids = prompt(4, 100)
    hidden_bytes = ids.numel() * 64 * 4
    expected, way, bytes_of = logits(relaying, ids), [], []
    for one in (relaying, model):
        logits(one, ids)  # opens connections
        sent, received = traffic.sent_bytes, traffic.received_bytes
        assert torch.equal(logits(one, ids), expected)
        bytes_of.append((traffic.sent_bytes - sent, traffic.received_bytes - received))
        way.append(num_pushed(one))
    assert way[0] == 0
    assert way[1] > 0
    relayed, pushed = bytes_of
    assert min(relayed) > 3 * hidden_bytes
    assert max(pushed) < 1.5 * hidden_bytes


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_those_of_relaying(model: Any, relaying: Any, local: PreTrainedModel, padded: bool) -> None:
    ids = prompt(6, 40)
    inputs = {}
    if padded:
        mask = torch.ones(6, 40, dtype=torch.int64)
        mask[0, :30] = 0
        inputs = {"attention_mask": mask}
    before = num_pushed(model)
    got, expected = gradients(model, ids, **inputs), gradients(relaying, ids, **inputs)
    assert num_pushed(model) > before
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(got, gradients(local, ids, **inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_every_boundary_goes_from_server_to_server(model: Any) -> None:
    """One micro-batch over three servers: two boundaries forward, two backward."""
    before = num_pushed(model)
    gradients(model, prompt(1, 12))
    assert num_pushed(model) - before == 4


def test_outputs_are_compressed_once_by_the_server_that_computed_them(llama: Path, swarm: LocalSwarm) -> None:
    found = []
    for push in (True, False):
        with connected(llama, swarm.initial_peers, compression="int8", push=push) as model:
            found.append((logits(model, prompt(4, 40)), *gradients(model, prompt(4, 40))))
            assert bool(num_pushed(model)) is push
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_spot_checks_are_for_what_was_relayed(llama: Path, swarm: LocalSwarm) -> None:
    with connected(llama, swarm.initial_peers, verify_fraction=0.01) as model:
        gradients(model, prompt(4, 40))
        assert num_pushed(model) == 0


@pytest.mark.parametrize(("unlinked", "left"), [((1,), 1), ((0, 1), 0)], ids=str)
@pytest.mark.parametrize("work", [logits, gradients])
def test_a_target_that_cannot_be_reached(
    llama: Path,
    swarm: LocalSwarm,
    relaying: Any,
    monkeypatch: pytest.MonkeyPatch,
    work: Any,
    unlinked: tuple[int, ...],
    left: int,
) -> None:
    """It is relayed, without blame, and the two aren't asked again."""
    wrong = {swarm.servers[number].peer_id for number in unlinked}
    nobody = Target(peer_id=NOBODY, addrs=("/ip4/127.0.0.1/tcp/1",), token="0" * 32)

    with connected(llama, swarm.initial_peers) as model:
        requests = model.remote_blocks.batches.requests
        send = requests.send

        async def to_nobody(kind: Any, hop: Any, *args: Any, neighbours: Neighbours = ALONE, **options: Any) -> Any:
            if hop.server.peer_id in wrong and neighbours.target is not None:
                neighbours = replace(neighbours, target=nobody)
            return await send(kind, hop, *args, neighbours=neighbours, **options)

        with monkeypatch.context() as patch:
            patch.setattr(requests, "send", to_nobody)
            for _ in unlinked:
                got, expected = work(model, prompt(1, 12)), work(relaying, prompt(1, 12))
                for one, other in zip(got, expected, strict=True):
                    assert torch.equal(one, other)
        before = num_pushed(model)
        logits(model, prompt(1, 12))
        assert num_pushed(model) - before == left, "a chain ends where the next server couldn't be reached last time"
        assert_nobody_is_avoided(model)
        assert not model.swarm.counts


@pytest.mark.parametrize("is_step_short", [True, False])
@pytest.mark.parametrize("work", [logits, gradients])
def test_a_push_that_never_comes(
    llama: Path, swarm: LocalSwarm, relaying: Any, monkeypatch: pytest.MonkeyPatch, work: Any, is_step_short: bool
) -> None:
    """The server says that it still waits, so nobody knows whose fault it is, and it is relayed. That isn't found out
    at the timeout of a step alone, in which a server may compute."""
    between, answer = hop_batches._with_neighbours, PushedBatches._answer

    def with_another_secret(*args: Any) -> Iterator[tuple[Any, Neighbours]]:
        for part, said in between(*args):
            source = None if said.source is None else Predecessor(peer_id=said.source.peer_id, token=WRONG_SECRET)
            yield part, replace(said, source=source if said.target is None else said.source)

    async def not_for_long(self: PushedBatches, link: Any, behind: Any) -> Any:
        """A push that never comes is waited for briefly; everything else as long as it takes on a busy machine."""
        config, source = self._view.config, link.neighbours.source
        if source is not None and source.token == WRONG_SECRET:
            if is_step_short:
                self._view.config = replace(config, step_timeout_s=0.5)
            else:
                monkeypatch.setattr(hop_batches, "ARRIVAL_S", 0.5)
        try:
            return await answer(self, link, behind)
        finally:
            self._view.config = config
            monkeypatch.setattr(hop_batches, "ARRIVAL_S", 1e3)

    monkeypatch.setattr(hop_batches, "_with_neighbours", with_another_secret)
    monkeypatch.setattr(PushedBatches, "_answer", not_for_long)
    with connected(llama, swarm.initial_peers) as model:
        for _ in range(2):
            got, expected = work(model, prompt(1, 12)), work(relaying, prompt(1, 12))
            for one, other in zip(got, expected, strict=True):
                assert torch.equal(one, other)
        assert_nobody_is_avoided(model)
        assert set(model.swarm.counts) == {"session_lost"}
