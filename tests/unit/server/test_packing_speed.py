"""The fastest way of packing is chosen by measurement; some ways are never tried."""

import pytest

from swarmllm.models.span.packing import Packing
from swarmllm.server.device.throughput import PACKING_ROUNDS, choose_packing

RAGGED, PADDED, ONE_BY_ONE = Packing.RAGGED, Packing.PADDED, Packing.ONE_BY_ONE
ALL = (RAGGED, PADDED, ONE_BY_ONE)


class Device:
    """Gives what a test says instead of measuring; `first_s` for the first time."""

    def __init__(self, seconds: dict[Packing, float], first_s: float = 0.0) -> None:
        self.seconds, self.first_s = seconds, first_s
        self.measured: list[Packing] = []
        self.now = 0.0

    def measure(self, way: Packing) -> float:
        took_s = self.seconds[way] + (0.0 if way in self.measured else self.first_s)
        self.measured.append(way)
        self.now += took_s
        return took_s

    def choose(self, ways: tuple[Packing, ...] = ALL) -> Packing:
        return choose_packing(ways, self.measure, lambda: self.now)


@pytest.mark.parametrize(
    ("seconds", "way"),
    [
        ((0.010, 0.020, 0.040), RAGGED),
        ((0.020, 0.010, 0.040), PADDED),
        ((0.020, 0.040, 0.010), ONE_BY_ONE),
        ((0.020, 0.019, 0.019), RAGGED),  # not by much
        ((0.020, 0.017, 0.016), PADDED),  # nor the last compared to the second
    ],
)
def test_the_fastest_is_chosen_if_it_is_clearly_so(seconds: tuple[float, ...], way: Packing) -> None:
    assert Device(dict(zip(ALL, seconds, strict=True))).choose() == way


def test_wrong_ways_are_not_tried() -> None:
    device = Device({PADDED: 0.02, ONE_BY_ONE: 0.01})  # would fail if asked for another
    assert device.choose((PADDED, ONE_BY_ONE)) == ONE_BY_ONE
    assert set(device.measured) == {PADDED, ONE_BY_ONE}


def test_the_first_run_may_be_slow() -> None:
    device = Device({RAGGED: 0.004, PADDED: 0.002, ONE_BY_ONE: 0.010}, first_s=0.004)
    assert device.choose() == PADDED
    assert device.measured == [*ALL] * PACKING_ROUNDS


def test_slow_blocks_are_measured_once() -> None:
    device = Device({RAGGED: 3.0, PADDED: 3.1, ONE_BY_ONE: 5.0})
    assert device.choose() == RAGGED
    assert device.measured == list(ALL)
