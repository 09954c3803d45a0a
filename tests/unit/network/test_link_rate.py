"""Bytes a second of a link, from the times of messages."""

import pytest

from swarmllm.errors import PeerUnreachableError, SessionClosedError
from swarmllm.network.wire.frames import MessageType
from swarmllm.network.wire.liveness import MEASURED_BYTES, MEASUREMENTS, MIN_MEASUREMENTS, LinkRate
from swarmllm.network.wire.stream import FrameStream

ROUND_TRIP_S = 0.1
MEGABIT_BYTES = 125_000


def send(rate: LinkRate, began_at: float, megabits: float, arrived_at: float) -> None:
    number = rate.sent(began_at, int(megabits * MEGABIT_BYTES))
    assert number is not None
    rate.answered(number, arrived_at + ROUND_TRIP_S / 2, ROUND_TRIP_S)


def test_messages_one_at_a_time() -> None:
    rate = LinkRate()
    for index in range(MIN_MEASUREMENTS):
        assert rate.mbps is None
        send(rate, index, 8, index + ROUND_TRIP_S / 2 + 0.4)
    assert rate.mbps == pytest.approx(20)


def test_messages_that_wait_for_one_another() -> None:
    rate = LinkRate()
    numbers = [rate.sent(0.0, 8 * MEGABIT_BYTES) for _ in range(MIN_MEASUREMENTS)]
    for index, number in enumerate(numbers):
        rate.answered(number, ROUND_TRIP_S + 0.4 * (index + 1), ROUND_TRIP_S)
    assert rate.mbps == pytest.approx(20)


def test_an_answer_that_comes_late_does_not_make_the_next_one_fast() -> None:
    rate = LinkRate()
    numbers = [rate.sent(0.0, 8 * MEGABIT_BYTES) for _ in range(MIN_MEASUREMENTS)]
    arrivals = [0.4 * (index + 1) for index in range(MIN_MEASUREMENTS)]
    arrivals[1] += 0.39
    for number, arrived_at in zip(numbers, arrivals, strict=True):
        rate.answered(number, ROUND_TRIP_S + arrived_at, ROUND_TRIP_S)
    assert rate.mbps == pytest.approx(20)


def test_a_busy_peer_is_not_a_slow_link_and_old_times_are_forgotten() -> None:
    rate = LinkRate()
    send(rate, 0.0, 8, 0.1)
    for index in range(1, MEASUREMENTS):
        send(rate, index, 8, index + 0.9)
    assert rate.mbps == pytest.approx(8 / (0.1 - ROUND_TRIP_S / 2))
    send(rate, MEASUREMENTS, 8, MEASUREMENTS + 0.9)
    assert rate.mbps == pytest.approx(8 / (0.9 - ROUND_TRIP_S / 2))


def test_what_says_nothing() -> None:
    rate = LinkRate()
    assert rate.sent(0.0, MEASURED_BYTES - 1) is None
    for number in (-1, 1, "x", None, 1.5):
        rate.answered(number, 1.0, ROUND_TRIP_S)
    for _ in range(2 * MIN_MEASUREMENTS):  # the round trip isn't known yet
        rate.answered(rate.sent(0.0, MEASURED_BYTES), 1.0, None)
    for _ in range(3 * MEASUREMENTS):  # never answered
        rate.sent(0.0, MEASURED_BYTES)
    assert rate.mbps is None


async def test_streams_time_their_large_messages(streams: tuple[FrameStream, FrameStream]) -> None:
    client, server = streams
    round_trip_s = await client.ping()
    for _ in range(MIN_MEASUREMENTS):
        assert client.link_rate.mbps is None
        await client.send(MessageType.FORWARD, {}, [bytes(MEASURED_BYTES)])
        await server.receive()
        await client.ping()  # behind the one that times
    assert client.link_rate.mbps is not None
    assert client.link_rate.mbps > 0
    assert server.link_rate.mbps is None
    assert client.liveness.round_trip_s is not None
    assert round_trip_s > 0


async def test_a_stream_is_measured_by_bytes_that_the_peer_skips(streams: tuple[FrameStream, FrameStream]) -> None:
    client, server = streams
    server.expect(frozenset())  # only small messages are taken from this peer
    mbps = await client.measure_rate()
    assert mbps is not None
    assert mbps == client.link_rate.mbps > 0
    await client.send(MessageType.ATTACH, {"id": 1})
    assert (await server.receive()).type == MessageType.ATTACH, "nothing else has come"


async def test_a_stream_that_ends_is_not_measured(streams: tuple[FrameStream, FrameStream]) -> None:
    client, server = streams
    server.abort()
    with pytest.raises((PeerUnreachableError, SessionClosedError)):
        await client.measure_rate()
