"""How long a silent peer is waited for: short where it was quick, long where anything is slow."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.network.wire.adaptive_timeout import DECAY, LEAST_S, ROUND_TRIPS, AdaptiveTimeout


def waiting(*round_trips_s: float) -> AdaptiveTimeout:
    timeout = AdaptiveTimeout()
    timeout.num_waiting = 1
    for round_trip_s in round_trips_s:
        timeout.pinged()
        timeout.answered(round_trip_s)
    return timeout


def test_nobody_waits_or_nothing_is_known() -> None:
    timeout = waiting(0.001)
    timeout.num_waiting = 0
    assert timeout.ends_at(0.0) == waiting().ends_at(0.0) == math.inf


@pytest.mark.parametrize("round_trip_s", [0.0, 0.001, 0.05, 0.099])
def test_a_quick_peer_is_given_up_early(round_trip_s: float) -> None:
    assert waiting(round_trip_s).ends_at(0.0) == LEAST_S


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=20))
def test_no_silence_is_too_long_that_was_normal_of_late(round_trips_s: list[float]) -> None:
    timeout = waiting(*round_trips_s)
    newest_first = enumerate(reversed(round_trips_s))
    for age, round_trip_s in newest_first:
        assert timeout.ends_at(0.0) >= ROUND_TRIPS * DECAY**age * round_trip_s * 0.999


@given(st.floats(0.5, 2.0))
def test_what_was_slow_is_forgotten(slow_s: float) -> None:
    assert waiting(slow_s, *[0.001] * 100).ends_at(0.0) <= LEAST_S + 0.2


def test_what_this_process_misses_counts_for_the_peer() -> None:
    timeout = waiting(0.001)
    timeout.restart(5.0)
    assert timeout.ends_at(0.0) == timeout.ends_at(4.0) == 5.0 + LEAST_S
    assert timeout.ends_at(6.0) == 6.0 + LEAST_S, "it said something meanwhile"


def test_what_is_under_way_takes_its_time() -> None:
    """Also what was sent before a ping that isn't answered; afterwards it has arrived."""
    timeout = waiting(0.001)
    timeout.sent(1 << 20)
    assert timeout.ends_at(0.0) > LEAST_S + 8
    timeout.pinged()
    assert timeout.ends_at(0.0) > LEAST_S + 8
    timeout.answered(0.001)
    assert timeout.ends_at(0.0) == LEAST_S
