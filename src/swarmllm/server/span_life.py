"""The life of a server's blocks, from the first that it loads until it leaves: load, serve, move to others.

Run by `server`, whose tasks go on at the same time. `Rebalancer` waits until other blocks need this server more: look,
claim, look again, then move (`swarm/placement` decides).

    JOINING   the span is chosen and announced, the blocks are loading
    ONLINE    streams are served. With --idle_unload, unused blocks leave the memory, and come back with the next
              request; this is announced (`wake_s`), and clients still count on them
    LEAVING   announced; no new sessions, the others are handed over, running steps end; then the server leaves, or
              becomes JOINING with other blocks
"""

import asyncio
import gc
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from swarmllm.command_line import unless_stopped
from swarmllm.data_structures import ServerState, Span, SwarmSnapshot
from swarmllm.errors import PeerUnreachableError, SwarmError
from swarmllm.machine_memory import return_free_memory
from swarmllm.server.announcer import Announcer, OwnRecord
from swarmllm.server.downloads import in_background
from swarmllm.server.peers.other_servers import OtherServers
from swarmllm.server.span_loader import LOADING_FAILURES, describe_changed
from swarmllm.swarm.placement import claim_stands, plan_move

logger = logging.getLogger(__name__)

CLAIM_SETTLES_S = 1.0
"""Seconds until all servers see a claim. Measured: announcements become visible in 40–180 ms."""
MOST_PATIENCE = 64
"""Most periods between two tries while blocks can't be loaded: half an hour with the usual period."""

FAREWELL_S = 1.0
"""Seconds for an announcement when leaving; there are two. If all servers leave at once, none answers, and each call
would time out."""
LOOK_S = 1.0
"""Seconds between looks for the end of the last session, when no requests come any more."""
DRAIN_S = 2.5
"""Seconds for sessions to be handed over, and again for running steps to end, when the server is told to stop: it must
be gone within 10 s."""
HAND_OVER_S = 15.0
"""The same when it moves to other blocks. Assumed: longer than any step, and as long as clients wait."""


@dataclass
class Rebalancer:
    """Waits until other blocks need this server more: looks every `period_s`, at a random phase so that servers don't
    all look at once."""

    peer_id: str
    balance_quality: float
    """Ratio of the swarm's bottleneck now to the one after the move below which this server moves, 0 to 1; 0 = never
    move."""
    period_s: float
    generator: random.Random = field(default_factory=random.Random)
    failed_moves: int = 0
    """Number of moves in a row that failed because blocks couldn't be loaded; each doubles the time until the next
    try."""

    async def wait_for_move(
        self,
        look: Callable[[], Awaitable[SwarmSnapshot]],
        claim: Callable[[Span | None], Awaitable[None]],
        can_load: Callable[[Span], Awaitable[bool]],
    ) -> Span:
        """Wait until other blocks need this server more, perhaps for ever, and return them.

        `look` returns the swarm as it is now, `claim` announces the blocks that this server is about to move to (None:
        none), `can_load` tells if it could load them now.
        """
        while True:
            patience = min(2**self.failed_moves, MOST_PATIENCE)
            await asyncio.sleep(patience * self.period_s * self.generator.uniform(0.5, 1.5))
            if not self.balance_quality:
                continue
            target = plan_move(await look(), self.peer_id, balance_quality=self.balance_quality)
            if target is None:
                continue
            logger.info("blocks %s need this server more: claiming them", target)
            await claim(target)
            await asyncio.sleep(CLAIM_SETTLES_S)
            if not claim_stands(await look(), self.peer_id, balance_quality=self.balance_quality):
                logger.info("another server is on its way to them; staying")
            elif await can_load(target):
                return target
            else:
                self.failed_moves += 1
            await claim(None)


