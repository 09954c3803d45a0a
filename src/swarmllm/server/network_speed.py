"""How fast this server's network is: now and then a probe to some other server, for the announcement.

Run by `server/server`. A measurement is one message of 256 KiB that the other side drops, and how much later than
without it a PING behind it is answered. On a path of many megabits that says little more than "fast enough"; what
counts is to notice the slow ones, where hidden states take longer on their way than in the blocks.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.errors import SwarmError
from swarmllm.network.frames import OPTIONAL
from swarmllm.network.protocol import FrameStream, MessageType

logger = logging.getLogger(__name__)

PROBE_BYTES = 256 << 10
PROBE_TIMEOUT_S = 20.0
"""Slower than 0.1 Mbit/s counts as a failure."""
PERIODS_BETWEEN = 10
"""Update periods from one probe to the next: some kilobytes per second and server at most."""
SHORTEST_S = 1e-4
"""Differences below are noise: faster than 20 Gbit/s is never claimed."""
SMOOTHING = 0.5
"""Share of the newest measurement."""


@dataclass
class NetworkSpeed:
    """Keeps `mbps` up to date while `run` runs."""

    peer_id: str
    look: Callable[[], Awaitable[SwarmSnapshot]]
    open_stream: Callable[[ServerInfo], Awaitable[FrameStream]]
    period_s: float
    mbps: float = 0.0
    """Megabits per second; 0 = not measured yet."""

    async def run(self) -> None:
        """Measure once per some update periods, for ever; failures wait for the next time."""
        while True:
            await asyncio.sleep(self.period_s)
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await self._probe()
            except (SwarmError, TimeoutError) as error:
                logger.debug("could not measure the network: %s", error)
            if self.mbps:
                await asyncio.sleep((PERIODS_BETWEEN - 1) * self.period_s)

    def tokens_per_s(self, hidden_bytes: int) -> float:
        """Hidden states of so many bytes that go through per second; infinite if nothing was measured."""
        return self.mbps * 1e6 / 8 / hidden_bytes if self.mbps else float("inf")

    async def _probe(self) -> None:
        snapshot = await self.look()
        others = [server for server in snapshot.online() if server.peer_id != self.peer_id]
        if not others:
            return
        stream = await self.open_stream(random.choice(others))
        try:
            newest = await measure_mbps(stream)
        finally:
            stream.abort()
        self.mbps = newest if not self.mbps else self.mbps + SMOOTHING * (newest - self.mbps)
        logger.info("the network to other servers carries about %.0f Mbit/s", self.mbps)


async def measure_mbps(stream: FrameStream) -> float:
    """Megabits per second to the other end of `stream`.

    Raises:
        PeerError, SessionClosedError: the stream has ended.
    """
    round_trip_s = min([await stream.ping() for _ in range(3)])
    started = time.perf_counter()
    await stream.send(MessageType.PROBE, {}, [bytes(PROBE_BYTES)], flags=OPTIONAL)
    await stream.ping()  # comes back when the probe has arrived
    elapsed_s = time.perf_counter() - started - round_trip_s
    return PROBE_BYTES * 8 / 1e6 / max(elapsed_s, SHORTEST_S)
