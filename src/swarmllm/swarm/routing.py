"""The search for a route, the servers that run the blocks in the least expected time; and for several parallel routes.

Used by the client's swarm view, `status` and the gateway's picture. It knows no network: `swarm/route_costs` computes
the cost of a hop from servers' announcements and the client's measurements. The search adds up the same costs for all
servers at once, in arrays.

The search goes block by block. For each server it keeps the cheapest way to finish everything up to here with that
server as the last. At each boundary a way stays with its server or changes to any other server of the next block. Few
servers need to be considered for a change *from* them: a server that is certainly more expensive than another one, with
any continuation, is left out. A beam of the best others is kept.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from swarmllm.data_structures import RouteHop, ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import MissingBlocksError
from swarmllm.swarm.route_costs import HOP_COST_MS, RouteCosts, route_tokens_per_s, seconds_per_token
from swarmllm.swarm.stacks import describe_blocks

BEAM_WIDTH = 32
"""Servers per boundary that a way may change from. Measured in benchmarks/routes.py: the best route was never missed
with 1000 servers, and half as many save little time."""
SHARE_WORTH_IT = 0.05
"""Least share of the fastest route's throughput. A slower route isn't worth its streams. Assumed."""
SEARCHES_PER_ROUTE = 2
"""Searches for parallel routes, per wanted route."""
CROWDED = 4.0
"""For each full load that a server has, it looks this many times slower to the next search. Measured with 154 random
swarms of 12 servers and 4 routes: 0.95 (median) of what any number of routes could carry; 0.96 with 2, 0.94 with 10,
and the worst case is best with 4. Routes without a common server would carry 0.50, one route 0.38."""
ENOUGH_SEARCHES = 4
"""Give up after this many searches without a new route. By then the first route looks `CROWDED**3` times as slow."""

MOVE_ROUND_TRIPS = 6
"""Round trips of a session's move: dialling, greeting, opening, linking, replaying."""

MAX_REPLAY_S = 60.0
"""Longest expected time of computing a text again step by step. Assumed: people rather read other words than wait
longer."""

Floats = NDArray[np.float64]
STAYS, BEGINS = -2, -1
"""Marks in place of the server that a way comes from."""


def find_route(
    snapshot: SwarmSnapshot,
    span: Span | None = None,
    *,
    avoid: Collection[str] = (),
    costs: RouteCosts | None = None,
    beam_width: int = BEAM_WIDTH,
) -> list[RouteHop]:
    """The route of least expected time through `span` (default: all blocks), without the peers in `avoid`.

    A hop may enter and leave a server's span wherever its traits allow.

    Raises:
        MissingBlocksError: some blocks have no server, or no chain of allowed cuts joins them.
    """
    span = span or Span(0, snapshot.num_blocks)
    servers = [s for s in snapshot.online() if s.peer_id not in avoid and s.start < span.end and s.end > span.start]
    route = _Search(servers, span, costs or RouteCosts()).find_cheapest(beam_width) if servers else None
    if route is None:
        raise _missing(servers, span, snapshot.encoder_blocks)
    return route


def route_cost_ms(route: Iterable[RouteHop], costs: RouteCosts | None = None) -> float:
    """Expected milliseconds of one decode step along `route`."""
    return sum(hop.total_ms for hop in (costs or RouteCosts()).of_hops(list(route)))


def find_parallel_routes(
    snapshot: SwarmSnapshot, span: Span, *, avoid: Collection[str] = (), costs: RouteCosts, max_routes: int
) -> list[tuple[list[RouteHop], float]]:
    """Parallel routes for the most tokens per second, and the share of the work for each. They may share servers.

    A fast server is in several routes, whose other servers it keeps busy together (SWARM parallelism, section 3). The
    routes are the cheapest ones while servers fill up one after another. A maximum flow decides how much each takes.

    Raises:
        MissingBlocksError: there is none.
    """
    routes = _searched(snapshot, span, avoid, costs, max_routes * SEARCHES_PER_ROUTE)
    alone = max(routes, key=route_tokens_per_s)
    flows = maximum_flow(routes) if len(routes) > 1 else [1.0]
    routes = [route for route, flow in zip(routes, flows, strict=True) if flow > 0]
    while len(routes) > 1:
        flows = maximum_flow(routes)
        if len(routes) <= max_routes and min(flows) >= SHARE_WORTH_IT * max(flows):
            break
        routes.pop(flows.index(min(flows)))
    if len(routes) == 1 or sum(flows) <= route_tokens_per_s(alone):
        return [(alone, 1.0)]
    return [(route, flow / sum(flows)) for route, flow in zip(routes, flows, strict=True)]


