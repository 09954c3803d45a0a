"""Keeps the swarm informed: announces this server twice per `update_period` and whenever its state changes.

Called by `server/server`; the record's form and signature are the matter of `network/block_directory`.
"""

import asyncio
import logging
from collections.abc import Callable

from swarmllm.config import RECORD_PERIODS, RENEWAL_PERIODS
from swarmllm.data_structures import ModelRecord, ServerInfo
from swarmllm.errors import SwarmError
from swarmllm.network.block_directory import BlockDirectory

logger = logging.getLogger(__name__)


class Announcer:
    """`describe` gives what is to be announced at the moment."""

    def __init__(
        self, directory: BlockDirectory, record: ModelRecord, describe: Callable[[], ServerInfo], period_s: float
    ) -> None:
        self._directory = directory
        self._record = record
        self._describe = describe
        self._period_s = period_s

    async def announce(self) -> bool:
        """Announce once; False (and a line in the log) when the DHT didn't take it."""
        try:
            ttl_s = RECORD_PERIODS * self._period_s
            return await self._directory.announce(self._record, self._describe(), ttl_s=ttl_s)
        except SwarmError as error:
            logger.warning("could not announce this server: %s", error)
            return False

    async def run(self) -> None:
        """Announce for ever."""
        while True:
            await asyncio.sleep(RENEWAL_PERIODS * self._period_s)
            await self.announce()

    async def withdraw(self) -> None:
        """Take the announcement back."""
        try:
            await self._directory.withdraw(self._record)
        except SwarmError as error:
            logger.warning("could not withdraw the announcement: %s", error)
