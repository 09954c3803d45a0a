"""Two ends of a stream in one event loop, over a socket pair: no daemon, no port."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.raw_stream import RawStream

from swarmllm.network.wire import stream as stream_module
from swarmllm.network.wire.frames import LARGE_TYPES

CLIENT_ID = "12D3KooWGRYpkGaDx4gAX4e8D3GUdVyM6z9ejguV9e6RigTPvRch"
SERVER_ID = "12D3KooWCJpnhEWDwhydvDx45sX6wfumYVb1tBX8mfF7g4j1B4xo"

RawEnd = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon, so nothing to linger for."""
    monkeypatch.setattr(stream_module, "LINGER_S", 0.01)


async def connect(sock: socket.socket, peer_id: str, **options: object) -> RawStream:
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: RawStream(peer_id, **options), sock=sock)
    stream.expect(LARGE_TYPES)  # as after the greeting
    return stream


@pytest.fixture
async def streams() -> AsyncIterator[tuple[RawStream, RawStream]]:
    """The client's and the server's end."""
    ours, theirs = socket.socketpair()
    client, server = await connect(ours, SERVER_ID), await connect(theirs, CLIENT_ID)
    yield client, server
    client.abort()
    server.abort()
    await asyncio.gather(client.gone, server.gone)


@pytest.fixture
async def half_stream() -> AsyncIterator[Callable[..., Awaitable[tuple[RawStream, RawEnd]]]]:
    """Makes one end, and a raw connection as the other, for peers that misbehave."""
    made: list[tuple[RawStream, RawEnd]] = []

    async def make(**options: object) -> tuple[RawStream, RawEnd]:
        ours, theirs = socket.socketpair()
        stream = await connect(ours, SERVER_ID, **options)
        raw = await asyncio.open_connection(sock=theirs)
        made.append((stream, raw))
        return stream, raw

    yield make
    for stream, (_, writer) in made:
        stream.abort()
        await stream.gone
        writer.transport.abort()
