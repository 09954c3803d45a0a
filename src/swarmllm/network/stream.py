"""A stream of messages to one peer, with signs of life.

`network/peer` makes the streams; client and server send and receive on them. What the messages say is not known here
(`network/messages`), nor how they look as bytes (`network/frames`).

A stream reads by itself, whether or not somebody waits in `receive()`: it answers PINGs, and keeps messages until they
are asked for. With keepalive on, it sends PINGs and ends with PeerTimeoutError when nothing at all is heard for a few
of them, or when a message begun makes no progress. Its life:

    open ── close(), abort() ───────────────→ ended: SessionClosedError
         ── the peer or its daemon hangs up → ended: PeerUnreachableError
         ── silence, or a stalled message ──→ ended: PeerTimeoutError
         ── bytes that make no sense ───────→ ended: RemoteProtocolError, after telling the peer

When a stream has ended, messages that were complete before can still be received; then everything raises its error.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from swarmllm.network import patience
from swarmllm.network.frames import (
    CHUNK_BYTES,
    CONTROL_TYPES,
    MAX_MESSAGE_BYTES,
    ByteChunk,
    FrameDecoder,
    Message,
    MessageType,
    encode_message,
)
from swarmllm.network.intake import Intake, Progress, memory_of
from swarmllm.network.link_rate import LinkRate
from swarmllm.network.messages import error_header
from swarmllm.network.patience import Patience

logger = logging.getLogger(__name__)

KEEPALIVE_INTERVAL_S = 2.5
KEEPALIVE_MISSES = 3
"""Assumed: a stop of 7.5 s is no garbage collection any more, and users wait less than 10 s for a failover."""
STALL_TIMEOUT_S = 30.0
"""Longest time for the end of a message begun, or for another `PROGRESS_BYTES` of it."""
CLOSE_TIMEOUT_S = 2.0
LINGER_S = 0.5
"""When we end a stream, we read (and drop) so much longer before we hang up. Without it, whatever the peer was still
sending (a PONG is enough) makes our daemon reset the stream, which can overtake our last words; tests/swarm/test_peer
has a handler that would often not be heard. A half-close doesn't help: the daemon closes both ways."""
WRITE_BUFFER_BYTES = 1 << 20
"""`send` waits while more than this is unsent, for control messages twice as much: they may overtake, but not pile up
for a peer that asks and never reads."""
INBOX_BYTES = 64 << 20
"""Reading pauses while more than this has arrived and nobody has received it."""


@dataclass
class Traffic:
    """Bytes of all streams of this process so far."""

    received_bytes: int = 0
    sent_bytes: int = 0


traffic = Traffic()


