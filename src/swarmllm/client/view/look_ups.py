"""This client's node of the DHT, what the servers of one checkpoint announce there, and how far they are.

Used by `SwarmView` and `routes`; runs in the client's event loop. Announcements may be anybody's inventions:
`p2p/verified_peers` says which of them have been met. `Distances` pings servers as long as the client is in use, over
streams that it has anyway and new ones, and learns from each new stream whether the server is there.
"""

import asyncio
import logging
import math
import random
import time
from weakref import WeakSet

from swarmllm.client.view.connection import Connection
from swarmllm.client.view.usable_servers import is_checkable
from swarmllm.config import ClientConfig, address_book_path
from swarmllm.data_structures import ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import ConfigurationError, MissingBlocksError, SwarmError, WeightsMismatchError
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.discovery import LOOK_ON_S, find_swarm
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.p2p.verified_peers import CheckGreeting, VerifiedPeers
from swarmllm.swarm.retry import PeerHealth
from swarmllm.swarm.round_trips import RoundTrips
from swarmllm.swarm.stacks import command_to_serve

logger = logging.getLogger(__name__)

PINGS_PER_ROUND = 8
"""Servers, at most."""
NEIGHBOURS_MET = 8
"""Servers that are met after each look, if they weren't, because this client is connected to their nodes of the DHT."""

PING_SAMPLES = 3
"""Pings of which the least counts: everything else that a sample holds is somebody's delay."""
LAN_LOOK_INTERVAL_S = 5.0
"""Seconds from one look at the local network to the next, while no peer answers. Assumed; a look takes 3 s."""
IDLE_S = 120.0
"""Seconds without a route or a step after which nobody is pinged any more."""


class LookUps:
    """The servers of one checkpoint, as far as they are known, and ways to know more."""

    def __init__(
        self, config: ClientConfig, *, name: str, fingerprint: str, num_blocks: int, check_greeting: CheckGreeting
    ) -> None:
        self.config = config
        self.name = name
        """The model's name in the swarm."""
        self.fingerprint = fingerprint
        self.num_blocks = num_blocks
        self.spans: tuple[Span, ...] = (Span(0, num_blocks),)
        """The blocks that servers are to run."""
        self.encoder_blocks = 0
        """How many blocks, the first ones, are an encoder's."""
        self.snapshot = SwarmSnapshot(num_blocks=num_blocks)
        path = config.contributor_identity
        contributor = None if path is None else Identity.load(path)
        self.verified = VerifiedPeers(lambda: self.peer, fingerprint, contributor=contributor, check=check_greeting)
        self.news = 0
        """Counts what a running session might change its route for: looks and rounds of pings."""
        self.is_outdated = False
        """A server has failed since the last look, so what was announced may no longer be true."""
        self._peer: Peer | None = None
        self._refreshing = asyncio.Lock()
        self._lan_look: asyncio.Task[None] | None = None
        self._lan_looked_at = -math.inf

    @property
    def peer(self) -> Peer:
        """This process in the swarm."""
        if self._peer is None:
            raise RuntimeError("the swarm view is not connected")
        return self._peer

    async def connect(self) -> None:
        """Join the swarm's DHT as a client.

        Raises:
            ConfigurationError: no initial peers although discovery is off, or not an address.
            MissingBlocksError: there are none on the local network either.
            PeerUnreachableError: none of them answers.
        """
        initial_peers = self.config.initial_peers
        if not initial_peers:
            if not self.config.lan_discovery:
                raise ConfigurationError(
                    "name peers of the swarm with --initial_peers (in Python: initial_peers=[…]), which servers "
                    "print when they start, or set SWARMLLM_INITIAL_PEERS"
                )
            initial_peers = await find_swarm(
                self.name, self.fingerprint, look_on_s=min(LOOK_ON_S, self.config.start_timeout_s)
            )
        self._peer = await Peer.create(
            initial_peers=initial_peers,
            identity_path=self.config.identity_path,
            client_mode=True,
            address_book=address_book_path(),
        )
        self._peer.prefer_records(self.verified.__contains__)
        self._directory = BlockDirectory(self._peer, self.config.swarm_name)

    async def close(self) -> None:
        """Leave the DHT and end the daemon."""
        if self._lan_look is not None:
            self._lan_look.cancel()
            await asyncio.gather(self._lan_look, return_exceptions=True)
        await self.verified.close()
        if self._peer is not None:
            await self._peer.close()
            self._peer = None

    async def refresh(self) -> SwarmSnapshot:
        """Look into the DHT now; calls at the same time share one look."""
        asked_at = time.monotonic()
        async with self._refreshing:
            if self.snapshot.taken_at < asked_at:
                if self.peer.is_alone and self._found_on_lan:
                    self._look_at_lan_soon()
                servers = await self._directory.servers(self.fingerprint)
                usable = tuple(s for s in servers if s.end <= self.num_blocks and self._may_use(s))
                self.snapshot = SwarmSnapshot(self.num_blocks, usable, self.encoder_blocks, taken_at=time.monotonic())
                self.verified.forget_others(usable)
                if len(online := self.snapshot.online()) > PINGS_PER_ROUND:  # else all are met by pings
                    self.verified.verify_soon(self.verified.neighbours(online)[:NEIGHBOURS_MET])
                self.news += 1
            return self.snapshot

    @property
    def _found_on_lan(self) -> bool:
        return not self.config.initial_peers

    def _look_at_lan_soon(self) -> None:
        """Look for servers that were started since the last peer was lost: their addresses are new."""
        now = time.monotonic()
        if self._lan_look is not None and not self._lan_look.done():
            return
        if now - self._lan_looked_at >= LAN_LOOK_INTERVAL_S:
            self._lan_looked_at = now
            self._lan_look = asyncio.get_running_loop().create_task(self._look_at_lan(), name="look at the LAN again")

    async def _look_at_lan(self) -> None:
        try:
            found = await find_swarm(self.name, self.fingerprint, look_on_s=0.0)
        except MissingBlocksError:
            return  # the route's error says what is missing
        self.peer.join_by(found)

    async def look_again(self) -> None:
        """`refresh`, whose failure is only logged."""
        try:
            await self.refresh()
        except SwarmError as error:
            logger.warning("could not look into the DHT: %s", error)

    async def check_fingerprint(self) -> None:
        """Look whether somebody serves another checkpoint of the same name, where nobody serves this one."""
        for record in (await self._directory.models()).values():
            if record.name == self.name and record.fingerprint != self.fingerprint:
                raise WeightsMismatchError(
                    f"the swarm serves another version of {self.name} (fingerprint {record.fingerprint[:12]}) "
                    f"than yours ({self.fingerprint[:12]}): use the same revision and files as its servers"
                )

    async def explained(self, error: MissingBlocksError, adapter: str | None, left_out: str) -> MissingBlocksError:
        """The error in words that name the mend; `adapter`: the one that servers have to offer; `left_out`: who wasn't
        used because of other weights."""
        names = sorted({record.name for record in (await self._directory.models()).values()})
        if not self.snapshot.servers and self.peer.is_alone:
            place = "on this network" if self._found_on_lan else "where it was"
            return MissingBlocksError(
                f"nobody serves {self.name}: no peer of the swarm that this one has met answers any more; start one "
                f"again {place}, or name peers that are there with --initial_peers",
                error.block_idxs,
            )
        if not self.snapshot.servers:
            others = f"; this swarm serves {', '.join(names)}" if names else "; this swarm serves no model at all"
            return MissingBlocksError(f"nobody serves {self.name}{others}", error.block_idxs)
        if adapter is not None:
            return MissingBlocksError(
                f"{error} of {self.name} with the adapter {adapter}: start servers with --adapters {adapter}, "
                "or leave active_adapter out",
                error.block_idxs,
            )
        if left_out:
            return MissingBlocksError(f"{error} of {self.name}{left_out}", error.block_idxs)
        text = f"{error} of {self.name} (waited {self.config.route_timeout_s:.0f} s)"
        if missing := error.block_idxs:  # none are, where spans can't be joined
            is_private = self.config.swarm_name is not None
            command = command_to_serve(missing, self.name, self.config.initial_peers, is_private=is_private)
            text += f": start a server of them, {command}"
        return MissingBlocksError(text, missing)

    def _may_use(self, server: ServerInfo) -> bool:
        config, peer_id = self.config, server.peer_id
        if peer_id in config.blocked_servers or (config.verify_fraction and not is_checkable(server, config)):
            return False
        return config.allowed_servers is None or peer_id in config.allowed_servers