def _searched(
    snapshot: SwarmSnapshot, span: Span, avoid: Collection[str], costs: RouteCosts, num_searches: int
) -> list[list[RouteHop]]:
    """The cheapest routes, found one after another, each with the capacity that earlier ones leave."""
    by_id = {server.peer_id: server for server in snapshot.servers}
    found: dict[tuple[object, ...], list[RouteHop]] = {}
    loads: dict[str, float] = {}
    for search in range(num_searches):
        crowded = replace(snapshot, servers=tuple(_crowded(one, loads) for one in snapshot.servers))
        hops = find_route(crowded, span, avoid=avoid, costs=costs)
        route = [RouteHop(by_id[hop.server.peer_id], hop.span) for hop in hops]
        speed = route_tokens_per_s(route)
        if found and not speed:
            break  # a server announced no throughput
        found.setdefault(tuple((hop.server.peer_id, hop.span) for hop in route), route)
        if not speed or (len(found) == 1 and search + 1 == ENOUGH_SEARCHES):
            break
        for hop in route:
            loads[hop.server.peer_id] = loads.get(hop.server.peer_id, 0.0) + speed * seconds_per_token(hop)
    return list(found.values())


def _crowded(server: ServerInfo, loads: Mapping[str, float]) -> ServerInfo:
    """The server as it looks when it already has this load, in shares of its capacity."""
    load = loads.get(server.peer_id, 0.0)
    return server.model_copy(update={"throughput": server.throughput / CROWDED**load}) if load else server


def maximum_flow(routes: Sequence[Sequence[RouteHop]]) -> list[float]:
    """Tokens per second for each route, with the largest sum that the servers can do."""
    places = {peer_id: place for place, peer_id in enumerate({hop.server.peer_id for route in routes for hop in route})}
    usage = np.zeros((len(places), len(routes)))
    for idx, route in enumerate(routes):
        for hop in route:
            usage[places[hop.server.peer_id], idx] += seconds_per_token(hop)
    flows: list[float] = linprog(-np.ones(len(routes)), A_ub=usage, b_ub=np.ones(len(places))).x.tolist()
    return flows


def is_worth_moving(
    current: Sequence[RouteHop],
    target: Sequence[RouteHop],
    costs: RouteCosts,
    *,
    tokens_left: int,
    min_gain: float,
) -> bool:
    """True if a session should move to another route: clearly faster, by more than the move itself costs."""
    before_ms, after_ms = route_cost_ms(current, costs), route_cost_ms(target, costs)
    if after_ms >= (1 - min_gain) * before_ms:
        return False
    return (before_ms - after_ms) * tokens_left > _move_ms(current, target, costs)


def _move_ms(current: Sequence[RouteHop], target: Sequence[RouteHop], costs: RouteCosts) -> float:
    """Milliseconds to open sessions on the new servers and replay what the old ones have seen."""
    kept = {(hop.server.peer_id, hop.span) for hop in current}
    new = [hop for hop in target if (hop.server.peer_id, hop.span) not in kept]
    replaying = replace(costs, forward_tokens=max(1, costs.context_tokens))
    round_trips_ms = max((costs.round_trip_ms(hop.server) for hop in new), default=0.0)
    replay_ms = sum(
        replaying.ms_per_block(hop.server) * len(hop.span) for hop in new if hop.server.rounds_finely
    ) + step_by_step_ms([hop for hop in new if not hop.server.rounds_finely], costs)
    if replay_ms > 1e3 * MAX_REPLAY_S:  # it would go in long calls then, and might change the text
        return math.inf
    return MOVE_ROUND_TRIPS * round_trips_ms + replay_ms


def step_by_step_ms(route: Sequence[RouteHop], costs: RouteCosts) -> float:
    """Milliseconds in which new servers compute the text again in the steps in which it was computed.

    The servers work at the same time, each on another step.
    """
    return costs.num_steps * max((costs.ms_per_block(hop.server) * len(hop.span) for hop in route), default=0.0)


class _Distances:
    """Milliseconds of one way from server to server, by their indices in `servers`."""

    def __init__(self, servers: Sequence[ServerInfo], half_ms: Floats, relayed: bool) -> None:
        self._half_ms, self._relayed = half_ms, relayed
        num_servers = len(servers)
        sources, self._link_targets, self._link_ms = _announced_links([] if relayed else servers)
        self._link_starts = np.searchsorted(sources, np.arange(num_servers + 1))
        # Distance from each server to its nearest and furthest possible successor.
        self.nearest = half_ms.copy()
        self.furthest = half_ms + half_ms.max() if relayed else np.maximum(half_ms, half_ms.max())
        np.minimum.at(self.nearest, sources, self._link_ms)
        np.maximum.at(self.furthest, sources, self._link_ms)
        self._rows = np.empty((num_servers, num_servers), np.float64)
        """Rows are filled when needed."""
        self._known = np.zeros(num_servers, bool)

    def rows(self, sources: NDArray[np.intp]) -> Floats:
        """The ways from each of these servers to all."""
        new = sources[~self._known[sources]]
        if new.size:
            half = self._half_ms
            rows = half[new, None] + half if self._relayed else np.maximum(half[new, None], half)
            for row, index in zip(rows, new, strict=True):
                links = slice(self._link_starts[index], self._link_starts[index + 1])
                row[self._link_targets[links]] = self._link_ms[links]
                row[index] = np.inf
            self._rows[new] = rows
            self._known[new] = True
        found: Floats = self._rows[sources]
        return found


