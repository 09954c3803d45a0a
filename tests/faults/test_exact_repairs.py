"""In 16 bits, a text goes on after a repair with the very same numbers: caches are rebuilt in the steps of the text.

In process, over layouts, steps and deaths at random; `test_failover` has real servers.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from swarm_in_process import Blocks, InProcessSwarm, Server
from swarm_models import wait_until
from torch import Tensor

from swarmllm.client.session import chain
from swarmllm.network.wire.protocol import Message, MessageType
from swarmllm.server.sessions.prefix_cache import PrefixCache

HIDDEN = 64
LAYOUTS = [[(0, 6)], [(0, 3), (3, 6)], [(0, 2), (2, 4), (4, 6)]]
"""Each span has two servers."""


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=str)
def short_blocks(request: pytest.FixtureRequest, llama: Path) -> Iterator[Blocks]:
    blocks = Blocks(llama, request.param)
    scheduler = blocks.device_thread._scheduler  # or a prompt would be cut if the text before it has just ended
    scheduler.budget = replace(scheduler.budget, decoding_s=0.0)
    yield blocks
    blocks.close()


def hidden_states(batch_size: int, seq_len: int, seed: int) -> Tensor:
    return torch.randn(batch_size, seq_len, HIDDEN, generator=torch.Generator().manual_seed(seed))


class Steps:
    """Steps of a text; some keep only their first positions, as wrong guesses do."""

    def __init__(self, prompt: int, lengths: Sequence[tuple[int, int]], batch_size: int) -> None:
        self.steps = [(prompt, prompt), *lengths]
        self._batch_size = batch_size

    def outputs(self, swarm: InProcessSwarm, deaths: dict[int, int], *, padded: bool = False) -> list[Tensor]:
        """The outputs of all steps. Before the so many-th step, the server of that hop of the route dies."""
        found: list[Tensor] = []
        with swarm.session(max_length=400, batch_size=self._batch_size) as session:
            session.record_past()
            for number, (length, kept) in enumerate(self.steps):
                if number in deaths and session.route:
                    hop = session.route[deaths[number] % len(session.route)]
                    swarm.kill(swarm.server(hop.server.peer_id))
                given = hidden_states(self._batch_size, length, number).to(swarm.blocks.dtype)
                mask = self._mask(session.position + length) if padded else None
                found.append(session.step(given, attention_mask=mask))
                session.position -= length - kept
            assert session.num_repairs == len(deaths)
        return found

    def _mask(self, width: int) -> Tensor:
        mask = torch.ones(self._batch_size, width, dtype=torch.int64)
        mask[0, :3] = 0
        return mask


def assert_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    differing = [number for number, pair in enumerate(zip(first, second, strict=True)) if not torch.equal(*pair)]
    assert not differing, f"steps {differing} of {len(first)}"


def swarm_of(blocks: Blocks, layout: Sequence[tuple[int, int]], **options: Any) -> InProcessSwarm:
    return InProcessSwarm(blocks, [*layout, *layout], **{"min_gain_to_move": 1, **options})


one_step = st.integers(1, 5).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))


@pytest.mark.slow
@settings(max_examples=60, phases=set(Phase) - {Phase.shrink}, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(2, 90),
    st.lists(one_step, min_size=3, max_size=40),
    st.data(),
    st.sampled_from([1, 1, 2]),
    st.booleans(),
    st.sampled_from([24, 1024]),
    st.booleans(),
)
def test_a_text_in_16_bits_goes_on_with_the_same_numbers(
    short_blocks: Blocks,
    layout: list[tuple[int, int]],
    prompt: int,
    lengths: list[tuple[int, int]],
    data: st.DataObject,
    batch_size: int,
    padded: bool,
    chunk_tokens: int,
    push: bool,
) -> None:
    steps = Steps(max(4, prompt), lengths, batch_size)
    death, place = data.draw(st.integers(1, len(lengths))), data.draw(st.integers(0, 2))
    options: dict[str, Any] = {"prefill_chunk_tokens": chunk_tokens, "push": push}
    with swarm_of(short_blocks, layout, **options) as swarm:
        undisturbed = steps.outputs(swarm, {}, padded=padded)
    with swarm_of(short_blocks, layout, **options) as swarm:
        assert_same(undisturbed, steps.outputs(swarm, {death: place}, padded=padded))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_server_dies_amid_steps_and_wrong_guesses(short_blocks: Blocks, place: int) -> None:
    steps = Steps(40, [(1, 1)] * 8 + [(4, 2), (3, 1), (1, 1), (5, 5)] * 6 + [(1, 1)] * 8, 1)
    with swarm_of(short_blocks, LAYOUTS[2]) as swarm:
        undisturbed = steps.outputs(swarm, {})
    with swarm_of(short_blocks, LAYOUTS[2]) as swarm:
        assert_same(undisturbed, steps.outputs(swarm, {36: place}))


def pages_of(swarm: InProcessSwarm) -> None:
    """Have all servers share pages of prompts, as real ones do."""
    for server in swarm.servers:
        server.sessions.pages = PrefixCache(64 << 20)


def prompt_after(swarm: InProcessSwarm, first: int, deaths: dict[int, int]) -> list[Tensor]:
    """Some steps of a text whose prompt begins as the `first` positions of an earlier one."""
    route = [swarm.hop(0, 0, 3), swarm.hop(1, 3, 6)]
    swarm.first_route(route)
    with swarm.session(max_length=400) as session:
        session.step(hidden_states(1, 200, 0)[:, :first].to(swarm.blocks.dtype))
        wait_until(lambda: all(len(server.sessions.pages or ()) for server in swarm.servers[:2]), "the pages")
    swarm.first_route(route)
    return Steps(200, [(1, 1)] * 10, 1).outputs(swarm, deaths)


def test_pages_of_other_texts_are_pieces_of_a_prompt(short_blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(chain, "LEAST_CHUNK_TOKENS", 256)  # so the client sends the prompt as a whole
    for deaths in ({}, {6: 1}):
        with swarm_of(short_blocks, LAYOUTS[1], prefill_chunk_tokens=256) as swarm:
            pages_of(swarm)
            found.append(prompt_after(swarm, 70, deaths))
            assert sum(server.sessions.pages.num_reused_tokens for server in swarm.servers) == 2 * 64
    assert_same(*found)


@pytest.mark.parametrize("place", [0, 1])
def test_a_prompt_that_was_computed_in_pieces_beside_other_texts(
    short_blocks: Blocks, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement has no other texts, and would compute the prompt as a whole."""
    monkeypatch.setattr(chain, "LEAST_CHUNK_TOKENS", 256)  # so the client sends the prompt as a whole
    scheduler = short_blocks.device_thread._scheduler
    usual, found = scheduler.budget, []
    for deaths in ({}, {6: place}):
        with swarm_of(short_blocks, LAYOUTS[1], prefill_chunk_tokens=256) as swarm:
            scheduler.budget = replace(usual, max_tokens=24)
            swarm.on_message = lambda _, message: message.header.get("seq_len") == 1 and restore()

            def restore() -> None:
                scheduler.budget = usual

            found.append(Steps(200, [(1, 1)] * 10, 1).outputs(swarm, deaths))
    assert_same(*found)


