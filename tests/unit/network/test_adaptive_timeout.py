"""The time to wait for a silent peer: short if it was quick, long if anything is slow."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.network.wire.liveness import (
    DECAY,
    LEAST_SILENCE_S,
    MAX_MARKS,
    SLOWEST_LINK_BYTES_PER_S,
    SLOWEST_ROUND_TRIPS,
    AdaptiveTimeout,
)


def waiting(*round_trips_s: float) -> AdaptiveTimeout:
    """A PING is under way since the time 0."""
    timeout = AdaptiveTimeout()
    timeout.num_waiting = 1
    for round_trip_s in round_trips_s:
        timeout.pinged(0.0)
        timeout.answered(round_trip_s)
    timeout.pinged(0.0)
    return timeout


def test_nobody_waits_or_nothing_is_known_or_asked() -> None:
    timeout, answered = waiting(0.001), waiting()
    timeout.num_waiting = 0
    answered.answered(0.001)
    assert timeout.ends_at() == answered.ends_at() == waiting().ends_at() == math.inf


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=20))
def test_silence_is_too_long_after_some_of_the_slowest_round_trips_of_late(round_trips_s: list[float]) -> None:
    ends_at = waiting(*round_trips_s).ends_at()
    ages = enumerate(reversed(round_trips_s))
    slowest_s = max(DECAY**age * round_trip_s for age, round_trip_s in ages)
    assert ends_at == pytest.approx(LEAST_SILENCE_S + SLOWEST_ROUND_TRIPS * slowest_s)


@given(st.floats(0.0, 0.4))
def test_a_frozen_peer_on_a_busy_machine_is_given_up_within_four_seconds(slow_s: float) -> None:
    """At a load of 26, the slowest round trip took 0.27 s."""
    assert waiting(slow_s).ends_at() <= 3.6


@given(st.floats(0.5, 2.0))
def test_what_was_slow_is_forgotten(slow_s: float) -> None:
    assert waiting(slow_s, *[0.001] * 100).ends_at() <= LEAST_SILENCE_S + 0.2


def test_silence_begins_with_the_first_ping_that_is_not_answered() -> None:
    timeout = waiting(0.001)
    timeout.pinged(1.0)
    assert timeout.ends_at() == pytest.approx(LEAST_SILENCE_S, abs=0.01)
    timeout.answered(0.001)
    timeout.pinged(5.0)
    assert timeout.ends_at() == pytest.approx(5.0 + LEAST_SILENCE_S, abs=0.01)


def test_what_this_process_misses_counts_for_the_peer() -> None:
    timeout = waiting(0.0)
    timeout.delay(1.0, 0.3)
    assert timeout.ends_at() == pytest.approx(0.6 + LEAST_SILENCE_S)
    timeout.delay(2.0, 60.0)
    assert timeout.ends_at() == pytest.approx(2.0 + LEAST_SILENCE_S)
    timeout.restart(5.0)
    assert timeout.ends_at() == pytest.approx(5.0 + LEAST_SILENCE_S)


def test_what_is_under_way_takes_its_time() -> None:
    """Also what was sent before a ping that isn't answered; afterwards it has arrived."""
    timeout = waiting(0.0)
    timeout.sent(1 << 20)
    assert timeout.ends_at() > LEAST_SILENCE_S + 8
    timeout.mark(1)
    assert timeout.ends_at() > LEAST_SILENCE_S + 8
    assert timeout.ends_at(mbps=1000.0) < LEAST_SILENCE_S + 0.1, "the link is known to be fast"
    timeout.arrived(1)
    assert timeout.ends_at() == LEAST_SILENCE_S


def test_what_came_before_any_ping_that_was_answered_has_arrived() -> None:
    timeout = waiting(0.0)
    for number in (-1, 1, -2):
        timeout.sent(1000)
        timeout.mark(number)
    timeout.sent(500)
    assert timeout.unmarked_bytes == 500
    assert timeout.ends_at() == LEAST_SILENCE_S + 3500 / SLOWEST_LINK_BYTES_PER_S
    timeout.arrived(1)
    timeout.arrived(-1)  # an older one tells nothing new
    timeout.arrived("nonsense")
    assert timeout.ends_at() == LEAST_SILENCE_S + 1500 / SLOWEST_LINK_BYTES_PER_S
    timeout.arrived(-2)
    assert timeout.ends_at() == LEAST_SILENCE_S + 500 / SLOWEST_LINK_BYTES_PER_S


def test_a_peer_that_answers_nothing_is_kept_in_mind_with_few_pings() -> None:
    timeout = waiting(0.0)
    for number in range(10 * MAX_MARKS):
        timeout.sent(1)
        timeout.mark(number)
    timeout.arrived(9 * MAX_MARKS - 1)  # forgotten
    assert timeout.unconfirmed_bytes == 10 * MAX_MARKS
    timeout.arrived(9 * MAX_MARKS)
    assert timeout.unconfirmed_bytes == MAX_MARKS - 1
