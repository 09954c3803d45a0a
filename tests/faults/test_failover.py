"""Servers die in the midst of everything, and tokens and gradients are those of an undisturbed run.

"Within" a request means: the server has been frozen, the client's request is under way, then the server is killed.
`test_fault_matrix` has each fault, crashes and frozen servers too, in each kind of work and at each place of the route.
"""

import copy
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from fault_tools import (
    PLACES,
    TIMEOUT_S,
    Doom,
    Faulty,
    assert_all_close,
    at_token,
    freeze,
    gradients,
    wait_until,
)
from swarm_models import connected, generate_seeded, prompt
from transformers import PreTrainedModel

from swarmllm.errors import MissingBlocksError

pytestmark = pytest.mark.rotates(3)


def places(*quick: str) -> pytest.MarkDecorator:
    """Each place of the route; all but those of `quick` only with the slow tests."""
    marks = {place: () if place in quick else (pytest.mark.slow,) for place in PLACES}
    return pytest.mark.parametrize("place", [pytest.param(place, marks=marks[place]) for place in PLACES])


NUM_TOKENS = 16


def requests_of(session: Any) -> Callable[[], object]:
    """True if steps of this session are under way."""
    return lambda: session.chains[0]._in_flight


def warm_up(model: Any, session: Any) -> None:
    """Open the session's caches, and leave them empty."""
    session.step(model.embed(prompt(1, 1)))
    session.position = 0


@places("middle")
def test_death_within_the_prefill(model: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom, place: str) -> None:
    ids = prompt(1, 400)
    expected = generate_seeded(local, ids, max_new_tokens=NUM_TOKENS)
    with model.inference_session(max_length=500) as session:
        warm_up(model, session)
        doom(swarm.on_route(session.route, place), requests_of(session))
        generated = generate_seeded(model, ids, max_new_tokens=NUM_TOKENS)
        assert 1 <= session.num_repairs <= 2  # the dead server's neighbour may notice before the client does

    assert generated.tolist() == expected.tolist()


@places()
def test_death_between_two_decode_steps(model: Any, swarm: Faulty, local: PreTrainedModel, place: str) -> None:
    expected = generate_seeded(local, prompt(), max_new_tokens=NUM_TOKENS)
    with model.inference_session(max_length=100) as session:
        others = set()

        def strike() -> None:
            victim = swarm.on_route(session.route, place)
            others.update(hop.server.peer_id for hop in session.route if hop.server.peer_id != victim.peer_id)
            victim.kill()

        generated = generate_seeded(model, prompt(), max_new_tokens=NUM_TOKENS, logits_processor=at_token(6, strike))
        assert others < {hop.server.peer_id for hop in session.route}, "the others must keep their caches"

    assert generated.tolist() == expected.tolist()


@places()
def test_death_while_a_session_is_rolled_back(
    model: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom, place: str
) -> None:
    ids = prompt(1, 12)
    with torch.no_grad(), model.inference_session(max_length=100) as session:
        session.step(model.embed(prompt(1, 5, seed=1)))
        session.position = 0
        for start in range(0, 12, 3):
            session.step(model.embed(ids[:, start : start + 3]))
        session.position = 7
        doom(swarm.on_route(session.route, place), requests_of(session))
        logits = model.head(session.step(model.embed(ids[:, 7:9])))
        assert session.position == 9

    torch.testing.assert_close(logits, local(ids[:, :9]).logits[:, 7:])


