"""Opening and repairing the servers of a chain, and moving to better ones.

Part of `session/chain`, which asks before every step. How a repair works:

1. Hops whose stream broke, or who lost the session, are replaced: a new route for exactly their blocks, new sessions.
2. Every hop is linked to its successor anew, under a new epoch: what is still in flight from before is dropped.
3. The new hops' caches are rebuilt by replaying inputs: the hop before them has kept what it sent; if the first hop is
   new, the client has. The others keep their caches.
4. The steps that were not answered are sent again; a hop that had run one already rolls its cache back to its start.

A move to a better route goes the same way from 2. on, except that the new sessions are opened before the old ones end.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from swarmllm.client.session.hop import Hop, SessionSettings
from swarmllm.client.session.in_flight import InFlight
from swarmllm.client.session.open_route import OpenRoute
from swarmllm.client.session.session_text import SessionText
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import ClientConfig
from swarmllm.data_structures import RouteHop
from swarmllm.swarm.route_costs import RouteCosts

logger = logging.getLogger(__name__)

MIN_TOKENS_LEFT = 64
"""Tokens that a move to a better route may count on. Assumed: the end of an answer of some sentences."""
CHUNK_S = 0.25
"""Longest time of a prompt's chunk on one server, unless it has no more than `prefill_chunk_tokens`. Assumed: over slow
links, which the announced throughput knows of, short chunks fill a pipeline of servers better."""

TOO_SMALL_S = 1e4
"""Servers without room for the session are avoided as if it were for so long: longer than any ban."""


class Repairs:
    """Makes a chain's servers ready for the next step."""

    def __init__(self, view: SwarmView, text: SessionText, hops: OpenRoute, in_flight: InFlight) -> None:
        self._view, self._text, self._hops, self._in_flight = view, text, hops, in_flight
        self.num_repairs = 0
        self.num_moves = 0
        self.on_route: Callable[[list[RouteHop], float], None] | None = None
        """Told, in the event loop, of the route when it has been opened or repaired, and how many seconds that took."""
        self._news = 0
        """The view's news when we last asked it for a better route."""

    async def make_ready(self) -> bool:
        """Repair what is broken, or take a clearly better route, between two steps; whether anything was changed.

        Raises:
            SwarmError: that failed; another try may succeed.
        """
        if not self._in_flight.is_linked or not self._hops.usable:
            await self._repair()
            return True
        return await self._move_if_better()

    async def _repair(self) -> None:
        """Make the chain complete, linked, and its caches filled up to the text's position."""
        began_at = asyncio.get_running_loop().time()
        if self._hops:
            self.num_repairs += 1
            self._view.counts["repairs"] += 1
        await self._hops.look_after_accused(self._view.config.connect_timeout_s)
        self._in_flight.begin_epoch()  # after the look, which may find that a stream has broken
        await self._hops.complete(self._settings, self._in_flight.epoch, self._costs())
        await self._rejoin(began_at)

    async def _move_if_better(self) -> bool:
        news = self._view.look_ups.news
        if news == self._news or not self._text.position:
            return False
        self._news = news
        # Nobody knows how much will be generated; on average, a stream that has run for some time is half over.
        tokens_left = min(self._text.room.max_length - self._text.position, max(MIN_TOKENS_LEFT, self._text.position))
        target = self._view.routes.better(self._hops.route, self._costs(), tokens_left)
        return target is not None and await self._move(target)

    async def _move(self, route: Sequence[RouteHop]) -> bool:
        """Whether the route could be taken; only then the old one is left and the new caches are filled.

        Raises:
            SwarmError: the old route is left, but the new one must be repaired.
        """
        began_at = asyncio.get_running_loop().time()
        if not await self._hops.exchange(route, self._settings, self._in_flight.epoch + 1):
            return False
        self._in_flight.begin_epoch()
        self._in_flight.is_linked = False
        self.num_moves += 1
        self._view.counts["moves"] += 1
        await self._rejoin(began_at)
        return True

    async def _rejoin(self, began_at: float) -> None:
        """Link the hops, and fill the caches of the new ones."""
        await self._hops.link(self._in_flight.epoch)
        if self._text.position:
            for before, run in list(self._hops.new_runs()):
                await self._replay(before, run)
        for hop in self._hops:
            hop.new = False
        self._in_flight.is_linked = True
        if self.on_route is not None:
            self.on_route(self._hops.route, asyncio.get_running_loop().time() - began_at)

    async def _replay(self, before: Hop | None, run: Sequence[Hop]) -> None:
        """Fill the caches of `run` with what once passed the boundary before it."""
        text, in_flight = self._text, self._in_flight
        logger.info("replaying %d tokens to rebuild %s", text.position, ", ".join(str(hop) for hop in run))
        *earlier, (position, inputs) = text.past()
        step = in_flight.add(inputs, position, run[-1], earlier)
        try:
            if before is None:
                for position, inputs in text.replay(chunk_tokens([hop.route_hop for hop in run], self._view.config)):
                    await run[0].send_step(
                        step.request, in_flight.state, position, inputs, replay_hops=len(run), exactly=True
                    )
            else:
                await before.send_replay(step.request, in_flight.state, text.position, len(run))
            await in_flight.answered(step)
        finally:
            in_flight.remove(step)

    @property
    def _settings(self) -> SessionSettings:
        text = self._text
        return SessionSettings(
            self._in_flight.on_answer,
            text.batch_size,
            text.room.max_length,
            text.record_past,
            text.adapter,
            text.source_length,
        )

    def _costs(self) -> RouteCosts:
        text = self._text
        costs = self._view.routes.costs(
            context_tokens=text.position,
            batch_size=text.batch_size,
            cache_tokens=text.batch_size * text.room.max_length,
            inner_states=text.shows,
        )
        return replace(costs, avoided_s=dict.fromkeys(text.room.too_small, TOO_SMALL_S))


def chunk_tokens(route: Sequence[RouteHop], config: ClientConfig) -> int:
    """Tokens of one step of a prompt: more than the setting where a device needs more to be busy with computing."""
    worth_asking_for = max(hop.server.batch_tokens for hop in route)
    in_time = int(CHUNK_S * min(hop.server.throughput for hop in route))
    return max(config.prefill_chunk_tokens, min(worth_asking_for, in_time, config.max_batch_tokens))