class SpanLife:
    """Goes through the states of the module's table; `on_online` is called each time that blocks are announced."""

    def __init__(
        self,
        record: OwnRecord,
        announcer: Announcer,
        others: OtherServers,
        on_online: Callable[[], None],
    ) -> None:
        config = record.config
        self._config = config
        self._record, self._access, self._loader = record, record.access, record.loader
        self._announcer, self._others, self._on_online = announcer, others, on_online
        self._idle_s = config.idle_unload or 0.0
        self._load_s = 0.0
        """Seconds that the last load took."""
        self._rebalancer = Rebalancer(
            record.peer.peer_id,
            # A server that was told which blocks to serve doesn't move.
            balance_quality=config.balance_quality if config.block_indices is None else 0.0,
            period_s=config.update_period,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Load and serve blocks until told to stop."""
        loaded = await self._load(stop)
        if loaded:
            # Imports count: the user has waited for them.
            logger.info("ready %.1f s after the start", time.time() - psutil.Process().create_time())
        while loaded:
            target = await self._serve(stop)
            gc.collect()  # tasks that have ended lie in circles with their errors, and with the blocks that they used
            if target is None:
                return
            loaded = await (self._sleep(stop) if target == self._record.span else self._move(target, stop))

    async def _load(self, stop: asyncio.Event) -> bool:
        """Load and measure the blocks of the record; False if told to stop meanwhile."""
        record, access = self._record, self._access
        if access.sleep is None:
            record.state, access.loading = ServerState.JOINING, record.span
            await self._announcer.announce()
        began_at = time.monotonic()
        access.serving = await unless_stopped(stop, self._loader.load(record.span))
        self._load_s = time.monotonic() - began_at
        if access.serving is None:
            logger.info("leaving, though blocks %s are still loading", record.span)
        return access.serving is not None

    async def _sleep(self, stop: asyncio.Event) -> bool:
        """Wait until a client asks for the blocks, and load them again, or others; False if told to stop meanwhile."""
        sleep = self._access.sleep
        assert sleep is not None
        return_free_memory()
        await self._announcer.announce()
        logger.info("no client has used blocks %s for %g s: they leave the memory", self._record.span, self._idle_s)
        target = await unless_stopped(stop, self._moved_or(sleep.wanted.wait()))
        if target is None:
            self._access.end_sleep()
            return False
        if target != self._record.span:
            self._access.end_sleep()
            return await self._move(target, stop)
        logger.info("a client asks for blocks %s: loading them again", target)
        return await self._load(stop)

    async def _move(self, target: Span, stop: asyncio.Event) -> bool:
        """Load other blocks; if that fails, the previous ones. False if told to stop meanwhile."""
        record = self._record
        before = record.span
        record.span, record.claim = target, None
        try:
            loaded = await self._load(stop)
        except LOADING_FAILURES as error:
            logger.warning(
                "going back to blocks %s, as loading blocks %s failed: %s", before, target, str(error) or repr(error)
            )
        else:
            self._rebalancer.failed_moves = 0
            return loaded
        self._rebalancer.failed_moves += 1
        record.span = before
        return await self._load(stop)

    async def _serve(self, stop: asyncio.Event) -> Span | None:
        """Serve the loaded blocks until told to stop (None), unused (the same blocks), or needed more elsewhere."""
        record, access = self._record, self._access
        record.state = ServerState.ONLINE
        if access.sleep is None:
            await self._introduce()
        else:
            access.end_sleep()
            await self._announcer.announce()
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(self._watch_adapters(), name="watch adapters"),
                tasks.create_task(self._watch_weights(), name="watch weights"),
                tasks.create_task(self._watch_followers(), name="watch followers"),
            ]
            target = await unless_stopped(stop, self._moved_or(self._idle()))
            for task in watching:
                task.cancel()
        if target == record.span:
            access.fall_asleep(record.describe_asleep(self._load_s))
            await access.retire(DRAIN_S)
            return target
        logger.info("leaving" if target is None else f"moving from blocks {record.span} to {target}")
        record.state = ServerState.LEAVING
        await at_most(FAREWELL_S, self._announcer.announce())
        access.loading = None
        await access.retire(DRAIN_S if target is None else HAND_OVER_S)
        return target

    async def _introduce(self) -> None:
        if not await self._announcer.introduce():
            raise PeerUnreachableError(
                "the swarm's DHT doesn't take this server's announcement", self._record.peer.peer_id
            )
        self._on_online()

    async def _moved_or(self, event: Coroutine[object, object, object]) -> Span:
        """Wait for a move or for `event`: return the blocks to move to, or the present ones if `event` comes first."""
        moving = asyncio.create_task(
            self._rebalancer.wait_for_move(self._look, self._stake_claim, self._loader.can_load), name="wait for a move"
        )
        coming = asyncio.create_task(event, name="wait for an event")
        try:
            await asyncio.wait({moving, coming}, return_when=asyncio.FIRST_COMPLETED)
            return moving.result() if moving.done() else self._record.span
        finally:
            for task in (moving, coming):
                task.cancel()
            await asyncio.gather(moving, coming, return_exceptions=True)
            if not moving.done() or moving.cancelled():
                self._record.claim = None

    async def _idle(self) -> None:
        """Return when no client has used the blocks for as long as the owner says."""
        if self._config.idle_unload is None:
            await asyncio.Event().wait()
        while (serving := self._access.serving) is not None:
            left_s = self._access.used_at + self._idle_s - time.monotonic()
            if left_s <= 0 and not len(serving.sessions) and not serving.device_thread.num_calls:
                return
            await asyncio.sleep(max(left_s, LOOK_S))

    async def _look(self) -> SwarmSnapshot:
        return await self._others.look(self._record.describe())

    async def _stake_claim(self, target: Span | None) -> None:
        self._record.claim = target
        await self._announcer.announce()

    async def _watch_adapters(self) -> None:
        adapters = self._loader.adapters
        while adapters.watches and (serving := self._access.serving) is not None:
            await asyncio.sleep(self._config.update_period)
            try:
                if await adapters.refresh(serving.blocks):
                    await self._announcer.announce()
            except OSError as error:  # a file that has just gone, or can't be read for the moment
                logger.warning("could not look for adapters: %s", error)

    async def _watch_weights(self) -> None:
        """Log when the files of this model change; the loaded blocks stay as they are."""
        told: list[str] = []
        while True:
            await asyncio.sleep(self._config.update_period)
            try:
                changed = await in_background(self._loader.changed_files)
            except (SwarmError, OSError) as error:  # a download that isn't complete
                logger.warning("could not look at the files of the weights: %s", error)
                continue
            if changed and changed != told:
                logger.warning(
                    "%s; until then it goes on with the blocks that it has, and moves to no others",
                    describe_changed(self._config.model, changed),
                )
            told = changed

    async def _watch_followers(self) -> None:
        """Raise GroupLostError when a process that shares the blocks has ended, also if no client asks for anything."""
        while (serving := self._access.serving) is not None and (group := serving.blocks.group) is not None:
            group.check()
            await asyncio.sleep(LOOK_S)


async def at_most(timeout_s: float, telling: Coroutine[object, object, object]) -> None:
    """Await it for at most `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await telling
