"""Expected costs of a route for one step: network, queue, computing and cache pressure of each hop.

Used by `swarm/routing`, which searches, and by code that explains routes. Pure: servers announce their side, and the
client adds the round trips that it measured. A cost of one server belongs into `waiting_ms` or `ms_per_block`, which
`of_hops` and the search both add up. A cost of two neighbours belongs into `between_ms` and the search's `_Distances`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from swarmllm.data_structures import RouteHop, ServerInfo

HOP_COST_MS = 1.0
"""Cost of each hop besides the network: encoding, waking up, decoding. Measured on loopback: about 1 ms
(docs/benchmarks.md)."""
RELAYED_MS = 0.5
"""Extra cost of servers that are reached through relays. If others are as near, these become first and last, and no
relay is burdened. Assumed; the relay's own time is part of the round trip already."""
REFUSAL_MS = 1000.0
"""Cost of a server whose announced cache has no room for the session. Assumed: it would probably refuse, but it is
better than none, because the announcement may be old."""
ROOM_FACTOR = 2.0
"""Cache pressure begins when fewer than this many such sessions would fit. Assumed: others come at the same time."""
AVOIDED_MS_PER_S = 1e9
"""Cost of each second for which a peer is to be avoided: more than anything else."""
OTHER_ROUNDING_MS = 60_000.0
"""Cost of a server that rounds numbers otherwise than the server whose blocks it takes over: the text may go on with
other words. More than any wait, and less than that of a server to be avoided."""
MEASURED_BATCH = 8
"""Rows computed together for `ServerInfo.decode_ms_per_block_batch8`."""


@dataclass(frozen=True)
class HopCosts:
    """The expected milliseconds of one hop, by cause."""

    network_ms: float
    """The way to the server (for the last one, also back), and the work of sending."""
    queue_ms: float
    """Waiting, and the risk that the cache is full."""
    compute_ms: float

    @property
    def total_ms(self) -> float:
        return self.network_ms + self.queue_ms + self.compute_ms


@dataclass(frozen=True, kw_only=True)
class RouteCosts:
    """The client's side: what it wants to run, and its distance to servers."""

    round_trips_ms: Mapping[str, float] = field(default_factory=dict)
    """Measured by the client, by peer id."""
    context_tokens: int = 0
    """Tokens in the session's KV cache."""
    num_steps: int = 0
    """Steps in which the session's text was computed so far."""
    batch_size: int = 1
    """Rows of a decode step."""
    forward_tokens: int = 0
    """Above 0: a forward of this many tokens instead of a decode step."""
    cache_tokens: int = 0
    """Tokens that the session will lease."""
    avoided_s: Mapping[str, float] = field(default_factory=dict)
    """Peers to use only as a last resort, and for how many seconds more. Those with the least time come first."""
    rounding: Mapping[int, tuple[str, str, str]] = field(default_factory=dict)
    """`ServerInfo.rounding` of the servers that computed these blocks for a text so far."""
    row_tokens: int = 0
    """Tokens of the longest row of a forward. Servers with a lower limit are used only as a last resort."""
    inner_states: bool = False
    """True if only servers that return values between their blocks are useful."""
    relayed: bool = False
    """True: servers don't pass hidden states on to each other, the client relays everything."""

    @cached_property
    def assumed_round_trip_ms(self) -> float:
        """Distance assumed for servers that were not measured: as far as most of the others."""
        return statistics.median(self.round_trips_ms.values()) if self.round_trips_ms else 0.0

    def round_trip_ms(self, server: ServerInfo) -> float:
        """Distance between the client and the server."""
        measured = self.round_trips_ms.get(server.peer_id)
        round_trip_ms = self.assumed_round_trip_ms if measured is None else measured
        return round_trip_ms + RELAYED_MS if server.relayed else round_trip_ms

    def between_ms(self, server: ServerInfo, successor: ServerInfo) -> float:
        """Milliseconds from server to server, as one of them announced it, else estimated.

        If two places are at the distances a and b from here, they are between |a - b| and a + b apart (triangle
        inequality). The middle is the greater of a and b.
        """
        here, there = self.round_trip_ms(server), self.round_trip_ms(successor)
        if self.relayed:
            return (here + there) / 2
        if server.peer_id == successor.peer_id:  # after a repair
            return 0.0
        for announcer, other in ((server, successor), (successor, server)):
            for peer_id, round_trip_ms in reversed(announcer.round_trips):  # the last entry counts, as in the search
                if peer_id == other.peer_id:
                    return round_trip_ms / 2
        return max(here, there) / 2

    def ms_per_block(self, server: ServerInfo) -> float:
        """Milliseconds of computing of one step in one block."""
        if self.forward_tokens:
            return self.forward_tokens * 1e3 / (max(server.throughput, 1e-3) * len(server.span))
        ms = server.decode_ms_per_block
        if self.batch_size > 1 and server.decode_ms_per_block_batch8:
            per_row = (server.decode_ms_per_block_batch8 - ms) / (MEASURED_BATCH - 1)
            ms += max(0.0, per_row) * (self.batch_size - 1)
        return ms + server.context_ms_per_block_per_1k * self.context_tokens / 1000

    def waiting_ms(self, server: ServerInfo) -> float:
        """Milliseconds for the queue, cache pressure, other rounding, and avoidance."""
        avoided_s = self.avoided_s.get(server.peer_id, 0.0)
        other_ms = OTHER_ROUNDING_MS if self.rounds_otherwise(server) else 0.0
        return server.queue_ms + self._pressure_ms(server) + other_ms + AVOIDED_MS_PER_S * avoided_s

    def rounds_otherwise(self, server: ServerInfo) -> bool:
        """True if the text was rounded in another way in some of the server's blocks so far."""
        own = server.rounding
        return bool(self.rounding) and any(self.rounding.get(block, own) != own for block in server.span)

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
        """Milliseconds of a step if this server held all blocks."""
        network_ms = HOP_COST_MS + self.round_trip_ms(server)
        return network_ms + self.waiting_ms(server) + self.ms_per_block(server) * num_blocks


def seconds_per_token(hop: RouteHop) -> float:
    """Seconds of the hop's server for one token of a forward; infinite if it announced no throughput."""
    blocks_per_s = hop.server.throughput * len(hop.server.span)
    return len(hop.span) / blocks_per_s if blocks_per_s else math.inf


def route_tokens_per_s(route: Sequence[RouteHop]) -> float:
    """Tokens per second of forwards through a route whose servers work at the same time: the slowest server's, over all
    its hops."""
    busy: dict[str, float] = {}
    for hop in route:
        busy[hop.server.peer_id] = busy.get(hop.server.peer_id, 0.0) + seconds_per_token(hop)
    return 1 / max(busy.values())
