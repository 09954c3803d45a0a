"""A stream of messages to one peer, with signs of life. Clients and servers send and receive on it.

`p2p/peer` makes the streams. This module knows neither the meaning of messages (`wire/messages`) nor their bytes
(`wire/frames`).

A stream always reads, also if nobody waits in `receive()`. It answers PINGs and keeps messages in its `Inbox`. With
keepalive on, it sends PINGs and ends when `wire/liveness` decides so. Its life:

    open ── close(), abort() ───────────────→ ended: SessionClosedError
         ── the peer or its daemon hangs up → ended: PeerUnreachableError
         ── silence, or a stalled message ──→ ended: PeerTimeoutError
         ── bytes that make no sense ───────→ ended: RemoteProtocolError, after telling the peer

After the end, complete messages can still be received. Then everything raises the stream's error.

A stream may move to another connection with the same peer while it is in use (`move`). Each side writes MOVED as its
last frame on the old connection, and reads the old one up to the other side's MOVED, so that no frame is lost or
overtaken. Then both close it.
"""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from swarmllm.errors import (
    LocalProtocolError,
    PeerError,
    PeerTimeoutError,
    PeerUnreachableError,
    RemoteProtocolError,
    SessionClosedError,
    SwarmError,
)
from swarmllm.machine_memory import total_memory_bytes
from swarmllm.network.wire.frames import (
    CONTROL_TYPES,
    MAX_MESSAGE_BYTES,
    ByteChunk,
    FrameDecoder,
    Message,
    MessageType,
    encode_message,
    filler,
)
from swarmllm.network.wire.liveness import (
    CONFIRMED_BYTES,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_MISSES,
    MEASURED_BYTES,
    MIN_MEASUREMENTS,
    STALL_TIMEOUT_S,
    LinkRate,
    Liveness,
)
from swarmllm.network.wire.messages import DirectOffer, error_header

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
LINGER_S = 0.5
"""After ending a stream, read and drop for this long before hanging up. Without it, anything that the peer still sends
(a PONG is enough) makes our daemon reset the stream, which can overtake our last message. tests/swarm/test_peer has
a handler that would often not be heard. A half-close doesn't help, because the daemon closes both ways."""
READ_BYTES = 256 << 10
"""Most bytes to read from a connection at a time."""
WRITE_BUFFER_BYTES = 1 << 20
"""`send` waits while more than this is unsent. Control messages may overtake, so they wait at twice as much: they must
not pile up for a peer that asks and never reads."""
INBOX_BYTES = 64 << 20
"""Reading pauses while more than this has arrived and wasn't received."""
MESSAGE_OVERHEAD_BYTES = 512
"""Counted per message, so that very many empty messages fill an inbox too."""
HEADER_FACTOR = 64
"""Counted per byte of a packed header, because one byte can unpack into an empty dict."""
MAX_BYTES_PER_PEER = 4 * MAX_MESSAGE_BYTES
"""Most bytes of one peer's streams. Assumed: twice the size of a client's requests to one server, all at once."""
MEMORY_SHARE = 0.25
"""Share of the machine's memory for all peers together. One message of the largest size always fits. Assumed."""


@dataclass
class Traffic:
    """Bytes of all streams of this process so far."""

    received_bytes: int = 0
    sent_bytes: int = 0


traffic = Traffic()


