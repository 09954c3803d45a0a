"""Expected costs of a route: network, queue, computing and cache pressure of each hop, for one step.

Used by `swarm/routing`, which searches, and by whoever explains a route. Pure: servers announce their side, the client
adds the round trips that it measured. What depends on one server belongs into `waiting_ms` or `ms_per_block`, from
which `of_hops` and the search both add up; what depends on two neighbours, into `between_ms` and the search's
`_Distances`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from swarmllm.data_structures import RouteHop, ServerInfo

HOP_COST_MS = 1.0
"""Cost of each hop beside the network's own time: encoding, waking up, decoding. Measured on loopback: about 1 ms
(docs/benchmarks.md)."""
RELAYED_MS = 0.5
"""On top of what was measured, for servers that are reached through relays: where others are as near, these are first
and last, and nobody's relay is burdened. Assumed; the relay's own time is in the round trip already."""
REFUSAL_MS = 1000.0
"""Cost of a server whose announced cache has no room for the session. Assumed: it would most likely refuse, but it is
better than nobody, because what it announced may be old."""
ROOM_FACTOR = 2.0
"""Cache pressure begins when less is left than this many such sessions need. Assumed: others come at the same time."""
AVOIDED_MS_PER_S = 1e9
"""Cost of a peer that is to be avoided for another second: more than anything else can cost."""
MEASURED_BATCH = 8
"""The batch of `ServerInfo.decode_ms_per_block_batch8`."""


@dataclass(frozen=True)
class HopCosts:
    """The expected milliseconds of one hop, by cause."""

    network_ms: float
    """The way to the server (for the last one, and the way back), and the work of sending."""
    queue_ms: float
    """Waiting, and the risk of being refused for want of cache."""
    compute_ms: float

    @property
    def total_ms(self) -> float:
        return self.network_ms + self.queue_ms + self.compute_ms


@dataclass(frozen=True, kw_only=True)
class RouteCosts:
    """The asker's side: what it wants to run, and what it knows about its distance to servers."""

    round_trips_ms: Mapping[str, float] = field(default_factory=dict)
    """Measured by the asker, by peer id."""
    context_tokens: int = 0
    """Tokens in the session's KV cache."""
    batch_size: int = 1
    """Rows of a decode step."""
    forward_tokens: int = 0
    """Above 0: a forward batch of this many tokens instead of a decode step."""
    cache_tokens: int = 0
    """Tokens that the session will lease."""
    avoided_s: Mapping[str, float] = field(default_factory=dict)
    """Peers that are used only where nobody else is left, and for how much longer: those with the least time first."""
    row_tokens: int = 0
    """Tokens of the longest row of a batch. Servers that take less at once are used only where there is nobody else."""
    inner_states: bool = False
    """True if only servers are of use that tell what passes between their blocks."""
    relayed: bool = False
    """Servers don't pass hidden states on to each other: everything goes through the asker."""

    @cached_property
    def assumed_round_trip_ms(self) -> float:
        """Distance of servers that were not measured: as far as most of the others."""
        return statistics.median(self.round_trips_ms.values()) if self.round_trips_ms else 0.0

    def round_trip_ms(self, server: ServerInfo) -> float:
        """Distance between the asker and the server."""
        measured = self.round_trips_ms.get(server.peer_id)
        round_trip_ms = self.assumed_round_trip_ms if measured is None else measured
        return round_trip_ms + RELAYED_MS if server.relayed else round_trip_ms

    def between_ms(self, server: ServerInfo, successor: ServerInfo) -> float:
        """One way from server to server: as one of them announced it, else estimated.

        Of two places at the distances a and b from here, the triangle inequality says that they are between |a - b|
        and a + b from each other; the middle is the greater of a and b.
        """
        here, there = self.round_trip_ms(server), self.round_trip_ms(successor)
        if self.relayed:
            return (here + there) / 2
        if server.peer_id == successor.peer_id:  # after a repair
            return 0.0
        for announcer, other in ((server, successor), (successor, server)):
            for peer_id, round_trip_ms in reversed(announcer.round_trips):  # what it said last counts, as in the search
                if peer_id == other.peer_id:
                    return round_trip_ms / 2
        return max(here, there) / 2

    def ms_per_block(self, server: ServerInfo) -> float:
        """Computing of one step in one block."""
        if self.forward_tokens:
            return self.forward_tokens * 1e3 / (max(server.throughput, 1e-3) * len(server.span))
        ms = server.decode_ms_per_block
        if self.batch_size > 1 and server.decode_ms_per_block_batch8:
            per_row = (server.decode_ms_per_block_batch8 - ms) / (MEASURED_BATCH - 1)
            ms += max(0.0, per_row) * (self.batch_size - 1)
        return ms + server.context_ms_per_block_per_1k * self.context_tokens / 1000

    def waiting_ms(self, server: ServerInfo) -> float:
        """The queue, cache pressure, and what it is to be avoided for."""
        avoided_s = self.avoided_s.get(server.peer_id, 0.0)
        return server.queue_ms + self._pressure_ms(server) + AVOIDED_MS_PER_S * avoided_s

    def _pressure_ms(self, server: ServerInfo) -> float:
        if not self.cache_tokens or not server.throughput:  # a server that measured nothing announced no cache either
            return 0.0
        left = max(server.cache_tokens_left, 1) / self.cache_tokens
        return REFUSAL_MS * min(1.0, max(0.0, ROOM_FACTOR / left - 1))

    def of_hops(self, route: Sequence[RouteHop]) -> list[HopCosts]:
        """The costs of each hop of a route."""
        costs: list[HopCosts] = []
        for index, hop in enumerate(route):
            way_ms = self.round_trip_ms(hop.server) / 2 if index == 0 else 0.0
            if index:
                way_ms += self.between_ms(route[index - 1].server, hop.server)
            if index == len(route) - 1:
                way_ms += self.round_trip_ms(hop.server) / 2
            compute_ms = self.ms_per_block(hop.server) * len(hop.span)
            costs.append(HopCosts(HOP_COST_MS + way_ms, self.waiting_ms(hop.server), compute_ms))
        return costs

    def alone_ms(self, server: ServerInfo, num_blocks: int) -> float:
        """A step if this server held all blocks."""
        network_ms = HOP_COST_MS + self.round_trip_ms(server)
        return network_ms + self.waiting_ms(server) + self.ms_per_block(server) * num_blocks


def seconds_per_token(hop: RouteHop) -> float:
    """What one token of a forward batch takes of all that the hop's server can do; infinite if it announced nothing."""
    blocks_per_s = hop.server.throughput * len(hop.server.span)
    return len(hop.span) / blocks_per_s if blocks_per_s else math.inf


def route_tokens_per_s(route: Sequence[RouteHop]) -> float:
    """Forward batches through a route whose servers all work at once: what its slowest server does, in all its hops."""
    busy: dict[str, float] = {}
    for hop in route:
        busy[hop.server.peer_id] = busy.get(hop.server.peer_id, 0.0) + seconds_per_token(hop)
    return 1 / max(busy.values())
