"""Streams: order, liveness, backpressure, and every way to end."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from tests.raw_stream import RawStream

from swarmllm.errors import (
    LocalProtocolError,
    PeerTimeoutError,
    PeerUnreachableError,
    RemoteProtocolError,
    SessionClosedError,
)
from swarmllm.network.wire import liveness
from swarmllm.network.wire import stream as stream_module
from swarmllm.network.wire.frames import CHUNK_BYTES, FrameDecoder, MessageType, encode_message
from swarmllm.network.wire.liveness import CONFIRMED_BYTES
from swarmllm.network.wire.stream import FrameStream, Intake

BIG = 8 << 20
Streams = tuple[RawStream, RawStream]


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the streams tell nobody of these states
            await asyncio.sleep(0)


async def answer_pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A peer that is alive and does nothing else."""
    decoder = FrameDecoder()
    try:
        while data := await reader.read(1 << 16):
            for message in decoder.feed(data):
                if message.type is MessageType.PING:
                    for frame in encode_message(MessageType.PONG, message.header):
                        writer.write(frame)
    except ConnectionError:
        return  # the other end gave up


@pytest.mark.parametrize("header", [{}, {"n": ((((((),),),),),)}, {"n": "1"}])
async def test_a_ping_without_a_number_ends_its_stream(streams: Streams, header: dict[str, object]) -> None:
    client, server = streams
    for frame in encode_message(MessageType.PING, header):
        client.transport.write(frame)
    with pytest.raises(RemoteProtocolError, match="no number"):
        await server.receive()


async def test_messages_arrive_in_order_and_whole(streams: Streams) -> None:
    client, server = streams
    payloads = [b"", b"x", bytes(CHUNK_BYTES), bytes(range(256)) * 8192, b"end"]

    async def send_all() -> None:
        for idx, payload in enumerate(payloads):
            await client.send(MessageType.STEP, {"id": idx}, [payload[:7], payload[7:]])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send_all())
        for idx, payload in enumerate(payloads):
            message = await server.receive()
            assert (message.type, message.header, message.payload) == (MessageType.STEP, {"id": idx}, payload)


async def test_many_senders_share_a_stream_without_mixing_their_messages(streams: Streams) -> None:
    client, server = streams
    async with asyncio.TaskGroup() as tasks:
        for idx in range(8):
            tasks.create_task(client.send(MessageType.STEP, {"id": idx}, [bytes([idx]) * (CHUNK_BYTES * 2 + idx)]))
        received = [await server.receive() for _ in range(8)]
    assert sorted(message.header["id"] for message in received) == list(range(8))
    assert all(set(message.payload) == {message.header["id"]} for message in received)


async def test_an_error_overtakes_a_long_message(streams: Streams) -> None:
    client, server = streams
    server.transport.pause_reading()
    sending = asyncio.create_task(client.send(MessageType.RESULT, {"id": 1}, [bytes(BIG)]))
    await wait_until(lambda: client.is_full)
    await client.send(MessageType.ERROR, {"code": "overloaded", "message": "busy"})
    server.transport.resume_reading()
    assert (await server.receive()).type is MessageType.ERROR
    assert len((await server.receive()).payload) == BIG
    await sending


async def test_pings_are_answered_although_nobody_receives(streams: Streams) -> None:
    client, server = streams
    client.start_keepalive(interval_s=0.01)
    await wait_until(lambda: client.liveness.round_trip_s is not None)
    assert 0 <= client.liveness.round_trip_s < 10
    assert not client.closed
    assert not server.closed


async def test_both_ends_stay_alive_while_one_sends_a_long_message(streams: Streams) -> None:
    client, server = streams
    client.start_keepalive(interval_s=0.05)
    server.start_keepalive(interval_s=0.05)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.send(MessageType.RESULT, {}, [bytes(BIG)]))
        assert len((await server.receive()).payload) == BIG


async def test_a_silent_peer_is_given_up(half_stream) -> None:
    stream, _ = await half_stream()
    stream.start_keepalive(interval_s=0.01, misses=3)
    with pytest.raises(PeerTimeoutError, match="no sign of life") as caught:
        await stream.receive()
    assert caught.value.peer_id == stream.peer_id
    with pytest.raises(PeerTimeoutError):
        await stream.send(MessageType.STEP, {})


