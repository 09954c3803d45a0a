"""Nothing is left of a stream when it has ended."""

import asyncio
import gc
import weakref
from typing import Any
from unittest.mock import AsyncMock, MagicMock

from swarmllm.errors import PeerUnreachableError
from swarmllm.network.wire.frames import Message
from swarmllm.network.wire.protocol import MessageType
from swarmllm.server.streams.connection import Connection

ID = "0" * 32
OPEN = {"id": 1, "session": ID, "token": ID, "start": 0, "end": 1, "batch_size": 1, "max_length": 8}


LOOP_TURNS = 5


class Session:
    """Stands for one with a large cache."""

    id = ID

    async def work(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


class HangsUp:
    """A stream on which a session is opened, and that ends while it is used."""

    peer_id = "somebody"
    closed = False

    def __init__(self) -> None:
        self._messages = [Message(MessageType.OPEN, OPEN)]

    def start_keepalive(self) -> None:
        pass

    async def send(self, *_: Any) -> None:
        pass

    async def receive(self) -> Message:
        await asyncio.sleep(0)
        if self._messages:
            return self._messages.pop()
        raise PeerUnreachableError("hung up", self.peer_id)


async def test_the_sessions_of_a_stream_that_has_ended_are_freed_without_the_garbage_collector() -> None:
    found: list[weakref.ref[Session]] = []

    def new_session(*_: Any, **__: Any) -> Session:
        session = Session()
        found.append(weakref.ref(session))
        return session

    access = MagicMock(wake=AsyncMock())
    access.served_to.return_value.sessions.open = new_session
    gc.disable()
    try:
        await Connection(HangsUp(), access, MagicMock(), "none").serve()
        (session,) = found
        for _ in range(LOOP_TURNS):  # the loop may hold the last callbacks of tasks that have ended
            await asyncio.sleep(0)
        assert session() is None
    finally:
        gc.enable()
