"""A stream of messages to one peer, with signs of life.

`p2p/peer` makes the streams; client and server send and receive on them. What the messages say is not known here
(`wire/messages`), nor how they look as bytes (`wire/frames`).

A stream reads by itself, whether or not somebody waits in `receive()`: it answers PINGs, and keeps messages until they
are asked for (`wire/inbox`). With keepalive on, it sends PINGs, and ends when `wire/liveness` says so. Its life:

    open ── close(), abort() ───────────────→ ended: SessionClosedError
         ── the peer or its daemon hangs up → ended: PeerUnreachableError
         ── silence, or a stalled message ──→ ended: PeerTimeoutError
         ── bytes that make no sense ───────→ ended: RemoteProtocolError, after telling the peer

When a stream has ended, messages that were complete before can still be received; then everything raises its error.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
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
from swarmllm.network.wire.adaptive_timeout import CONFIRMED_BYTES
from swarmllm.network.wire.frames import (
    CONTROL_TYPES,
    MAX_MESSAGE_BYTES,
    ByteChunk,
    Message,
    MessageType,
    encode_message,
)
from swarmllm.network.wire.inbox import Inbox
from swarmllm.network.wire.intake import Intake
from swarmllm.network.wire.link_rate import LinkRate
from swarmllm.network.wire.liveness import KEEPALIVE_INTERVAL_S, KEEPALIVE_MISSES, STALL_TIMEOUT_S, Liveness
from swarmllm.network.wire.messages import error_header
from swarmllm.network.wire.outbox import Outbox

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
LINGER_S = 0.5
"""When we end a stream, we read (and drop) for this long before we hang up. Without it, whatever the peer was still
sending (a PONG is enough) makes our daemon reset the stream, which can overtake our last words; tests/swarm/test_peer
has a handler that would often not be heard. A half-close doesn't help: the daemon closes both ways."""
WRITE_BUFFER_BYTES = 1 << 20
"""`send` waits while more than this is unsent, for control messages twice as much: they may overtake, but not pile up
for a peer that asks and never reads."""


@dataclass
class Traffic:
    """Bytes of all streams of this process so far."""

    received_bytes: int = 0
    sent_bytes: int = 0


traffic = Traffic()


