"""Streams to a relay, spoken by hand: to ask for what no honest peer would."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar

import base58

from swarmllm.network.p2p.peer import Peer
from swarmllm.network.relay.messages import (
    HOP,
    Fields,
    HopKind,
    Status,
    circuit_through,
    encode,
    framed,
    number,
    read_message,
    reserve,
)

NewPeer = Callable[..., Awaitable[Peer]]


async def until(condition: Callable[[], object]) -> None:
    """Wait for what nobody tells of."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def circuits(relay: Peer) -> list[str]:
    """Addresses through this relay."""
    return [circuit_through(addr, relay.peer_id) for addr in relay.addrs]


class HopStream:
    """One stream of a peer to a relay."""

    opened: ClassVar[list["HopStream"]] = []
    """To be closed by whoever closes the peers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.opened.append(self)

    @classmethod
    async def open(cls, peer: Peer, relay: Peer | str) -> "HopStream":
        peer_id = relay if isinstance(relay, str) else relay.peer_id
        return cls(*await peer._running_daemon().open_stream(base58.b58decode(peer_id), HOP))

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Fields:
        async with asyncio.timeout(120):
            return await read_message(self.reader)

    async def status(self) -> Status:
        return Status(number(await self.answer(), 5) or 0)

    async def ended(self) -> None:
        """Return when the relay has hung up."""
        with suppress(OSError):
            async with asyncio.timeout(120):
                while await self.reader.read(1 << 16):
                    pass

    async def reserve(self) -> Status:
        self.say(reserve())
        return await self.status()

    async def connect(self, peer_id: str) -> Status:
        self.say(framed(encode((1, HopKind.CONNECT), (2, encode((1, base58.b58decode(peer_id)))))))
        return await self.status()

    def close(self) -> None:
        self.writer.transport.abort()

    @classmethod
    def close_all(cls) -> None:
        while cls.opened:
            cls.opened.pop().close()


async def made_peers() -> AsyncIterator[NewPeer]:
    """As a fixture: makes peers, and closes them and their streams in the end."""
    made: list[Peer] = []

    async def make(*neighbours: Peer, **options: Any) -> Peer:
        initial_peers = [maddr for neighbour in neighbours for maddr in neighbour.join_maddrs]
        made.append(await Peer.create(initial_peers=initial_peers, **options))
        return made[-1]

    yield make
    HopStream.close_all()
    for peer in reversed(made):
        await peer.close()
