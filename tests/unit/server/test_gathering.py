"""When a forward is held back for more steps, and for how long."""

import pytest

from swarmllm.server.gathering import (
    CONTESTED_PER_S,
    LONGEST_S,
    MANY,
    MOST_S,
    PAUSE_S,
    SMOOTHING,
    TRIES,
    WORTHWHILE,
    Gathering,
)


def test_it_waits_as_long_as_steps_keep_coming() -> None:
    gathering = Gathering()
    assert gathering.wait_s(10.0) == pytest.approx(PAUSE_S)
    gathering.came(10.0 + PAUSE_S / 2)
    assert gathering.wait_s(10.0 + PAUSE_S / 2) == pytest.approx(PAUSE_S)
    assert gathering.wait_s(10.0 + 1.5 * PAUSE_S) == pytest.approx(0.0)


def test_it_never_waits_for_long() -> None:
    gathering, now, waits = Gathering(), 0.0, 0
    while gathering.wait_s(now) > 0:
        now += PAUSE_S / 2
        gathering.came(now)
        waits += 1
    assert waits <= 1 + 2 * MOST_S / PAUSE_S


def test_it_stops_waiting_in_vain_and_finds_out_when_it_is_not_any_more() -> None:
    gathering = Gathering()

    def forward(*, another_comes: bool) -> bool:
        waited = gathering.wait_s(0.0) > 0
        if another_comes:
            gathering.came(PAUSE_S / 2)
        gathering.ran()
        return waited

    alone = [forward(another_comes=False) for _ in range(100)]
    tries = alone.index(False)
    assert (1 - SMOOTHING) ** tries < WORTHWHILE <= (1 - SMOOTHING) ** (tries - 1)
    assert sum(alone[tries:]) == (100 - tries) // (TRIES + 1)
    together = [forward(another_comes=True) for _ in range(10 * TRIES)]
    assert all(together[5 * TRIES :])


def after_forwards(seconds: float, lost_per_s: float) -> Gathering:
    gathering = Gathering()
    for _ in range(100):
        gathering.computed(seconds, round(lost_per_s * seconds))
    return gathering


def test_where_others_want_the_core_it_waits_a_forward_for_half_of_those_who_decode() -> None:
    gathering = after_forwards(0.015, 2 * CONTESTED_PER_S)
    assert gathering.wait_s(10.0, num_here=1, num_decoding=8) == pytest.approx(0.015, rel=0.01)
    gathering.came(10.01)
    assert gathering.wait_s(10.01, num_here=2, num_decoding=8) == pytest.approx(0.005, rel=0.01)
    assert gathering.wait_s(10.01, num_here=4, num_decoding=8) == 0.0
    gathering.ran()
    assert gathering.wait_s(20.0, num_here=5, num_decoding=8) == 0.0


def test_it_waits_for_no_half_longer_than_a_moment() -> None:
    gathering = after_forwards(10.0, 2 * CONTESTED_PER_S)
    assert gathering.wait_s(0.0, num_here=1, num_decoding=8) == pytest.approx(LONGEST_S)


@pytest.mark.parametrize(
    ("lost_per_s", "num_decoding"),
    [
        pytest.param(CONTESTED_PER_S / 2, MANY, id="a core of its own"),
        pytest.param(2 * CONTESTED_PER_S, MANY - 1, id="few sessions"),
        pytest.param(2 * CONTESTED_PER_S, 0, id="something else to compute"),
    ],
)
def test_otherwise_it_waits_for_the_burst_alone(lost_per_s: float, num_decoding: int) -> None:
    gathering = after_forwards(0.1, lost_per_s)
    assert gathering.wait_s(0.0, num_here=1, num_decoding=num_decoding) == pytest.approx(PAUSE_S)