def _announced_links(servers: Sequence[ServerInfo]) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """Pairs of servers with an announced distance, ordered by the first, and the milliseconds of one way."""
    index_of = {server.peer_id: index for index, server in enumerate(servers)}
    said = [
        (index, index_of[peer_id], round_trip_ms)
        for index, server in enumerate(servers)
        for peer_id, round_trip_ms in server.round_trips
        if peer_id in index_of
    ]
    if not said:
        return np.empty(0, np.intp), np.empty(0, np.intp), np.empty(0)
    announcer, other = (np.array([pair[side] for pair in said], np.intp) for side in (0, 1))
    way_ms = np.array([pair[2] for pair in said]) / 2
    # A server's own announcement comes after the other's, and so overwrites it.
    sources, targets = np.concatenate((other, announcer)), np.concatenate((announcer, other))
    order = np.argsort(sources, kind="stable")
    return sources[order], targets[order], np.tile(way_ms, 2)[order]


class _Search:
    """One search. Indices are those of `servers`, boundaries count from the span's start."""

    def __init__(self, servers: Sequence[ServerInfo], span: Span, costs: RouteCosts) -> None:
        self._servers, self._span, self._length = servers, span, len(span)
        self._starts = np.array([max(server.start - span.start, 0) for server in servers])
        self._ends = np.array([min(server.end - span.start, self._length) for server in servers])
        self._per_block = np.array([costs.ms_per_block(server) for server in servers])
        self._fixed = np.array([HOP_COST_MS + costs.waiting_ms(server) for server in servers])
        self._half = np.array([costs.round_trip_ms(server) / 2 for server in servers])
        """Milliseconds of one way to or from the client."""
        self._distances = _Distances(servers, self._half, costs.relayed)
        self._may_cut = self._allowed_cuts()

    def find_cheapest(self, beam_width: int) -> list[RouteHop] | None:
        length, num_servers = self._length, len(self._servers)
        came_from = np.full((length, num_servers), STAYS, np.int32)
        begins = (self._starts <= 0) & self._may_cut[:, 0]
        cost = np.where(begins, self._half + self._fixed, np.inf)
        came_from[0, begins] = BEGINS
        for boundary in range(length):
            if boundary:
                cost = self._change(boundary, cost, came_from[boundary], beam_width)
            cost = cost + self._per_block
        cost = np.where(self._may_cut[:, length], cost + self._half, np.inf)
        last = int(cost.argmin())
        return self._trace(came_from, last) if np.isfinite(cost[last]) else None

    def _change(self, boundary: int, cost: Floats, came_from: NDArray[np.int32], beam_width: int) -> Floats:
        """The costs after changing to another server here, where that is cheaper."""
        ends, may_cut = self._ends, self._may_cut[:, boundary]
        stay = np.where(ends > boundary, cost, np.inf)
        sources = np.flatnonzero(np.isfinite(cost) & may_cut)
        targets = np.flatnonzero((self._starts <= boundary) & (ends > boundary) & may_cut)
        if not sources.size or not targets.size:
            return stay
        sources = self._beam(sources, cost, beam_width)
        arrivals = cost[sources, None] + self._distances.rows(sources)[:, targets]
        first = arrivals.argmin(axis=0)
        change = arrivals[first, np.arange(targets.size)] + self._fixed[targets]
        gains = change < stay[targets]
        stay[targets[gains]] = change[gains]
        came_from[targets[gains]] = sources[first[gains]]
        return stay

    def _beam(self, sources: NDArray[np.intp], cost: Floats, width: int) -> NDArray[np.intp]:
        """The servers that no other one beats, however the way goes on; at most `width`."""
        at_best = cost[sources] + self._distances.nearest[sources]
        at_worst = cost[sources] + self._distances.furthest[sources]
        useful = at_best <= at_worst.min()
        sources, at_best = sources[useful], at_best[useful]
        if sources.size <= width:
            return sources
        return sources[np.argpartition(at_best, width)[:width]]

    def _allowed_cuts(self) -> NDArray[np.bool_]:
        allowed = np.ones((len(self._servers), self._length + 1), bool)
        for index, server in enumerate(self._servers):
            for cut in server.traits.forbidden_cuts:
                if self._span.start <= cut <= self._span.end:
                    allowed[index, cut - self._span.start] = False
        return allowed

    def _trace(self, came_from: NDArray[np.int32], last: int) -> list[RouteHop]:
        route: list[RouteHop] = []
        offset, end, server = self._span.start, self._length, last
        for boundary in range(self._length - 1, -1, -1):
            source = int(came_from[boundary, server])
            if source != STAYS:
                route.append(RouteHop(self._servers[server], Span(offset + boundary, offset + end)))
                end, server = boundary, source
        return route[::-1]


def _missing(servers: Sequence[ServerInfo], span: Span, encoder_blocks: int) -> MissingBlocksError:
    held = {block for server in servers for block in server.span}
    missing = [block for block in span if block not in held]
    if missing:
        return MissingBlocksError(f"nobody serves {describe_blocks(missing, encoder_blocks)}", missing)
    return MissingBlocksError(f"the servers of blocks {span} can't be joined: their cuts are not allowed there", ())
