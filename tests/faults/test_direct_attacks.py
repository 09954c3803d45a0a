"""Attacks on the door for direct connections, while a stream that came through it goes on."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.direct_streams import HOST, OVER_TLS, Streams, greeted, opened_door, use, wait_until

from swarmllm.errors import PeerError
from swarmllm.files import PrivateDirectory
from swarmllm.network.p2p import direct
from swarmllm.network.p2p.direct import ACCEPTED, MAGIC, NAME_BYTES, DirectDialler, Door, dial
from swarmllm.network.wire.frames import MessageType, encode_message
from swarmllm.network.wire.messages import TICKET_BYTES, DirectOffer
from swarmllm.network.wire.stream import WRITE_BUFFER_BYTES

KNOCK_BYTES = len(MAGIC) + NAME_BYTES
PLACES = 4


@dataclass
class House:
    """A door, and a stream that has moved through it."""

    door: Door
    dialler: DirectDialler
    streams: Streams
    open_for: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self, *said: bytes) -> asyncio.StreamReader:
        """A stranger's connection."""
        reader, writer = await asyncio.open_connection(HOST, self.door.port)
        self.open_for.append(writer)
        writer.writelines(said)
        return reader

    async def goes_on(self) -> None:
        """Nobody disturbs the stream, and nobody's place is taken for ever."""
        await use(*self.streams, size=1 << 16)
        assert all(stream.is_moved for stream in self.streams)

    @property
    def num_unproven(self) -> int:
        return len(self.door._places)


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """It has few places."""
    monkeypatch.setattr(direct, "MAX_UNPROVEN", PLACES)
    dialler = DirectDialler()
    async with opened_door() as door, greeted(door, dialler) as streams:
        await use(*streams)
        await wait_until(lambda: all(stream.is_moved for stream in streams))
        house = House(door, dialler, streams)
        yield house
        await house.goes_on()
        for writer in house.open_for:
            writer.transport.abort()
        await wait_until(lambda: not house.num_unproven)
        await dialler.close()


@pytest.fixture
def _impatient(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "KNOCK_S", 0.2)
    monkeypatch.setattr(direct, "HANDSHAKE_S", 0.2)


async def is_hung_up_on(reader: asyncio.StreamReader) -> bool:
    """True if the door ends the connection, and has said nothing."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
        MAGIC,
        MAGIC + bytes(NAME_BYTES - 1),
        MAGIC + bytes(NAME_BYTES),
        MAGIC + bytes(NAME_BYTES + 100_000),
    ],
    ids=["nothing", "HTTP", "TLS", "half", "nearly", "no ticket", "too much"],
)
async def test_port_scan(house: House, said: bytes) -> None:
    """No answer tells anything, and no cryptography is done for a stranger."""
    assert await is_hung_up_on(await house.connect(said))
    await wait_until(lambda: not house.num_unproven)


@pytest.mark.usefixtures("_impatient")
async def test_silent_connections_leave(house: House) -> None:
    """Connections beyond the places are closed at once, the others after a while."""
    readers = [await house.connect(MAGIC[:5]) for _ in range(3 * PLACES)]
    async with asyncio.TaskGroup() as tasks:
        for reader in readers:
            tasks.create_task(is_hung_up_on(reader))
        await wait_until(lambda: house.num_unproven)
        await house.goes_on()
        assert house.num_unproven <= PLACES


async def test_flood(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood waits in the kernel: the event loop takes one connection in so much time."""
    monkeypatch.setattr(direct, "REST_S", 3600.0)
    accepted: list[socket.socket] = []
    serve = house.door._serve
    monkeypatch.setattr(house.door, "_serve", lambda sock, caller: accepted.append(sock) or serve(sock, caller))
    flood = []
    for _ in range(80):
        flood.append(socket.socket())
        flood[-1].setblocking(False)
        flood[-1].connect_ex((HOST, house.door.port))
    await wait_until(lambda: accepted)
    for _ in range(20):
        await house.goes_on()
    assert len(accepted) == 1
    for one in flood:
        one.close()


