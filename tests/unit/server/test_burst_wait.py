"""A forward waits for more steps of a burst: when, and for how long."""

import pytest

from swarmllm.server.device.scheduler import GAPS, MOST_SHARE, TRIES, BurstWait


def seen(forward_s: float) -> BurstWait:
    burst_wait = BurstWait()
    for _ in range(100):
        burst_wait.took(forward_s)
    return burst_wait


def test_there_is_no_wait_before_its_gain_is_known() -> None:
    assert BurstWait().wait_s(10.0) == 0.0


@pytest.mark.parametrize("forward_s", [0.0004, 0.004, 0.4])
def test_it_waits_as_long_as_steps_keep_coming(forward_s: float) -> None:
    burst_wait, pause_s = seen(forward_s), MOST_SHARE * forward_s
    assert burst_wait.wait_s(10.0) == pytest.approx(pause_s)
    burst_wait.came(10.0 + pause_s / 2)
    assert burst_wait.wait_s(10.0 + pause_s / 2) == pytest.approx(pause_s)
    assert burst_wait.wait_s(10.0 + 1.5 * pause_s) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("forward_s", [0.0004, 0.004, 0.4])
@pytest.mark.parametrize("gap", [0.01, 0.1, 0.4])
def test_it_never_waits_for_longer_than_a_forward_takes(forward_s: float, gap: float) -> None:
    burst_wait, now, begun = seen(forward_s), 0.0, 0.0
    for _ in range(20):
        begun = now
        while burst_wait.wait_s(now) > 0:
            now += gap * forward_s
            burst_wait.came(now)
        assert now - begun <= (1 + gap) * forward_s + 1e-9
        burst_wait.begins()


def test_where_steps_follow_each_other_quickly_a_long_forward_is_no_reason_to_wait_long() -> None:
    burst_wait = seen(0.1)
    for number in range(100):
        assert burst_wait.wait_s(number) > 0
        burst_wait.came(number + 0.0003)
        burst_wait.begins()
    assert burst_wait.wait_s(200.0) == pytest.approx(GAPS * 0.0003, rel=0.01)


def test_it_stops_waiting_in_vain_and_finds_out_when_it_is_not_any_more() -> None:
    burst_wait = seen(0.004)

    def forward(*, another_comes: bool) -> bool:
        waited = burst_wait.wait_s(0.0) > 0
        if another_comes:
            burst_wait.came(0.001)
        burst_wait.begins()
        return waited

    alone = [forward(another_comes=False) for _ in range(100)]
    tries = alone.index(False)
    assert 5 < tries < 20
    assert sum(alone[tries:]) == (100 - tries) // (TRIES + 1)
    together = [forward(another_comes=True) for _ in range(10 * TRIES)]
    assert all(together[5 * TRIES :])