class Distances:
    """The pings of one client."""

    def __init__(self, config: ClientConfig, look_ups: LookUps, health: PeerHealth) -> None:
        self.round_trips = RoundTrips()
        self.connections: WeakSet[Connection] = WeakSet()
        """Streams that are there anyway."""
        self.used_at = -math.inf
        """Time at which somebody last asked for a route or took a step, by `time.monotonic()`."""
        self._config = config
        self._look_ups = look_ups
        self._health = health
        self._random = random.Random()  # the module's own belongs to the user's program, which may have seeded it

    async def keep_measuring(self) -> None:
        """Look into the DHT, and ping servers, as long as somebody uses this client."""
        while True:
            await asyncio.sleep(self._config.ping_period_s)
            now = time.monotonic()
            if now - self.used_at > IDLE_S:
                continue
            if now - self._look_ups.snapshot.taken_at > self._config.update_period_s:
                await self._look_ups.look_again()
            await self.ping_some()

    async def ping_some(self) -> None:
        now = time.monotonic()
        in_use = {c.peer_id: c for c in self.connections if c.error is None}
        others = self.round_trips.to_measure(
            self._look_ups.snapshot,
            count=max(0, PINGS_PER_ROUND - len(in_use)),
            avoid=self._health.avoided(now) | in_use.keys(),
            generator=self._random,
        )
        connected = self._random.sample(list(in_use.values()), min(PINGS_PER_ROUND, len(in_use)))
        await asyncio.gather(
            *(self._ping(connection.server, connection) for connection in connected),
            *(self._ping(server) for server in others),
        )
        self._look_ups.news += 1

    async def _ping(self, server: ServerInfo, connection: Connection | None = None) -> None:
        """Measure one server's distance, over a stream that is there already or a new one.

        One that can't be reached is nobody's concern here.
        """
        self.round_trips.begin(server.peer_id, time.monotonic())
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                if connection is not None:
                    samples = [await connection.ping() for _ in range(PING_SAMPLES)]
                    self._look_ups.verified.renew(server)
                else:
                    samples = await self._ping_over_new_stream(server)
        except (SwarmError, TimeoutError) as error:
            logger.debug("no ping to %s: %s", server.peer_id, error)
            self.round_trips.fail(server.peer_id)
            return
        self.round_trips.observe(server.peer_id, 1e3 * min(samples), time.monotonic())

    async def _ping_over_new_stream(self, server: ServerInfo) -> list[float]:
        timeout_s = self._config.connect_timeout_s
        stream, _ = await self._look_ups.verified.open_stream(server, timeout_s=timeout_s)
        try:
            return [await stream.ping() for _ in range(PING_SAMPLES)]
        finally:
            stream.abort()