async def test_a_silent_peer_is_given_up_sooner_while_somebody_waits(
    half_stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before it has answered a ping; and as usual when nobody waits any more."""
    monkeypatch.setattr(liveness, "ATTENDED_INTERVAL_S", 0.01)
    monkeypatch.setattr(liveness, "LEAST_SILENCE_S", 0.1)
    stream, (reader, writer) = await half_stream()
    answering = asyncio.create_task(answer_pings(reader, writer))
    stream.start_keepalive(interval_s=1000)
    await stream.ping()
    stream.attend()
    before = stream.liveness.num_pings
    await wait_until(lambda: stream.liveness.num_pings > before + 3)  # it looks more often, and finds it alive
    stream.liveness.relax()
    stream.attend()
    answering.cancel()
    with pytest.raises(PeerTimeoutError, match="did not answer"):
        await stream.receive()


async def test_a_peer_that_stops_within_a_message_is_given_up_though_it_answers_pings(half_stream) -> None:
    stream, (reader, writer) = await half_stream(stall_timeout_s=0.05)
    first, *_ = encode_message(MessageType.RESULT, {}, [bytes(BIG)])
    writer.write(first)
    alive = asyncio.create_task(answer_pings(reader, writer))
    stream.start_keepalive(interval_s=0.01, misses=1000)
    with pytest.raises(PeerTimeoutError, match="within a message"):
        await stream.receive()
    await alive


async def test_an_idle_peer_that_answers_pings_is_not_given_up(half_stream) -> None:
    stream, (reader, writer) = await half_stream(stall_timeout_s=0.02)
    alive = asyncio.create_task(answer_pings(reader, writer))
    stream.start_keepalive(interval_s=0.005, misses=1000)
    await wait_until(lambda: stream.liveness.num_pings > 20)
    assert not stream.closed
    stream.abort()
    await alive


async def test_a_stop_of_this_process_is_not_blamed_on_the_peer(streams: Streams) -> None:
    client, server = streams
    client.start_keepalive(interval_s=0.01, misses=3)
    await wait_until(lambda: client.liveness.round_trip_s is not None)
    time.sleep(0.1)  # noqa: ASYNC251 - blocks the loop, which is what this test is about
    pings = client.liveness.num_pings
    await wait_until(lambda: client.liveness.num_pings > pings + 5)
    assert not client.closed
    assert not server.closed


@pytest.mark.parametrize("garbage", [b"\x00" * 64, b"SSH-2.0-OpenSSH_9.6\r\n" * 2])
async def test_garbage_ends_the_stream_and_the_peer_is_told(half_stream, garbage: bytes) -> None:
    stream, (reader, writer) = await half_stream()
    writer.write(garbage)
    with pytest.raises(RemoteProtocolError, match="one must begin"):
        await stream.receive()
    (message,) = FrameDecoder().feed(await reader.read())
    assert message.type is MessageType.ERROR
    assert message.header["code"] == "remote_protocol"


async def test_at_the_end_a_stream_reads_on_so_that_its_last_words_are_heard(
    half_stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "LINGER_S", 60.0)
    stream, (reader, writer) = await half_stream()
    await stream.send(MessageType.ERROR, {"code": "overloaded", "message": "busy"})
    closing = asyncio.create_task(stream.close())
    (message,) = FrameDecoder().feed(await reader.read(1 << 16))
    assert message.type is MessageType.ERROR
    writer.write(b"still on its way" * 1000)
    await writer.drain()
    assert not stream.gone.done()  # a connection closed with unread bytes would be reset, perhaps before the error
    writer.close()
    await closing
    assert stream.gone.done()


async def test_a_message_over_the_cap_is_refused_at_its_first_bytes(half_stream) -> None:
    stream, (_, writer) = await half_stream(max_message_bytes=1000)
    first, *_ = encode_message(MessageType.STEP, {}, [bytes(BIG)])
    writer.write(first[:64])
    with pytest.raises(RemoteProtocolError, match="cap of 1000"):
        await stream.receive()


async def test_a_hang_up_wakes_the_receiver_and_complete_messages_come_first(streams: Streams) -> None:
    client, server = streams
    await server.send(MessageType.RESULT, {"id": 1})
    await server.close()
    await client.gone
    assert (await client.receive()).header == {"id": 1}
    with pytest.raises(PeerUnreachableError, match="hung up"):
        await client.receive()
    with pytest.raises(PeerUnreachableError):
        await client.send(MessageType.STEP, {})


async def test_a_sender_that_never_waits_hears_that_the_peer_has_hung_up(streams: Streams) -> None:
    """The event loop, which would tell it, isn't called in between."""
    client, server = streams
    server.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    sent: list[None] = []

    async def send_all() -> None:
        while len(sent) < 1000:
            await client.send(MessageType.STEP, {})
            sent.append(None)

    with pytest.raises(PeerUnreachableError, match="hung up"):
        await send_all()
    assert len(sent) < 10


@pytest.mark.parametrize("own_message", ["ping", "pong", "error"])
async def test_a_message_of_the_streams_own_to_a_peer_that_has_hung_up_ends_the_stream_quietly(
    streams: Streams, own_message: str
) -> None:
    """They are written in callbacks of the event loop, where nobody would hear an error: all who use the stream do."""
    client, server = streams
    receiving = asyncio.create_task(client.receive())
    client.start_keepalive()
    await client.ping()
    server.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    while not client.transport.is_closing():  # the event loop would notice it, too, and isn't called in between
        client.transport.write(b"x")
    if own_message == "ping":
        client.attend()
    elif own_message == "pong":
        client.data_received(b"".join(encode_message(MessageType.PING, {"n": 1})))
    else:
        client.data_received(b"".join(encode_message(MessageType.PING, {})))
    assert client.closed
    with pytest.raises(PeerUnreachableError, match="hung up"):
        await receiving


async def test_closing_wakes_the_own_receiver(streams: Streams) -> None:
    client, _ = streams
    receiving = asyncio.create_task(client.receive())
    await asyncio.sleep(0)  # it begins to receive
    await client.close()
    with pytest.raises(SessionClosedError):
        await receiving
    await client.close()


async def test_close_sends_what_is_unsent(streams: Streams) -> None:
    client, server = streams
    receiving = asyncio.create_task(server.receive())
    await client.send(MessageType.RESULT, {}, [bytes(BIG)])
    await client.close()
    assert len((await receiving).payload) == BIG


async def test_close_does_not_wait_for_a_peer_that_never_reads(half_stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "CLOSE_TIMEOUT_S", 0.02)
    stream, _ = await half_stream()
    sending = asyncio.create_task(stream.send(MessageType.RESULT, {}, [bytes(BIG)]))
    await wait_until(lambda: stream.is_full)
    await stream.close()
    assert stream.gone.done()
    with pytest.raises(SessionClosedError):
        await sending


async def test_a_peer_that_does_not_read_blocks_its_own_stream_only(streams: Streams, half_stream) -> None:
    client, server = streams
    stuck, _ = await half_stream()
    sending = asyncio.create_task(stuck.send(MessageType.RESULT, {}, [bytes(BIG)]))
    await wait_until(lambda: stuck.is_full)
    await client.send(MessageType.STEP, {"id": 1}, [bytes(100)])
    assert (await server.receive()).header == {"id": 1}
    assert not sending.done()
    stuck.start_keepalive(interval_s=0.01)
    with pytest.raises(PeerTimeoutError):
        await sending


@pytest.mark.parametrize("num_left", [1, 2, 5])
async def test_a_message_that_its_sender_leaves_goes_on_to_its_end(streams: Streams, num_left: int) -> None:
    client, server = streams
    for _ in range(num_left):
        server.transport.pause_reading()
        leaving = asyncio.create_task(client.send(MessageType.STEP, {"id": 1}, [bytes(BIG)]))
        not_begun = asyncio.create_task(client.send(MessageType.STEP, {"id": 2}, [bytes(BIG)]))
        staying = asyncio.create_task(client.send(MessageType.STEP, {"id": 3}, [b"x" * BIG]))
        await wait_until(lambda: client.is_full)
        for task in (leaving, not_begun):
            task.cancel()
        await asyncio.wait([leaving, not_begun])
        assert not client.closed
        server.transport.resume_reading()
        messages = [await server.receive(), await server.receive()]
        assert [(message.header["id"], len(message.payload)) for message in messages] == [(1, BIG), (3, BIG)]
        await staying
    await server.send(MessageType.RESULT, {})
    assert (await client.receive()).type is MessageType.RESULT


async def test_a_message_that_its_sender_has_left_ends_with_the_stream(half_stream) -> None:
    stream, _ = await half_stream()
    sending = [asyncio.create_task(stream.send(MessageType.RESULT, {}, [bytes(BIG)])) for _ in range(2)]
    await wait_until(lambda: stream.is_full)
    sending[0].cancel()
    await asyncio.wait(sending[:1])
    stream.abort()
    with pytest.raises(SessionClosedError):
        await sending[1]


@pytest.mark.parametrize("is_left", [False, True])
async def test_half_a_message_ends_the_stream(streams: Streams, monkeypatch: pytest.MonkeyPatch, is_left: bool) -> None:
    """The peer would take the next message for the rest of it."""
    client, server = streams

    def without_memory(*args: object, **options: object) -> Iterator[bytes]:
        *frames, _ = encode_message(*args, **options)
        yield from frames
        raise MemoryError("no room")

    if is_left:
        server.transport.pause_reading()
    with monkeypatch.context() as patch:
        patch.setattr(stream_module, "encode_message", without_memory)
        half = asyncio.create_task(client.send(MessageType.STEP, {"id": 1}, [bytes(BIG)]))
        await asyncio.sleep(0)  # it begins
    after = asyncio.create_task(client.send(MessageType.STEP, {"id": 2}, [bytes(100)]))
    if is_left:
        await wait_until(lambda: client.is_full)
        half.cancel()
        await asyncio.wait([half])
        assert not client.closed
        server.transport.resume_reading()
    else:
        with pytest.raises(MemoryError):
            await half
    with pytest.raises(PeerUnreachableError, match=r"rest of a message \(MemoryError: no room\)"):
        await after
    with pytest.raises(PeerUnreachableError):
        await server.receive()


async def test_a_message_that_cannot_begin_changes_nothing(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = streams
    with monkeypatch.context() as patch:
        patch.setattr(stream_module, "encode_message", lambda *_, **__: iter(map(bytes, [-1])))
        with pytest.raises(ValueError, match="negative count"):
            await client.send(MessageType.STEP, {"id": 1}, [bytes(BIG)])
    await client.send(MessageType.STEP, {"id": 2})
    assert (await server.receive()).header == {"id": 2}


async def test_a_cancelled_receive_loses_nothing(streams: Streams) -> None:
    client, server = streams
    receiving = asyncio.create_task(server.receive())
    await asyncio.sleep(0)  # it begins to receive
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    await client.send(MessageType.STEP, {"id": 5})
    assert (await server.receive()).header == {"id": 5}


async def test_what_nobody_receives_fills_a_bounded_inbox(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "INBOX_BYTES", 100_000)
    client, server = streams
    server.count_in(intake := Intake())

    async def flood() -> None:
        for idx in range(400):
            await client.send(MessageType.STEP, {"id": idx}, [bytes(20_000)])

    flooding = asyncio.create_task(flood())
    await wait_until(lambda: not server.transport.is_reading() and client.is_full)
    assert 100_000 < intake.num_bytes < 1_000_000
    for idx in range(400):
        assert (await server.receive()).header == {"id": idx}
    await flooding


async def test_two_receivers_are_a_bug_of_ours(streams: Streams) -> None:
    client, _ = streams
    receiving = asyncio.create_task(client.receive())
    await asyncio.sleep(0)  # it begins to receive
    with pytest.raises(LocalProtocolError, match="two tasks"):
        await client.receive()
    receiving.cancel()


async def test_a_stream_takes_over_what_had_been_read_before(half_stream) -> None:
    stream, (reader, writer) = await half_stream()
    await stream.send(MessageType.HELLO, {"id": 1})
    await wait_until(lambda: reader._buffer)
    other = FrameStream.over("somebody", reader, writer)
    assert (await other.receive()).header == {"id": 1}
    await other.send(MessageType.WELCOME, {"id": 2})
    assert (await stream.receive()).header == {"id": 2}
    await other.close()


async def test_what_was_sent_is_soon_known_to_have_arrived(streams: Streams) -> None:
    """Though nobody waits long enough for a ping to be sent, and however small the messages are."""
    client, server = streams
    timeout = client.liveness.timeout
    for _ in range(100):
        await client.send(MessageType.STEP, {}, [bytes(2000)])
        await server.receive()
    await wait_until(lambda: timeout.unconfirmed_bytes < CONFIRMED_BYTES)
    assert client.liveness.num_pings == 0
