"""Distances of servers, learned from occasional samples, and the servers to measure next.

Used by the client's swarm view and by `peers/other_servers`, which send the pings. Pure: the time is an argument, in
seconds.
"""

import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.errors import MissingBlocksError
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import find_route

SMOOTHING = 0.3
"""Weight of a new sample. A ping is itself the best of some."""
FORGET_S = 900.0
"""Assumed: paths through the internet and the load of home connections change within a quarter of an hour."""
DIAL_ROUND_TRIPS = 8
"""Round trips of a new connection and its first ping (TCP, Noise, yamux, our greeting), counted at an emulated delay. A
server that hasn't answered yet is at least that far away."""


@dataclass
class RoundTrips:
    """Smoothed milliseconds by peer id."""

    _ms: dict[str, float] = field(default_factory=dict)
    _seen_at: dict[str, float] = field(default_factory=dict)
    _tried_at: dict[str, float] = field(default_factory=dict)
    _waiting_since: dict[str, float] = field(default_factory=dict)
    _tidied_at: float = -math.inf

    def begin(self, peer_id: str, now: float) -> None:
        """Note that a ping was sent."""
        if now - self._tidied_at > FORGET_S:
            self._tidied_at = now
            for gone in [other for other, at in self._tried_at.items() if now - at > FORGET_S]:
                for known in (self._ms, self._seen_at, self._tried_at, self._waiting_since):
                    known.pop(gone, None)
        self._tried_at[peer_id] = now
        self._waiting_since[peer_id] = now

    def observe(self, peer_id: str, ms: float, now: float) -> None:
        """Note a sample."""
        old = self._ms.get(peer_id)
        aged = now - self._seen_at.get(peer_id, now) > FORGET_S
        self._ms[peer_id] = ms if old is None or aged else old + SMOOTHING * (ms - old)
        self._seen_at[peer_id] = self._tried_at[peer_id] = now
        self._waiting_since.pop(peer_id, None)

    def fail(self, peer_id: str) -> None:
        """Note that the ping got no answer."""
        self._waiting_since.pop(peer_id, None)
        self._ms.pop(peer_id, None)

    def known(self, now: float) -> dict[str, float]:
        """Measured distances that aren't too old. For a first ping without an answer, the least possible distance."""
        known = {peer_id: ms for peer_id, ms in self._ms.items() if now - self._seen_at[peer_id] < FORGET_S}
        least = RouteCosts(round_trips_ms=known).assumed_round_trip_ms
        for peer_id, since in self._waiting_since.items():
            if peer_id not in known:
                known[peer_id] = max(least, (now - since) * 1e3 / DIAL_ROUND_TRIPS)
        return known

    def to_measure(
        self, snapshot: SwarmSnapshot, *, count: int, avoid: Collection[str], generator: random.Random
    ) -> list[ServerInfo]:
        """At most `count` servers whose distance should be measured next.

        First come those that would be on the best route if all unknown ones were near, then those measured the longest
        ago.
        """
        nobody_knows = {s.peer_id: self._ms.get(s.peer_id, 0.0) for s in snapshot.online()}
        try:
            hoped = find_route(snapshot, avoid=avoid, costs=RouteCosts(round_trips_ms=nobody_knows))
        except MissingBlocksError:
            hoped = []
        first = [hop.server for hop in hoped if hop.server.peer_id not in self._tried_at]
        chosen = {server.peer_id for server in first}
        others = [s for s in snapshot.online() if s.peer_id not in chosen and s.peer_id not in avoid]
        return list({s.peer_id: s for s in (*first, *self.oldest_first(others, generator))}.values())[:count]

    def oldest_first(self, servers: Iterable[ServerInfo], generator: random.Random) -> list[ServerInfo]:
        """Servers never tried, in any order, then the others by when they were tried last."""
        shuffled = list(servers)
        generator.shuffle(shuffled)
        return sorted(shuffled, key=lambda server: self._tried_at.get(server.peer_id, float("-inf")))
