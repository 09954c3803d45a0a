"""When this server moves to other blocks: look, claim, look again, then go (`swarm/placement` decides).

Called by `server/server`, which does the moving.
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
"""Until everybody sees a claim. Measured: announcements become visible in 40–180 ms."""


@dataclass(frozen=True)
class Rebalancer:
    """Looks every `period_s`, at a random phase so that servers don't all look at once."""

    peer_id: str
    balance_quality: float
    """How much worse than after the move the swarm's bottleneck must be, 0 to 1; 0 = never move."""
    period_s: float
    generator: random.Random = field(default_factory=random.Random)

    async def wait_for_move(
        self, look: Callable[[], Awaitable[SwarmSnapshot]], claim: Callable[[Span | None], Awaitable[None]]
    ) -> Span:
        """The blocks that this server shall move to, once there are some; may take for ever.

        `look` gives the swarm as it is now, `claim` announces what this server is about to move to (None: nothing).
        """
        while True:
            await asyncio.sleep(self.period_s * self.generator.uniform(0.5, 1.5))
            if not self.balance_quality:
                continue
            target = plan_move(await look(), self.peer_id, balance_quality=self.balance_quality)
            if target is None:
                continue
            logger.info("blocks %s need this server more: claiming them", target)
            await claim(target)
            await asyncio.sleep(CLAIM_SETTLES_S)
            if claim_stands(await look(), self.peer_id, balance_quality=self.balance_quality):
                return target
            logger.info("another server is on its way to them; staying")
            await claim(None)
