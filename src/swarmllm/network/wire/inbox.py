"""Messages of one peer that have come and wait to be received, and the one that is still coming.

Part of `wire/stream`. How much all streams together may hold is decided in `wire/intake`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from swarmllm.errors import LocalProtocolError
from swarmllm.network.wire.frames import FrameDecoder, Message, MessageType

INBOX_BYTES = 64 << 20
"""Reading pauses while more than this has arrived and nobody has received it."""
MESSAGE_OVERHEAD_BYTES = 512
"""Counted per message, so that very many empty ones fill an inbox too."""
HEADER_FACTOR = 64
"""Counted per byte of a packed header: one byte can unpack into an empty dict."""


class Inbox:
    """Bytes in, messages out, in order. One task may wait in `wait`."""

    def __init__(self, peer_id: str, max_message_bytes: int) -> None:
        self._peer_id, self.max_message_bytes = peer_id, max_message_bytes
        self.waiting_bytes = 0
        """Memory of the messages that nobody has taken."""
        self.transport: asyncio.ReadTransport | None = None
        """The source of the bytes: it pauses while the inbox is full."""
        self.is_paused = False
        self._receiver: asyncio.Future[None] | None = None
        self._tell: Callable[[int], None] | None = None
        self.clear()
        self.decoder.large_types = frozenset()  # until the greeting

    def clear(self) -> None:
        """Forget what has come."""
        self.decoder = FrameDecoder(max_message_bytes=self.max_message_bytes, peer_id=self._peer_id)
        self._messages: deque[Message] = deque()
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def count(self, tell: Callable[[int], None]) -> None:
        """Tell how many bytes are held here, now and whenever that changes."""
        self._tell = tell
        self._counted()

    def _counted(self) -> None:
        if self._tell is not None:
            self._tell(self.waiting_bytes + self.decoder.unfinished_bytes)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take bytes in; returns PINGs and PONGs, which nobody waits for.

        Raises:
            RemoteProtocolError: they break the protocol; the messages before the fault are kept.
        """
        for message in self.decoder.feed(data):
            if message.type in (MessageType.PING, MessageType.PONG):
                yield message
            else:
                self._messages.append(message)
                self.waiting_bytes += memory_of(message)
        if self.waiting_bytes > INBOX_BYTES and not self.is_paused and self.transport is not None:
            self.is_paused = True
            self.transport.pause_reading()
        if self._messages:
            self._wake()
        self._counted()

    def take(self) -> Message:
        """The oldest message."""
        message = self._messages.popleft()
        self.waiting_bytes -= memory_of(message)
        self._counted()
        if self.waiting_bytes < INBOX_BYTES // 2:
            self.read_on()
        return message

    def read_on(self) -> None:
        """End a pause."""
        if self.is_paused and self.transport is not None:
            self.is_paused = False
            self.transport.resume_reading()

    async def wait(self) -> None:
        """Return when there is a message, or there will be none any more."""
        if self._receiver is not None:
            raise LocalProtocolError("two tasks receive on one stream")
        self._receiver = asyncio.get_running_loop().create_future()
        try:
            await self._receiver
        finally:
            self._receiver = None

    def end(self) -> None:
        """Hold nothing any more but the messages that are complete."""
        if self._tell is not None:
            self._tell(0)
        self._tell = self.transport = None
        self._wake()

    def _wake(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)


def memory_of(message: Message) -> int:
    """About what a message takes, at worst."""
    return len(message.payload) + HEADER_FACTOR * message.header_bytes + MESSAGE_OVERHEAD_BYTES
