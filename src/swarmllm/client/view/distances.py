"""Keeps a client's knowledge up to date of how far servers are: pings over streams that it has anyway, and new ones.

Runs in the client's event loop as long as the client is in use, which also learns from each new stream whether the
server is there (`p2p/verified_peers`).
"""

import asyncio
import logging
import math
import random
import time
from weakref import WeakSet

from swarmllm.client.view.connection import Connection
from swarmllm.client.view.look_ups import PINGS_PER_ROUND, LookUps
from swarmllm.config import ClientConfig
from swarmllm.data_structures import ServerInfo
from swarmllm.errors import SwarmError
from swarmllm.swarm.retry import PeerHealth
from swarmllm.swarm.round_trips import RoundTrips

logger = logging.getLogger(__name__)

PING_SAMPLES = 3
"""Pings of which the least counts: everything else that a sample holds is somebody's delay."""
IDLE_S = 120.0
"""Seconds without a route or a step after which nobody is pinged any more."""


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
