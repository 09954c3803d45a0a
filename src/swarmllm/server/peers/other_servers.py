"""The other servers of the swarm, as this one sees them: their records, their round trips, and copies of this server.

`OtherServers` reads records and greets the servers that announced them. It is used to choose blocks, to dial
successors and to find relays. `Successors` pings servers that may come next in a route, for the announcement: clients
can't measure these round trips from outside.

`Twins` are other processes with the identity of this server, as on cloned machines: each takes the other's place in
the swarm. Connections to the peer id reach either of them, and their records replace each other, so the blocks of one
or the other seem to be missing. No other peer can tell them apart, but each of them can see the other:

- in the swarm's records, where a record of the own peer id comes from another process;
- at the address of an initial peer with the own peer id (`greet_twin`, before the server begins), which is then told,
  and told again in each period: the two may have no other peers in common, so no records either.

Both say so in their logs and in what they announce, so `swarmllm status` and `swarmllm doctor` say it as well. They
say it until nothing has shown another process for `TWIN_PERIODS`: it may have ended, or was refused when it began.
"""

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from swarmllm.config import RECORD_PERIODS
from swarmllm.data_structures import MAX_ROUND_TRIPS, ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import SwarmError
from swarmllm.network.p2p.addresses import split_initial_peer
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.identity import Identity, contribution, is_genuine
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.p2p.reachability import RelayPeer
from swarmllm.network.p2p.verified_peers import VerifiedPeers
from swarmllm.network.wire.protocol import FrameStream, HelloHeader, hello
from swarmllm.swarm.claims import plausible
from swarmllm.swarm.round_trips import RoundTrips

logger = logging.getLogger(__name__)

MEND = "give each server an --identity_path of its own, and remove copied files"

TWIN_PERIODS = 3
"""Update periods after which another process that nothing shows any more counts as gone. A living one renews its record
twice per period, and `OtherServers.look_for_twins` reads it as often."""

PINGS_PER_PERIOD = 8
"""Number of servers that are pinged; each costs a stream and some hundred bytes."""
PING_SAMPLES = 3
PING_TIMEOUT_S = 5.0

PROBES = 3
"""Number of looks after which the rate of a connection to another server is measured. The best counts, because this
server may be busy loading its blocks. Each sends a megabyte. Real messages between servers count more."""
PROBE_TIMEOUT_S = 20.0
"""Seconds of one of them. A connection of less than 0.4 Mbit/s stays unknown."""

CONNECT_TIMEOUT_S = 5.0
"""Seconds to dial another server and greet it."""


