"""Servers that say in their greeting what a test wants, over socket pairs; nobody else can be dialled."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tests.unit.network.conftest import connect

from swarmllm.data_structures import BlockTraits, ServedBlocks, ServerInfo
from swarmllm.errors import PeerUnreachableError, ServerOverloadedError, WeightsMismatchError
from swarmllm.network.wire.protocol import FrameStream, welcome

LOADED = ServedBlocks(start=0, end=4, traits=BlockTraits())


def peer_id(name: str) -> str:
    return name.ljust(46, "x")


def info(name: str, start: int = 0, end: int = 4, **fields: Any) -> ServerInfo:
    return ServerInfo(peer_id=peer_id(name), start=start, end=end, **fields)


class FakePeer:
    """Servers say in their greeting what stands in `says`; nobody else can be dialled."""

    def __init__(self) -> None:
        self.says: dict[str, ServedBlocks | Exception | None] = {}
        self.dialled: list[str] = []
        self.near: set[str] = set()
        self.silent: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[FrameStream] = []
        self.now = 1000.0

    def is_neighbour(self, peer_id: str) -> bool:
        return peer_id in self.near

    async def open_stream(self, peer_id: str, addrs: Sequence[str], **_: Any) -> FrameStream:
        self.dialled.append(peer_id.rstrip("x"))
        if peer_id not in self.says and peer_id not in self.silent:
            raise PeerUnreachableError("connection refused", peer_id)
        ours, theirs = socket.socketpair()
        stream, served = await connect(ours, peer_id), await connect(theirs, "caller")
        self._streams += [stream, served]
        if peer_id not in self.silent:
            self._tasks.append(asyncio.create_task(self._welcome(served, self.says[peer_id])))
        return stream

    async def _welcome(self, stream: FrameStream, says: ServedBlocks | Exception | None) -> None:
        def accept(_: object) -> None:
            if isinstance(says, Exception):
                raise says

        with suppress(WeightsMismatchError, ServerOverloadedError):
            await welcome(stream, info=says.model_dump() if isinstance(says, ServedBlocks) else {}, accept=accept)

    async def close(self) -> None:
        for stream in self._streams:
            stream.abort()
        await asyncio.gather(*self._tasks, *(stream.gone for stream in self._streams), return_exceptions=True)
