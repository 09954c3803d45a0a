"""Persistent streams to successors: one per peer, shared by all sessions and requests whose outputs go there.

Links stay open between sessions, because a new stream's first messages are slow over long distances (its flow-control
window starts small). Called by `sessions/session` and `pushes`; knows nothing about blocks.

A client names the next server of its chain (LINK, FORWARD, BACKWARD). `Targets` dials only servers that are in the
directory, at the addresses of their own signed records. Every failure is reported by the same sentence. So no client
can make this server probe addresses and ports for it.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.errors import PeerError, PeerUnreachableError, SessionClosedError, SessionLostError, SwarmError
from swarmllm.network.wire.frames import ByteChunk
from swarmllm.network.wire.messages import AttachHeader, ResultHeader, Successor, Target, parse
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType, raise_error

logger = logging.getLogger(__name__)

REFUSAL = "the next server can't be reached from here"
"""Said of every server that can't be reached: it is unknown, refuses, doesn't answer or serves another checkpoint."""
FRESH_S = 300.0
"""Seconds in which a record counts as the address of its server, unless a dial fails. Not shorter: repairs wait for the
answer, and a look takes seconds if it asks the very node whose freezing made the repair necessary."""
LOOK_AGAIN_S = 1.0
"""Seconds between two looks into the directory for an unknown server; clients can name as many as they like."""
TARGET_TIMEOUT_S = 7.0
"""Seconds for look-up and dial; less than the 8 s that callers wait, so that a server that never answers gives the same
error."""
FAILURES_PER_MINUTE = 60
"""Failed dials after which no server is dialled for clients until the minute is over; clients relay meanwhile. Assumed:
fewer of a server's successors die in a minute."""

OpenStream = Callable[[Target], Awaitable[FrameStream]]
OnLost = Callable[[PeerError], None]

WATCHED_S = 10.0
"""Seconds after each message in which the next server is watched as closely as by a waiting client. The answer goes to
the client, so this server doesn't know how long it waits. Assumed: longer than nearly all steps take."""
FIRST_REQUEST_ID = 1 << 62
"""The first id of ATTACH requests. Errors about steps carry the ids that clients gave them, which count from 1."""


