"""How far the servers are that may come next in a route, for the announcement: clients can't measure it from outside.

Run by `server/server`. Each update period some servers that hold the blocks behind this one's last are pinged.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmllm.data_structures import MAX_ROUND_TRIPS, ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import SwarmError
from swarmllm.network.wire.protocol import FrameStream
from swarmllm.swarm.round_trips import RoundTrips

logger = logging.getLogger(__name__)

PINGS_PER_PERIOD = 8
"""Servers that are pinged; each costs a stream and some hundred bytes."""
PING_SAMPLES = 3
PING_TIMEOUT_S = 5.0


@dataclass
class Successors:
    """Keeps `announced` up to date while `run` runs."""

    look: Callable[[], Awaitable[SwarmSnapshot]]
    open_stream: Callable[[ServerInfo], Awaitable[FrameStream]]
    period_s: float
    announced: tuple[tuple[str, float], ...] = ()
    """(peer id, ms), the nearest first."""
    _round_trips: RoundTrips = field(default_factory=RoundTrips)

    async def run(self, peer_id: str, span: Callable[[], Span]) -> None:
        """Measure for ever; `span` says what `peer_id`, this server, holds now."""
        while True:
            await asyncio.sleep(self.period_s)
            try:
                candidates = likely_successors(await self.look(), peer_id, span())
            except SwarmError as error:
                logger.debug("could not look for the servers that come next: %s", error)
                continue
            await self._measure(candidates)

    async def _measure(self, candidates: list[ServerInfo]) -> None:
        unmeasured_first = self._round_trips.oldest_first(candidates, random.Random())
        await asyncio.gather(*map(self._ping, unmeasured_first[:PINGS_PER_PERIOD]))
        known = self._round_trips.known(time.monotonic())
        near = sorted((known[s.peer_id], s.peer_id) for s in candidates if s.peer_id in known)
        self.announced = tuple((peer_id, ms) for ms, peer_id in near[:MAX_ROUND_TRIPS])

    async def _ping(self, server: ServerInfo) -> None:
        """Ping a server; one that can't be reached is nobody's concern here."""
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
    """Who else can take over where this server's blocks end."""
    return [s for s in snapshot.online() if s.peer_id != peer_id and s.start <= span.end < s.end]
