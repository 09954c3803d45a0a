"""For any load of other programs: no pause while they want no cores, and never more than ten times slower."""

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.data_structures import ServerInfo
from swarmllm.server.device.niceness import FULL, MAX_MS, MAX_PAUSE_S, MIN_SHARE, Niceness

cores = st.integers(1, 256)
load = st.floats(0, 256)
seconds = st.floats(0, 100)
clock = st.floats(0, 1e6)


@given(load, load, cores, cores)
def test_the_more_others_want_the_less_is_left(one: float, other: float, num_cores: int, wanted: int) -> None:
    less, more = Niceness(), Niceness()
    for niceness, others in zip((less, more), sorted((one, other)), strict=True):
        niceness.look(others, num_cores, wanted, 0.0)
    assert MIN_SHARE <= more.share <= less.share <= 1


@given(cores, cores, seconds, clock)
def test_cores_that_nobody_wants_need_no_pause(num_cores: int, wanted: int, compute_s: float, now: float) -> None:
    niceness = Niceness()
    niceness.look(max(0, num_cores - wanted), num_cores, wanted, now)
    niceness.ran(compute_s, compute_s, now)
    assert niceness.pause_s(now) == 0


@given(st.lists(load, max_size=30), cores, cores, seconds, clock)
def test_pauses_are_bounded(loads: list[float], num_cores: int, wanted: int, compute_s: float, now: float) -> None:
    niceness = Niceness()
    for count, others in enumerate(loads):
        niceness.look(others, num_cores, wanted, now + 10 * count)
    niceness.ran(compute_s, compute_s, now)
    pause_s = niceness.pause_s(now)
    rounding_s = 1e-6 * (1 + now / 1e3)
    assert 0 <= pause_s <= min(MAX_PAUSE_S, compute_s * (1 / MIN_SHARE - 1)) + rounding_s
    assert niceness.pause_s(now + MAX_PAUSE_S) <= rounding_s
    assert niceness.pause_s(now + pause_s / 2) <= pause_s


@given(st.lists(load, max_size=30), cores, cores, st.floats(0, MAX_MS), st.floats(0, 1e9))
def test_the_announced_record_is_valid_and_never_faster(
    loads: list[float], num_cores: int, wanted: int, ms: float, tokens_per_s: float
) -> None:
    measured = ServerInfo(peer_id="a" * 46, start=0, end=2, throughput=tokens_per_s, decode_ms_per_block=ms)
    niceness = Niceness()
    for count, others in enumerate(loads):
        niceness.look(others, num_cores, wanted, 10.0 * count)
    told = niceness.announced(measured)
    assert ServerInfo.model_validate(told.model_dump()) == told
    assert told.throughput <= measured.throughput
    assert told.decode_ms_per_block >= measured.decode_ms_per_block
    assert (told == measured) == (niceness.share == 1)
    niceness.look((1 - FULL) / 2 * min(num_cores, wanted), num_cores, wanted, 1e6)
    assert niceness.announced(measured) == measured, "when the others have ended, everything is as before"
