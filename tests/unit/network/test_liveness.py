"""When a peer is pinged and when it is given up, without a clock: every test says what time it is."""

import pytest

from swarmllm.network.wire.liveness import LEAST_SILENCE_S, PROGRESS_BYTES, Liveness

INTERVAL_S, MISSES, STALL_S = 2.5, 3, 30.0


def watched() -> Liveness:
    liveness = Liveness(0.0, STALL_S)
    liveness.watch(0.0, INTERVAL_S, MISSES)
    return liveness


def looks(liveness: Liveness, now: float, *, until_s: float, **came: object) -> tuple[float, str | None]:
    """Look as often as it is due; when the peer was given up and why, or the end and None."""
    arguments = {"num_messages": 0, "unfinished_bytes": 0} | came
    while now < until_s:
        look = liveness.look(now, **arguments)
        if look.give_up is not None:
            return now, look.give_up
        if look.ping:
            liveness.pinged(now)
        assert now < look.next_at <= now + INTERVAL_S
        now = look.next_at
    return until_s, None


def test_a_silent_peer_is_given_up_after_the_intervals_that_it_missed() -> None:
    assert looks(watched(), 0.0, until_s=100.0) == (INTERVAL_S * MISSES, "gave no sign of life for 7.5 s")


def test_a_peer_that_says_anything_is_kept() -> None:
    liveness = watched()
    for now in range(100):
        liveness.last_heard_at = float(now)
        assert liveness.look(float(now), 0, 0).give_up is None


def test_a_quick_peer_is_given_up_sooner_while_somebody_waits() -> None:
    liveness = watched()
    assert liveness.answered(liveness.pinged(0.0), 0.01) == 0.01
    assert liveness.attend()
    assert not liveness.attend(), "another one waits already"
    at, reason = looks(liveness, 1.0, until_s=100.0)
    assert 1.0 + LEAST_SILENCE_S <= at < 1.2 + LEAST_SILENCE_S
    assert reason is not None
    assert "did not answer" in reason


def test_a_peer_that_pings_and_does_not_answer_is_given_up_as_soon() -> None:
    """The way there carries nothing, the way back does."""
    liveness = watched()
    liveness.answered(liveness.pinged(0.0), 0.01)
    liveness.attend()
    now, given_up = 1.0, None
    while given_up is None and now < 100:
        liveness.last_heard_at = now
        look = liveness.look(now, 0, 0)
        given_up = look.give_up
        if look.ping:
            liveness.pinged(now)
        now = look.next_at
    assert now < 1.2 + LEAST_SILENCE_S
    assert given_up == "did not answer for 2.0 s"


def test_a_peer_whose_messages_come_is_kept_though_its_answers_wait_behind_them() -> None:
    liveness = watched()
    liveness.answered(liveness.pinged(0.0), 0.01)
    liveness.attend()
    assert liveness.look(1.0, 0, 0).ping
    liveness.pinged(1.0)
    for step in range(1, 100):
        now = liveness.last_heard_at = 1.0 + 0.4 * step
        assert liveness.look(now, 0, 1 + step * 10_000).give_up is None


def test_silence_lasts_however_often_somebody_begins_to_wait() -> None:
    liveness = watched()
    liveness.answered(liveness.pinged(0.0), 0.01)
    now, given_up = 1.0, None
    while given_up is None and now < 100:
        liveness.attend()
        look = liveness.look(now, 0, 0)
        given_up = look.give_up
        if look.ping:
            liveness.pinged(now)
        liveness.relax()
        now = look.next_at
    assert now < 2.0 + LEAST_SILENCE_S


def test_nobody_is_given_up_at_a_look_that_comes_late() -> None:
    """The event loop reads what has come after it."""
    liveness = watched()
    liveness.answered(liveness.pinged(0.0), 0.01)
    liveness.attend()
    assert liveness.look(1.0, 0, 0).ping
    liveness.pinged(1.0)
    assert liveness.look(3.5, 0, 0).give_up is None


def test_when_nobody_waits_any_more_it_has_as_long_as_ever() -> None:
    liveness = watched()
    liveness.answered(liveness.pinged(0.0), 0.01)
    liveness.attend()
    liveness.relax()
    assert looks(liveness, 1.0, until_s=100.0)[0] > 7.0


def test_while_somebody_waits_one_ping_is_under_way_at_a_time() -> None:
    liveness = watched()
    assert liveness.look(0.0, 0, 0).ping
    number = liveness.pinged(0.0)
    assert liveness.look(1.0, 0, 0).ping, "nobody waits"
    liveness.attend()
    assert not liveness.look(1.4, 0, 0).ping
    liveness.answered(number, 1.5)
    assert liveness.look(1.8, 0, 0).ping


def test_a_message_that_stops_ends_the_peer_though_it_gives_signs_of_life() -> None:
    liveness = watched()
    given_up = []
    for now in range(60):
        liveness.last_heard_at = float(now)
        given_up.append(liveness.look(float(now), 1, 100).give_up)
    first = next(now for now, reason in enumerate(given_up) if reason is not None)
    assert first == STALL_S + 1
    assert given_up[first] == "stopped within a message for 31 s"


def test_a_message_that_goes_on_is_waited_for() -> None:
    liveness = watched()
    for step in range(20):
        now = liveness.last_heard_at = 25.0 * step
        assert liveness.look(now, 0, 1 + step * PROGRESS_BYTES).give_up is None


@pytest.mark.parametrize("is_reading", [True, False])
def test_what_this_process_could_not_see_is_not_blamed_on_the_peer(is_reading: bool) -> None:
    """It was stopped for a minute, or doesn't take what comes."""
    liveness = watched()
    look = liveness.look(0.0, 0, 100, is_reading=is_reading)
    late = look.next_at + (60.0 if is_reading else 0.0)
    for _ in range(30):
        look = liveness.look(late, 0, 100, is_reading=is_reading)
        assert look.give_up is None
        late = look.next_at + (60.0 if is_reading else 0.0)


def test_only_the_last_ping_measures_a_round_trip() -> None:
    liveness = watched()
    first, second = liveness.pinged(0.0), liveness.pinged(1.0)
    assert liveness.answered(first, 1.1) is None
    assert liveness.answered("x", 1.1) is None
    assert liveness.round_trip_s is None
    assert liveness.answered(second, 1.5) == 0.5
    assert liveness.answered(liveness.pinged(2.0), 2.1) == pytest.approx(0.1)
    assert liveness.round_trip_s == pytest.approx(0.45)
    assert liveness.least_round_trip_s == pytest.approx(0.1)
