"""Order of clients at a server without room for all: clients that serve as well and those its owner names are first."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import (
    EVERYTHING,
    OPTIONS,
    assert_same_tokens,
    connected,
    generate_seeded,
    names,
    prompt,
    wait_until,
)
from transformers import PreTrainedModel

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.errors import ConfigurationError, ServerOverloadedError
from swarmllm.network.p2p.identity import Identity

pytestmark = pytest.mark.rotates(6, whole_file=True)


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    """The key of a server of somebody who is a client as well."""
    Identity.load_or_create(tmp_path / "server.key")
    return tmp_path / "server.key"


def gets_a_place(model: Any, stack: ExitStack | None = None) -> bool:
    """True if a session can be opened; with a `stack` it stays open."""
    with ExitStack() as attempt, torch.no_grad():
        session = attempt.enter_context(model.inference_session(max_length=32))
        try:
            session.step(model.embed(prompt()))
        except ServerOverloadedError:
            return False
        session.position = 0
        if stack is not None:
            stack.push(attempt.pop_all())
        return True


def test_a_serving_peer_gets_the_place_of_one_that_goes_on_elsewhere(
    llama: Path, local: PreTrainedModel, identity: Path, tmp_path: Path
) -> None:
    Identity.load_or_create(tmp_path / "unused.key")
    expected = generate_seeded(local, prompt(), max_new_tokens=16).tolist()
    with ExitStack() as stack:
        swarm = stack.enter_context(LocalSwarm(llama, [EVERYTHING], max_sessions=1, update_period=1, **OPTIONS))
        contested = swarm.servers[0].peer_id
        stranger = stack.enter_context(connected(llama, swarm.initial_peers, min_gain_to_move=1.0))
        session = stack.enter_context(stranger.inference_session(max_length=64))
        half = generate_seeded(stranger, prompt(), max_new_tokens=8)
        mine = swarm.add_server(EVERYTHING, identity_path=identity, max_sessions=64).peer_id

        def client(**options: Any) -> Any:
            options |= {"allowed_servers": (contested,), "max_retries": 1}
            return stack.enter_context(connected(llama, swarm.initial_peers, **options))

        another, liar = client(), client(contributor_identity=tmp_path / "unused.key")
        contributor = client(contributor_identity=identity)
        assert not gets_a_place(another)
        assert not gets_a_place(liar), "its server serves nothing"
        assert names(session.route) == [contested]
        wait_until(lambda: gets_a_place(contributor, stack), "a place for somebody whose server has been met")
        assert generate_seeded(stranger, half, max_new_tokens=8).tolist() == expected
        assert names(session.route) == [mine]
        assert_same_tokens(contributor, local, prompt(), max_new_tokens=4)
        assert not gets_a_place(another), "nobody gives way to a stranger"


def test_peers_that_the_owner_names_come_first(llama: Path, tmp_path: Path) -> None:
    named = Identity.load_or_create(tmp_path / "client.key").peer_id
    with (
        LocalSwarm(llama, spans=[EVERYTHING] * 2, max_sessions=1, priority_clients=named, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers, max_retries=1) as stranger,
        connected(llama, swarm.initial_peers, max_retries=1, identity_path=tmp_path / "client.key") as friend,
        friend.inference_session(max_length=32) as first,
        torch.no_grad(),
    ):
        first.step(friend.embed(prompt()))
        with stranger.inference_session(max_length=32) as theirs:
            theirs.step(stranger.embed(prompt()))
            assert names(theirs.route) != names(first.route)
            with friend.inference_session(max_length=32) as second:
                second.step(friend.embed(prompt()))
                assert names(second.route) == names(theirs.route)


@pytest.mark.parametrize("kind", ["contributor", "strangers alone"])
def test_everybody_gets_the_same_tokens_and_gradients_as_alone(
    llama: Path, local: PreTrainedModel, identity: Path, kind: str
) -> None:
    """Several who decode, bring long prompts and train, at once, of whom one may come first."""
    ids = [prompt(length=9 + 40 * number, seed=number) for number in range(3)]
    texts = [generate_seeded(local, one, max_new_tokens=24).tolist() for one in ids]
    gradient = gradient_of(local, prompt(batch=4))
    with LocalSwarm(llama, spans=[EVERYTHING], update_period=1, **OPTIONS) as swarm:
        contested: LocalServer = swarm.servers[0]
        swarm.add_server((0, 1), identity_path=identity)
        proof = {"contributor_identity": identity} if kind == "contributor" else {}

        def use(number: int) -> None:
            options: dict[str, Any] = proof if number == 0 else {}
            with connected(llama, swarm.initial_peers, allowed_servers=(contested.peer_id,), **options) as model:
                for turn in range(3):
                    which = (number + turn) % 4
                    if which == 3:
                        torch.testing.assert_close(gradient_of(model, prompt(batch=4)), gradient, rtol=1e-4, atol=1e-5)
                    else:
                        assert model.generate(ids[which], max_new_tokens=24, do_sample=False).tolist() == texts[which]

        with ThreadPoolExecutor(5) as threads:
            for done in [threads.submit(use, number) for number in range(5)]:
                done.result()


def gradient_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Gradients of the loss, by the embeddings."""
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds, labels=ids).loss.backward()
    assert embeds.grad is not None
    return embeds.grad


def test_an_identity_that_is_not_there_is_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.key can't be read"):
        AutoDistributedModel.from_pretrained(
            str(llama), client_config=ClientConfig(contributor_identity=str(tmp_path / "none.key"))
        )
