"""Who is tried again, after how long, and who is avoided meanwhile."""

import pytest

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
from swarmllm.swarm.retry import FULL_SERVER_PAUSE_S, MAX_BACKOFF_S, MAX_BAN_FACTOR, PeerHealth, Retries

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


def test_patience_ends_only_where_nobody_is_left() -> None:
    retries = Retries(max_retries=9, patience_s=3)
    missing = MissingBlocksError("nobody serves them", [2])
    assert retries.next_delay_s(missing, now=100) is not None
    assert retries.next_delay_s(PeerUnreachableError("gone", A), now=104) is not None
    assert retries.next_delay_s(missing, now=102.9) is not None
    assert retries.next_delay_s(missing, now=103) is None


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


def test_quarantine_does_not_end() -> None:
    health = PeerHealth(ban_s=1)
    health.quarantine(B)
    health.succeeded(B)
    assert health.avoided(1e9) == {B} == health.quarantined
    assert not health.report(CorruptActivationsError("again", B), now=0)


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
