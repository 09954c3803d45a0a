"""What is left of a session that had a successor."""

import dataclasses
import gc
import weakref
from typing import Any
from unittest.mock import MagicMock

from swarmllm.network.messages import Successor
from swarmllm.server.sessions import Session

ID = "0" * 32


class TakesAll:
    """A link, and the links among which it is found."""

    def __init__(self) -> None:
        self.listeners: dict[str, Any] = {}

    async def get(self, successor: Successor) -> "TakesAll":
        return self

    async def attach(self, successor: Successor, on_lost: Any) -> None:
        self.listeners[successor.session] = on_lost

    def forget(self, session: str) -> None:
        del self.listeners[session]


async def test_it_is_freed_without_the_garbage_collector() -> None:
    given = {field.name: MagicMock() for field in dataclasses.fields(Session) if field.init}
    session = Session(**{**given, "epoch": 0, "on_close": lambda session: None})
    link: Any = TakesAll()
    await session.link_to(link, Successor(peer_id="p" * 46, session=ID, token=ID))
    assert ID in link.listeners
    found = weakref.ref(session)
    gc.disable()
    try:
        session.close()
        del session
        assert found() is None
    finally:
        gc.enable()
