"""The client takes the nearest servers, and a running session moves when a better one joins. Distances are emulated."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from delay_proxies import DelayProxies
from swarm_models import NUM_BLOCKS, OPTIONS, connected, generate_seeded, names, prompt, wait_until
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError

pytestmark = pytest.mark.rotates(3)

HALF = NUM_BLOCKS // 2
FAR_MS, MIDDLE_MS, NEAR_MS = 80.0, 40.0, 10.0
"""One way. The nearest server joins last."""


@pytest.fixture(scope="module")
def proxies() -> Iterator[DelayProxies]:
    with DelayProxies() as proxies:
        yield proxies


@pytest.fixture(scope="module")
def far_swarm(llama: Path, proxies: DelayProxies) -> Iterator[LocalSwarm]:
    """All blocks far away; of the second half, another server is less so."""
    with LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], **OPTIONS, **proxies.in_front_of_new_server(FAR_MS)) as swarm:
        swarm.add_server((0, HALF), **proxies.in_front_of_new_server(MIDDLE_MS))
        swarm.add_server((HALF, NUM_BLOCKS), **proxies.in_front_of_new_server(MIDDLE_MS))
        yield swarm


@pytest.fixture(scope="module")
def client(llama: Path, far_swarm: LocalSwarm) -> Iterator[Any]:
    with connected(llama, far_swarm.initial_peers, ping_period_s=0.2, update_period_s=0.2, speculation="off") as model:
        yield model


def test_the_nearest_servers_are_taken_and_better_ones_moved_to(
    client: Any, local: PreTrainedModel, far_swarm: LocalSwarm, proxies: DelayProxies
) -> None:
    first_half, second_half = far_swarm.servers[1:3]
    wait_until(lambda: names(client.swarm.route()) == [first_half.peer_id, second_half.peer_id], "pings of all servers")
    route = client.swarm.route()
    assert "network" in str(route)
    assert f"{route.expected_ms:.1f} ms per token" in str(route)
    assert "this machine alone would take about" in str(route), "no network is nearer than none"

    ids = prompt()
    expected = generate_seeded(local, ids, max_new_tokens=240)
    with torch.no_grad(), client.inference_session(max_length=256) as session:
        generated, feed = ids, ids

        def step() -> None:
            nonlocal generated, feed
            hidden = session.step(client.embed(feed))
            feed = client.head(hidden)[:, -1].argmax(-1, keepdim=True)
            generated = torch.cat([generated, feed], dim=1)

        def moved_to(*peer_ids: str) -> bool:
            step()
            return names(session.route) == [*peer_ids]

        # On a busy machine a ping may take long just when the session opens; then it moves.
        wait_until(lambda: moved_to(first_half.peer_id, second_half.peer_id), "a session on the nearest servers")

        near = far_swarm.add_server((0, NUM_BLOCKS), **proxies.in_front_of_new_server(NEAR_MS))
        try:
            wait_until(lambda: moved_to(near.peer_id), "a move to the server that joined")
            step()
            assert session.num_repairs == 0
            assert client.swarm.counts["moves"] >= 1
            assert names(client.swarm.route()) == [near.peer_id]
        finally:
            near.stop()
    assert generated.tolist() == expected[:, : generated.shape[1]].tolist()


def test_a_batch_is_split_over_routes_and_fits_into_small_servers(llama: Path, local: PreTrainedModel) -> None:
    """The second server takes only 16 tokens at once, and no server takes what the other one does."""
    with LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], **OPTIONS, throughput=100) as swarm:
        swarm.add_server((0, NUM_BLOCKS), max_batch_tokens=16, throughput=100)
        with connected(llama, swarm.initial_peers) as model:
            ids = prompt(batch=8, length=8)
            embedded = model.embed(ids).detach().requires_grad_()
            routes = model.swarm.loop.run_coroutine(model.swarm.routes.parallel(model.remote_blocks.span, 64, 4))
            assert [share for _, share in routes] == pytest.approx([0.5, 0.5])

            output = model.remote_blocks(embedded)
            output.square().sum().backward()
            swarm.servers[0].kill()  # what was split for the large one must be split again
            again = model.remote_blocks(embedded.detach())

    reference = embedded.detach().clone().requires_grad_()
    positions = torch.arange(8)[None]
    hidden, turn = reference, local.model.rotary_emb(reference, positions)
    mask = torch.full((8, 8), float("-inf")).triu(1)[None, None]
    for block in local.model.layers:
        hidden = block(hidden, attention_mask=mask, position_embeddings=turn)
    hidden.square().sum().backward()
    torch.testing.assert_close(output, hidden)
    torch.testing.assert_close(again, hidden)
    torch.testing.assert_close(embedded.grad, reference.grad)


@pytest.mark.parametrize("push", [True, False])
def test_routes_of_a_batch_share_a_fast_server(llama: Path, local: PreTrainedModel, push: bool) -> None:
    """It keeps three slow ones busy; with any of them the outputs and gradients are those of the local model."""
    half = NUM_BLOCKS // 2
    with LocalSwarm(llama, spans=[(0, half)], **OPTIONS, throughput=300) as swarm:
        slow = [swarm.add_server((half, NUM_BLOCKS), throughput=100) for _ in range(3)]
        with connected(llama, swarm.initial_peers, push=push) as model:
            routes = model.swarm.loop.run_coroutine(model.swarm.routes.parallel(model.remote_blocks.span, 64, 4))
            assert [share for _, share in routes] == pytest.approx([1 / 3] * 3)
            assert {route[-1].server.peer_id for route, _ in routes} == {server.peer_id for server in slow}
            for batch, killed in ((7, False), (7, True), (2, False)):
                ids = prompt(batch=batch, length=8)
                if killed:
                    slow[0].kill()
                found, expected = (one.get_input_embeddings()(ids).detach().requires_grad_() for one in (model, local))
                for one, embeddings in ((model, found), (local, expected)):
                    logits = one(inputs_embeds=embeddings).logits
                    logits.square().sum().backward()
                torch.testing.assert_close(found.grad, expected.grad)


def test_hidden_states_of_a_wrong_width_are_refused_here(client: Any) -> None:
    wrong = torch.zeros(1, 2, 65)
    with pytest.raises(ConfigurationError, match="64 wide"):
        client.remote_blocks(wrong)
    with client.inference_session() as session, pytest.raises(ConfigurationError, match="64 wide"):
        session.step(wrong)


def test_explaining_a_route_leaves_the_random_state_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be sampling, and would draw again what it has drawn if the state were put back."""

    def forbidden(**_: Any) -> Any:
        raise AssertionError("the random state is saved")

    monkeypatch.setattr(torch.random, "fork_rng", forbidden)
    assert model.swarm.route().expected_ms > 0
