"""Servers die in the midst of everything, and tokens and gradients are those of an undisturbed run.

"Within" a request means: the server has been frozen, the client's request is under way, then the server is killed.
`test_fault_matrix` has each fault, crashes and frozen servers too, in each kind of work and at each place of the route;
`test_repairs` has any layout and any deaths, in process.
"""

import copy
import logging
import os
import signal
from collections.abc import Callable
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
)
from swarm_models import OPTIONS, connected, generate_seeded, prompt
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm

pytestmark = pytest.mark.rotates(3)


def places(*quick: str) -> pytest.MarkDecorator:
    """Each place of the route; all but those of `quick` only with the slow tests."""
    marks = {place: () if place in quick else (pytest.mark.slow,) for place in PLACES}
    return pytest.mark.parametrize("place", [pytest.param(place, marks=marks[place]) for place in PLACES])


NUM_TOKENS = 16
IN_8_OR_16_BITS = [("float16", "none"), ("bfloat16", "auto"), ("bfloat16", "nf4")]
"""Ways to keep weights and to round their inputs (dtype, quant_type)."""


def requests_of(session: Any) -> Callable[[], object]:
    """True if steps of this session are under way."""
    return lambda: session.num_under_way


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


@pytest.mark.parametrize(
    ("dtype", "quant_type"),
    [("bfloat16", "none"), *(pytest.param(*kind, marks=pytest.mark.slow) for kind in IN_8_OR_16_BITS)],
)
def test_death_where_long_calls_round_otherwise(llama: Any, dtype: str, quant_type: str) -> None:
    """The replacement computes the steps of the text as the lost server did, so all outputs stay the same."""
    parts = prompt(1, 160).split([100, *[1] * 20, 4, 4, 4, *[1] * 28], dim=1)
    outputs: list[list[Tensor]] = []
    with (
        LocalSwarm(llama, spans=[(0, 6), (0, 6)], **OPTIONS | {"dtype": dtype, "quant_type": quant_type}) as swarm,
        connected(llama, swarm.initial_peers, min_gain_to_move=1) as model,
        torch.no_grad(),
    ):
        for dies in (False, True):
            with model.inference_session(max_length=200) as session:
                outputs.append([])
                for number, part in enumerate(parts):
                    if dies and number == 40:
                        next(one for one in swarm.servers if one.peer_id == session.route[0].server.peer_id).kill()
                    outputs[-1].append(session.step(model.embed(part)))
                assert session.num_repairs == dies
    differing = [number for number, pair in enumerate(zip(*outputs, strict=True)) if not torch.equal(*pair)]
    assert not differing


def test_death_with_compressed_hidden_states(llama: Any, swarm: Faulty, local: PreTrainedModel, doom: Doom) -> None:
    """A replay sends the hidden states that were seen: rounded to 8 bits, once."""
    living = [server.peer_id for server in swarm.living]
    with connected(llama, swarm.initial_peers, allowed_servers=living, compression="int8") as model:
        ids = prompt(1, 200)
        with torch.no_grad(), model.inference_session(max_length=300) as session:
            undisturbed = [session.step(model.embed(part)) for part in ids.split((150, 1, 49), dim=1)]
        with torch.no_grad(), model.inference_session(max_length=300) as session:
            session.step(model.embed(ids[:, :150]))
            doom(swarm.on_route(session.route, "middle"), requests_of(session))
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
