"""A relay's service to other peers: it keeps reservations, opens circuits, and passes their bytes on.

It replaces the relay in libp2p's daemon, which relays for anybody and cuts each circuit after 128 KiB or two minutes.
`p2p/peer` hands every stream that is opened at HOP to `RelayService.serve`:

    RESERVE  → refused, or a reservation that lasts while the stream stays open and RESERVE is repeated in time
    CONNECT  → refused, or STOP is opened to the target, and bytes pass until one side ends or both are idle

`Places` limits the number of users: per peer, per host and in all. Peer ids cost nothing and addresses little, so the
last number limits memory, and the others keep one guest from taking everything. `ByteBucket` limits the bytes a second.
A relay learns which peers talk, when and how much, and nothing else: the two ends encrypt.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import base58

from swarmllm.errors import SwarmError
from swarmllm.network.relay.messages import (
    Fields,
    HopKind,
    Status,
    decode,
    hop_status,
    number,
    read_message,
    stop_connect,
    text,
)

logger = logging.getLogger(__name__)

BURST_S = 0.25
"""Seconds of the rate that may pass at once after a pause, so that a decode step never waits on a quiet relay."""

RESERVATION_S = 60.0
"""A reservation ends if it isn't renewed for this long. Holders renew it several times in this time."""
RENEWAL_REST_S = 1.0
"""Least time between two renewals that are read."""
HANDSHAKE_S = 10.0
"""Longest time for everything before the bytes of a circuit."""
LINGER_S = 1.0
"""Time between a refusal and the end of the stream, which could overtake it."""
IDLE_S = 120.0
"""A circuit without a byte is cut after this time or twice as much. libp2p's own signs of life come every 30 s."""
CHUNK_BYTES = 32 << 10
"""Bytes passed on at once, in turn with other hosts."""
BUFFER_BYTES = 16 << 10
"""Reading pauses while more than twice this waits. One read of asyncio brings 256 KiB at most."""

ByteStream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
OpenStop = Callable[[str], Awaitable[ByteStream]]


@dataclass(frozen=True)
class Caller:
    """The peer that opened a stream, according to this peer's daemon."""

    peer_id: str
    host: str
    """Address of its machine, or of the router or relay before it; "": not told."""
    through_relay: bool


@dataclass(eq=False)
class Places:
    """Free places of one kind."""

    of_peer: int
    of_host: int
    in_all: int
    _taken: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __len__(self) -> int:
        return self._taken["all", ""]

    def take(self, caller: Caller) -> bool:
        """Take a place for this caller until `leave`; False if there is none."""
        keys = self._keys(caller)
        if any(self._taken[key] >= most for key, most in zip(keys, self._limits(), strict=True)):
            return False
        self._taken.update(keys)
        return True

    def leave(self, caller: Caller) -> None:
        """Give a place back."""
        self._taken.subtract(self._keys(caller))
        self._taken = +self._taken

    def _limits(self) -> tuple[int, int, int]:
        return self.of_peer, self.of_host, self.in_all

    def _keys(self, caller: Caller) -> tuple[tuple[str, str], ...]:
        return ("peer", caller.peer_id), ("host", caller.host), ("all", "")


class ByteBucket:
    """Limits bytes per second. Hosts take turns, so a flood from one host delays others by one chunk at most."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._turn = asyncio.Lock()
        self._turn_of_host: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._free_at = 0.0
        self.num_bytes = 0
        """Bytes passed since the start."""

    def lock_of(self, host: str) -> asyncio.Lock:
        """The lock of this host, for `take`."""
        return self._turn_of_host.setdefault(host, asyncio.Lock())

    async def take(self, num_bytes: int, of_host: asyncio.Lock) -> None:
        """Return when this many bytes may pass."""
        async with of_host, self._turn:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now - BURST_S) + num_bytes / self._bytes_per_s
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)
        self.num_bytes += num_bytes


MAX_STREAMS = Places(of_peer=64, of_host=96, in_all=256)
"""Places for streams at HOP. Most are circuits: a client has one to each server that it reaches through this relay. If
all of them are stalled and full, they take about 200 MB (computed)."""
MAX_RESERVATIONS = Places(of_peer=2, of_host=32, in_all=128)
"""Places for reservations. A peer's newer one replaces its older one, which keeps its place for a moment."""


@dataclass(frozen=True, kw_only=True)
class RelayRules:
    """Rules of a relay."""

    mbps: float = 100.0
    """Megabits per second of all circuits together."""
    servers: Collection[str] | None = None
    """Peer ids that may reserve a place and reach others; None: all."""
    clients: Collection[str] | None = None
    """Peer ids that may reach others as well; None: all."""


