"""Retries: which peer, after how long, and which peers are avoided meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.config import ClientConfig
from swarmllm.errors import (
    ERRORS_BY_CODE,
    BlocksNotServedError,
    CacheFullError,
    ConfigurationError,
    CorruptActivationsError,
    LocalProtocolError,
    MissingBlocksError,
    PeerError,
    PeerTimeoutError,
    PeerUnreachableError,
    RemoteProtocolError,
    ServerOutOfMemoryError,
    ServerOverloadedError,
    SessionClosedError,
    SessionLostError,
    error_from_code,
)
from swarmllm.swarm import retry
from swarmllm.swarm.retry import (
    CUT_FORGOTTEN_S,
    DIAL_DECAY,
    FULL_SERVER_PAUSE_S,
    LEAST_DIAL_S,
    LOOK_AGAIN_S,
    MAX_BACKOFF_S,
    MAX_BAN_FACTOR,
    MAX_REMEMBERED,
    SLOWEST_DIALS,
    DialTimes,
    PeerHealth,
    Retries,
)

A, B = "a" * 46, "b" * 46
BLAMED = [PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, CorruptActivationsError]
FULL = [ServerOverloadedError, ServerOutOfMemoryError, CacheFullError, BlocksNotServedError]


def test_delays_grow_to_a_bound_and_end() -> None:
    retries = Retries(max_retries=9)
    delays = [retries.next_delay_s(PeerUnreachableError("gone", A)) for _ in range(10)]
    assert delays[-1] is None
    assert delays[0] == 0
    assert delays[1:9] == sorted(delays[1:9])
    assert delays[8] == MAX_BACKOFF_S


@pytest.mark.parametrize("error", [LocalProtocolError("our bug"), ConfigurationError("wrong"), SessionClosedError("")])
def test_what_cannot_get_better_is_not_tried_again(error: Exception) -> None:
    assert Retries(max_retries=9).next_delay_s(error) is None


def test_no_retries_means_none() -> None:
    assert Retries(max_retries=0).next_delay_s(PeerUnreachableError("gone", A)) is None


def test_the_timeout_counts_only_where_nobody_is_left() -> None:
    retries = Retries(max_retries=9, timeout_s=3)
    missing = MissingBlocksError("nobody serves them", [2])
    assert retries.next_delay_s(missing, now=100) is not None
    assert retries.next_delay_s(PeerUnreachableError("gone", A), now=104) is not None
    assert retries.next_delay_s(missing, now=102.9) is not None
    assert retries.next_delay_s(missing, now=103) is None


@given(st.integers(0, 9), st.floats(0.1, 1e3), st.floats(0, 1e6))
def test_missing_blocks_are_waited_for_as_long_as_promised(max_retries: int, timeout_s: float, began_at: float) -> None:
    """However often those that are announced still have been tried meanwhile, and whatever else fails."""
    retries, now, tries = Retries(max_retries, timeout_s), began_at, 0
    for _ in range(max_retries):
        assert retries.next_delay_s(PeerUnreachableError("gone", A), now) is not None
    while (delay_s := retries.next_delay_s(MissingBlocksError("nobody serves them", [2]), now)) is not None:
        now += delay_s
        tries += 1
        assert tries <= 2 + timeout_s / LOOK_AGAIN_S
    assert -1e-3 < now - began_at - timeout_s < LOOK_AGAIN_S + 1e-3
    assert retries.next_delay_s(PeerUnreachableError("gone", A), now) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 30)), max_size=20))
def test_the_latest_failure_comes_last_among_avoided_peers(faults: list[tuple[str, bool, float]]) -> None:
    health, now, order = PeerHealth(ban_s=10), 0.0, []
    for name, is_full, later_s in faults:
        now += later_s
        peer_id = name * 46
        health.report((ServerOverloadedError if is_full else PeerTimeoutError)("oh", peer_id), now)
        order = [other for other in order if other in health.avoided(now) and other != peer_id] + [peer_id]
        assert health.avoided_s(now).keys() == set(order) == health.avoided(now)
        if not any(full for _, full, _ in faults) and len({health._faults[peer] for peer in order}) == 1:
            assert sorted(order, key=health.avoided_s(now).__getitem__) == order


def test_a_fault_is_news_once() -> None:
    health = PeerHealth(ban_s=10)
    told = [health.report(PeerTimeoutError("oh", A), now) for now in (0, 1, 100)]
    assert told == [True, False, True]
    assert health.report(ServerOverloadedError("full", B), now=100)
    assert health.avoided(100) == {A, B}
    assert health.blamed(100) == {A}


@pytest.mark.parametrize("error", BLAMED)
def test_a_peer_at_fault_is_banned_and_the_ban_ends(error: type[PeerError]) -> None:
    health = PeerHealth(ban_s=10)
    health.report(error("oh", A), now=100)
    assert health.avoided(109.9) == {A}
    assert health.avoided(110.1) == set()


def test_bans_double_to_a_bound_and_are_forgotten_after_success() -> None:
    health = PeerHealth(ban_s=1)
    now = 0.0
    for factor in (1, 2, 4, 8, 16, MAX_BAN_FACTOR):
        health.report(PeerTimeoutError("oh", A), now)
        assert health.avoided(now + factor - 0.1) == {A}
        now += factor + 0.1
        assert health.avoided(now) == set()
    health.succeeded(A)
    health.report(PeerTimeoutError("oh", A), now)
    assert health.avoided(now + 1.1) == set()


def test_requests_that_fail_together_are_one_fault() -> None:
    health = PeerHealth(ban_s=10)
    health.report(ServerOverloadedError("full", A), now=0)
    for now in (0, 0, 1, 2):
        health.report(PeerTimeoutError("oh", A), now)
    assert health.avoided(11.9) == {A}
    assert health.avoided(12.1) == set()


@pytest.mark.parametrize("error", FULL)
def test_a_full_server_is_passed_over_without_blame(error: type[PeerError]) -> None:
    health = PeerHealth(ban_s=100)
    health.report(error("full", A), now=0)
    assert health.avoided(FULL_SERVER_PAUSE_S / 2) == {A}
    assert health.avoided(FULL_SERVER_PAUSE_S * 2) == set()


@pytest.mark.parametrize(
    "error", [SessionLostError("lost", A), PeerUnreachableError("who?"), LocalProtocolError("our bug")]
)
def test_nobody_is_avoided_for_a_lost_session_or_our_own_bug(error: PeerError) -> None:
    health = PeerHealth(ban_s=100)
    health.report(error, now=0)
    assert health.avoided(0) == set()


@pytest.mark.parametrize("error", [*BLAMED, *FULL])
def test_what_one_peer_says_of_another_makes_nobody_avoided(error: type[PeerError]) -> None:
    health, said = PeerHealth(ban_s=10), error("it is broken", A)
    said.accused_by = B
    assert health.report(said, now=0)
    assert health.avoided(0) == set()
    said.accused_by = A  # which it may say of itself
    health.report(said, now=0)
    assert health.avoided(0) == {A}


def test_peers_without_number_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server with the longest ban stays."""
    monkeypatch.setattr(retry, "MAX_REMEMBERED", 64)
    health, now = PeerHealth(ban_s=10), 0.0
    for _ in range(5):
        now += 200
        health.report(PeerTimeoutError("oh", A), now)
    for number in range(200):
        now += 0.001
        health.report(PeerUnreachableError("gone", f"{number:046d}"), now)
    assert len(health.avoided(now)) == len(health.blamed(now)) == 64
    assert A in health.blamed(now)