@asynccontextmanager
async def impostor(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Somebody else at the port."""
    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.transport.abort()
            ended.set()

    async with await asyncio.start_server(handle, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1]
        await ended.wait()


async def test_wrong_certificate(house: House) -> None:
    """Somebody between both ends does the handshake. The ticket isn't told, and the stream stays where it is."""
    heard: list[bytes] = []
    with PrivateDirectory() as private:
        tls, _ = direct._server_tls(private.path)

    async def stand_between(listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        sock, _ = await loop.sock_accept(listener)
        assert len(await loop.sock_recv(sock, KNOCK_BYTES)) == KNOCK_BYTES
        reader, writer = await direct._streams(sock, tls, server_side=True)
        heard.append(await reader.read(100))
        writer.transport.abort()

    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        standing = asyncio.create_task(stand_between(listener))
        change = {**OVER_TLS, "port": listener.getsockname()[1]}
        async with greeted(house.door, house.dialler, change) as streams:
            await use(*streams)
            await standing
            await asyncio.gather(*house.dialler._tasks)
            assert not any(stream.is_moved for stream in streams)
            await use(*streams)
    assert heard == [b""]


async def test_replayed_knock(house: House) -> None:
    """Whoever sees the beginning of a connection can repeat it, but has neither the certificate nor the ticket."""
    seen: list[bytes] = []

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, house.door.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                if source is reader:
                    seen.append(data)
                target.write(data)
            target.write_eof()

        try:
            await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)
        finally:
            back.transport.abort()

    async with impostor(between) as port, greeted(house.door, house.dialler, {**OVER_TLS, "port": port}) as streams:
        await use(*streams)
        await wait_until(lambda: all(stream.is_moved for stream in streams))
        await use(*streams)
        assert await is_hung_up_on(await house.connect(b"".join(seen)))
        await use(*streams)


async def test_tickets_of_others(house: House) -> None:
    """A ticket works for its own stream only; its name alone, which others may see, opens nothing."""
    async with greeted(house.door, house.dialler) as mine, greeted(house.door, house.dialler) as theirs:
        offers = [streams[0].offered for streams in (mine, theirs)]
        assert offers[0] is not None
        assert offers[1] is not None
        names = [direct._name_of(offer.ticket) for offer in offers]
        assert names[0] != names[1]
        knock = direct._knock

        async def with_the_wrong_one() -> None:
            name_of = direct._name_of
            try:
                direct._name_of = lambda ticket: names[1]
                await knock(socket.AF_INET, (HOST, house.door.port), offers[0], direct._CLIENT_TLS)
            finally:
                direct._name_of = name_of

        with pytest.raises((OSError, EOFError)):
            await with_the_wrong_one()
        await use(*mine)
        await wait_until(lambda: mine[1].is_moved)
        await use(*theirs)  # its ticket is used up
        await asyncio.gather(*house.dialler._tasks)
        assert not theirs[1].is_moved
        await use(*theirs)


async def test_tickets_end_with_their_stream(house: House) -> None:
    async with greeted(house.door, house.dialler) as streams:
        offer = streams[0].offered
    assert offer is not None
    assert not house.door._tickets
    with pytest.raises((OSError, EOFError)):
        await dial(HOST, offer)


@pytest.mark.usefixtures("_impatient")
async def test_unfinished_handshakes_end(house: House) -> None:
    """A ticket, and then nothing, or half a handshake."""
    for begun in (b"", b"\x16\x03\x01\x02\x00"):
        async with greeted(house.door, house.dialler) as streams:
            assert streams[0].offered is not None
            said = MAGIC + direct._name_of(streams[0].offered.ticket) + begun
            assert await is_hung_up_on(await house.connect(said))
            await use(*streams)


@pytest.mark.parametrize("move_s", [60.0, 0.0])
async def test_connections_to_which_nobody_moves(house: House, move_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep their places for a while, so there are never many of them, and they end with their streams."""
    monkeypatch.setattr(direct, "MOVE_S", move_s)
    async with greeted(house.door, house.dialler) as streams:
        offer = streams[0].offered
        assert offer is not None
        streams[0].offered = None
        reader, writer = await dial(HOST, offer)
        writer.write(b"x" * (1 << 20))  # what isn't read isn't kept either
        await wait_until(lambda: house.num_unproven == bool(move_s))
        await use(*streams)
        assert not streams[1].is_moved
        assert house.num_unproven == bool(move_s)
    assert await is_hung_up_on(reader)
    await wait_until(lambda: not house.num_unproven)
    writer.transport.abort()


@pytest.mark.parametrize("change", [OVER_TLS, {}], ids=["TLS", "on one machine"])
async def test_slow_reader(house: House, change: dict[str, object]) -> None:
    """The sender waits, as on the old connection."""
    async with greeted(house.door, house.dialler, change) as (client, server):
        await use(client, server)
        await wait_until(lambda: client.is_moved and server.is_moved)
        client._transport.pause_reading()
        sending = asyncio.create_task(server.send(MessageType.RESULT, {}, [bytes(64 << 20)]))
        await wait_until(lambda: server.is_full)
        assert server._transport.get_write_buffer_size() < 2 * WRITE_BUFFER_BYTES
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_moves_that_were_not_agreed(house: House) -> None:
    """MOVED without a connection, and twice."""
    async with greeted(house.door, house.dialler) as (client, server):
        client._write(b"".join(encode_message(MessageType.MOVED, {})))
        with pytest.raises(PeerError, match="doesn't exist"):
            await server.receive()
    async with greeted(house.door, house.dialler) as (client, server):
        await use(client, server)
        await wait_until(lambda: client.is_moved and server.is_moved)
        client._write(b"".join(encode_message(MessageType.MOVED, {})))
        with pytest.raises(PeerError, match="doesn't exist"):
            await server.receive()


async def test_a_server_that_points_at_other_programs(house: House) -> None:
    """A client may be told any port of the server's address. The program there hears 32 bytes that nobody chose."""
    heard: list[bytes] = []

    async def innocent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(KNOCK_BYTES))
        writer.write(b"500 what?\r\n")
        heard.append(await reader.read(TICKET_BYTES))

    wanted = b"FLUSHALL\r\n".ljust(TICKET_BYTES)
    async with impostor(innocent) as port:
        change = {**OVER_TLS, "port": port, "ticket": wanted}
        async with greeted(house.door, house.dialler, change) as streams:
            await use(*streams)
            await asyncio.gather(*house.dialler._tasks)
            await use(*streams)
    assert heard[0].startswith(MAGIC)
    assert wanted[:8] not in b"".join(heard)


async def test_no_socket_answers_in_anothers_name(house: House) -> None:
    """A directory of that name that others can write to is left alone."""
    with PrivateDirectory(max_path_bytes=90) as private:
        private.path.chmod(0o777)
        heard: list[bytes] = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(KNOCK_BYTES))
            writer.write(ACCEPTED)

        async with await asyncio.start_unix_server(handle, os.fspath(private.path / direct.SOCKET)):
            offer = DirectOffer(
                port=house.door.port, directory=private.path.name, certificate=bytes(32), ticket=bytes(32)
            )
            with pytest.raises((OSError, EOFError)):
                await dial(HOST, offer)
        assert not heard
