"""A stream that moves from one connection to another while it is in use."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.raw_stream import RawStream

from swarmllm.errors import PeerUnreachableError, RemoteProtocolError
from swarmllm.network.wire import stream as stream_module
from swarmllm.network.wire.frames import CHUNK_BYTES, MessageType, encode_message
from swarmllm.network.wire.stream import FrameStream

BIG = 2 << 20
Streams = tuple[RawStream, RawStream]
End = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connection = Callable[[], Awaitable[tuple[End, End]]]
Move = Callable[[], Awaitable[None]]


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the streams tell nobody of these states
            await asyncio.sleep(0)


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    """Makes connections: the client's end and the server's."""
    made: list[End] = []

    async def make() -> tuple[End, End]:
        ours, theirs = [await asyncio.open_connection(sock=sock) for sock in socket.socketpair()]
        made.extend((ours, theirs))
        return ours, theirs

    yield make
    for _, writer in made:
        writer.transport.abort()


@pytest.fixture
def move(streams: Streams, connection: Connection) -> Move:
    """Tells both ends to move."""

    async def begin() -> None:
        client, server = streams
        there, here = await connection()
        server.move(*here, first=False)
        client.move(*there, first=True)

    return begin


async def test_a_move_after_the_peer_has_hung_up_ends_the_stream_quietly(
    streams: Streams, connection: Connection
) -> None:
    client, server = streams
    (there, _) = await connection()
    server.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    while not client.transport.is_closing():  # the event loop would notice it, too, and isn't called in between
        client.transport.write(b"x")
    moved = client.move(*there, first=True)
    assert client.closed
    await moved
    await wait_until(there[1].transport.is_closing)
    with pytest.raises(PeerUnreachableError, match="hung up"):
        await client.receive()


async def test_no_frame_is_lost_or_overtaken(streams: Streams, move: Move) -> None:
    """Large messages of several senders go both ways, and the connection changes in the midst of them."""
    client, server = streams
    old = client.transport, server.transport
    payloads = [bytes([number]) * (BIG + number) for number in range(4)]

    async def send(stream: FrameStream, number: int) -> None:
        await stream.send(MessageType.STEP, {"id": number}, [payloads[number]])

    async def receive(stream: FrameStream) -> None:
        messages = [await stream.receive() for _ in payloads]
        assert [message.header["id"] for message in messages] == list(range(4))
        assert [message.payload for message in messages] == payloads

    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            for number in range(4):
                tasks.create_task(send(stream, number))
        await wait_until(lambda: client.is_full and server.is_full)
        await move()
        assert not client.is_moved
        for stream in streams:
            tasks.create_task(receive(stream))
    await wait_until(lambda: client.is_moved and server.is_moved)
    await wait_until(lambda: all(transport.is_closing() for transport in old))
    assert await client.ping() >= 0
    assert await server.ping() >= 0


async def test_a_full_connection_is_left_when_it_takes_more(streams: Streams, move: Move) -> None:
    """Frames that are unsent go before, and the last one of a sender that gave up is completed."""
    client, server = streams
    server.transport.pause_reading()
    sending = asyncio.create_task(client.send(MessageType.STEP, {"id": 1}, [bytes(BIG)]))
    await wait_until(lambda: client.is_full)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await move()
    assert client.is_full
    server.transport.resume_reading()
    assert len((await server.receive()).payload) == BIG
    await client.send(MessageType.STEP, {"id": 2})
    assert (await server.receive()).header == {"id": 2}
    await wait_until(lambda: client.is_moved and server.is_moved)


async def test_a_full_inbox_stops_the_new_connection(
    streams: Streams, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmllm.network.wire.stream.INBOX_BYTES", CHUNK_BYTES)
    client, server = streams
    await move()
    await wait_until(lambda: client.is_moved and server.is_moved)
    sending = asyncio.create_task(client.send(MessageType.STEP, {}, [bytes(BIG)]))
    await wait_until(lambda: server._inbox.is_paused or sending.done())
    more = asyncio.create_task(client.send(MessageType.STEP, {}, [bytes(BIG)]))
    await wait_until(lambda: client.is_full)
    assert not client._transport.is_closing()
    assert [len((await server.receive()).payload) for _ in range(2)] == [BIG, BIG]
    await asyncio.gather(sending, more)


async def test_bytes_of_the_new_connection_wait_for_the_last_of_the_old(
    streams: Streams, connection: Connection
) -> None:
    client, server = streams
    there, here = await connection()
    server.move(*here, first=False)
    for frame in encode_message(MessageType.STEP, {"id": 2}):
        there[1].write(frame)
    client.transport.write(b"".join(encode_message(MessageType.STEP, {"id": 1})))
    assert (await server.receive()).header == {"id": 1}
    waiting = asyncio.create_task(server.receive())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    client.transport.write(b"".join(encode_message(MessageType.MOVED, {})))
    assert (await waiting).header == {"id": 2}


@pytest.mark.parametrize("times", [1, 2])
async def test_moving_to_no_connection_breaks_the_protocol(streams: Streams, move: Move, times: int) -> None:
    client, server = streams
    if times == 2:
        await move()
        await wait_until(lambda: client.is_moved and server.is_moved)
    for frame in encode_message(MessageType.MOVED, {}):
        client._transport.write(frame)
    with pytest.raises(RemoteProtocolError, match="doesn't exist"):
        await server.receive()


async def test_a_connection_that_is_lost_before_changes_nothing(streams: Streams, connection: Connection) -> None:
    client, server = streams
    there, here = await connection()
    server.move(*here, first=False)
    there[1].transport.abort()
    await asyncio.sleep(0)
    await client.send(MessageType.STEP, {"id": 1})
    assert (await server.receive()).header == {"id": 1}
    await server.send(MessageType.RESULT, {"id": 1})
    assert (await client.receive()).header == {"id": 1}


@pytest.mark.parametrize("which", ["new", "old"])
async def test_a_connection_that_is_lost_ends_the_stream(streams: Streams, connection: Connection, which: str) -> None:
    client, server = streams
    there, here = await connection()
    if which == "old":
        server.move(*here, first=False)
        client.transport.abort()
        with pytest.raises(PeerUnreachableError):
            await server.receive()
    else:
        client.move(*there, first=True)
        server.move(*here, first=False)
        await wait_until(lambda: client.is_moved and server.is_moved)
        there[1].transport.abort()
        with pytest.raises(PeerUnreachableError):
            await server.receive()
    await server.gone
    await wait_until(here[1].transport.is_closing)


async def test_an_ended_stream_moves_nowhere(streams: Streams, connection: Connection) -> None:
    client, server = streams
    await client.close()
    there, _ = await connection()
    client.move(*there, first=True)
    assert there[1].transport.is_closing()
    server.abort()


async def test_a_second_connection_is_refused(streams: Streams, move: Move, connection: Connection) -> None:
    client, _ = streams
    await move()
    there, _ = await connection()
    client.move(*there, first=True)
    assert there[1].transport.is_closing()
    assert not client.closed


async def test_a_peer_that_never_reads_keeps_no_second_connection(
    streams: Streams, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each stream could hold two files."""
    monkeypatch.setattr(stream_module, "STALL_TIMEOUT_S", 0.01)
    client, server = streams
    client.transport.pause_reading()
    sending = asyncio.create_task(server.send(MessageType.STEP, {}, [bytes(BIG)]))
    await wait_until(lambda: server.is_full)
    left = server.transport
    server.resume_writing()  # as if it had just become a bit less
    _, here = await connection()
    server.move(*here, first=False)
    client.transport.write(b"".join(encode_message(MessageType.MOVED, {})))
    await wait_until(lambda: server.is_moved)
    await wait_until(lambda: left.is_closing() and not left.get_write_buffer_size())
    assert not server.closed
    server.abort()
    await asyncio.gather(sending, return_exceptions=True)