class FrameStream(asyncio.Protocol):
    """Messages to and from one peer. One task may wait in `receive()`, any number in `send()`."""

    def __init__(
        self,
        peer_id: str,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self.peer_id = peer_id
        self.max_message_bytes = max_message_bytes
        self.round_trip_s: float | None = None
        """Smoothed time from PING to PONG; None before the first one."""
        self.encodings: frozenset[str] = frozenset()
        """Ways to pack tensors that the peer understands, as it said in its greeting."""
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(max_message_bytes=max_message_bytes, peer_id=peer_id)
        self._decoder.large_types = frozenset()  # until the greeting
        self._intake: Intake | None = None
        self._transport: asyncio.Transport | None = None
        self._adopted: tuple[object, ...] = ()
        self._previous: asyncio.BaseProtocol | None = None
        self._ended: tuple[type[SwarmError], str] | None = None
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection under the stream is closed, too."""

        self._inbox: deque[Message] = deque()
        self._inbox_bytes = 0
        self._reading_paused = False
        self._receiver: asyncio.Future[None] | None = None

        self._send_lock = asyncio.Lock()
        self._rest: Iterator[bytes] | None = None
        """Frames of a message whose sender has left; then writing is paused, or the stream has ended."""
        self._writing_paused = False
        self._drain_waiter: asyncio.Future[None] | None = None

        self._interval_s = KEEPALIVE_INTERVAL_S
        self._misses = KEEPALIVE_MISSES
        self._timer: asyncio.TimerHandle | None = None
        self._tick_due_at = 0.0
        self._last_heard_at = self._loop.time()
        self._progress = Progress(self._last_heard_at)
        self._ping_idx = 0
        self._ping_sent_at = 0.0
        self._patience = Patience()
        self._pong_waiter: asyncio.Future[float] | None = None

        self._least_round_trip_s: float | None = None
        self._rate = LinkRate()

    @classmethod
    def over(
        cls, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **options: Any
    ) -> "FrameStream":
        """Take over a connection that began as an asyncio stream (hivemind opens them so)."""
        stream = cls(peer_id, **options)
        # The old objects close the connection when they are garbage collected.
        stream._adopted = (reader, writer)
        early = bytes(reader._buffer)  # type: ignore[attr-defined]  # what came before we took over
        reader._buffer.clear()  # type: ignore[attr-defined]
        transport = cast(asyncio.Transport, writer.transport)
        stream._previous = transport.get_protocol()
        lost = stream._previous is None
        transport.set_protocol(stream)
        stream.connection_made(transport)
        if early:
            stream.data_received(early)
        if lost:
            stream.connection_lost(None)
        elif reader.at_eof() or transport.is_closing():
            stream._end(PeerUnreachableError, "hung up")
        else:
            transport.resume_reading()
        return stream

    def __repr__(self) -> str:
        return f"<FrameStream to {self.peer_id}{' (ended)' if self._ended else ''}>"

    @property
    def closed(self) -> bool:
        """Whether the stream has ended, for whatever reason."""
        return self._ended is not None

    @property
    def sent_mbps(self) -> float | None:
        """Megabits per second that the link carries to the peer; None before enough large messages have gone there."""
        return self._rate.mbps

    # Sending

    async def send(
        self,
        kind: MessageType,
        header: Mapping[str, Any],
        payload_chunks: Sequence[ByteChunk] = (),
        *,
        flags: int = 0,
    ) -> None:
        """Send one message; returns when nearly all of it is with the operating system.

        A message that has begun goes on to its end if this is cancelled: half of one would end the stream for all who
        share it. Its chunks shouldn't be changed then.

        Raises:
            PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, SessionClosedError: the stream has ended.
            LocalProtocolError: the message can't be sent, whatever the stream.
        """
        frames = encode_message(kind, header, payload_chunks, max_message_bytes=self.max_message_bytes, flags=flags)
        if kind in CONTROL_TYPES:  # may overtake a long message
            for frame in frames:
                self._write(frame)
            if self._transport is not None and self._transport.get_write_buffer_size() > 2 * WRITE_BUFFER_BYTES:
                await self._drained()
            return
        async with self._send_lock:
            if self._rest is not None:
                await self._drained()
            began_at = self._loop.time()
            first = next(frames)
            self._write(first)
            if len(first) < CHUNK_BYTES:
                if self._writing_paused:
                    await self._drained()
                return
            try:
                if self._writing_paused:
                    await self._drained()
                for frame in frames:
                    self._write(frame)
                    if self._writing_paused:
                        await self._drained()
                if number := self._rate.sent(began_at, sum(map(len, payload_chunks))):
                    self._write_ping(number)
            except asyncio.CancelledError:
                self._rest = frames
                self._write_rest()
                raise

    def _write_rest(self) -> None:
        while self._rest is not None and not self._writing_paused and self._ended is None:
            frame = next(self._rest, None)
            if frame is None:
                self._rest = None
            else:
                self._write(frame)

    def _write(self, frame: bytes) -> None:
        if self._ended is not None or self._transport is None:
            raise self._error()
        traffic.sent_bytes += len(frame)
        self._patience.sent(len(frame))
        self._transport.write(frame)

    async def _drained(self) -> None:
        while self._writing_paused and self._ended is None:
            if self._drain_waiter is None:
                self._drain_waiter = self._loop.create_future()
            await asyncio.shield(self._drain_waiter)
        if self._ended is not None:
            raise self._error()

    # Receiving

    async def receive(self) -> Message:
        """The next message, control messages other than ERROR excepted.

        Raises:
            PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, SessionClosedError: the stream has ended.
        """
        while not self._inbox:
            if self._ended is not None:
                raise self._error()
            if self._receiver is not None:
                raise LocalProtocolError("two tasks receive on one stream")
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None
        message = self._inbox.popleft()
        self._inbox_bytes -= memory_of(message)
        self._count()
        if self._reading_paused and self._inbox_bytes < INBOX_BYTES // 2:
            self._reading_paused = False
            self._last_heard_at = self._loop.time()
            if self._transport is not None and self._ended is None:
                self._transport.resume_reading()
        return message

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        traffic.received_bytes += len(data)
        self._last_heard_at = self._loop.time()
        if self._ended is not None:
            return
        try:
            for message in self._decoder.feed(data):
                if message.type is MessageType.PING:
                    self._answer_ping(message)
                elif message.type is MessageType.PONG:
                    self._take_pong(message)
                else:
                    self._inbox.append(message)
                    self._inbox_bytes += memory_of(message)
        except RemoteProtocolError as error:
            logger.warning("%s broke the protocol: %s", self.peer_id, error)
            self._tell(error)
            self._end(RemoteProtocolError, str(error))
            return
        self._count()
        if self._inbox:
            if self._receiver is not None and not self._receiver.done():
                self._receiver.set_result(None)
            if self._inbox_bytes > INBOX_BYTES and not self._reading_paused and self._transport is not None:
                self._reading_paused = True
                self._transport.pause_reading()

    def expect(self, large_types: frozenset[MessageType]) -> None:
        """Let messages of these types be large from now on, and no others: before the greeting all are small."""
        self._decoder.large_types = large_types

    def count_in(self, intake: Intake) -> None:
        """Count what comes here and waits to be taken, together with other streams."""
        self._intake = intake
        self._count()

    def _count(self) -> None:
        if self._intake is not None:
            num_bytes = 0 if self._ended is not None else self._inbox_bytes + self._decoder.unfinished_bytes
            self._intake.holds(self, num_bytes)

    def sent_too_much(self) -> None:
        """End, and forget what has come."""
        error = RemoteProtocolError("more was sent at once than there is room for: send less, or elsewhere")
        self._tell(error)
        self._forget_received()
        self._end(RemoteProtocolError, str(error))

    def _forget_received(self) -> None:
        self._inbox.clear()
        self._inbox_bytes = 0
        self._decoder = FrameDecoder(max_message_bytes=self.max_message_bytes, peer_id=self.peer_id)

    def _tell(self, error: SwarmError) -> None:
        for frame in encode_message(MessageType.ERROR, error_header(error)):
            self._write(frame)

    # Signs of life

    def start_keepalive(self, interval_s: float = KEEPALIVE_INTERVAL_S, misses: int = KEEPALIVE_MISSES) -> None:
        """Watch the peer from now on; again with other numbers to change them."""
        self._interval_s, self._misses = interval_s, misses
        self._last_heard_at = self._loop.time()
        self._progress.restart(self._last_heard_at)
        if self._timer is not None:
            self._timer.cancel()
        if self._ended is None:
            self._ping()
            self._schedule_tick()

    async def ping(self) -> float:
        """Seconds of one round trip, measured now.

        Raises:
            PeerUnreachableError, PeerTimeoutError, RemoteProtocolError, SessionClosedError: the stream has ended.
        """
        if self._pong_waiter is None:
            self._pong_waiter = self._loop.create_future()
            if self._ended is None:
                self._ping()
        if self._ended is not None:
            raise self._error()
        return await asyncio.shield(self._pong_waiter)

    def answered_within(self, seconds: float) -> None:
        """The peer has answered something else than a PING: a first idea of how punctual it is."""
        self._patience.answered(seconds)

    def attend(self) -> None:
        """Somebody waits for the peer: look more often, and give up sooner if it used to be quick; until `relax()`."""
        self._patience.num_waiting += 1
        if self._patience.num_waiting == 1 and self._ended is None and self._timer is not None:
            self._patience.restart(self._loop.time())
            self._timer.cancel()
            self._ping_again()
            self._schedule_tick()

    def relax(self) -> None:
        """One fewer waits."""
        self._patience.num_waiting -= 1

    def _schedule_tick(self) -> None:
        interval_s = min(self._interval_s, patience.INTERVAL_S) if self._patience.num_waiting else self._interval_s
        now = self._loop.time()
        self._tick_due_at = max(now, min(now + interval_s, self._patience.ends_at(self._last_heard_at)))
        self._timer = self._loop.call_at(self._tick_due_at, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        late_s = now - self._tick_due_at
        if late_s > patience.INTERVAL_S / 2 or self._reading_paused:
            self._patience.restart(now)
        if late_s > self._interval_s or self._reading_paused:
            # This process was stopped or busy, or doesn't take what came: what the peer sent could not be seen.
            self._last_heard_at = now
            self._progress.restart(now)
        silent_s = now - self._last_heard_at
        usual_s = self._interval_s * (self._misses - 0.5)
        if silent_s > usual_s or now >= self._patience.ends_at(self._last_heard_at):
            self._end(PeerTimeoutError, f"gave no sign of life for {silent_s:.1f} s", abort=True)
            return
        decoder = self._decoder
        stalled_s = self._progress.stalled_s(decoder.num_messages, decoder.unfinished_bytes, now)
        if stalled_s > self._stall_timeout_s:
            self._end(PeerTimeoutError, f"stopped within a message for {stalled_s:.0f} s", abort=True)
            return
        self._ping_again()
        self._schedule_tick()

    def _ping_again(self) -> None:
        if not (self._patience.num_waiting and self._patience.ping_is_under_way):
            self._ping()

    def _ping(self) -> None:
        if self._writing_paused:  # the peer doesn't read; more bytes would only pile up
            return
        self._ping_idx += 1
        self._ping_sent_at = self._loop.time()
        self._patience.pinged()
        self._write_ping(self._ping_idx)

    def _write_ping(self, number: int) -> None:
        for frame in encode_message(MessageType.PING, {"n": number}):
            self._write(frame)

    def _answer_ping(self, message: Message) -> None:
        number = message.header.get("n")
        if not isinstance(number, int):
            raise RemoteProtocolError("a PING has no number", self.peer_id)
        if not self._writing_paused and self._ended is None:
            for frame in encode_message(MessageType.PONG, {"n": number}):
                self._write(frame)

    def _take_pong(self, message: Message) -> None:
        number = message.header.get("n")
        self._rate.answered(number, self._loop.time(), self._least_round_trip_s)
        if number != self._ping_idx:
            return
        sample = self._loop.time() - self._ping_sent_at
        self._patience.answered(sample)
        self._least_round_trip_s = min(sample, self._least_round_trip_s or sample)
        # RFC 6298, section 2: the same smoothing as TCP's
        self.round_trip_s = sample if self.round_trip_s is None else 0.875 * self.round_trip_s + 0.125 * sample
        if self._pong_waiter is not None:
            self._pong_waiter.set_result(sample)
            self._pong_waiter = None

    # The end

    async def close(self) -> None:
        """Send what is unsent, for two seconds at most, and end the stream. Messages not yet received are dropped."""
        self._forget_received()
        self._end(SessionClosedError, "is closed")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.shield(self.gone)
        except TimeoutError:
            self.abort()
            await self.gone

    def abort(self) -> None:
        """End the stream now, whatever is unsent."""
        self._forget_received()
        self._end(SessionClosedError, "is closed")
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: type[SwarmError], reason: str, *, abort: bool = False) -> None:
        if self._ended is None:
            self._ended = (error, reason)
            self._count()
            if self._timer is not None:
                self._timer.cancel()
            for waiter in (self._receiver, self._drain_waiter):
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
            if self._pong_waiter is not None:
                self._pong_waiter.set_exception(self._error())
                self._pong_waiter.exception()  # nobody may be waiting
            if self._transport is not None:
                if abort:
                    self._transport.abort()
                elif error is not PeerUnreachableError:
                    if self._reading_paused:
                        self._transport.resume_reading()
                    self._timer = self._loop.call_later(LINGER_S, self._hang_up)
                else:
                    self._hang_up()

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
            return error(f"the peer {self.peer_id} {reason}", self.peer_id)
        return error(f"the stream to {self.peer_id} {reason}")

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by isinstance()
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._end(PeerUnreachableError, "hung up" if exc is None else f"can't be reached any more: {exc}")
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        self._adopted = ()
        if isinstance(self._previous, asyncio.Protocol):
            self._previous.connection_lost(None)  # until it hears this, it and its writer hold each other
            self._previous = None
        if not self.gone.done():
            self.gone.set_result(None)

    def pause_writing(self) -> None:
        """Called by the event loop."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Called by the event loop."""
        self._writing_paused = False
        self._write_rest()
        if self._drain_waiter is not None and not self._writing_paused:
            if not self._drain_waiter.done():
                self._drain_waiter.set_result(None)
            self._drain_waiter = None
