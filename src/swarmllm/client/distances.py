"""Keeps a client's knowledge up to date of how far servers are: pings over streams that it has anyway, and new ones.

Runs in the client's event loop as long as a `SwarmView` is in use, which also learns from each new stream whether the
server is there (`network/verified_peers`).
"""

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from swarmllm.client.connection import Connection
from swarmllm.data_structures import ServerInfo
from swarmllm.errors import SwarmError
from swarmllm.swarm.round_trips import RoundTrips

if TYPE_CHECKING:
    from swarmllm.client.swarm_view import SwarmView

logger = logging.getLogger(__name__)

PINGS_PER_ROUND = 8
PING_SAMPLES = 3
"""Of which the least counts: everything else that a sample holds is somebody's delay."""
IDLE_S = 120.0
"""Without a route or a step for so long, nobody is pinged."""


class Distances:
    """The pings of one view."""

    def __init__(self, view: "SwarmView") -> None:
        self.round_trips = RoundTrips()
        self._view = view
        self._random = random.Random()  # the module's own belongs to the user's program, which may have seeded it

    async def keep_measuring(self) -> None:
        """As long as somebody uses this view: look into the DHT, and ping servers."""
        while True:
            await asyncio.sleep(self._view.config.ping_period_s)
            now = time.monotonic()
            if now - self._view.used_at > IDLE_S:
                continue
            if now - self._view.snapshot.taken_at > self._view.config.update_period_s:
                await self._view.look_again()
            await self.ping_some()

    async def ping_some(self) -> None:
        now = time.monotonic()
        in_use = {c.peer_id: c for c in self._view.connections if c.error is None}
        others = self.round_trips.to_measure(
            self._view.snapshot,
            now,
            count=max(0, PINGS_PER_ROUND - len(in_use)),
            avoid=self._view.health.avoided(now) | in_use.keys(),
            generator=self._random,
        )
        connected = self._random.sample(list(in_use.values()), min(PINGS_PER_ROUND, len(in_use)))
        await asyncio.gather(
            *(self._ping(connection.server, connection) for connection in connected),
            *(self._ping(server) for server in others),
        )
        self._view.news += 1

    async def _ping(self, server: ServerInfo, connection: Connection | None = None) -> None:
        """Measure one server's distance, over a stream that is there already or a new one.

        One that can't be reached is nobody's concern here.
        """
        self.round_trips.begin(server.peer_id, time.monotonic())
        try:
            async with asyncio.timeout(self._view.config.connect_timeout_s):
                if connection is not None:
                    samples = [await connection.ping() for _ in range(PING_SAMPLES)]
                    self._view.verified.renew(server)
                else:
                    samples = await self._ping_over_new_stream(server)
        except (SwarmError, TimeoutError) as error:
            logger.debug("no ping to %s: %s", server.peer_id, error)
            self.round_trips.fail(server.peer_id)
            return
        self.round_trips.observe(server.peer_id, 1e3 * min(samples), time.monotonic())

    async def _ping_over_new_stream(self, server: ServerInfo) -> list[float]:
        timeout_s = self._view.config.connect_timeout_s
        stream, _ = await self._view.verified.open_stream(server, timeout_s=timeout_s)
        try:
            return [await stream.ping() for _ in range(PING_SAMPLES)]
        finally:
            stream.abort()
