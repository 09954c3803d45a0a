"""Connections on which nobody asks anything don't stay: uvicorn's HTTP protocol with a patience and an upper number.

uvicorn itself waits for ever for the first byte of a request, and for each further one. What comes after the head of a
request has limits of its own (`responder.read_body`). Used by `gateway/__main__`.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_turns = itertools.count(1)
HEAD_TIMEOUT_S = 15.0
"""For the whole head of a request, counted from the connection's begin or the last answer. Assumed: browsers connect in
advance and send a head in one packet; uvicorn itself closes idle connections 5 s after an answer."""


SLICE_BYTES = 1 << 10
"""Read of a connection at a time; uvloop reads 32 of them before others have their turn. In chunks or frames of one
byte, which cost some microseconds each, its own 256 KiB would hold the event loop up for 0.3 s."""


def http_protocol(max_connections: int) -> Callable[..., asyncio.BufferedProtocol]:
    """Makes the protocols of a server with a bounded number of connections at a time, WebSockets included."""

    class Patient(_Patient):
        most = max_connections

    return lambda **options: _InSlices(Patient(**options))


class _InSlices(asyncio.BufferedProtocol):
    """Hands what comes to a protocol of uvicorn, a slice at a time."""

    def __init__(self, inner: Any) -> None:
        self._buffer = memoryview(bytearray(SLICE_BYTES))
        self._inner = inner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def get_buffer(self, _hint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        self._inner.data_received(bytes(self._buffer[:num_bytes]))


class _Patient(H11Protocol):
    most: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._patience: asyncio.TimerHandle | None = None
        self._idle_since = 0
        """In turns: many come within one tick of the loop's clock."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle or self not in self.connections:  # it has become a WebSocket
            self._stop_waiting()

    def handle_websocket_upgrade(self, event: Any) -> None:
        super().handle_websocket_upgrade(event)
        self.transport.set_protocol(_InSlices(self.transport.get_protocol()))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_idle:  # else the next request has come already
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._idle_since = next(_turns)
        self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest; this one is the last choice."""
        idle = (one for one in self.connections if isinstance(one, _Patient) and one._patience is not None)
        oldest = min(idle, key=lambda one: one._idle_since)
        oldest._stop_waiting()  # one that is being closed can't make room for another one
        oldest.transport.close()