class Twins:
    """Other processes with the identity of this server, as far as it knows."""

    def __init__(self, update_period_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.instance = secrets.token_hex(4)
        """Name of this process in its records."""
        self._clock, self._period_s = clock, update_period_s
        self._seen_until = -math.inf
        self.greet: Callable[[], Awaitable[str | None]] | None = None
        """Greets the one that answered before this server began; returns its address, None if it doesn't answer."""
        self._greets = self._met_itself = False
        self._proven = ""
        """Name of the process that renewed a record."""
        self._expected_from = clock() + RECORD_PERIODS * update_period_s
        self._last: ServerInfo | None = None

    @property
    def seen(self) -> bool:
        """True if another one was seen lately."""
        return self._clock() < self._seen_until

    def note_record(self, own: ServerInfo) -> None:
        """Compare a record of this peer id. One of an earlier process of this server stays unchanged, and expires."""
        if own.instance in ("", self.instance):
            return
        last, self._last = self._last, own
        is_renewed = last is not None and last.instance == own.instance and last != own
        if own.instance == self._proven or (is_renewed and self._clock() > self._expected_from):
            self._proven = own.instance
            self.report(f"the swarm has records of it from a process at {', '.join(own.addrs) or 'unknown addresses'}")

    def note_greeting(self, own_peer_id: str, greeting: HelloHeader, client: str) -> None:
        """Note a client's greeting that it is going to serve with this key; it counts if the client proves that it has
        the key."""
        shown = greeting.contribution
        if self._greets:  # the remembered address may lead here by now
            self._met_itself = True
            return
        if greeting.same_identity and shown is not None and shown.server == own_peer_id and is_genuine(shown, client):
            self.report("a process that begins now has said so")

    def report(self, how: str) -> None:
        """Note that another one was seen now. The log tells it once."""
        if not self.seen:
            logger.warning("another process has this server's identity (%s): %s", how, MEND)
        self._seen_until = self._clock() + TWIN_PERIODS * self._period_s

    async def greet_while_seen(self) -> None:
        """Greet the one that answered before this server began in each period, as long as one is seen: so both know
        that the other lives on."""
        while self.greet is not None and self.seen:
            await asyncio.sleep(self._period_s)
            self._greets, self._met_itself = True, False
            try:
                maddr = await self.greet()
            finally:
                self._greets = False
            if maddr is not None and not self._met_itself:
                self.report(f"it answers at {maddr}")


async def greet_twin(identity: Identity, initial_peers: Sequence[str]) -> str | None:
    """Greet a process with this identity at one of these addresses; return its address, or None if there is none.

    Call it before this server listens anywhere, or it would find itself; `Twins` tells that later.
    """
    own = [maddr for maddr in initial_peers if split_initial_peer(maddr)[0] == identity.peer_id]
    if not own or not await _greet(identity, own):
        return None
    if len(own) == 1:
        return own[0]
    for maddr in own:
        if await _greet(identity, [maddr]):
            return maddr
    return None


async def _greet(identity: Identity, own: Sequence[str]) -> bool:
    """Greet a process with this identity at one of these addresses; False if there is none."""
    try:
        peer = await Peer.create(initial_peers=own, client_mode=True)
    except SwarmError as error:  # usual: a server that restarts is among its own initial peers
        logger.debug("nobody else has this identity: %s", error)
        return False
    async with peer:
        try:
            stream = await peer.open_stream(identity.peer_id, [split_initial_peer(maddr)[1] for maddr in own])
            await hello(stream, contribution=contribution(identity, peer.peer_id), same_identity=True)
            stream.abort()
        except SwarmError as error:
            logger.debug("the other process with this identity can't be told: %s", error)
    return True


@dataclass
class Successors:
    """Round trips to servers that may come next in a route, and the rate of this server's network.

    `ping_forever` keeps them up to date.
    """

    look: Callable[[], Awaitable[SwarmSnapshot]]
    open_stream: Callable[[ServerInfo], Awaitable[FrameStream]]
    period_s: float
    announced: tuple[tuple[str, float], ...] = ()
    """(peer id, milliseconds), the nearest first."""
    mbps: float | None = None
    """Megabits per second of the fastest probed connection; None before the first one."""
    _round_trips: RoundTrips = field(default_factory=RoundTrips)

    async def ping_forever(self, peer_id: str, span: Callable[[], Span]) -> None:
        """Probe the network when joining, then ping some servers each period, for ever; `span` returns the blocks of
        this server, `peer_id`."""
        probes_left = PROBES
        snapshot = await self._seen()
        while True:
            online = () if snapshot is None else snapshot.online()
            others = [server for server in online if server.peer_id != peer_id]
            if probes_left and others:
                probes_left -= 1
                await self._probe(random.choice(others))
            await asyncio.sleep(self.period_s)
            snapshot = await self._seen()
            if snapshot is not None:
                await self._measure(likely_successors(snapshot, peer_id, span()))

    async def _seen(self) -> SwarmSnapshot | None:
        """Look at the swarm; None if that failed."""
        try:
            return await self.look()
        except SwarmError as error:
            logger.debug("could not look for other servers: %s", error)
            return None

    async def _probe(self, server: ServerInfo) -> None:
        """Measure the rate of a connection to a server; one that can't be reached is left out."""
        mbps = None
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                stream = await self.open_stream(server)
                try:
                    mbps = await stream.measure_rate()
                finally:
                    stream.abort()
        if mbps is not None:
            self.mbps = max(mbps, self.mbps or 0.0)
            logger.info("the connection to %s has %.0f Mbit/s", server.peer_id, mbps)

    async def _measure(self, candidates: list[ServerInfo]) -> None:
        unmeasured_first = self._round_trips.oldest_first(candidates, random.Random())
        await asyncio.gather(*map(self._ping, unmeasured_first[:PINGS_PER_PERIOD]))
        known = self._round_trips.known(time.monotonic())
        near = sorted((known[s.peer_id], s.peer_id) for s in candidates if s.peer_id in known)
        self.announced = tuple((peer_id, ms) for ms, peer_id in near[:MAX_ROUND_TRIPS])

    async def _ping(self, server: ServerInfo) -> None:
        """Ping a server; one that can't be reached is only left out."""
        self._round_trips.begin(server.peer_id, time.monotonic())
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                stream = await self.open_stream(server)
                try:
                    samples = [await stream.ping() for _ in range(PING_SAMPLES)]
                finally:
                    stream.abort()
        except (SwarmError, TimeoutError) as error:
            logger.debug("no ping to %s: %s", server.peer_id, error)
            self._round_trips.fail(server.peer_id)
            return
        self._round_trips.observe(server.peer_id, 1e3 * min(samples), time.monotonic())


def likely_successors(snapshot: SwarmSnapshot, peer_id: str, span: Span) -> list[ServerInfo]:
    """Return the other servers that can continue where this server's blocks end."""
    return [s for s in snapshot.online() if s.peer_id != peer_id and s.start <= span.end < s.end]


class OtherServers:
    """The servers of one checkpoint; only peer ids in `allowed` count (None: all)."""

    def __init__(
        self,
        peer: Peer,
        directory: BlockDirectory,
        *,
        fingerprint: str,
        num_blocks: int,
        allowed: Collection[str] | None,
        twins: Twins | None = None,
    ) -> None:
        self._own_peer_id = peer.peer_id
        self._directory = directory
        self._fingerprint, self._num_blocks = fingerprint, num_blocks
        self._allowed, self._twins = allowed, twins or Twins()
        self._met: tuple[ServerInfo, ...] = ()
        self.verified = VerifiedPeers(lambda: peer, fingerprint)
        self.on_seen: Callable[[Sequence[ServerInfo]], None] | None = None
        """Called with all records, whenever they are read."""

    async def announced(self) -> SwarmSnapshot:
        """Read the records of all servers, this one included; they may not be there any more."""
        found = await self._directory.servers(self._fingerprint)
        for own in (server for server in found if server.peer_id == self._own_peer_id):
            self._twins.note_record(own)
        counted = None if self._allowed is None else {*self._allowed, self._own_peer_id}
        servers = tuple(server for server in found if counted is None or server.peer_id in counted)
        if self.on_seen is not None:
            self.on_seen(servers)
        return SwarmSnapshot(num_blocks=self._num_blocks, servers=servers)

    async def look(self, *own: ServerInfo) -> SwarmSnapshot:
        """Look at the swarm: other servers that serve what they announce, and this server as it knows itself
        (`own`)."""
        announced = (await self.announced()).servers
        others = await self.verified.verify([server for server in announced if server.peer_id != self._own_peer_id])
        self._met = others
        return SwarmSnapshot(num_blocks=self._num_blocks, servers=plausible((*others, *own)))

    async def look_for_twins(self) -> None:
        """Read the records again if another process was seen with this identity: it may live on.

        Call it right before this server renews its record, which then hides the other's.
        """
        if not self._twins.seen:
            return
        try:
            await self.announced()
        except SwarmError as error:
            logger.debug("could not look for another process with this identity: %s", error)

    def relays(self, round_trips_ms: Mapping[str, float]) -> list[RelayPeer]:
        """Return servers of the last look that may relay for this one, the nearest first."""
        public = [server for server in self._met if not server.relayed]
        public.sort(key=lambda server: round_trips_ms.get(server.peer_id, math.inf))
        return [RelayPeer(server.peer_id, server.addrs) for server in public]

    async def open_stream(self, other: ServerInfo) -> FrameStream:
        """Open a stream to another server, and greet it.

        Raises:
            SwarmError: it can't be reached, or isn't what it says.
        """
        stream, _ = await self.verified.open_stream(other, timeout_s=CONNECT_TIMEOUT_S)
        return stream
