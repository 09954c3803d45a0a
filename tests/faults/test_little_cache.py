"""Sessions whose length nobody gave ask servers for what they have room for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_in_process import CACHE_TOKENS, Blocks, InProcessSwarm, Reference

from swarmllm.client.view import routes
from swarmllm.errors import CacheFullError, ServerOutOfMemoryError, SessionTooLargeError
from swarmllm.server.sessions.step_runner import Step, StepRunner
from swarmllm.swarm import retry


@pytest.fixture(scope="module", autouse=True)
def _soon() -> Iterator[None]:
    """A refused client tries again as often as ever, without the pauses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "RETRY_LOOKUP_S", 0.01)
        patch.setattr(retry, "FIRST_BACKOFF_S", 0.001)
        patch.setattr(retry, "FULL_SERVER_PAUSE_S", 0.01)
        yield


@settings(max_examples=8)
@given(st.integers(1, 65), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_a_guessed_length_shrinks_to_what_there_is(blocks: Blocks, num_rows: int, lengths: list[int]) -> None:
    """The usual guess is 2048 positions for each row, which is more than these servers hold for 3 rows."""
    fitting = CACHE_TOKENS // num_rows
    layout = [(0, 3), (3, blocks.num_blocks)]
    with InProcessSwarm(blocks, layout) as swarm, swarm.session(batch_size=num_rows, grows=True) as session:
        reference = Reference(blocks.all)
        for length in lengths:
            given_states = torch.randn(num_rows, length, blocks.all.embedding_dim)
            if session.position + length > fitting:
                with pytest.raises(CacheFullError):
                    session.step(given_states)
                break
            torch.testing.assert_close(session.step(given_states), reference.step(given_states))


def test_what_no_server_has_room_for_is_refused_once_by_each(blocks: Blocks) -> None:
    """Though the client would try 8 times if it could get better."""
    with (
        InProcessSwarm(blocks, [(0, 3), (3, blocks.num_blocks), (0, 3), (3, blocks.num_blocks)]) as swarm,
        swarm.session(max_length=CACHE_TOKENS + 1) as session,
    ):
        with pytest.raises(SessionTooLargeError, match="in all: use a smaller max_length or batch"):
            session.step(torch.randn(1, 5, blocks.all.embedding_dim))
        assert 1 < swarm.view.counts["session_too_large"] <= len(swarm.servers)
        assert set(swarm.view.counts) == {"session_too_large"}


def test_what_one_server_has_no_room_for_goes_to_a_larger_one(blocks: Blocks) -> None:
    with InProcessSwarm(blocks, [(0, blocks.num_blocks)] * 4) as swarm:
        swarm.servers[2].sessions.budget.capacity_bytes *= 2
        given_states = torch.randn(1, 5, blocks.all.embedding_dim)
        with swarm.session(max_length=CACHE_TOKENS + 1) as session:
            torch.testing.assert_close(session.step(given_states), Reference(blocks.all).step(given_states))
            assert [hop.server.peer_id for hop in session.route] == [swarm.servers[2].peer_id]
        with swarm.session(max_length=CACHE_TOKENS) as session:
            assert swarm.view.health.blamed(0.0) == frozenset(), "no server is at fault"


@pytest.mark.parametrize("num_lacks", [2, 10**6])
def test_a_lone_server_without_memory_is_asked_a_few_times(
    blocks: Blocks, num_lacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt takes seconds to fail, so 8 more tries were a minute without an answer."""
    lacks = iter(range(num_lacks))
    honest = StepRunner.run

    async def run(self: StepRunner, step: Step) -> Any:
        if next(lacks, None) is not None:
            raise MemoryError
        return await honest(self, step)

    monkeypatch.setattr(StepRunner, "run", run)
    given_states = torch.randn(1, 5, blocks.all.embedding_dim)
    with InProcessSwarm(blocks, [(0, blocks.num_blocks)]) as swarm, swarm.session(max_length=64) as session:
        if num_lacks < retry.MOST_REFUSALS:
            torch.testing.assert_close(session.step(given_states), Reference(blocks.all).step(given_states))
        else:
            with pytest.raises(ServerOutOfMemoryError, match="ask for less at once"):
                session.step(given_states)
        assert swarm.view.counts["out_of_memory"] == min(num_lacks, retry.MOST_REFUSALS)


def test_a_length_that_was_asked_for_does_not(blocks: Blocks) -> None:
    with (
        InProcessSwarm(blocks, [(0, blocks.num_blocks)], max_retries=0) as swarm,
        swarm.session(max_length=CACHE_TOKENS + 1, grows=True) as session,
        pytest.raises(CacheFullError),
    ):
        session.step(torch.randn(1, 5, blocks.all.embedding_dim))
