"""When a forward is held back for more steps, and for how long."""

import pytest

from swarmllm.server.device.burst_wait import MOST_S, PAUSE_S, SMOOTHING, TRIES, WORTHWHILE, BurstWait


def test_it_waits_as_long_as_steps_keep_coming() -> None:
    burst_wait = BurstWait()
    assert burst_wait.wait_s(10.0) == pytest.approx(PAUSE_S)
    burst_wait.came(10.0 + PAUSE_S / 2)
    assert burst_wait.wait_s(10.0 + PAUSE_S / 2) == pytest.approx(PAUSE_S)
    assert burst_wait.wait_s(10.0 + 1.5 * PAUSE_S) == pytest.approx(0.0)


def test_it_never_waits_for_long() -> None:
    burst_wait, now, waits = BurstWait(), 0.0, 0
    while burst_wait.wait_s(now) > 0:
        now += PAUSE_S / 2
        burst_wait.came(now)
        waits += 1
    assert waits <= 1 + 2 * MOST_S / PAUSE_S


def test_it_stops_waiting_in_vain_and_finds_out_when_it_is_not_any_more() -> None:
    burst_wait = BurstWait()

    def forward(*, another_comes: bool) -> bool:
        waited = burst_wait.wait_s(0.0) > 0
        if another_comes:
            burst_wait.came(PAUSE_S / 2)
        burst_wait.ran()
        return waited

    alone = [forward(another_comes=False) for _ in range(100)]
    tries = alone.index(False)
    assert (1 - SMOOTHING) ** tries < WORTHWHILE <= (1 - SMOOTHING) ** (tries - 1)
    assert sum(alone[tries:]) == (100 - tries) // (TRIES + 1)
    together = [forward(another_comes=True) for _ in range(10 * TRIES)]
    assert all(together[5 * TRIES :])