def test_a_replay_that_would_take_long_goes_in_long_calls(
    short_blocks: Blocks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chain, "MAX_REPLAY_S", 1e-3)
    seen: list[int] = []
    with swarm_of(short_blocks, LAYOUTS[1]) as swarm, caplog.at_level(logging.WARNING):

        def note(_: Server, message: Message) -> None:
            if message.type is MessageType.STEP and message.header.get("replay_hops"):
                seen.append(message.header["seq_len"])

        swarm.on_message = note
        Steps(8, [(1, 1)] * 10, 1).outputs(swarm, {9: 1})
    assert seen == [16]
    assert "the text may go on with other words" in caplog.text


def test_a_server_of_an_older_version_replays_what_it_kept_in_long_calls(short_blocks: Blocks) -> None:
    announced = [{"replays_steps": False}] * 4
    seen: list[int] = []
    with swarm_of(short_blocks, LAYOUTS[1], announced=announced) as swarm:

        def note(_: Server, message: Message) -> None:
            assert not message.header.get("steps")
            if message.type is MessageType.STEP and message.header.get("replay_hops"):
                seen.append(message.header["seq_len"])

        swarm.on_message = note
        Steps(8, [(1, 1)] * 10, 1).outputs(swarm, {9: 1})
    assert seen == [16]


def test_a_long_replay_is_no_single_step(short_blocks: Blocks) -> None:
    """Its requests are answered one by one, so that none takes as long as a step may; and few messages wait."""
    requests: dict[int, int] = {}
    with swarm_of(short_blocks, LAYOUTS[1]) as swarm:

        def note(_: Server, message: Message) -> None:
            if message.type is MessageType.STEP and message.header.get("replay_hops"):
                requests[message.header["id"]] = requests.get(message.header["id"], 0) + 1

        swarm.on_message = note
        Steps(4, [(1, 1)] * 100, 1).outputs(swarm, {100: 1})
    assert sum(requests.values()) == 100
    assert max(requests.values()) <= 32
