"""Whatever the owner's programs do: no pause where nobody wants the cores, and never more than ten times slower."""

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.data_structures import ServerInfo
from swarmllm.server.courtesy import FULL, MAX_MS, MAX_PAUSE_S, MIN_SHARE, Courtesy, share_left

cores = st.integers(1, 256)
load = st.floats(0, 256)
seconds = st.floats(0, 100)
clock = st.floats(0, 1e6)


@given(load, load, cores, cores)
def test_the_more_others_want_the_less_is_left(one: float, other: float, num_cores: int, wanted: int) -> None:
    less, more = sorted((one, other))
    assert MIN_SHARE <= share_left(more, num_cores, wanted) <= share_left(less, num_cores, wanted) <= 1
    assert share_left(0.0, num_cores, wanted) == 1


@given(cores, cores, seconds, clock)
def test_cores_that_nobody_wants_need_no_pause(num_cores: int, wanted: int, compute_s: float, now: float) -> None:
    courtesy = Courtesy()
    courtesy.look(max(0, num_cores - wanted), num_cores, wanted, now)
    courtesy.ran(compute_s, compute_s, now)
    assert courtesy.pause_s(now) == 0


@given(st.lists(load, max_size=30), cores, cores, seconds, clock)
def test_pauses_are_bounded(loads: list[float], num_cores: int, wanted: int, compute_s: float, now: float) -> None:
    courtesy = Courtesy()
    for count, others in enumerate(loads):
        courtesy.look(others, num_cores, wanted, now + 10 * count)
    courtesy.ran(compute_s, compute_s, now)
    pause_s = courtesy.pause_s(now)
    rounding_s = 1e-6 * (1 + now / 1e3)
    assert 0 <= pause_s <= min(MAX_PAUSE_S, compute_s * (1 / MIN_SHARE - 1)) + rounding_s
    assert courtesy.pause_s(now + MAX_PAUSE_S) <= rounding_s
    assert courtesy.pause_s(now + pause_s / 2) <= pause_s


@given(st.lists(load, max_size=30), cores, cores, st.floats(0, MAX_MS), st.floats(0, 1e9))
def test_what_is_announced_is_valid_and_never_faster(
    loads: list[float], num_cores: int, wanted: int, ms: float, tokens_per_s: float
) -> None:
    measured = ServerInfo(peer_id="a" * 46, start=0, end=2, throughput=tokens_per_s, decode_ms_per_block=ms)
    courtesy = Courtesy()
    for count, others in enumerate(loads):
        courtesy.look(others, num_cores, wanted, 10.0 * count)
    told = courtesy.announced(measured)
    assert ServerInfo.model_validate(told.model_dump()) == told
    assert told.throughput <= measured.throughput
    assert told.decode_ms_per_block >= measured.decode_ms_per_block
    assert (told == measured) == (courtesy.share == 1)
    courtesy.look((1 - FULL) / 2 * min(num_cores, wanted), num_cores, wanted, 1e6)
    assert courtesy.announced(measured) == measured, "when the others have ended, everything is as before"
