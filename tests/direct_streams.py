"""A door for direct connections on loopback, and streams whose greeting offers it. No daemon."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from tests.raw_stream import RawStream

from swarmllm.files import PrivateDirectory
from swarmllm.network.p2p.direct import DirectDialler, Door
from swarmllm.network.wire.frames import MessageType
from swarmllm.network.wire.protocol import hello, welcome

HOST = "127.0.0.1"
CLIENT_ID = "12D3KooWGRYpkGaDx4gAX4e8D3GUdVyM6z9ejguV9e6RigTPvRch"
SERVER_ID = "12D3KooWCJpnhEWDwhydvDx45sX6wfumYVb1tBX8mfF7g4j1B4xo"
OVER_TLS = {"directory": ""}
"""Change of an offer: as if the client were on another machine."""

Streams = tuple[RawStream, RawStream]
Changes = Mapping[str, object]


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the streams tell nobody of these states
            await asyncio.sleep(0)


@asynccontextmanager
async def opened_door() -> AsyncIterator[Door]:
    with PrivateDirectory(max_path_bytes=90) as private:
        door = Door.open(private.path, [HOST], 0)
        yield door
        await door.close()


@asynccontextmanager
async def greeted(
    door: Door, dialler: DirectDialler, change: Mapping[str, object] = OVER_TLS
) -> AsyncIterator[Streams]:
    """Two ends of a stream whose greeting offered the door; `change`: what another offer would say."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: RawStream(SERVER_ID), sock=ours)
    _, server = await loop.create_connection(lambda: RawStream(CLIENT_ID), sock=theirs)
    server.make_offer = partial(door.offer, server)
    client.take_offer = partial(dialler.take_offer, client, HOST)
    await asyncio.gather(hello(client), welcome(server))
    await client.ping()  # as keepalive does: only near peers are dialled
    client.liveness.least_round_trip_s = 1e-9  # on however busy a machine
    assert client.offered is not None
    client.offered = client.offered.model_copy(update=change)
    yield client, server
    for stream in (client, server):
        stream.abort()
        await stream.gone


async def use(client: RawStream, server: RawStream, size: int = 0) -> None:
    """There and back."""
    for one, other in ((client, server), (server, client)):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.send(MessageType.RESULT, {"id": size}, [bytes(size)]))
            assert len((await other.receive()).payload) == size
