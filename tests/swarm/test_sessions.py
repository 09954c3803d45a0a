"""Inference sessions as users hold them: steps, rollbacks, chats, and what happens at their limits."""

import gc
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, assert_same_tokens, connected, generate_seeded, prompt, wait_until
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.errors import (
    ConfigurationError,
    ServerOverloadedError,
    SessionClosedError,
    SessionLengthExceededError,
    SessionTooLargeError,
    SwarmError,
)


def test_own_generation_loop_with_embed_step_and_head(model: Any, local: PreTrainedModel) -> None:
    """Figure 2 of the paper."""
    ids = prompt()
    expected = generate_seeded(local, ids, max_new_tokens=12)

    with model.inference_session(max_length=64) as session:
        generated, feed = ids, ids
        while generated.shape[1] < expected.shape[1]:
            hidden = session.step(model.embed(feed))
            feed = model.head(hidden)[:, -1].argmax(-1, keepdim=True)
            generated = torch.cat([generated, feed], dim=1)
        assert session.position == expected.shape[1] - 1
        spans = [hop.span for hop in session.route]
        assert (spans[0].start, spans[-1].end) == (0, NUM_BLOCKS)
        assert len(session.timings) == len(spans)

    assert generated.tolist() == expected.tolist()


class Copies(TorchDispatchMode):
    """Counts copies of tensors of a size, in the threads in which it is entered."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("clone", "_to_copy", "copy_", "cat", "stack", "index_select", "mul"):
            self.found += [str(func)] * (isinstance(result, torch.Tensor) and result.numel() == self.numel)
        return result


def test_a_client_copies_a_token_once(model: Any) -> None:
    """For the replay, as users may change their tensors; what is sent and what comes is the message's own memory."""
    here, loop = Copies(model.config.hidden_size), model.swarm.loop
    there = Copies(model.config.hidden_size)

    async def enter() -> None:
        there.__enter__()

    async def leave() -> None:
        there.__exit__(None, None, None)

    with torch.no_grad(), model.inference_session(max_length=64) as session:
        session.step(model.embed(prompt()))
        hidden = model.embed(prompt()[:, :1])
        session.step(hidden)
        loop.run_coroutine(enter())
        try:
            with here:
                session.step(hidden)
        finally:
            loop.run_coroutine(leave())
    assert (here.found, there.found) == ([], ["aten.clone.default"])


def test_what_the_program_has_seeded_stays_its_own(model: Any) -> None:
    """Python's and torch's random generators are the user's; the client works in a thread beside, and at any time."""
    python, pytorch = random.getstate(), torch.get_rng_state()
    with torch.no_grad(), model.inference_session(max_length=64) as session:
        session.step(model.embed(prompt()))
        model.swarm.loop.run_coroutine(model.swarm.distances.ping_some())
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), pytorch)


def test_rolling_back_forgets(model: Any, local: PreTrainedModel) -> None:
    ids, other = prompt(), prompt(seed=1)
    mixed = torch.cat([ids[:, :4], other[:, 4:]], dim=1)
    with torch.no_grad(), model.inference_session(max_length=64) as session:
        session.step(model.embed(ids))
        session.position = 4
        logits = model.head(session.step(model.embed(other[:, 4:])))
        torch.testing.assert_close(logits, local(mixed).logits[:, 4:])
        session.position = 0
        logits = model.head(session.step(model.embed(other)))
        torch.testing.assert_close(logits, local(other).logits)


def test_position_can_only_be_set_back(model: Any) -> None:
    with model.inference_session(max_length=64) as session:
        session.step(model.embed(prompt()))
        for position in (-1, 10):
            with pytest.raises(ConfigurationError, match="set back"):
                session.position = position
        assert session.position == 9


def test_a_chat_continues_on_its_session(model: Any, local: PreTrainedModel) -> None:
    with model.inference_session(max_length=200) as session:
        first = assert_same_tokens(model, local, prompt(), max_new_tokens=10)
        assert session.position == first.shape[1] - 1

        grown = torch.cat([first, prompt(seed=1)], dim=1)
        second = assert_same_tokens(model, local, grown, max_new_tokens=10)
        assert session.position == second.shape[1] - 1

        changed = grown.clone()
        changed[:, 12] = 5
        assert_same_tokens(model, local, changed, max_new_tokens=10)
        assert_same_tokens(model, local, prompt(seed=2), max_new_tokens=10)
        assert_same_tokens(model, local, prompt(seed=2), max_new_tokens=10, num_beams=3)
        assert_same_tokens(model, local, prompt(seed=2), max_new_tokens=10, prompt_lookup_num_tokens=3)
        assert session.num_repairs == 0


def test_only_what_is_new_is_computed(model: Any) -> None:
    fed: list[int] = []
    with model.inference_session(max_length=200) as session:
        run = session.run_step

        def counting(inputs: Any, part: Any = None) -> Any:
            fed.append(inputs.seq_len)
            return run(inputs, part)

        session.run_step = counting
        first = generate_seeded(model, prompt(), max_new_tokens=5)
        generate_seeded(model, torch.cat([first, prompt(1, 4)], dim=1), max_new_tokens=2)

    assert fed == [9, 1, 1, 1, 1, 5, 1]