class RelayService:
    """Serves streams at HOP. `open_stop` opens a stream to a peer at STOP. Without rules everybody is refused."""

    def __init__(self, open_stop: OpenStop, rules: RelayRules | None) -> None:
        self._open_stop = open_stop
        self._rules = rules
        self._streams = _empty(MAX_STREAMS)
        self._places = _empty(MAX_RESERVATIONS)
        self._reserved: dict[str, asyncio.Task[None]] = {}
        """Holders of reservations, and the tasks that keep them."""
        self._bucket = ByteBucket((rules or RelayRules()).mbps * 1e6 / 8)
        self.num_circuits = 0
        self.num_refused = 0

    @property
    def num_reservations(self) -> int:
        return len(self._reserved)

    @property
    def num_bytes(self) -> int:
        """Bytes passed on since the start, both ways."""
        return self._bucket.num_bytes

    async def serve(self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one stream until it ends. The caller closes it."""
        if not self._streams.take(caller):
            self.num_refused += 1
            return
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                asked = await read_message(reader)
            if number(asked, 1) == HopKind.RESERVE:
                await self._keep_reservation(caller, reader, writer)
            elif number(asked, 1) == HopKind.CONNECT:
                await self._connect(caller, asked, reader, writer)
            else:
                await self._refuse(Status.MALFORMED_MESSAGE, reader, writer)
        except ValueError as error:
            logger.debug("%s sent this relay an invalid message: %s", caller.peer_id, error)
            await self._refuse(Status.MALFORMED_MESSAGE, reader, writer)
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("a stream of %s to this relay ended: %r", caller.peer_id, error)
        finally:
            self._streams.leave(caller)

    async def _refuse(self, status: Status, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_refused += 1
        with suppress(OSError, EOFError, TimeoutError):
            writer.write(hop_status(status))
            async with asyncio.timeout(LINGER_S):
                await writer.drain()
                await reader.read(1)

    # Reservations

    async def _keep_reservation(
        self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        rules = self._rules
        if rules is None or caller.through_relay or not _holds(rules.servers, caller.peer_id):
            return await self._refuse(Status.PERMISSION_DENIED, reader, writer)
        if (older := self._reserved.pop(caller.peer_id, None)) is not None:
            older.cancel()
            await asyncio.wait([older])
        if not self._places.take(caller):
            return await self._refuse(Status.RESERVATION_REFUSED, reader, writer)
        keeping = asyncio.get_running_loop().create_task(_renew(reader, writer))
        self._reserved[caller.peer_id] = keeping
        try:
            await asyncio.wait([keeping])
        finally:
            if self._reserved.get(caller.peer_id) is keeping:
                del self._reserved[caller.peer_id]
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            self._places.leave(caller)

    # Circuits

    async def _connect(
        self, caller: Caller, asked: Fields, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        target_id = base58.b58encode(text(decode(text(asked, 2)), 1)).decode()
        if not self._may_connect(caller):
            return await self._refuse(Status.PERMISSION_DENIED, reader, writer)
        if target_id not in self._reserved:
            return await self._refuse(Status.NO_RESERVATION, reader, writer)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                target = await self._reach(target_id, caller)
        except (SwarmError, OSError, EOFError, TimeoutError, ValueError) as error:
            logger.debug("%s can't be reached for %s: %r", target_id, caller.peer_id, error)
            return await self._refuse(Status.CONNECTION_FAILED, reader, writer)
        self.num_circuits += 1
        try:
            writer.write(hop_status(Status.OK))
            await self._pass_on(caller, (reader, writer), target)
        finally:
            self.num_circuits -= 1
            target[1].transport.abort()

    def _may_connect(self, caller: Caller) -> bool:
        """Servers always may. Holders of reservations count as servers."""
        if self._rules is None or caller.through_relay:
            return False
        clients, servers = self._rules.clients, self._rules.servers
        known = (*(servers or ()), *self._reserved)
        return _holds(clients, caller.peer_id) or caller.peer_id in known

    async def _reach(self, target_id: str, caller: Caller) -> ByteStream:
        """Open a stream to the target and wait until it accepts the circuit."""
        reader, writer = await self._open_stop(target_id)
        try:
            writer.write(stop_connect(base58.b58decode(caller.peer_id)))
            if (status := number(await read_message(reader), 4)) != Status.OK:
                raise ValueError(f"it answers {status}")
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def _pass_on(self, caller: Caller, source: ByteStream, target: ByteStream) -> None:
        """Pass bytes on until one side ends or nothing came for a while."""
        host, passed = self._bucket.lock_of(caller.host), [0]
        loop = asyncio.get_running_loop()
        ways = {
            loop.create_task(self._pump(source[0], target[1], host, passed)),
            loop.create_task(self._pump(target[0], source[1], host, passed)),
        }
        try:
            seen = -1
            while passed[0] > seen:
                seen = passed[0]
                done, _ = await asyncio.wait(ways, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: asyncio.Lock, passed: list[int]
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._bucket.take(len(data), host)
            writer.write(data)
            await writer.drain()
            passed[0] += len(data)


async def _renew(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Grant the reservation as long as its holder renews it in time."""
    with suppress(OSError, EOFError, TimeoutError, ValueError):
        while True:
            writer.write(hop_status(Status.OK, time.time() + RESERVATION_S))
            await writer.drain()
            await asyncio.sleep(RENEWAL_REST_S)
            async with asyncio.timeout(RESERVATION_S):
                if number(await read_message(reader), 1) != HopKind.RESERVE:
                    return


def _holds(peer_ids: Collection[str] | None, peer_id: str) -> bool:
    return peer_ids is None or peer_id in peer_ids


def _empty(places: Places) -> Places:
    return Places(places.of_peer, places.of_host, places.in_all)