class _ReadBuffer(threading.local):
    """Memory for the bytes that a connection has just delivered. Streams decode them at once, so all streams of a
    thread share it."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_BYTES))


_read_buffer = _ReadBuffer()


class FrameStream(asyncio.BufferedProtocol):
    """Messages to and from one peer. One task may wait in `receive()`, any number in `send()`."""

    through_relay = False
    """True if a relay passes the bytes on. Set by the maker of the stream."""
    host = ""
    """Address of the other end, or of the router before it; empty: not known, or through a relay."""
    on_silence: Callable[[], None] | None = None
    """Called when the stream ends because of silence."""
    make_offer: Callable[[], DirectOffer] | None = None
    """Makes the offer of a direct connection for the greeting. None: none is offered."""
    offered: DirectOffer | None = None
    """The peer's offer, until it is taken."""
    take_offer: Callable[[DirectOffer], bool] | None = None
    """Called with the offer when the stream is used after the greeting, until it returns True."""

    def __init__(
        self, peer_id: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES, stall_timeout_s: float = STALL_TIMEOUT_S
    ) -> None:
        self.peer_id = peer_id
        self.encodings: frozenset[str] = frozenset()
        """Encodings of tensors that the peer understands, from its greeting."""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the underlying connection is closed as well."""
        self.link_rate = LinkRate()
        self.liveness = Liveness(self._loop.time(), stall_timeout_s)
        self._transport: asyncio.Transport | None = None
        self._ended: tuple[type[SwarmError], str] | None = None
        self._inbox = Inbox(peer_id, max_message_bytes)
        self._outbox = Outbox(self._write, self._error, self._sent_half)
        self._timer: asyncio.TimerHandle | None = None
        self._pong_waiter: asyncio.Future[float] | None = None
        self._move: Move | None = None

    @classmethod
    def over(
        cls, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **options: Any
    ) -> "FrameStream":
        """Take over a connection that began as an asyncio stream, as hivemind opens them."""
        stream = cls(peer_id, **options)
        early, is_lost = stream._take_over(reader, writer)
        transport = cast(asyncio.Transport, writer.transport)
        stream.connection_made(transport)
        stream.data_received(early)
        if is_lost:
            stream.connection_lost(None)
        elif reader.at_eof() or transport.is_closing():
            stream._end(PeerUnreachableError, "hung up")
        else:
            transport.resume_reading()
        return stream

    def _take_over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[bytes, bool]:
        """Become the protocol of this connection. Returns the bytes that came before, and whether it is lost."""
        early = bytes(reader._buffer)  # type: ignore[attr-defined]
        reader._buffer.clear()  # type: ignore[attr-defined]
        transport = cast(asyncio.Transport, writer.transport)
        previous = cast(asyncio.BaseProtocol | None, transport.get_protocol())

        def release(
            _: object, kept: object = (reader, writer)
        ) -> None:  # they close the connection when they are collected
            if isinstance(previous, asyncio.Protocol):
                previous.connection_lost(None)  # until it hears this, it and its writer keep each other alive

        self.gone.add_done_callback(release)
        if not transport.is_closing():
            transport.pause_reading()  # transports look how to read for a protocol when they begin
        transport.set_protocol(self)
        return early, previous is None

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self.gone.get_loop()

    @property
    def closed(self) -> bool:
        """True if the stream has ended, for any reason."""
        return self._ended is not None

    # Sending

    async def send(
        self, kind: MessageType, header: Mapping[str, Any], payload_chunks: Sequence[ByteChunk] = ()
    ) -> None:
        """Send one message. Returns when nearly all of it was handed to the operating system.

        If this is cancelled, a message that has begun is still sent to its end, because half of one would end the
        stream for all who share it. So don't change its chunks then.

        Raises:
            PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, SessionClosedError: the stream has ended.
            LocalProtocolError: the message is invalid.
        """
        if self.offered is not None and self.take_offer is not None and self.take_offer(self.offered):
            self.offered = None
        if kind in CONTROL_TYPES:  # may overtake a long message
            self._write_control(kind, header)
            if self._transport is not None and self._transport.get_write_buffer_size() > 2 * WRITE_BUFFER_BYTES:
                await self._outbox.drained()
            return
        frames = encode_message(kind, header, payload_chunks, max_message_bytes=self._inbox.max_message_bytes)
        self._confirm(await self._outbox.send(frames), sum(map(len, payload_chunks)))

    async def measure_rate(self) -> float | None:
        """Send a megabyte that the peer skips, and return the megabits per second of the connection; None: unknown.

        Raises:
            PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, SessionClosedError: the stream has ended.
        """
        await self.ping()
        for _ in range(MIN_MEASUREMENTS):
            self._confirm(await self._outbox.send(filler(MEASURED_BYTES)), MEASURED_BYTES)
        await self.ping()  # answered after all of them
        return self.link_rate.mbps

    def _confirm(self, began_at: float, num_bytes: int) -> None:
        """Send a PING behind a message of so many bytes, unless it is short."""
        number = self.link_rate.sent(began_at, num_bytes)
        if number is None and self.liveness.timeout.unmarked_bytes >= CONFIRMED_BYTES:
            number = self.link_rate.next_number()
        if number is not None:
            self.liveness.timeout.mark(number)
            self._write_control(MessageType.PING, {"n": number})

    def _sent_half(self, error: BaseException) -> None:
        """End the stream because the rest of a message can't be sent."""
        self._end(PeerUnreachableError, f"can't be sent the rest of a message ({type(error).__name__}: {error})")

    def _write_control(self, kind: MessageType, header: Mapping[str, Any]) -> None:
        for frame in encode_message(kind, header):
            self._write(frame)

    def _tell(self, kind: MessageType, header: Mapping[str, Any]) -> None:
        """Write a control message for which no caller waits. Nothing is written once the stream has ended."""
        with suppress(SwarmError):
            self._write_control(kind, header)

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and self._transport.is_closing():
            # The event loop tells it later: never, if the sender doesn't wait in between.
            self._end(PeerUnreachableError, "hung up")
        if self._ended is not None or self._transport is None:
            raise self._error()
        traffic.sent_bytes += len(frame)
        self.liveness.timeout.sent(len(frame))
        self._transport.write(frame)

    # Receiving

    async def receive(self) -> Message:
        """Wait for the next message. PINGs and PONGs are not returned, ERRORs are.

        Raises:
            PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, SessionClosedError: the stream has ended.
        """
        while not self._inbox:
            if self._ended is not None:
                raise self._error()
            await self._inbox.wait()
        return self._inbox.take()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the event loop before it reads."""
        return _read_buffer.view

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the event loop after it has read into that buffer."""
        self.data_received(_read_buffer.view[:nbytes])

    def data_received(self, data: ByteChunk) -> None:
        """Take in bytes; nothing refers to them afterwards."""
        traffic.received_bytes += len(data)
        self.liveness.last_heard_at = self._loop.time()
        if self._ended is not None:
            return
        moves = False
        try:
            for message in self._inbox.feed(data):
                if message.type is MessageType.PING:
                    self._answer_ping(message)
                elif message.type is MessageType.PONG:
                    self._take_pong(message)
                else:
                    moves = True
            if moves:
                self._read_there()
        except RemoteProtocolError as error:
            logger.warning("%s broke the protocol: %s", self.peer_id, error)
            self._refuse(error)

    def expect(self, large_types: frozenset[MessageType]) -> None:
        """Allow large messages of these types from now on, and of no others. Before the greeting all are small."""
        self._inbox.decoder.large_types = large_types

    def count_in(self, intake: "Intake") -> None:
        """Count the bytes that wait here, together with those of other streams."""
        if self._ended is None:
            self._inbox.count(partial(intake.holds, self))

    def sent_too_much(self) -> None:
        """End the stream and forget what has come."""
        self._inbox.clear()
        self._refuse(RemoteProtocolError("too much was sent at once: send less, or use another server"))

    def _refuse(self, error: RemoteProtocolError) -> None:
        self._tell(MessageType.ERROR, error_header(error))
        self._end(RemoteProtocolError, str(error))

    # Signs of life

    def start_keepalive(self, interval_s: float = KEEPALIVE_INTERVAL_S, misses: int = KEEPALIVE_MISSES) -> None:
        """Watch the peer from now on. Call it again to change the numbers."""
        self.liveness.watch(self._loop.time(), interval_s, misses)
        self._look()

    def attend(self) -> None:
        """Check the peer more often, because a caller waits for it, until `liveness.relax()`."""
        if self.liveness.attend() and self._timer is not None:
            self._look()

    async def ping(self) -> float:
        """Measure the seconds of one round trip.

        Raises:
            PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, SessionClosedError: the stream has ended.
        """
        if self._ended is not None:
            raise self._error()
        if self._pong_waiter is None:
            self._pong_waiter = self._loop.create_future()
            self._ping()
        return await asyncio.shield(self._pong_waiter)

    def _look(self) -> None:
        if self._ended is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        decoder = self._inbox.decoder
        look = self.liveness.look(
            self._loop.time(),
            decoder.num_messages,
            decoder.unfinished_bytes,
            is_reading=not self._inbox.is_paused,
            mbps=self.link_rate.mbps,
        )
        if look.give_up is not None:
            self._end(PeerTimeoutError, look.give_up)
            return
        if look.ping:
            self._ping()
        if not self.closed:
            self._timer = self._loop.call_at(look.next_at, self._look)

    def _ping(self) -> None:
        if not self._outbox.is_paused:  # else the peer doesn't read, and bytes would only pile up
            self._tell(MessageType.PING, {"n": self.liveness.pinged(self._loop.time())})

    def _answer_ping(self, ping: Message) -> None:
        number = ping.header.get("n")
        if not isinstance(number, int):
            raise RemoteProtocolError("a PING has no number", self.peer_id)
        if not self._outbox.is_paused:
            self._tell(MessageType.PONG, {"n": number})

    def _take_pong(self, pong: Message) -> None:
        number, now = pong.header.get("n"), self._loop.time()
        self.link_rate.answered(number, now, self.liveness.least_round_trip_s)
        sample = self.liveness.answered(number, now)
        if sample is not None and self._pong_waiter is not None:
            self._pong_waiter.set_result(sample)
            self._pong_waiter = None

    # Another connection

    @property
    def is_moved(self) -> bool:
        """True if both sides use the connection to which the stream has moved."""
        return self._move is not None and self._move.reads and self._move.writes

    def move(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, first: bool) -> asyncio.Future[None]:
        """Move to another connection, whose other end is proven to be the same peer.

        One side goes first, when it knows that the other one has called this too. That one follows. Returns a future
        that is done when the peer has moved, or nothing comes of it.
        """
        moved: asyncio.Future[None] = self._loop.create_future()
        new = cast(asyncio.Transport, writer.transport)
        if self._transport is None or self.closed or self._move is not None or reader.at_eof() or new.is_closing():
            new.abort()
            moved.set_result(None)
            return moved
        new.pause_reading()
        self._move = Move(reader, writer, self._transport, new, moved, goes_on=first)
        self._write_there()
        return moved

    def _write_there(self) -> None:
        """Write to the new connection from now on, if it is time to, and as soon as the old one isn't full."""
        move = self._move
        if move is None or move.writes or not move.goes_on or self._outbox.is_paused or self._ended is not None:
            return
        self._attach(move)
        move.old.set_write_buffer_limits(high=2 * WRITE_BUFFER_BYTES)  # so that it doesn't fill up now
        self._tell(MessageType.MOVED, {})
        if self.closed:
            return
        move.writes, self._transport = True, move.new
        if move.reads:
            Left(self._loop, move.old)

    def _read_there(self) -> None:
        """Read the new connection from now on: the peer has written its last frame on the old one.

        Raises:
            RemoteProtocolError: there is no new one.
        """
        move = self._move
        if move is None or move.reads:
            raise RemoteProtocolError("it moves to a connection that doesn't exist", self.peer_id)
        self._attach(move)
        move.reads = move.goes_on = True
        move.moved.set_result(None)
        self._inbox.transport = move.new
        if move.writes:
            Left(self._loop, move.old)
        else:
            move.old.pause_reading()
            self._write_there()
        self.data_received(move.early)
        if move.reader.at_eof() or move.new.is_closing():
            self._end(PeerUnreachableError, "hung up")
        elif not self._inbox.is_paused and self._ended is None:
            move.new.resume_reading()

    def _attach(self, move: "Move") -> None:
        if move.new.get_protocol() is not self:
            move.early, _ = self._take_over(move.reader, move.writer)
            move.new.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    # The end

    async def close(self) -> None:
        """Send unsent bytes, for two seconds at most, and end the stream. Messages not yet received are dropped."""
        self._inbox.clear()
        self._end(SessionClosedError, "is closed")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.shield(self.gone)
        except TimeoutError:
            self.abort()
            await self.gone

    def abort(self) -> None:
        """End the stream now. Unsent bytes are dropped."""
        self._inbox.clear()
        self._end(SessionClosedError, "is closed")
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: type[SwarmError], reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = error, reason
        if self._timer is not None:
            self._timer.cancel()
        self._outbox.end()
        if self._pong_waiter is not None:
            self._pong_waiter.set_exception(self._error())
            self._pong_waiter.exception()  # perhaps nobody waits
        if self._transport is not None:
            if error is PeerTimeoutError:
                self._transport.abort()
                if self.on_silence is not None:
                    self.on_silence()
            elif error is PeerUnreachableError:
                self._hang_up()
            else:
                self._inbox.read_on()
                self._timer = self._loop.call_later(LINGER_S, self._hang_up)
        self._inbox.end()

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()
            # The peer may never read the rest. Then the connection is cut.
            self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def _error(self) -> SwarmError:
        if self._ended is None:
            return LocalProtocolError("the stream is not connected yet")
        error, reason = self._ended
        if issubclass(error, PeerError):
            broken = error(f"the peer {self.peer_id} {reason}", self.peer_id)
            broken.through_relay = self.through_relay and error is not RemoteProtocolError
            return broken
        return error(f"the stream to {self.peer_id} {reason}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports fail isinstance()
        self._transport = self._inbox.transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(PeerUnreachableError, "hung up" if exc is None else f"can't be reached any more: {exc}")
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        if self._move is not None:
            for transport in () if self.is_moved else (self._move.old, self._move.new):
                self._loop.call_soon(abort_transport, transport)  # later, because one of them is just being lost
            if not self._move.moved.done():
                self._move.moved.set_result(None)
        if not self.gone.done():
            self.gone.set_result(None)

    def pause_writing(self) -> None:
        self._outbox.is_paused = True

    def resume_writing(self) -> None:
        self._outbox.is_paused = False
        self._write_there()
        self._outbox.resume()


@dataclass(slots=True)
class Move:
    """A stream's move from one connection to another."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    old: asyncio.Transport
    new: asyncio.Transport
    moved: asyncio.Future[None]
    """Done when the peer has moved, or the stream has ended."""
    goes_on: bool
    """True if this side goes first, or the peer has moved."""
    writes: bool = False
    """True if this side writes to the new connection."""
    reads: bool = False
    """True if this side reads it, so the peer writes to it."""
    early: bytes = b""
    """Bytes of the new connection that came before the stream took it over."""


class Left(asyncio.Protocol):
    """Closes a connection from which both sides have moved. Nothing comes there any more, so no daemon resets it before
    our last bytes have arrived."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        transport.set_protocol(self)
        transport.close()
        self._timer = loop.call_later(STALL_TIMEOUT_S, transport.abort)  # the peer may never read them

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()


def abort_transport(transport: asyncio.WriteTransport) -> None:
    """Abort a transport that may be lost already. asyncio's fail then if it happened in a certain way."""
    with suppress(AttributeError):
        transport.abort()


class Inbox:
    """Received messages that wait, in order, and the one that is still arriving. One task may wait in `wait`."""

    def __init__(self, peer_id: str, max_message_bytes: int) -> None:
        self._peer_id, self.max_message_bytes = peer_id, max_message_bytes
        self.waiting_bytes = 0
        """Memory of the messages that wait."""
        self.transport: asyncio.ReadTransport | None = None
        """The transport that delivers the bytes. It pauses while the inbox is full."""
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
        """Call `tell` with the number of bytes held here, now and at each change."""
        self._tell = tell
        self._counted()

    def _counted(self) -> None:
        if self._tell is not None:
            self._tell(self.waiting_bytes + self.decoder.unfinished_bytes)

    def feed(self, data: ByteChunk) -> Iterator[Message]:
        """Take bytes in; yield PINGs, PONGs and MOVED, which nobody waits for.

        Raises:
            RemoteProtocolError: they break the protocol. Messages before the fault are kept.
        """
        for message in self.decoder.feed(data):
            if message.type in CONTROL_TYPES and message.type is not MessageType.ERROR:
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
        """Take the oldest message."""
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
        """Return when there is a message, or there will be no more."""
        if self._receiver is not None:
            raise LocalProtocolError("two tasks receive on one stream")
        self._receiver = asyncio.get_running_loop().create_future()
        try:
            await self._receiver
        finally:
            self._receiver = None

    def end(self) -> None:
        """Release everything except complete messages."""
        if self._tell is not None:
            self._tell(0)
        self._tell = self.transport = None
        self._wake()

    def _wake(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)


def memory_of(message: Message) -> int:
    """Memory of a message, at worst."""
    return len(message.payload) + HEADER_FACTOR * message.header_bytes + MESSAGE_OVERHEAD_BYTES


class Outbox:
    """Messages on their way to the peer, each in one piece, no faster than the peer reads. `write` writes one frame or
    raises; `error` is the reason for the stream's end; `fail` ends it."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        error: Callable[[], SwarmError],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._write, self._error, self._fail = write, error, fail
        self._turn = asyncio.Lock()
        """Senders take turns, one message each, in the order of their calls."""
        self._rest: Iterator[bytes] | None = None
        """The remaining frames of a message whose sender was cancelled. Then writing is paused, or the stream has
        ended."""
        self.is_paused = False
        """True while too much is unsent: the peer doesn't read fast enough."""
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    async def send(self, frames: Iterator[bytes]) -> float:
        """Write a message, even if the sender is cancelled meanwhile. Returns the time when it began.

        Raises:
            SwarmError: the one from `error`.
            Exception: a frame can't be made, for lack of memory, say. Behind the first one that ends the stream.
        """
        async with self._turn:
            if self._rest is not None:
                await self.drained()
            began_at = asyncio.get_running_loop().time()
            has_begun = False
            try:
                for frame in frames:
                    self._write(frame)
                    has_begun = True
                    if self.is_paused:
                        await self.drained()
            except asyncio.CancelledError:
                self._rest = frames
                self._write_rest()
                raise
            except BaseException as error:
                if has_begun:  # the peer would take the next message for the rest of this one
                    self._fail(error)
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
        """The peer has read on. The rest of a cancelled sender's message goes first."""
        self.is_paused = False
        self._write_rest()
        if not self.is_paused:
            self._wake()

    def end(self) -> None:
        """The stream has ended. Wake all who wait."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None

    def _write_rest(self) -> None:
        try:
            while self._rest is not None and not self.is_paused and not self._ended:
                frame = next(self._rest, None)
                if frame is None:
                    self._rest = None
                else:
                    self._write(frame)
        except Exception as error:  # noqa: BLE001 - whatever it is, half of the message is sent
            self._fail(error)


class Intake:
    """Counts the bytes of several streams: unfinished messages, and messages that wait to be received.

    A peer with too many bytes loses the stream on which they grew. If all together have too many, the peer with the
    most loses its largest stream. So a peer that sends little is never in danger.
    """

    def __init__(self, max_bytes_per_peer: int = MAX_BYTES_PER_PEER, max_bytes: int | None = None) -> None:
        machine = int(total_memory_bytes() * MEMORY_SHARE)
        self._max_bytes_per_peer = max_bytes_per_peer
        self._max_bytes = max(MAX_MESSAGE_BYTES, machine) if max_bytes is None else max_bytes
        self._of_peers: Counter[str] = Counter()
        self._of_streams: dict[FrameStream, int] = {}
        self.num_bytes = 0

    def holds(self, stream: FrameStream, num_bytes: int) -> None:
        """Note how many bytes this stream holds now; 0 when it has ended."""
        more = num_bytes - self._of_streams.get(stream, 0)
        if not more:
            return
        self.num_bytes += more
        self._of_peers[stream.peer_id] += more
        if num_bytes:
            self._of_streams[stream] = num_bytes
        else:
            del self._of_streams[stream]
            if not self._of_peers[stream.peer_id]:
                del self._of_peers[stream.peer_id]
        if more > 0 and self._of_peers[stream.peer_id] > self._max_bytes_per_peer:
            stream.sent_too_much()
        elif more > 0 and self.num_bytes > self._max_bytes:
            greediest = max(self._of_peers, key=lambda peer_id: self._of_peers[peer_id])
            theirs = (held for held in self._of_streams if held.peer_id == greediest)
            max(theirs, key=lambda held: self._of_streams[held]).sent_too_much()
