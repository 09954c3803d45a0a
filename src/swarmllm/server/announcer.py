"""Keeps the swarm informed: announces this server twice per `update_period`, and when its state or load changes.

Called by `server/server` and `span_life`; the record's form and signature are the matter of `p2p/block_directory`.
"""

import asyncio
import logging
from collections.abc import Callable

from swarmllm.config import RECORD_PERIODS, RENEWAL_PERIODS
from swarmllm.data_structures import ModelRecord, ServerInfo
from swarmllm.errors import SwarmError
from swarmllm.network.p2p.block_directory import BlockDirectory

logger = logging.getLogger(__name__)

LOOKS_PER_RENEWAL = 6
"""Looks at the load between two announcements: one every 5 s with the usual update period."""
LEAST_SHARE = 0.01
"""Share of the speed that is less than the least which is computed, and more than none."""
DELAYS_S = (0.0, 1.0, 3.0)
"""Pauses before each try of the first announcement: on a busy machine, nodes may answer too late once."""
NOTABLE_QUEUE_MS = 50.0
"""Queues that are shorter change few routes. Assumed: round trips through the internet are as long."""


def changed_notably(announced: ServerInfo, now: ServerInfo) -> bool:
    """Whether clients would choose other routes if they knew: the queue, the free cache or the speed that is left for
    them doubled or halved, its addresses changed, or another process was seen with its identity."""
    if announced.addrs != now.addrs or announced.identity_shared != now.identity_shared:
        return True
    for before, after, floor in (
        (announced.queue_ms, now.queue_ms, NOTABLE_QUEUE_MS),
        (announced.cache_tokens_left, now.cache_tokens_left, now.max_batch_tokens),
        (announced.speed_share, now.speed_share, LEAST_SHARE),
    ):
        low, high = sorted((max(before, floor), max(after, floor)))
        if high > 2 * low:
            return True
    return False


class Announcer:
    """`describe` gives what is to be announced at the moment."""

    def __init__(
        self, directory: BlockDirectory, record: ModelRecord, describe: Callable[[], ServerInfo], period_s: float
    ) -> None:
        self._directory = directory
        self._record = record
        self._describe = describe
        self._period_s = period_s
        self._announced: ServerInfo | None = None

    async def announce(self) -> bool:
        """Announce once; False (and a line in the log) when the DHT didn't take it."""
        self._announced = self._describe()
        try:
            ttl_s = RECORD_PERIODS * self._period_s
            return await self._directory.announce(self._record, self._announced, ttl_s=ttl_s)
        except SwarmError as error:
            logger.warning("could not announce this server: %s", error)
            return False

    async def introduce(self) -> bool:
        """Announce what the swarm doesn't know yet, trying a few times; False when the DHT didn't take it."""
        for delay_s in DELAYS_S:
            await asyncio.sleep(delay_s)
            if await self.announce():
                return True
        return False

    async def run(self) -> None:
        """Announce for ever."""
        while True:
            for _ in range(LOOKS_PER_RENEWAL):
                await asyncio.sleep(RENEWAL_PERIODS * self._period_s / LOOKS_PER_RENEWAL)
                if self._announced is not None and changed_notably(self._announced, self._describe()):
                    break
            await self.announce()

    async def withdraw(self) -> None:
        """Take the announcement back."""
        try:
            await self._directory.withdraw(self._record)
        except SwarmError as error:
            logger.warning("could not withdraw the announcement: %s", error)
