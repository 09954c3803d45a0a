"""Routes of a client: which servers its sessions and sessionless requests use, and which they avoid.

Part of `SwarmView`; runs in the client's event loop. The decisions themselves are pure (`swarm/routing`,
`swarm/retry`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from swarmllm.client.view.event_loop import EventLoop
from swarmllm.client.view.servers import ActiveAdapter, AgreedWeights, Distances, LookUps
from swarmllm.config import ClientConfig
from swarmllm.data_structures import RouteHop, ServerState, Span, SwarmSnapshot
from swarmllm.errors import ConfigurationError, MissingBlocksError, PeerError, SwarmError
from swarmllm.network.p2p.block_directory import DEFAULT_TTL_S
from swarmllm.network.p2p.verified_peers import VerifiedPeers
from swarmllm.swarm.claims import plausible
from swarmllm.swarm.retry import PeerHealth
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import find_parallel_routes, find_route, is_worth_moving

logger = logging.getLogger(__name__)

LOOK_UP_TIMEOUT_S = 0.5
"""A look takes 3 s if the DHT asks a frozen node; then the route uses what was known before."""
RETRY_LOOKUP_S = 0.5
"""Seconds between looks for missing blocks: announcements become visible within 40–180 ms (measured)."""
FIRST_PINGS_TIMEOUT_S = 0.5
"""Seconds that the first route waits for the first pings, if there is a choice. Assumed: near servers answer within it,
and far ones are worse."""

VOTERS_TIMEOUT_S = 1.0
"""Seconds that the first route waits for greetings of servers, if their weights differ. Assumed, as above."""


class Routes:
    """The routes of one client."""

    def __init__(
        self,
        config: ClientConfig,
        loop: EventLoop,
        look_ups: LookUps,
        health: PeerHealth,
        active_adapter: ActiveAdapter,
        distances: Distances,
    ) -> None:
        self._config = config
        self._loop = loop
        self._look_ups = look_ups
        self._health = health
        self._active_adapter = active_adapter
        self._distances = distances
        self._weights = AgreedWeights(look_ups.verified)
        self._first_pings: asyncio.Task[None] | None = None

    async def find(self, span: Span, costs: RouteCosts | None = None) -> list[RouteHop]:
        """The best route for `span`; waits up to `route_timeout_s` for missing blocks.

        Raises:
            MissingBlocksError: no server has some blocks.
            WeightsMismatchError: the model's servers hold another checkpoint.
        """
        route = await self.find_soon(span, costs)
        if self._first_pings is not None and not self._first_pings.done() and self._has_choice(span):
            await asyncio.wait((self._first_pings,), timeout=FIRST_PINGS_TIMEOUT_S)
            return await self.find_soon(span, self._updated(costs))
        return route

    async def find_soon(self, span: Span, costs: RouteCosts | None = None, *, patient: bool = False) -> list[RouteHop]:
        """`find`, without waiting for pings. `patient`: also wait for blocks that servers are loading."""
        self._distances.used_at = began = time.monotonic()
        costs = costs or self.costs()
        await self._know_enough()
        await self._meet_voters()
        deadline = time.monotonic() + self._config.route_timeout_s
        loaded_by = max(deadline, time.monotonic() + self._config.start_timeout_s)
        told: str | None = None
        while True:
            now = time.monotonic()
            try:
                return self._search(span, self._avoided(now), costs)
            except MissingBlocksError as error:
                if now > deadline:
                    left_out = self._left_out(error)
                    self.give_up()
                    adapter, waited_s = self._active_adapter.wanted, now - began
                    raise await self._look_ups.explained(error, adapter, left_out, waited_s) from None
                if not self._snapshot.servers:
                    await self._look_ups.check_fingerprint()
            await self._look_for_others(span)
            try:  # better a server that failed before than none
                avoided_s = self._health.avoided_s(time.monotonic())
                return self._search(span, self._excluded, replace(costs, avoided_s={**avoided_s, **costs.avoided_s}))
            except MissingBlocksError as error:
                if costs.inner_states:
                    self._check_old(span, costs, error)
                loading = self._loading(error) if patient else ""
                if loading:
                    deadline = min(loaded_by, time.monotonic() + self._config.route_timeout_s)
                if told is None or (loading and not told):  # one warning is enough
                    if not self._snapshot.servers:  # of this model: name the others
                        error = await self._look_ups.explained(error, None, "")
                    until = loaded_by if loading else deadline
                    logger.warning("%s%s; looking again for %.0f s", error, loading, max(0.0, until - time.monotonic()))
                    told = loading

    def alternative(
        self, span: Span, without: Collection[str], *, even_avoided: bool = False, costs: RouteCosts | None = None
    ) -> list[RouteHop] | None:
        """A route for `span` without these peers and those to avoid, among known servers; None if there is none.

        `even_avoided`: leave out only servers that were caught lying, whatever their weights are.
        """
        lacking = self._health.quarantined | self._active_adapter.lacked_by(self._snapshot)
        avoid = (lacking if even_avoided else self._avoided(time.monotonic())) | frozenset(without)
        try:
            return self._best(span, avoid, costs or self.costs())
        except MissingBlocksError:
            return None

    def without_blamed(self, route: list[RouteHop], costs: RouteCosts) -> list[RouteHop]:
        """The route, or another one for its blocks if one of its servers has failed meanwhile and others have them."""
        if self._health.blamed(time.monotonic()).isdisjoint(hop.server.peer_id for hop in route):
            return route
        span = Span(route[0].span.start, route[-1].span.end)
        return self.alternative(span, (), costs=costs) or route

    async def parallel(
        self, span: Span, num_tokens: int, max_routes: int, costs: RouteCosts | None = None
    ) -> list[tuple[list[RouteHop], float]]:
        """(route, share of the rows) for a batch of `num_tokens`, on at most `max_routes` routes.

        Raises:
            MissingBlocksError: no server has some blocks.
        """
        costs = replace(costs or self.costs(), forward_tokens=num_tokens)
        route = await self.find(span, costs)
        avoid = self._avoided(time.monotonic()) | self._useless(costs) | self._too_small(costs)
        if max_routes == 1 or any(hop.server.peer_id in avoid for hop in route):
            return [(route, 1.0)]
        servers = confirmed = self._verified.confirmed(self._snapshot.servers)
        if not {hop.server.peer_id for hop in route} <= {server.peer_id for server in confirmed}:
            servers = self._snapshot.servers
        snapshot = replace(self._snapshot, servers=plausible(servers))
        return find_parallel_routes(snapshot, span, avoid=avoid, costs=costs, max_routes=max_routes)

    def better(self, route: Sequence[RouteHop], costs: RouteCosts, tokens_left: int) -> list[RouteHop] | None:
        """A route to which a session on `route` should move; None if no move is worth its cost."""
        self._distances.used_at = time.monotonic()
        gain = self._config.min_gain_to_move
        if gain >= 1:
            return None
        latest = {server.peer_id: server for server in self._snapshot.online()}
        current = [replace(hop, server=latest.get(hop.server.peer_id, hop.server)) for hop in route]
        try:
            target = self._best(Span(route[0].span.start, route[-1].span.end), self._avoided(time.monotonic()), costs)
        except MissingBlocksError:
            return None
        return target if is_worth_moving(current, target, costs, tokens_left=tokens_left, min_gain=gain) else None

    def costs(
        self,
        *,
        context_tokens: int = 0,
        num_steps: int = 0,
        batch_size: int = 1,
        cache_tokens: int = 0,
        row_tokens: int = 0,
        inner_states: bool = False,
    ) -> RouteCosts:
        """The costs of hops, as far as this client knows now."""
        return RouteCosts(
            round_trips_ms=self._round_trips_ms(),
            context_tokens=context_tokens,
            num_steps=num_steps,
            batch_size=batch_size,
            cache_tokens=cache_tokens,
            row_tokens=row_tokens,
            inner_states=inner_states,
            relayed=not self._config.push,
        )

    def what_is_wrong(self, error: SwarmError, span: Span) -> SwarmError:
        """The error, or a MissingBlocksError if the failed server was the only one of some blocks."""
        if not isinstance(error, PeerError) or not error.blames_peer:
            return error
        try:
            find_route(self._snapshot, span, avoid=self._avoided(time.monotonic()))
        except MissingBlocksError as missing:
            name, adapter = self._look_ups.name, self._active_adapter.wanted
            what = name if adapter is None else f"{name} with the adapter {adapter}"
            text = f"{missing} of {what} any more: {error}{self._left_out(missing)}"
            return MissingBlocksError(text, missing.block_idxs)
        return error

    def _check_old(self, span: Span, costs: RouteCosts, missing: MissingBlocksError) -> None:
        """Raise ConfigurationError if the servers of these blocks are too old to answer inner states."""
        try:
            self._best(span, self._excluded, replace(costs, inner_states=False))
        except MissingBlocksError:
            return
        raise ConfigurationError(
            f"output_hidden_states and output_attentions need servers that answer the outputs of their blocks, and "
            f"those found run an older version of swarmllm ({missing}): leave them out, or have the servers updated"
        ) from None

    def give_up(self) -> None:
        """No server is left for some blocks: new sessions may use servers with other weights."""
        self._weights.forget()

    def _loading(self, error: MissingBlocksError) -> str:
        """Half a sentence if servers announce that they are loading all missing blocks; else empty."""
        servers = [server for server in self._snapshot.servers if server.state == ServerState.JOINING]
        if not servers or not all(any(block in server.span for server in servers) for block in error.block_idxs):
            return ""
        first = servers[0]
        who = f"{first.public_name or first.peer_id} is" if len(servers) == 1 else f"{len(servers)} servers are"
        return f", but {who} loading them"

    def _left_out(self, error: MissingBlocksError) -> str:
        """Half a sentence if servers of missing blocks aren't used because of other weights; else empty."""
        differing = self._differing(self._health.quarantined)
        servers = [server for server in self._snapshot.online() if server.peer_id in differing]
        if not any(block in server.span for server in servers for block in error.block_idxs):
            return ""
        return (
            f"; {len(servers)} with other weights than those in use were left out: give all servers the same files "
            "(swarmllm status names those that differ), or try again to use others"
        )

    # ------------------------------------------------------------------ what this client knows

    @property
    def _snapshot(self) -> SwarmSnapshot:
        return self._look_ups.snapshot

    @property
    def _verified(self) -> VerifiedPeers:
        return self._look_ups.verified

    async def _know_enough(self) -> None:
        look_ups = self._look_ups
        age_s = time.monotonic() - look_ups.snapshot.taken_at
        if not look_ups.snapshot.servers:
            await look_ups.refresh()
        elif age_s > self._config.update_period_s or look_ups.is_outdated:
            looking = self._loop.spawn(look_ups.look_again(), name="look into the DHT")
            if not look_ups.is_outdated or age_s > DEFAULT_TTL_S:  # a repair doesn't wait, but uses known servers
                await asyncio.wait((looking,), timeout=LOOK_UP_TIMEOUT_S)
            look_ups.is_outdated = False
        if self._first_pings is None and look_ups.snapshot.servers:
            self._first_pings = self._loop.spawn(self._distances.ping_some(), name="first pings")

    async def _meet_voters(self) -> None:
        """Greet the servers, if their weights differ, so that they can vote on the weights to use."""
        if self._weights.is_open(self._snapshot):
            await self._verified.verify(self._snapshot.online(), timeout_s=VOTERS_TIMEOUT_S)

    async def _look_for_others(self, span: Span) -> None:
        """Look into the DHT, and greet all servers of `span` again; returns soon if there is a route then."""
        self.ask_again(span)
        enough = time.monotonic() + RETRY_LOOKUP_S
        looking = self._loop.spawn(self._look_ups.refresh(), name="look into the DHT")
        await asyncio.wait((looking,), timeout=LOOK_UP_TIMEOUT_S)
        if looking.done():
            looking.result()
        if self.alternative(span, ()) is None:
            await asyncio.sleep(enough - time.monotonic())

    def ask_again(self, span: Span) -> None:
        """Greet all announced servers of these blocks at once; the first to answer come first.

        One after the other, all dead servers that are still announced could come before the live one.
        """
        announced = [
            server for server in self._snapshot.online() if server.start < span.end and span.start < server.end
        ]
        self._verified.verify_soon(announced, again=True)

    # ------------------------------------------------------------------ the choice

    def _search(self, span: Span, avoid: Collection[str], costs: RouteCosts) -> list[RouteHop]:
        route = self._best(span, avoid, costs)
        self._active_adapter.keep(self._snapshot)
        self._weights.keep(route)
        return route

    def _best(self, span: Span, avoid: Collection[str], costs: RouteCosts) -> list[RouteHop]:
        """The best route of servers that accept so many tokens at once, or else of all.

        Raises:
            MissingBlocksError: there is none.
        """
        if too_small := self._too_small(costs):
            with suppress(MissingBlocksError):
                return self._best_met(span, too_small.union(avoid), costs)
        return self._best_met(span, avoid, costs)

    def _best_met(self, span: Span, avoid: Collection[str], costs: RouteCosts) -> list[RouteHop]:
        """The best route of servers that have been met, if there is one; servers of a better one are greeted meanwhile.

        Else the best route of servers without known faults, and else of all.

        Raises:
            MissingBlocksError: there is none.
        """
        snapshot, online, verified = self._snapshot, self._snapshot.online(), self._verified
        avoid = self._useless(costs).union(avoid)
        try:
            refuted = {server.peer_id for server in online if verified.is_refuted(server)}
            best = find_route(snapshot, span, avoid=refuted.union(avoid), costs=costs)
            confirmed = {server.peer_id for server in verified.confirmed(online)}
            strangers = [hop.server for hop in best if hop.server.peer_id not in confirmed]
            if not strangers:
                return best
        except MissingBlocksError:
            return find_route(snapshot, span, avoid=avoid, costs=costs)
        verified.verify_soon(strangers)
        try:
            unmet = {server.peer_id for server in online} - confirmed
            return find_route(snapshot, span, avoid=unmet.union(avoid), costs=costs)
        except MissingBlocksError:
            return best

    def _useless(self, costs: RouteCosts) -> frozenset[str]:
        """Peers that can't answer inner states, if they are wanted."""
        servers = self._snapshot.online() if costs.inner_states else ()
        return frozenset(server.peer_id for server in servers if not server.inner_states)

    def _too_small(self, costs: RouteCosts) -> frozenset[str]:
        """Peers that don't accept so many tokens at once."""
        servers = self._snapshot.online() if costs.row_tokens else ()
        return frozenset(server.peer_id for server in servers if server.max_batch_tokens < costs.row_tokens)

    def _avoided(self, now: float) -> frozenset[str]:
        """Peers that routes avoid now."""
        avoided = self._health.avoided(now)
        return avoided | self._active_adapter.lacked_by(self._snapshot) | self._differing(avoided)

    @property
    def _excluded(self) -> frozenset[str]:
        """Peers that no route uses, even if there is no other one."""
        quarantined = self._health.quarantined
        return quarantined | self._active_adapter.lacked_by(self._snapshot) | self._differing(quarantined)

    def _differing(self, avoided: Collection[str]) -> frozenset[str]:
        """Peers with other weights than those in use."""
        return self._weights.differing(self._snapshot, avoided)

    def _updated(self, costs: RouteCosts | None) -> RouteCosts | None:
        return None if costs is None else replace(costs, round_trips_ms=self._round_trips_ms())

    def _round_trips_ms(self) -> dict[str, float]:
        return self._distances.round_trips.known(time.monotonic())

    def _has_choice(self, span: Span) -> bool:
        held = Counter(block for server in self._snapshot.online() for block in server.span if block in span)
        return any(count > 1 for count in held.values())
