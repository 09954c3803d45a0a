"""The last hour of a swarm: what is shown agrees with what servers announced, and no liar spoils it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from swarmllm.data_structures import ServerInfo, Span, SwarmSnapshot
from swarmllm.gateway.monitor import MISSES, NUM_MINUTES, QUIET_S, Contact, SwarmHistory, SwarmPicture

START = 1_790_000_000.0 // 60 * 60  # the beginning of a minute


def server(number: int, start: int, end: int, tokens: int = 0, **more: Any) -> ServerInfo:
    return ServerInfo(peer_id=f"{number:046d}", start=start, end=end, throughput=9.0, tokens_served=tokens, **more)


def look(
    history: SwarmHistory, at: float, *servers: ServerInfo, missing: tuple[int, ...] = (), kinds: Any = ()
) -> None:
    history.take(servers, missing, kinds, START + at)


@given(
    steps=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), min_size=1, max_size=40),
    cut=st.integers(1, 7),
)
def test_all_tokens_are_in_some_minute(steps: list[tuple[int, int]], cut: int) -> None:
    """Two servers that each token passes: what minutes have together is what was computed, and each look's rate too."""
    history, at, tokens, announced = SwarmHistory([Span(0, 8)]), 0.0, 0, 0.0
    look(history, at, server(1, 0, cut), server(2, cut, 8))
    for seconds, more in steps:
        at, tokens = at + seconds, tokens + more
        look(history, at, server(1, 0, cut, tokens), server(2, cut, 8, tokens))
        if more:
            expected, announced = more / (at - announced), at
            assert history.tokens_per_s_now == history.tokens_per_s(f"{1:046d}") == round(expected, 1)
    minutes = history.as_json()
    assert [one["at"] for one in minutes] == [int(START + 60 * i) for i in range(len(minutes))]
    inner = history.minutes
    assert sum(one.tokens.get(block, 0) for one in inner for block in (0,)) == pytest.approx(tokens)
    for shown, known in zip(minutes[:-1], inner, strict=False):
        assert shown["tokens_per_s"] == round(known.tokens.get(7, 0) / 60, 1)
    assert minutes[-1]["tokens_per_s"] == (history.tokens_per_s_now or 0)


def test_shared_blocks_and_boasting_servers() -> None:
    history = SwarmHistory([Span(0, 8)])
    look(history, 0, server(1, 0, 4), server(2, 4, 8), server(3, 4, 8), server(4, 0, 2))
    look(history, 10, server(1, 0, 4, 100), server(2, 4, 8, 60), server(3, 4, 8, 40), server(4, 0, 2, 1 << 53))
    assert history.tokens_per_s_now == 10  # blocks 2 and 3 are one server's, 4 to 7 two servers'
    look(history, 61, server(1, 0, 4, 100), server(2, 4, 8, 60), server(3, 4, 8, 40), server(4, 0, 2, 1 << 53))
    assert history.as_json()[0]["tokens_per_s"] == round(100 / 60, 1)
    assert history.tokens_per_s_now == 0  # no news for so long
    assert 10 + QUIET_S < 61


def test_a_server_that_begins_anew_and_an_encoder() -> None:
    history = SwarmHistory([Span(0, 8)])
    look(history, 0, server(1, 0, 8, 1000))
    assert history.tokens_per_s_now is None
    look(history, 10, server(1, 0, 8, 5))
    assert history.tokens_per_s_now is None
    look(history, 20, server(1, 0, 8, 25))
    assert history.tokens_per_s_now == 2
    encoder = SwarmHistory([Span(0, 8)])
    look(encoder, 0, server(1, 0, 4), server(2, 4, 8))
    look(encoder, 10, server(1, 0, 4, 0), server(2, 4, 8, 50))
    assert encoder.tokens_per_s_now == 5


def test_a_clock_that_was_set_back() -> None:
    history = SwarmHistory([Span(0, 8)])
    for at in (0, 60, 120, 180):
        look(history, at, server(1, 0, 8, 10 * at))
    assert history.tokens_per_s_now == 10
    look(history, 170, server(1, 0, 8, 1800))  # by seconds: nothing is lost
    assert len(history.minutes) == 4
    look(history, -3600, server(1, 0, 8, 1800))
    assert history.tokens_per_s_now is None
    look(history, -3590, server(1, 0, 8, 1850))
    assert history.tokens_per_s_now == 5
    assert [one["at"] for one in history.as_json()] == [START - 3600]
    look(history, -3590 + QUIET_S + 1, server(1, 0, 8, 1850))
    assert history.tokens_per_s_now == 0


def test_minutes() -> None:
    history = SwarmHistory([Span(0, 8)])
    look(history, 30, server(1, 0, 8), kinds=["joined"])
    look(history, 59, missing=(0, 1, 2), kinds=["lost", "reachable"])
    look(history, 61, server(1, 0, 8), kinds=["joined", "joined"])
    look(history, 60 * 4, server(1, 0, 8), kinds=["left"])
    shown = history.as_json()
    assert [one["blocks"] for one in shown] == [5, 8, 8, 8, 8]
    assert [(one["joined"], one["left"], one["lost"]) for one in shown] == [
        (1, 0, 1),
        (2, 0, 0),
        *[(0, 0, 0)] * 2,
        (0, 1, 0),
    ]
    look(history, 60 * 500, server(1, 0, 8))
    assert len(history.as_json()) == NUM_MINUTES
    assert history.as_json()[-1]["at"] == START + 60 * 500


def test_a_look_that_misses_a_server_is_no_leave() -> None:
    """Under load a DHT answers with less than it has; a connected server is still there."""
    picture = SwarmPicture("m", "f", 8)
    both = SwarmSnapshot(8, (server(1, 0, 4), server(2, 4, 8)))
    contacts = {one.peer_id: Contact(True) for one in both.servers}
    picture.update(both, contacts, START)
    half = SwarmSnapshot(8, both.servers[:1])
    for number in range(1, MISSES):
        seen = picture.completed(half, contacts)
        assert picture.update(seen, contacts, START + number) == []
        assert picture.missing_blocks() == []
    seen = picture.completed(half, contacts)
    (event,) = picture.update(seen, contacts, START + MISSES)
    assert event["kind"] == "left"
    picture.update(both, contacts, START + 10)
    alone = {both.servers[0].peer_id: Contact(True)}
    assert picture.completed(half, alone) == half  # the line has ended, too


def test_a_lost_server_does_not_count_as_left() -> None:
    picture = SwarmPicture("m", "f", 8)
    both = SwarmSnapshot(8, (server(1, 0, 4), server(2, 4, 8)))
    first, second = (one.peer_id for one in both.servers)
    picture.update(both, {first: Contact(True), second: Contact(True)}, START)
    picture.update(both, {first: Contact(True), second: Contact(False)}, START + 1)
    (event,) = picture.update(SwarmSnapshot(8, both.servers[:1]), {first: Contact(True)}, START + 70)
    assert event["kind"] == "expired"
    assert [(one["lost"], one["left"]) for one in picture.as_json()["history"]] == [(1, 0), (0, 0)]


@pytest.mark.parametrize("more", [{"hardware": "x" * 65}, {"memory_left_bytes": -1}, {"num_sessions": 1 << 21}])
def test_texts_for_people_are_bounded(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        server(1, 0, 4, **more)
    assert server(1, 0, 4, hardware="a\x1b[31mb\u202e").hardware == "a?[31mb?"