@places("middle", "last")
@pytest.mark.parametrize("push", [True, False])
def test_death_after_masks_that_contradict_each_other(
    llama: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom, place: str, push: bool
) -> None:
    """Padding is hidden, then not, then something else is: what each step has seen is what its replay sees."""
    ids = prompt(2, 200)
    masks = [torch.ones_like(ids[:, :end]) for end in (150, 151, 160, 200)]
    masks[0][0, :40] = masks[2][1, 10:20] = masks[3][1, 10:20] = 0
    parts = list(zip(ids.split((150, 1, 9, 40), dim=1), [masks[0], None, *masks[2:]], strict=True))
    cache, expected = None, []
    with torch.no_grad():
        for part, mask in parts:
            output = local(part, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache, expected = output.past_key_values, [*expected, output.logits]
    living = [server.peer_id for server in swarm.living]
    with connected(llama, swarm.initial_peers, allowed_servers=living, push=push) as model, torch.no_grad():
        output = model(parts[0][0], attention_mask=masks[0])
        cache, got = output.past_key_values, [output.logits]
        for number, (part, mask) in enumerate(parts[1:]):
            if number == 2:
                doom(swarm.on_route(cache.session.route, place), requests_of(cache.session))
            got.append(model(part, attention_mask=mask, past_key_values=cache).logits)
        assert 1 <= cache.session.num_repairs <= 2
        cache.close()

    # The first is computed as a batch, of which padding comes back as zeros, until somebody goes on with its cache.
    shown = masks[0][..., None].bool()
    got[0], expected[0] = got[0] * shown, expected[0] * shown
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@places("middle")
def test_death_with_compressed_hidden_states(
    llama: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom, place: str
) -> None:
    """A replay sends the hidden states that were seen: rounded to 8 bits, once."""
    living = [server.peer_id for server in swarm.living]
    with connected(llama, swarm.initial_peers, allowed_servers=living, compression="int8") as model:
        ids = prompt(1, 200)
        with torch.no_grad(), model.inference_session(max_length=300) as session:
            undisturbed = [session.step(model.embed(part)) for part in ids.split((150, 1, 49), dim=1)]
        with torch.no_grad(), model.inference_session(max_length=300) as session:
            session.step(model.embed(ids[:, :150]))
            doom(swarm.on_route(session.route, place), requests_of(session))
            after = [session.step(model.embed(part)) for part in ids[:, 150:].split((1, 49), dim=1)]
            assert 1 <= session.num_repairs <= 2
        exact = local.model(ids).last_hidden_state[:, 150:]

    for got, expected in zip(after, undisturbed[1:], strict=True):
        torch.testing.assert_close(got, expected)
    assert not torch.equal(model.head(torch.cat(after, dim=1)), local.lm_head(exact))


@places("first", "middle")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_death_behind_a_prefix(
    model: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement's cache begins with the prefix, too."""
    import peft

    def tuned(of: Any) -> Any:
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return peft.get_peft_model(of, config)

    sessions: list[Any] = []
    new_session = model.remote_blocks.new_cache_session

    def noted(*args: Any) -> Any:
        sessions.append(new_session(*args))
        return sessions[-1]

    def strike() -> None:
        (session,) = (session for session in sessions if session.route)
        doom(swarm.on_route(session.route, place), requests_of(session))

    monkeypatch.setattr(model.remote_blocks, "new_cache_session", noted)
    options = {"input_ids": prompt(), "max_new_tokens": NUM_TOKENS, "do_sample": False}
    expected = tuned(copy.deepcopy(local)).generate(**options).tolist()
    adapted = tuned(model)
    assert adapted.generate(**options, logits_processor=at_token(6, strike)).tolist() == expected
    assert 1 <= max(session.num_repairs for session in sessions) <= 2
    assert expected != generate_seeded(local, prompt(), max_new_tokens=NUM_TOKENS).tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
@pytest.mark.parametrize("method", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_training_gives_the_same_losses_while_servers_die(
    model: Any, swarm: Faulty, local: PreTrainedModel, method: str
) -> None:
    import peft

    def losses(of: Any, before_step: Callable[[int], object]) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            config = getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=4)
            tuned = peft.get_peft_model(of.requires_grad_(False), config)
        optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.5)
        found = []
        for step in range(7):
            before_step(step)
            loss = tuned(input_ids=prompt(4, 20), labels=prompt(4, 20)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def strike(step: int) -> None:
        if step in (2, 4, 6):
            swarm.on_route(model.swarm.route(), list(PLACES)[step // 2 - 1]).kill()

    got = losses(model, strike)
    assert got[-1] < got[0]
    assert got == pytest.approx(losses(copy.deepcopy(local), lambda _: None), rel=1e-5)


def test_two_deaths_at_once(model: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom) -> None:
    expected = generate_seeded(local, prompt(), max_new_tokens=NUM_TOKENS)
    with model.inference_session(max_length=100) as session:

        def strike() -> None:
            for place in ("first", "last"):
                doom(swarm.on_route(session.route, place), requests_of(session))

        generated = generate_seeded(model, prompt(), max_new_tokens=NUM_TOKENS, logits_processor=at_token(6, strike))

    assert generated.tolist() == expected.tolist()


def test_death_of_the_replacement_during_the_replay(
    llama: Any, model: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom
) -> None:
    """The first server dies, its twin takes over and dies while its cache is being rebuilt, then a third one comes."""
    expected = generate_seeded(local, prompt(), max_new_tokens=NUM_TOKENS)
    with model.inference_session(max_length=100) as session:
        chain: Any = session.chains[0]
        replay = chain._replay
        doomed, added = [], []

        async def replay_and_doom(before: Any, run: list[Any]) -> None:
            if not doomed:
                doomed.append(twin := swarm.server(run[0].peer_id))
                doom(twin, requests_of(session))
            await replay(before, run)

        def strike() -> None:
            victim = swarm.on_route(session.route, "first")
            added.append(third := swarm.add(victim.span))
            look_ups = model.swarm.look_ups
            look_ups.config = replace(look_ups.config, allowed_servers=None)
            wait_until(lambda: third.peer_id in [s.peer_id for s in model.swarm.servers()], "the announcement")
            chain._replay = replay_and_doom
            victim.kill()

        generated = generate_seeded(model, prompt(), max_new_tokens=NUM_TOKENS, logits_processor=at_token(6, strike))
        assert len(doomed) == 1
        assert chain.num_repairs >= 2
    added[0].kill()

    assert generated.tolist() == expected.tolist()


def test_a_server_whose_daemon_dies_exits_and_its_clients_go_on(
    model: Any, swarm: Faulty, local: PreTrainedModel
) -> None:
    expected = generate_seeded(local, prompt(), max_new_tokens=NUM_TOKENS)
    victims = []
    with model.inference_session(max_length=100) as session:

        def strike() -> None:
            victims.append(victim := swarm.on_route(session.route, "middle"))
            (daemon,) = (c for c in psutil.Process(victim.pid).children() if c.name() == "p2pd")
            os.kill(daemon.pid, signal.SIGKILL)

        generated = generate_seeded(model, prompt(), max_new_tokens=NUM_TOKENS, logits_processor=at_token(6, strike))

    assert generated.tolist() == expected.tolist()
    assert victims[0].process.wait(TIMEOUT_S) == 1
    assert "p2pd" in victims[0].log_path.read_text().splitlines()[-1]
    victims[0].kill()


def test_when_nobody_is_left_the_error_names_the_blocks(llama: Any, swarm: Faulty) -> None:
    servers = {s.span: s.peer_id for s in swarm.living}
    with connected(
        llama, swarm.initial_peers, allowed_servers=list(servers.values()), max_retries=3, route_timeout_s=3
    ) as model:
        with model.inference_session(max_length=100) as session:
            session.step(model.embed(prompt()))
            swarm.on_route(session.route, "middle").kill()
            with pytest.raises(MissingBlocksError, match="blocks 2:4") as caught:
                session.step(model.embed(prompt(1, 1)))
            assert caught.value.block_idxs == (2, 3)
        with pytest.raises(MissingBlocksError, match="blocks 2:4"):
            model(prompt(), labels=prompt())


def test_a_session_waits_once_for_blocks_that_nobody_serves(llama: Any, swarm: Faulty) -> None:
    """`route_timeout_s`, and not once more for each retry."""
    usable = list({s.span: s.peer_id for s in swarm.living}.values())
    with (
        connected(llama, swarm.initial_peers, allowed_servers=usable, max_retries=3, route_timeout_s=1) as model,
        model.inference_session(max_length=100) as session,
    ):
        session.step(model.embed(prompt()))
        swarm.on_route(session.route, "middle").stop()  # it takes its record along
        with pytest.raises(MissingBlocksError, match="blocks 2:4"):
            session.step(model.embed(prompt(1, 1)))
        assert model.swarm.counts["missing_blocks"] == 1


@pytest.mark.parametrize("strikes_at", ["forward", "backward"])
def test_when_nobody_is_left_training_names_the_blocks(llama: Any, swarm: Faulty, strikes_at: str) -> None:
    """The record of the dead is still there, and it is tried again once: "can't be reached" is not the whole truth."""
    servers = {s.span: s.peer_id for s in swarm.living}
    usable = list(servers.values())
    with connected(llama, swarm.initial_peers, allowed_servers=usable, max_retries=1, route_timeout_s=1) as model:
        gradients(model, prompt(8, 40))
        victim = swarm.on_route(model.swarm.route(), "middle")
        if strikes_at == "forward":
            victim.kill()
            with pytest.raises(MissingBlocksError, match="blocks 2:4") as caught:
                gradients(model, prompt(8, 40))
        else:
            loss = model(inputs_embeds=model.embed(prompt(8, 40)).requires_grad_(), labels=prompt(8, 40)).loss
            victim.kill()
            with pytest.raises(MissingBlocksError, match="blocks 2:4") as caught:
                loss.backward()
        assert caught.value.block_idxs == (2, 3)
        assert victim.peer_id in model.swarm.health.blamed(now=0.0)


@pytest.mark.parametrize("strikes_at", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_training_does_not_ask_a_frozen_server_for_each_micro_batch(
    model: Any,
    swarm: Faulty,
    local: PreTrainedModel,
    strikes_at: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its silence is seen by all of them at once; then they go to its twin, and the log says so once."""
    ids = prompt(12, 120)
    gradients(model, ids)
    victim = swarm.on_route(model.swarm.route(), "middle")
    dialled: list[str] = []
    open_connection = model.swarm.open_connection

    def noted(server: Any, *args: Any) -> Any:
        dialled.append(server.peer_id)
        return open_connection(server, *args)

    monkeypatch.setattr(model.swarm, "open_connection", noted)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    with caplog.at_level(logging.INFO, "swarmllm.client"):
        if strikes_at == "forward":
            freeze(victim)
        loss = model(inputs_embeds=embeds, labels=ids).loss
        if strikes_at == "backward":
            freeze(victim)
        loss.backward()
    victim.kill()
    assert_all_close((loss.detach(), embeds.grad), gradients(local, ids))
    assert dialled.count(victim.peer_id) <= 1
    told = [record.getMessage() for record in caplog.records if victim.peer_id in record.getMessage()]
    assert len(told) == len(set(told)) <= 2, "once that it is silent, once that nobody can pass on to it"
