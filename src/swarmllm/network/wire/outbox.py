"""Messages on their way to one peer: each goes in one piece, and none faster than the peer reads.

Part of `wire/stream`, which hands over frames and puts bytes on the wire; what they mean is not known here.
"""

import asyncio
from collections.abc import Callable, Iterator

from swarmllm.errors import SwarmError


class Outbox:
    """The frames of one stream. `write` takes one, or raises; `error` says why the stream has ended."""

    def __init__(self, write: Callable[[bytes], None], error: Callable[[], SwarmError]) -> None:
        self._write, self._error = write, error
        self._turn = asyncio.Lock()
        """Senders take turns, a message each, in the order in which they came."""
        self._rest: Iterator[bytes] | None = None
        """Frames of a message whose sender has left; then writing is paused, or the stream has ended."""
        self.is_paused = False
        """Too much is unsent: the peer doesn't read fast enough."""
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    async def send(self, frames: Iterator[bytes]) -> float:
        """Write a message, however often the sender is cancelled meanwhile; returns when it began.

        Raises:
            SwarmError: what `error` says.
        """
        async with self._turn:
            if self._rest is not None:
                await self.drained()
            began_at = asyncio.get_running_loop().time()
            try:
                for frame in frames:
                    self._write(frame)
                    if self.is_paused:
                        await self.drained()
            except asyncio.CancelledError:
                self._rest = frames
                self._write_rest()
                raise
            return began_at

    async def drained(self) -> None:
        """Return when the peer has read on. Raises as `send` does."""
        while self.is_paused and not self._ended:
            if self._waiter is None:
                self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._waiter)
        if self._ended:
            raise self._error()

    def resume(self) -> None:
        """The peer has read on: first comes the rest of a message that its sender has left."""
        self.is_paused = False
        self._write_rest()
        if not self.is_paused:
            self._wake()

    def end(self) -> None:
        """The stream has ended: nobody waits any more."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None

    def _write_rest(self) -> None:
        while self._rest is not None and not self.is_paused and not self._ended:
            frame = next(self._rest, None)
            if frame is None:
                self._rest = None
            else:
                self._write(frame)