def test_a_closed_session_says_so(model: Any) -> None:
    with model.inference_session(max_length=64) as session:
        hidden = model.embed(prompt())
        session.step(hidden)
    with pytest.raises(SessionClosedError):
        session.step(hidden)
    session.close()


def test_a_closed_model_says_so(llama: Path, swarm: LocalSwarm) -> None:
    with connected(llama, swarm.initial_peers) as model:
        session = model.inference_session(max_length=64)
        hidden = model.embed(prompt())
        session.step(hidden)
        model.close()
        with pytest.raises(SessionClosedError):
            session.step(hidden)
        with pytest.raises(SessionClosedError):
            generate_seeded(model, prompt(), max_new_tokens=2)
        with pytest.raises(SessionClosedError):
            model(prompt(), labels=prompt())


def test_closing_a_session_ends_the_step_of_another_thread(model: Any) -> None:
    errors: list[BaseException] = []
    stepped = threading.Event()
    session = model.inference_session(max_length=512)
    hidden = model.embed(prompt(1, 256))

    def step_until_closed() -> None:
        try:
            while True:
                session.step(hidden)
                session.position = 0
                stepped.set()
        except SessionClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=step_until_closed)
    thread.start()
    assert stepped.wait(30)
    session.close()
    thread.join(120)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_too_long_a_text_leaves_the_session_usable(model: Any, local: PreTrainedModel) -> None:
    with torch.no_grad(), model.inference_session(max_length=12) as session:
        session.step(model.embed(prompt()))
        with pytest.raises(SessionLengthExceededError, match="max_length of 12"):
            session.step(model.embed(prompt(1, 4)))
        assert session.position == 9
        logits = model.head(session.step(model.embed(prompt(1, 3, seed=3))))
        expected = local(torch.cat([prompt(), prompt(1, 3, seed=3)], dim=1)).logits[:, 9:]
        torch.testing.assert_close(logits, expected)


def test_another_batch_size_in_the_midst_is_refused(model: Any) -> None:
    with model.inference_session(max_length=64) as session:
        session.step(model.embed(prompt()))
        with pytest.raises(ConfigurationError, match="1 rows"):
            session.step(model.embed(prompt(2)))
        session.step(model.embed(prompt()))
        assert session.position == 18


def test_hidden_states_of_another_shape_are_refused(model: Any) -> None:
    with model.inference_session(max_length=64) as session, pytest.raises(ConfigurationError, match="batch, seq"):
        session.step(torch.zeros(3, 64))


def test_a_text_that_is_done_leaves_no_session_behind(llama: Path, swarm: LocalSwarm) -> None:
    """Its streams end, and with them the caches on the servers, without waiting for the garbage collector."""
    with connected(llama, swarm.initial_peers) as model:
        peer = model.swarm.look_ups.peer
        gc.disable()
        try:
            for options in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True}):
                generate_seeded(model, prompt(), max_new_tokens=5, **options)
            with torch.no_grad():
                model(prompt(), use_cache=True)
            wait_until(lambda: peer.num_streams == 0, "the sessions' end")
        finally:
            gc.enable()


def test_a_server_promises_the_memory_that_it_may_use(llama: Path, local: PreTrainedModel) -> None:
    limit = 0.0043  # GB
    with (
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], max_memory=str(limit), **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
    ):
        with model.inference_session(max_length=300) as session:
            generated = generate_seeded(model, prompt(), max_new_tokens=4)
            (server,) = (hop.server for hop in session.route)
        assert generated.tolist() == generate_seeded(local, prompt(), max_new_tokens=4).tolist()
        config = local.config
        bytes_per_token = 2 * NUM_BLOCKS * config.num_key_value_heads * config.head_dim * 4
        assert 300 < server.cache_tokens_left < limit * 1e9 / bytes_per_token < 65536
        with (
            pytest.raises(SessionTooLargeError, match="use a smaller max_length"),
            model.inference_session(max_length=server.cache_tokens_left + 400) as session,
        ):
            session.step(model.embed(prompt()))


def test_a_server_without_memory_for_sessions_says_so(llama: Path) -> None:
    with pytest.raises(SwarmError, match=r"for sessions, of which 256 tokens take .* \(--max_memory\)"):
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], max_memory="0.0005", **OPTIONS).start()


def test_no_more_sessions_than_a_server_takes(llama: Path, local: PreTrainedModel) -> None:
    """The next one is sent elsewhere, and comes back when a place is free."""
    expected = generate_seeded(local, prompt(), max_new_tokens=3).tolist()
    with (
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)] * 2, max_sessions=1, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers, max_retries=1) as model,
    ):
        with model.inference_session(max_length=64) as first, torch.no_grad():
            first.step(model.embed(prompt()))
            with model.inference_session(max_length=64) as second:
                assert generate_seeded(model, prompt(), max_new_tokens=3).tolist() == expected
                assert second.route[0].server.peer_id != first.route[0].server.peer_id
                with (
                    pytest.raises(ServerOverloadedError, match="takes 1 session at a time"),
                    model.inference_session(max_length=64) as third,
                ):
                    third.step(model.embed(prompt()))
        wait_until(
            lambda: generate_seeded(model, prompt(), max_new_tokens=3).tolist() == expected, "a place that is free"
        )