def test_quarantine_does_not_end() -> None:
    health = PeerHealth(ban_s=1)
    health.quarantine(B)
    health.succeeded(B)
    assert health.avoided(1e9) == {B} == health.quarantined
    assert not health.report(CorruptActivationsError("again", B), now=0)
    for number in range(retry.MAX_REMEMBERED):
        health.quarantine(str(number))
    assert len(health.quarantined) == retry.MAX_REMEMBERED
    assert B not in health.quarantined, "caught longest ago"


def test_errors_travel_as_codes() -> None:
    assert len(ERRORS_BY_CODE) >= 20
    for code, cls in ERRORS_BY_CODE.items():
        error = error_from_code(code, "a sentence", A)
        assert type(error) is cls
        assert str(error) == "a sentence"
        if isinstance(error, PeerError):
            assert error.peer_id == A
    unknown = error_from_code("from the future", "a sentence", A)
    assert type(unknown) is PeerError
    assert not unknown.blames_peer


def cut(peer_id: str = "p") -> PeerUnreachableError:
    error = PeerUnreachableError("hung up", peer_id)
    error.through_relay = True
    return error


def test_a_stream_through_a_relay_may_be_cut_once_before_the_peer_is_blamed() -> None:
    health = PeerHealth(ban_s=10.0)
    for at in (100.0, 100.5):  # streams of one connection end together
        assert health.report(cut(), at)
    assert not health.avoided(100.6)
    assert health.report(cut(), 103.0)
    assert health.avoided(103.0) == {"p"} == health.blamed(103.0)
    assert not health.avoided(113.1)
    assert health.report(cut(), 103.0 + CUT_FORGOTTEN_S)  # a new cut, of another hour
    assert not health.avoided(104.0 + CUT_FORGOTTEN_S)
    direct = PeerUnreachableError("can't be dialled", "p")
    assert health.report(direct, 103.5 + CUT_FORGOTTEN_S)
    assert health.avoided(104.0 + CUT_FORGOTTEN_S) == {"p"}


def test_cuts_of_endless_peers_are_not_kept() -> None:
    health = PeerHealth(ban_s=10.0)
    for number in range(2 * MAX_REMEMBERED):
        health.report(cut(str(number)), 100.0)
    assert len(health._cut_at) <= MAX_REMEMBERED


def test_a_server_has_longer_to_be_reached_where_others_took_long() -> None:
    times = DialTimes()
    for _ in range(30):
        times.took(0.02)
    assert times.longest_s(0.0) == pytest.approx(LEAST_DIAL_S + SLOWEST_DIALS * 0.02)
    assert times.longest_s(0.6) == pytest.approx(LEAST_DIAL_S + SLOWEST_DIALS * 0.6), "it is known to be far"
    times.took(2.0)
    assert times.longest_s(0.0) == pytest.approx(LEAST_DIAL_S + SLOWEST_DIALS * 2.0)
    times.took(0.02)
    assert times.longest_s(0.0) == pytest.approx(LEAST_DIAL_S + SLOWEST_DIALS * DIAL_DECAY * 2.0)


def test_where_all_are_slow_few_are_left() -> None:
    """Each that is left after the limit raises it; the tries of one step suffice for that."""
    times = DialTimes(slowest_s=0.0)
    num_left = 0
    while times.longest_s(0.0) < ClientConfig().connect_timeout_s:
        times.took(times.longest_s(0.0))
        num_left += 1
    assert 2 * num_left <= ClientConfig().max_retries
