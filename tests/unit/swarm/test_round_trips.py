"""Distances from samples: smoothed, forgotten, assumed while an answer is awaited; and whom to measure next."""

import random

import pytest

from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.swarm.round_trips import DIAL_ROUND_TRIPS, FORGET_S, SMOOTHING, RoundTrips


def server(name: str, start: int = 0, end: int = 4, **more: float) -> ServerInfo:
    return ServerInfo(peer_id=name * 46, start=start, end=end, **more)


def test_samples_are_smoothed_until_they_are_too_old() -> None:
    trips = RoundTrips()
    trips.observe("a", 10.0, now=0.0)
    trips.observe("a", 20.0, now=1.0)
    smoothed = 10.0 + SMOOTHING * 10.0
    assert trips.known(1.0) == {"a": pytest.approx(smoothed)}
    assert trips.known(FORGET_S) == {"a": pytest.approx(smoothed)}
    assert trips.known(1.0 + FORGET_S) == {}
    trips.observe("a", 50.0, now=2.0 + FORGET_S)
    assert trips.known(2.0 + FORGET_S) == {"a": 50.0}, "an old path says nothing about the new one"


def test_a_peer_that_has_not_answered_yet_is_at_least_so_far_away() -> None:
    trips = RoundTrips()
    trips.observe("near", 10.0, now=0.0)
    trips.begin("waiting", now=0.0)
    assert trips.known(0.0)["waiting"] == 10.0, "as far as the others, to begin with"
    assert trips.known(8.0)["waiting"] == pytest.approx(8000 / DIAL_ROUND_TRIPS)
    trips.fail("waiting")
    assert trips.known(8.0) == {"near": 10.0}


def test_first_servers_of_the_best_route_then_the_oldest_measurements() -> None:
    fast, slow, slower = (server(name, decode_ms_per_block=ms) for name, ms in (("f", 1.0), ("s", 5.0), ("t", 9.0)))
    snapshot = SwarmSnapshot(4, (slower, slow, fast))
    trips = RoundTrips()

    def chosen(now: float, count: int, avoid: tuple[str, ...] = ()) -> list[ServerInfo]:
        return trips.to_measure(snapshot, count=count, avoid=avoid, generator=random.Random(0))

    assert chosen(0.0, 1) == [fast]
    assert chosen(0.0, 1, avoid=(fast.peer_id,)) == [slow]
    trips.observe(fast.peer_id, 1.0, now=0.0)
    trips.observe(slower.peer_id, 1.0, now=1.0)
    assert chosen(2.0, 3) == [slow, fast, slower]
    assert trips.to_measure(SwarmSnapshot(8, (slow,)), count=3, avoid=(), generator=random.Random(0)) == [slow], (
        "a swarm without a route has distances, too"
    )


def test_peers_without_number_are_not_remembered() -> None:
    trips = RoundTrips()
    for number in range(1000):
        now = number * FORGET_S / 100
        trips.begin(f"{number}", now)
        if number % 3:
            trips.observe(f"{number}", 1.0, now)
        elif number % 2:
            trips.fail(f"{number}")
    for known in (trips._ms, trips._seen_at, trips._tried_at, trips._waiting_since):
        assert 0 < len(known) <= 201
