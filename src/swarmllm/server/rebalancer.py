"""When this server moves to other blocks: look, claim, look again, then go (`swarm/placement` decides).

Called by `span_life`, which does the moving.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmllm.data_structures import Span, SwarmSnapshot
from swarmllm.swarm.placement import claim_stands, plan_move

logger = logging.getLogger(__name__)

CLAIM_SETTLES_S = 1.0
"""Seconds until everybody sees a claim. Measured: announcements become visible in 40–180 ms."""
MOST_PATIENCE = 64
"""Periods at most between two tries while blocks can't be loaded: with the usual period half an hour."""


@dataclass
class Rebalancer:
    """Looks every `period_s`, at a random phase so that servers don't all look at once."""

    peer_id: str
    balance_quality: float
    """How much worse than after the move the swarm's bottleneck must be, 0 to 1; 0 = never move."""
    period_s: float
    generator: random.Random = field(default_factory=random.Random)
    failed_moves: int = 0
    """Moves that failed in a row, for want of loadable blocks; each doubles the time until the next try."""

    async def wait_for_move(
        self,
        look: Callable[[], Awaitable[SwarmSnapshot]],
        claim: Callable[[Span | None], Awaitable[None]],
        can_load: Callable[[Span], Awaitable[bool]],
    ) -> Span:
        """The blocks that this server shall move to, once there are some; may take for ever.

        `look` gives the swarm as it is now, `claim` announces what this server is about to move to (None: nothing),
        `can_load` says whether it could load them now.
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
