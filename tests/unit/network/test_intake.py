"""Messages that peers have sent and nobody has taken: bounded for each peer and for all, and they have to go on."""

import asyncio
from collections.abc import Callable

import pytest

from swarmllm.errors import PeerTimeoutError, RemoteProtocolError
from swarmllm.network.wire.frames import (
    CONTROL_TYPES,
    FORMAT,
    LARGE_TYPES,
    MAGIC,
    PREFIX,
    SMALL_BYTES,
    FrameDecoder,
    MessageType,
    encode_message,
)
from swarmllm.network.wire.liveness import PROGRESS_BYTES, Progress
from swarmllm.network.wire.stream import FrameStream, Intake

BIG = 4 << 20


class Held:
    """Stands for a stream."""

    def __init__(self, intake: Intake, peer_id: str) -> None:
        self.peer_id, self._intake = peer_id, intake
        self.ended = False

    def hold(self, num_bytes: int) -> None:
        self._intake.holds(self, num_bytes)

    def sent_too_much(self) -> None:
        self.ended = True
        self.hold(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the streams tell nobody of these states
            await asyncio.sleep(0.001)


def test_a_peer_that_has_too_much_loses_the_stream_that_grows() -> None:
    intake = Intake(max_bytes_per_peer=100, max_bytes=1000)
    first, second, other = (Held(intake, name) for name in ("mallory", "mallory", "honest"))
    first.hold(60)
    other.hold(90)
    second.hold(40)
    assert not any(held.ended for held in (first, second, other))
    second.hold(41)
    assert second.ended
    assert intake.num_bytes == 150
    first.hold(100)
    assert not first.ended
    assert not other.ended


def test_when_all_have_too_much_the_largest_loses_most() -> None:
    intake = Intake(max_bytes_per_peer=100, max_bytes=200)
    greedy = [Held(intake, "mallory") for _ in range(3)]
    for held, num_bytes in zip(greedy, (20, 45, 25), strict=True):
        held.hold(num_bytes)
    others = [Held(intake, f"peer {number}") for number in range(10)]
    for held in others:
        held.hold(11)
    assert not any(held.ended for held in (*greedy, *others))
    others[0].hold(12)  # 201
    assert [held.ended for held in greedy] == [False, True, False]
    assert not any(held.ended for held in others)
    for held in (*greedy, *others):
        held.hold(0)
    assert intake.num_bytes == 0
    assert not intake._of_peers
    assert not intake._of_streams


def test_progress_is_bytes_or_messages_and_not_frames() -> None:
    progress = Progress(0.0)
    assert progress.stalled_s(0, 0, 10.0) == 0
    assert progress.stalled_s(0, 1, 20.0) == 10
    assert progress.stalled_s(0, PROGRESS_BYTES - 1, 30.0) == 20
    assert progress.stalled_s(0, PROGRESS_BYTES, 40.0) == 0
    assert progress.stalled_s(0, PROGRESS_BYTES + 1, 50.0) == 10
    assert progress.stalled_s(1, 5, 60.0) == 0
    progress.restart(70.0)
    assert progress.stalled_s(1, 5, 70.0) == 0


async def test_bytes_of_frames_without_end_are_no_progress(half_stream) -> None:
    """A frame of one byte after the other, each a sign of life, and a ping between them."""
    stream, (_, writer) = await half_stream(stall_timeout_s=0.1)
    stream.start_keepalive(interval_s=0.01, misses=1_000_000)
    writer.write(PREFIX.pack(MAGIC, FORMAT, MessageType.STEP, 0, 1, 1, BIG) + b"\x80" + b"x")
    (ping,) = encode_message(MessageType.PING, {"n": 1})
    async with asyncio.timeout(120):
        while not stream.closed:
            writer.write(PREFIX.pack(MAGIC, FORMAT, MessageType.CONTINUE, 0, 0, 1, BIG) + b"x" + ping)
            await asyncio.sleep(0.002)
    with pytest.raises(PeerTimeoutError, match="within a message"):
        await stream.receive()


async def test_unfinished_and_waiting_messages_of_one_peer_count_together(half_stream) -> None:
    intake = Intake(max_bytes_per_peer=3 * BIG, max_bytes=1 << 40)
    ends: list[tuple[FrameStream, asyncio.StreamWriter]] = []
    for _ in range(4):
        stream, (_, writer) = await half_stream()
        stream.count_in(intake)
        ends.append((stream, writer))
    wire = b"".join(encode_message(MessageType.STEP, {}, [bytes(BIG)]))
    for number, (_, writer) in enumerate(ends[:2], start=1):
        writer.write(wire[:-1])
        await until(lambda number=number: intake.num_bytes >= number * (BIG - 1))
    ends[2][1].write(wire[: BIG // 2])
    await until(lambda: intake.num_bytes > 2 * BIG)
    ends[3][1].write(wire)
    with pytest.raises(RemoteProtocolError, match="too much was sent at once"):
        await ends[3][0].receive()
    assert not any(stream.closed for stream, _ in ends[:3])
    ends[0][1].write(wire[-1:])
    assert len((await ends[0][0].receive()).payload) == BIG
    assert intake.num_bytes < 2 * BIG
    for stream, _ in ends:
        stream.abort()
    assert intake.num_bytes == 0


def claim(kind: int, header_bytes: int, payload_bytes: int) -> bytes:
    return PREFIX.pack(MAGIC, FORMAT, kind, 0, header_bytes, min(payload_bytes, SMALL_BYTES), payload_bytes)


@pytest.mark.parametrize("kind", sorted(MessageType)[1:])
def test_messages_are_as_small_as_their_type(kind: MessageType) -> None:
    largest_header, payload = {
        MessageType.STEP: (320 << 10, 256 << 20),
        MessageType.RESULT: (128 << 10, 256 << 20),
        MessageType.REPLAY: (256 << 10, SMALL_BYTES),
        MessageType.ADAPTER: (512 << 10, 256 << 20),
    }.get(kind, (SMALL_BYTES, 256 << 20 if kind in LARGE_TYPES else SMALL_BYTES))
    if kind in CONTROL_TYPES:
        payload = 0
    assert list(FrameDecoder().feed(claim(kind, largest_header, payload))) == []
    for too_much in (claim(kind, largest_header + 1, payload), claim(kind, 1, payload + 1)):
        with pytest.raises(RemoteProtocolError, match="cap"):
            list(FrameDecoder().feed(too_much))


@pytest.mark.parametrize("kind", sorted(MessageType)[1:])
def test_before_the_greeting_all_are_small(kind: MessageType) -> None:
    for too_much in (claim(kind, SMALL_BYTES + 1, 0), claim(kind, 1, SMALL_BYTES + 1)):
        decoder = FrameDecoder()
        decoder.large_types = frozenset()
        with pytest.raises(RemoteProtocolError, match="cap"):
            list(decoder.feed(too_much))


def test_a_large_header_is_of_few_maps_and_arrays() -> None:
    """Unpacking others would keep the event loop for 50 ms, and no thread could help it."""
    patches = [{"block": 1, "path": "x" * 60, "kind": "lora", "shapes": [[8, 64], [64, 8], [1]]}] * 4096
    for kind, header in (
        (MessageType.STEP, {"batch_index": list(range(1 << 16))}),
        (MessageType.ADAPTER, {"p": patches}),
    ):
        (wire,) = encode_message(kind, header)
        (message,) = FrameDecoder().feed(wire)
        assert message.header.keys() == header.keys()
    for containers in ([{}] * 100_000, [[]] * 100_000):
        (wire,) = encode_message(MessageType.STEP, {"x": containers})
        with pytest.raises(RemoteProtocolError, match="not msgpack"):
            list(FrameDecoder().feed(wire))
