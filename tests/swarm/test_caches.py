"""The caches that `forward()` returns, in front of real servers: what they cost, how they grow, and when they end."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swarm_models import EVERYTHING, OPTIONS, connected, generate_seeded, prompt, wait_until
from tests.numerics.test_call_sequences import Pair, run_sequence
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.client.session import inference_session
from swarmllm.errors import ConfigurationError, SessionClosedError
from swarmllm.models.architecture import find_blocks


def loop(model: Any, ids: Tensor, num_tokens: int, **options: Any) -> tuple[Tensor, Any]:
    """The usual one: each token with the cache of the call before."""
    output = model(ids, **options)
    for _ in range(num_tokens - 1):
        next_id = output.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, next_id], dim=1)
        output = model(next_id, past_key_values=output.past_key_values, **options)
    return torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1), output.past_key_values


@pytest.mark.parametrize("num_examples", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_any_sequence_of_calls(swarm: LocalSwarm, llama: Path, num_examples: int) -> None:
    """Padding included, which clients leave out by default."""

    @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        local = AutoModelForCausalLM.from_pretrained(llama, dtype="auto")
        find_blocks(local).blocks.requires_grad_(False)
        run_sequence(Pair(local, model, "past_key_values"), data)

    with connected(llama, swarm.initial_peers, compute_padding=True) as model:
        check()


@pytest.mark.parametrize("use_cache", [True, None])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_session_is_opened_when_it_is_continued(
    model: Any, local: PreTrainedModel, use_cache: bool | None, with_gradients: bool
) -> None:
    """Or at once, for who asks for a cache and wants no gradients: then nothing is computed twice."""
    expected = generate_seeded(local, prompt(2), max_new_tokens=5)
    with torch.set_grad_enabled(with_gradients):
        cache = model(prompt(2), use_cache=use_cache).past_key_values
        assert bool(cache.session.route) == (use_cache is True and not with_gradients)
        text, cache = loop(model, prompt(2), 5, use_cache=use_cache)
    assert text.tolist() == expected.tolist()
    assert cache.session.route
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_batches_take_no_session(model: Any) -> None:
    """Neither training nor an evaluation costs servers a cache."""
    model.train()
    outputs = model(prompt(4), labels=prompt(4))
    outputs.loss.backward()
    model.eval()
    with torch.no_grad():
        evaluated = [model(prompt(4), labels=prompt(4)) for _ in range(3)]
    assert all(not output.past_key_values.session.route for output in (outputs, *evaluated))
    model.zero_grad()


@pytest.mark.parametrize("begin", ["forward", "generate", "a copy"])
def test_sessions_grow_with_their_text(
    model: Any, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    monkeypatch.setattr(inference_session, "DEFAULT_MAX_LENGTH", 12)
    monkeypatch.setattr("swarmllm.models.shell.client_shell.SOFT_PROMPT_ROOM", 0)
    expected = generate_seeded(local, prompt(), max_new_tokens=50)
    if begin == "generate":
        output = model.generate(prompt(), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        text, cache = output.sequences, output.past_key_values
    else:
        text, cache = loop(model, prompt(), 2)
        cache = copy.deepcopy(cache) if begin == "a copy" else cache
    assert cache.session.max_length < 20
    with torch.no_grad():
        while text.shape[1] < expected.shape[1]:
            logits = model(text[:, cache.get_seq_length() :], past_key_values=cache).logits
            text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
    assert text.tolist() == expected.tolist()
    assert cache.session.max_length >= expected.shape[1] - 1
    assert cache.session.num_repairs == 0


def test_another_batch_from_the_begin(model: Any, local: PreTrainedModel) -> None:
    """Rolled back to nothing, a session takes any number of rows."""
    with model.inference_session(max_length=64) as session, torch.no_grad():
        for rows in (1, 3, 2):
            session.position = 0
            logits = model.head(session.step(model.embed(prompt(rows))))
            torch.testing.assert_close(logits, local(prompt(rows)).logits)
        assert session.num_repairs == 0


@pytest.mark.parametrize("use_cache", [True, None])
@pytest.mark.parametrize("end", ["forgotten", "closed"])
def test_servers_are_free_when_the_cache_is_gone(model: Any, use_cache: bool | None, end: str) -> None:
    """At once, without the garbage collector."""
    gc.disable()
    try:
        with torch.no_grad():
            text, cache = loop(model, prompt(), 3, use_cache=use_cache)
        peer = model.swarm.look_ups.peer
        num_streams = peer.num_streams
        assert len(cache.session.route) == 2
        if end == "closed":
            cache.close()
            with pytest.raises(SessionClosedError):
                model(text[:, -1:], past_key_values=cache)
        del cache
        wait_until(lambda: peer.num_streams <= num_streams - 2, "the session's end")
    finally:
        gc.enable()


@torch.no_grad()
def cut_prompt(model: Any) -> Any:
    """The cache of a prompt whose positions see each other, cut in its middle."""
    cache = model(prompt(1, 12), attention_mask=torch.zeros(1, 1, 12, 12), use_cache=True).past_key_values
    cache.crop(-5)
    return cache


@torch.no_grad()
def two_steps(model: Any, cache: Any) -> Tensor:
    ids = prompt(1, 12)
    return torch.cat([model(ids[:, at : at + 2], past_key_values=cache).logits for at in (7, 9)], dim=1)


def test_a_cut_prompt_that_looks_ahead_is_computed_again_as_a_whole(llama: Path, local: PreTrainedModel) -> None:
    """What is left of it has looked at what is gone, and so must the caches of a new server."""
    expected = two_steps(local, cut_prompt(local))
    with (
        LocalSwarm(llama, spans=[EVERYTHING, EVERYTHING], **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers, speculation="off") as model,
    ):
        cache = cut_prompt(model)
        with pytest.raises(ConfigurationError, match="copy it before you cut it"):
            copy.deepcopy(cache)
        (hop,) = cache.session.route
        next(server for server in swarm.servers if server.peer_id == hop.server.peer_id).kill()
        assert torch.allclose(two_steps(model, cache), expected, rtol=1e-4, atol=1e-5)
        assert cache.session.num_repairs == 1


@pytest.mark.parametrize("rows", [[0], [0, 0]])
def test_a_cut_prompt_that_looks_ahead_and_is_computed_later(
    model: Any, local: PreTrainedModel, rows: list[int]
) -> None:
    """A forward that opens no session, whose rows are selected before the cut."""
    ids, found = prompt(1, 12), []
    with torch.no_grad():
        for one in (local, model):
            cache = one(ids, attention_mask=torch.zeros(1, 1, 12, 12)).past_key_values
            cache.batch_select_indices(torch.tensor(rows))
            cache.crop(-5)
            more = ids[:, 7:9].expand(len(rows), -1)
            found.append(one(more, past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
