"""The servers of a chain, in the order of their blocks, with a session of ours on each: opened, linked, replaced, left.

Used by `client/chain`, which decides when, and whose steps go through them.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import overload

from swarmllm.client.concurrency import gather
from swarmllm.client.connection import Connection
from swarmllm.client.hop import Hop, Terms
from swarmllm.client.swarm_view import SwarmView
from swarmllm.data_structures import RouteHop, Span
from swarmllm.errors import PeerError, SwarmError
from swarmllm.swarm.route_costs import RouteCosts

logger = logging.getLogger(__name__)


class OpenRoute(Sequence[Hop]):
    """Empty at first, and without some blocks between the loss of a server and the next `complete`."""

    def __init__(self, view: SwarmView, span: Span) -> None:
        self._view = view
        self._span = span
        self._hops: list[Hop] = []

    def __len__(self) -> int:
        return len(self._hops)

    @overload
    def __getitem__(self, index: int) -> Hop: ...
    @overload
    def __getitem__(self, index: slice) -> list[Hop]: ...
    def __getitem__(self, index: int | slice) -> Hop | list[Hop]:
        return self._hops[index]

    @property
    def usable(self) -> bool:
        """Whether no server is known to be lost."""
        return all(hop.usable for hop in self._hops)

    def hop_of(self, connection: Connection) -> Hop | None:
        """The one that is reached by it, if it is still part of the route."""
        return next((hop for hop in self._hops if hop.connection is connection), None)

    def lose(self, peer_id: str) -> None:
        """Nothing of that server is to be used any more."""
        for hop in self._hops:
            if hop.peer_id == peer_id:
                hop.lost = True

    def close(self) -> None:
        """Leave all servers: they free our sessions when the streams end."""
        for hop in self._hops:
            hop.connection.close()
        self._hops = []

    async def complete(self, terms: Terms, epoch: int, costs: RouteCosts) -> None:
        """Leave what isn't usable; for each gap look for a new route, and open sessions on its servers.

        Raises:
            SwarmError: that failed somewhere; the sessions that could be opened are kept.
        """
        for hop in self._hops:
            if not hop.usable:
                hop.connection.close()
        self._hops = [hop for hop in self._hops if hop.usable]
        for gap in self._gaps():
            await self._open(gap, terms, epoch, costs)

    def _gaps(self) -> list[Span]:
        gaps: list[Span] = []
        start = self._span.start
        for hop in self._hops:
            if start < hop.span.start:
                gaps.append(Span(start, hop.span.start))
            start = hop.span.end
        if start < self._span.end:
            gaps.append(Span(start, self._span.end))
        return gaps

    async def _open(self, span: Span, terms: Terms, epoch: int, costs: RouteCosts) -> None:
        async def open_hop(route_hop: RouteHop) -> None:
            hop = await Hop.open(self._view, route_hop, terms, epoch=epoch)
            self._hops = sorted([*self._hops, hop], key=lambda hop: hop.span)

        route = await self._view.find_route(span, costs)
        opening = await asyncio.gather(*map(open_hop, route), return_exceptions=True)
        errors = [error for error in opening if isinstance(error, BaseException)]
        for error in errors[1:]:
            if isinstance(error, SwarmError):
                self._view.report(error)
        if errors:
            raise errors[0]

    async def exchange(self, route: Sequence[RouteHop], terms: Terms, epoch: int) -> bool:
        """Open what is new of `route`; only if that works, leave what isn't part of it. Otherwise nothing changes."""
        held = {(hop.peer_id, hop.span): hop for hop in self._hops}
        kept = [held[hop.server.peer_id, hop.span] for hop in route if (hop.server.peer_id, hop.span) in held]
        wanted = [hop for hop in route if (hop.server.peer_id, hop.span) not in held]
        opened: list[Hop] = []

        async def open_hop(route_hop: RouteHop) -> None:
            opened.append(await Hop.open(self._view, route_hop, terms, epoch=epoch))

        try:
            await gather([partial(open_hop, hop) for hop in wanted])
        except BaseException as error:
            for hop in opened:
                hop.connection.close()
            if not isinstance(error, SwarmError):
                raise
            self._view.report(error)
            logger.info("staying on the route, because a better one can't be taken: %s", error)
            return False
        logger.info("moving to a better route: %s", ", ".join(map(str, route)))
        left = [hop for hop in self._hops if hop not in kept]
        self._hops = sorted([*kept, *opened], key=lambda hop: hop.span)
        for hop in left:
            hop.connection.close()
        return True

    async def link(self, epoch: int) -> None:
        """Tell every hop where its outputs go; where that fails the client relays.

        Raises:
            SwarmError: a server doesn't answer.
        """
        successors: list[Hop | None] = [*self._hops[1:], None]
        if not self._view.config.push:
            successors = [None] * len(self._hops)
        pairs = zip(self._hops, successors, strict=True)
        await gather([partial(self._link, hop, successor, epoch) for hop, successor in pairs])

    async def _link(self, hop: Hop, successor: Hop | None, epoch: int) -> None:
        if hop.new and successor is None:
            return  # a new session's outputs go to the client anyway
        try:
            await hop.link(successor, epoch)
        except PeerError as error:
            # Where one server holds both sessions, its name doesn't tell which of them is lost: relayed steps will.
            is_own = error.peer_id == hop.peer_id and (successor is None or successor.peer_id != hop.peer_id)
            if successor is None or hop.connection.error is not None or is_own:
                hop.lost = True
                raise
            logger.info("%s can't reach its successor, so hidden states go through this client: %s", hop, error)

    def new_runs(self) -> Iterator[tuple[Hop | None, list[Hop]]]:
        """(the hop before, the new hops) for each stretch of new hops."""
        before: Hop | None = None
        run: list[Hop] = []
        for hop in self._hops:
            if hop.new:
                run.append(hop)
                continue
            if run:
                yield before, run
            before, run = hop, []
        if run:
            yield before, run