class Targets:
    """Dials servers that clients name. `look` reads the directory, `open_stream` dials."""

    def __init__(
        self,
        look: Callable[[], Awaitable[SwarmSnapshot]],
        open_stream: Callable[[ServerInfo], Awaitable[FrameStream]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._open_stream = open_stream
        self._clock = clock
        self._seen: dict[str, tuple[ServerInfo, float]] = {}
        """Records of servers by peer id, and the time when they were read."""
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()
        self._failed_at: deque[float] = deque(maxlen=FAILURES_PER_MINUTE)

    def see(self, servers: Iterable[ServerInfo]) -> None:
        """Remember records that were read: a repair then finds its servers without a look."""
        now = self._clock()
        self._seen |= {server.peer_id: (server, now) for server in servers}
        self._seen = {peer_id: seen for peer_id, seen in self._seen.items() if now - seen[1] < FRESH_S}

    async def open(self, target: Target) -> FrameStream:
        """Open a stream to that server, and greet it.

        Raises:
            PeerUnreachableError: it can't be reached, for any reason.
        """
        try:
            async with asyncio.timeout(TARGET_TIMEOUT_S):
                server = await self._find(target.peer_id)
                if server is not None and not self._has_failed_often():
                    return await self._dial(server)
        except (SwarmError, TimeoutError):
            pass
        raise PeerUnreachableError(REFUSAL, target.peer_id)

    def _has_failed_often(self) -> bool:
        return len(self._failed_at) == FAILURES_PER_MINUTE and self._clock() - self._failed_at[0] < 60

    async def _dial(self, server: ServerInfo) -> FrameStream:
        try:
            return await self._open_stream(server)
        except BaseException as error:  # also if the caller was cancelled
            self._failed_at.append(self._clock())
            self._seen.pop(server.peer_id, None)  # it may have moved to another address
            logger.info("%s, which a client has named, can't be reached: %s", server.peer_id, str(error) or "no answer")
            raise

    async def _find(self, peer_id: str) -> ServerInfo | None:
        asked_at = self._clock()
        if (known := self._known(peer_id)) is not None:
            return known
        async with self._looking:
            if self._looked_at < asked_at:
                await asyncio.sleep(self._looked_at + LOOK_AGAIN_S - self._clock())
                looked_at = self._clock()
                self.see((await self._look()).servers)
                self._looked_at = looked_at
        return self._known(peer_id)

    def _known(self, peer_id: str) -> ServerInfo | None:
        server, seen_at = self._seen.get(peer_id, (None, 0.0))
        return server if self._clock() - seen_at < FRESH_S else None


class Link:
    """One stream to the next server."""

    def __init__(self, stream: FrameStream) -> None:
        self.stream = stream
        self._ids = itertools.count(FIRST_REQUEST_ID)
        self._pending: dict[int, asyncio.Future[None]] = {}
        self._listeners: dict[str, OnLost] = {}  # by the next server's session
        self.error: PeerError | None = None
        self._used_at = 0.0
        self._watching: asyncio.TimerHandle | None = None

    async def attach(self, successor: Successor, on_lost: OnLost) -> None:
        """Tell the next server that steps of its session will come here.

        `on_lost` is called when the stream breaks, or the next server doesn't take a step.

        Raises:
            SwarmError: the next server refuses, or the stream broke.
        """
        if self.error is not None:
            raise self.error
        request = next(self._ids)
        future = self._pending[request] = asyncio.get_running_loop().create_future()
        self._listeners[successor.session] = on_lost
        try:
            header = AttachHeader(id=request, session=successor.session, token=successor.token)
            await self.send(MessageType.ATTACH, header.model_dump())
            await future
        except BaseException:
            self.forget(successor.session)
            raise
        finally:
            self._pending.pop(request, None)

    async def send(self, kind: MessageType, header: Mapping[str, Any], chunks: Sequence[ByteChunk] = ()) -> None:
        """Send a message. If the caller is cancelled meanwhile, the stream stays intact (`FrameStream.send`).

        Raises:
            PeerError: the stream broke, or this side has closed it, for which no peer is blamed.
            LocalProtocolError: the message can't be sent.
        """
        self._watch()
        try:
            await self.stream.send(kind, header, chunks)
        except SessionClosedError:
            raise self._closed_here() from None

    def _watch(self) -> None:
        """Watch the stream: a frozen server, or one that nothing reaches, is noticed as soon as by a client."""
        loop = asyncio.get_running_loop()
        self._used_at = loop.time()
        if self._watching is None and self.error is None:
            self.stream.attend()
            self._watching = loop.call_later(WATCHED_S, self._look_away)

    def _look_away(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._used_at + WATCHED_S:
            self._watching = loop.call_at(self._used_at + WATCHED_S, self._look_away)
        else:
            self._watching = None
            self.stream.liveness.relax()

    def _closed_here(self) -> SessionLostError:
        return SessionLostError("the link to the next server was closed", self.stream.peer_id)

    def forget(self, session: str) -> None:
        """Forget that session of the next server; no more steps of it are sent here."""
        self._listeners.pop(session, None)

    async def read(self) -> None:
        """Receive answers until the stream breaks, and report its end to every session."""
        try:
            while True:
                message = await self.stream.receive()
                error: SwarmError | None = None
                try:
                    if message.type == MessageType.ERROR:
                        raise_error(message.header, self.stream.peer_id)
                    parse(ResultHeader, message.header, self.stream.peer_id)
                except SwarmError as caught:
                    error = caught
                request = message.header.get("id")
                future = self._pending.get(request) if isinstance(request, int) else None
                if future is None:
                    self._step_refused(message, error)
                elif future.done():
                    continue
                elif error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
        except PeerError as lost:
            self.error = lost
        except SwarmError:
            pass  # this side has closed it
        finally:
            self.error = self.error or self._closed_here()
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(self.error)
            for on_lost in tuple(self._listeners.values()):
                on_lost(self.error)
            if self._watching is not None:
                self._watching.cancel()
            self.stream.abort()

    def _step_refused(self, message: Message, error: SwarmError | None) -> None:
        """Report an error about a step. Usually the next server answers the client; this one couldn't read or take the
        step."""
        session = message.header.get("session")  # may be anything, even nested so deep that str() fails
        on_lost = self._listeners.get(session) if isinstance(session, str) else None
        if error is not None and on_lost is not None:
            on_lost(error if isinstance(error, PeerError) else SessionLostError(str(error), self.stream.peer_id))


@dataclass
class _Dialling:
    """A dial under way. It is forgotten when no request waits for it: clients name servers as they like."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


class Links:
    """All links of this server. Their readers run in `tasks`, the server's own TaskGroup."""

    def __init__(self, open_stream: OpenStream, tasks: asyncio.TaskGroup) -> None:
        self._open_stream = open_stream
        self._tasks = tasks
        self._links: dict[str, Link] = {}
        self._dialling: dict[str, _Dialling] = {}
        self._mbps: float | None = None

    @property
    def num_dialling(self) -> int:
        """Servers that are being dialled for a link."""
        return len(self._dialling)

    def mbps(self, own_peer_id: str) -> float | None:
        """Megabits per second of the fastest link to another server; a slow link may be the other side's fault.

        None before enough large messages were sent; the last known value if there is no link now.
        """
        known = (link.stream.link_rate.mbps for peer_id, link in self._links.items() if peer_id != own_peer_id)
        self._mbps = max((mbps for mbps in known if mbps is not None), default=self._mbps)
        return self._mbps

    def __len__(self) -> int:
        return len(self._links)

    async def get(self, successor: Target) -> Link:
        """Return the link to that peer, and open it if there is none.

        Raises:
            PeerError: it can't be reached.
        """
        peer_id = successor.peer_id
        dialling = self._dialling.setdefault(peer_id, _Dialling())
        dialling.num_waiting += 1
        try:
            async with dialling.lock:
                link = self._links.get(peer_id)
                if link is None or link.error is not None:
                    stream = await self._open_stream(successor)
                    stream.expect(frozenset())  # short answers only: outputs go to the client
                    stream.start_keepalive()
                    link = self._links[peer_id] = Link(stream)
                    self._tasks.create_task(self._read(peer_id, link), name=f"link to {peer_id}")
                return link
        finally:
            dialling.num_waiting -= 1
            if not dialling.num_waiting:
                del self._dialling[peer_id]

    async def _read(self, peer_id: str, link: Link) -> None:
        try:
            await link.read()
        except Exception:  # no message of a peer may end the server's own TaskGroup
            logger.exception("the link to %s failed; everything else goes on", peer_id)
        finally:
            if self._links.get(peer_id) is link:
                del self._links[peer_id]

    async def close(self) -> None:
        """End all streams; their readers end, too."""
        for link in tuple(self._links.values()):
            link.stream.abort()
        self._links.clear()