class FrameStream(asyncio.Protocol):
    """Messages to and from one peer. One task may wait in `receive()`, any number in `send()`."""

    through_relay = False
    """Whether another peer passes the bytes on. Set by whoever makes the stream."""
    on_silence: Callable[[], None] | None = None
    """Called when the stream ends since nothing came any more."""

    def __init__(
        self, peer_id: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES, stall_timeout_s: float = STALL_TIMEOUT_S
    ) -> None:
        self.peer_id = peer_id
        self.encodings: frozenset[str] = frozenset()
        """Ways to pack tensors that the peer understands, as it said in its greeting."""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection under the stream is closed, too."""
        self.link_rate = LinkRate()
        self.liveness = Liveness(self._loop.time(), stall_timeout_s)
        self._transport: asyncio.Transport | None = None
        self._ended: tuple[type[SwarmError], str] | None = None
        self._inbox = Inbox(peer_id, max_message_bytes)
        self._outbox = Outbox(self._write, self._error)
        self._timer: asyncio.TimerHandle | None = None
        self._pong_waiter: asyncio.Future[float] | None = None

    @classmethod
    def over(
        cls, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **options: Any
    ) -> "FrameStream":
        """Take over a connection that began as an asyncio stream (hivemind opens them so)."""
        stream = cls(peer_id, **options)
        early = bytes(reader._buffer)  # type: ignore[attr-defined]  # what came before we took over
        reader._buffer.clear()  # type: ignore[attr-defined]
        transport = cast(asyncio.Transport, writer.transport)
        previous = cast(asyncio.BaseProtocol | None, transport.get_protocol())

        def release(_: object, kept: object = (reader, writer)) -> None:  # which close the connection when they go
            if isinstance(previous, asyncio.Protocol):
                previous.connection_lost(None)  # until it hears this, it and its writer hold each other

        stream.gone.add_done_callback(release)
        transport.set_protocol(stream)
        stream.connection_made(transport)
        stream.data_received(early)
        if previous is None:  # the connection is lost already
            stream.connection_lost(None)
        elif reader.at_eof() or transport.is_closing():
            stream._end(PeerUnreachableError, "hung up")
        else:
            transport.resume_reading()
        return stream

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self.gone.get_loop()

    @property
    def closed(self) -> bool:
        """Whether the stream has ended, for whatever reason."""
        return self._ended is not None

    # Sending

    async def send(
        self, kind: MessageType, header: Mapping[str, Any], payload_chunks: Sequence[ByteChunk] = ()
    ) -> None:
        """Send one message; returns when nearly all of it is with the operating system.

        A message that has begun goes on to its end if this is cancelled: half of one would end the stream for all who
        share it. Its chunks shouldn't be changed then.

        Raises:
            PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, SessionClosedError: the stream has ended.
            LocalProtocolError: the message can't be sent, whatever the stream.
        """
        if kind in CONTROL_TYPES:  # may overtake a long message
            self._write_control(kind, header)
            if self._transport is not None and self._transport.get_write_buffer_size() > 2 * WRITE_BUFFER_BYTES:
                await self._outbox.drained()
            return
        frames = encode_message(kind, header, payload_chunks, max_message_bytes=self._inbox.max_message_bytes)
        began_at = await self._outbox.send(frames)
        number = self.link_rate.sent(began_at, sum(map(len, payload_chunks)))
        if number is None and self.liveness.timeout.unmarked_bytes >= CONFIRMED_BYTES:
            number = self.link_rate.next_number()
        if number is not None:
            self.liveness.timeout.mark(number)
            self._write_control(MessageType.PING, {"n": number})

    def _write_control(self, kind: MessageType, header: Mapping[str, Any]) -> None:
        for frame in encode_message(kind, header):
            self._write(frame)

    def _write(self, frame: bytes) -> None:
        if self._ended is not None or self._transport is None:
            raise self._error()
        traffic.sent_bytes += len(frame)
        self.liveness.timeout.sent(len(frame))
        self._transport.write(frame)

    # Receiving

    async def receive(self) -> Message:
        """The next message, control messages other than ERROR excepted.

        Raises:
            PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, SessionClosedError: the stream has ended.
        """
        while not self._inbox:
            if self._ended is not None:
                raise self._error()
            await self._inbox.wait()
        return self._inbox.take()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        traffic.received_bytes += len(data)
        self.liveness.last_heard_at = self._loop.time()
        if self._ended is not None:
            return
        try:
            for message in self._inbox.feed(data):
                if message.type is MessageType.PING:
                    self._answer_ping(message)
                else:
                    self._take_pong(message)
        except RemoteProtocolError as error:
            logger.warning("%s broke the protocol: %s", self.peer_id, error)
            self._refuse(error)

    def expect(self, large_types: frozenset[MessageType]) -> None:
        """Let messages of these types be large from now on, and no others: before the greeting all are small."""
        self._inbox.decoder.large_types = large_types

    def count_in(self, intake: Intake) -> None:
        """Count what comes here and waits to be taken, together with other streams."""
        if self._ended is None:
            self._inbox.count(partial(intake.holds, self))

    def sent_too_much(self) -> None:
        """End, and forget what has come."""
        self._inbox.clear()
        self._refuse(RemoteProtocolError("more was sent at once than there is room for: send less, or elsewhere"))

    def _refuse(self, error: RemoteProtocolError) -> None:
        self._write_control(MessageType.ERROR, error_header(error))
        self._end(RemoteProtocolError, str(error))

    # Signs of life

    def start_keepalive(self, interval_s: float = KEEPALIVE_INTERVAL_S, misses: int = KEEPALIVE_MISSES) -> None:
        """Watch the peer from now on; again with other numbers to change them."""
        self.liveness.watch(self._loop.time(), interval_s, misses)
        self._look()

    def attend(self) -> None:
        """Look more often, and give up a quick peer sooner: somebody waits for it until `liveness.relax()`."""
        if self.liveness.attend() and self._timer is not None:
            self._look()

    async def ping(self) -> float:
        """Seconds of one round trip, measured now.

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
        self._timer = self._loop.call_at(look.next_at, self._look)

    def _ping(self) -> None:
        if not self._outbox.is_paused:  # else the peer doesn't read, and more bytes would only pile up
            self._write_control(MessageType.PING, {"n": self.liveness.pinged(self._loop.time())})

    def _answer_ping(self, ping: Message) -> None:
        number = ping.header.get("n")
        if not isinstance(number, int):
            raise RemoteProtocolError("a PING has no number", self.peer_id)
        if not self._outbox.is_paused and self._ended is None:
            self._write_control(MessageType.PONG, {"n": number})

    def _take_pong(self, pong: Message) -> None:
        number, now = pong.header.get("n"), self._loop.time()
        self.link_rate.answered(number, now, self.liveness.least_round_trip_s)
        sample = self.liveness.answered(number, now)
        if sample is not None and self._pong_waiter is not None:
            self._pong_waiter.set_result(sample)
            self._pong_waiter = None

    # The end

    async def close(self) -> None:
        """Send what is unsent, for two seconds at most, and end the stream. Messages not yet received are dropped."""
        self._inbox.clear()
        self._end(SessionClosedError, "is closed")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.shield(self.gone)
        except TimeoutError:
            self.abort()
            await self.gone

    def abort(self) -> None:
        """End the stream now, whatever is unsent."""
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
            self._pong_waiter.exception()  # nobody may be waiting
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
            # The peer may never read the rest; then the connection must go without.
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
        # uvloop's transports are none by isinstance()
        self._transport = self._inbox.transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(PeerUnreachableError, "hung up" if exc is None else f"can't be reached any more: {exc}")
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        if not self.gone.done():
            self.gone.set_result(None)

    def pause_writing(self) -> None:
        self._outbox.is_paused = True

    def resume_writing(self) -> None:
        self._outbox.resume()
