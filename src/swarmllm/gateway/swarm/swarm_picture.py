"""What people see of a swarm: its servers now, what is missing, what is slow, and what happened lately. No I/O.

`swarm_watch` feeds it with snapshots; `/api/swarm` and the page show what comes out.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarmllm.data_structures import ServerInfo, ServerState, Span, SwarmSnapshot
from swarmllm.errors import MissingBlocksError
from swarmllm.gateway.engine.trace import describe_route
from swarmllm.gateway.swarm.swarm_history import SwarmHistory
from swarmllm.swarm.block_map import state_name
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import find_route, route_cost_ms

MAX_EVENTS = 200
MISSES = 3
"""Looks that need not show a server to which there is a line: under load a DHT answers with less than it has."""
_NOT_SHOWN = {"addrs", "traits", "max_batch_tokens"}


@dataclass(frozen=True)
class Contact:
    """What was last noticed of a server itself, besides what it announces."""

    reachable: bool
    round_trip_s: float | None = None


class SwarmPicture:
    """Remembers the last look, to tell what has changed since."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        num_blocks: int,
        needed: Sequence[Span] | None = None,
        encoder_blocks: int = 0,
    ) -> None:
        """`needed`: blocks that servers have to run; None = all. The first `encoder_blocks` are an encoder's."""
        self._model, self._fingerprint = model, fingerprint
        self._snapshot: SwarmSnapshot | None = None
        self._num_blocks, self._encoder_blocks = num_blocks, encoder_blocks
        self._needed = (Span(0, num_blocks),) if needed is None else tuple(needed)
        self._contacts: dict[str, Contact] = {}
        self._most_cache: dict[str, int] = {}
        self._misses: dict[str, int] = {}
        self._history = SwarmHistory(self._needed)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)

    def completed(self, snapshot: SwarmSnapshot, lines: Container[str]) -> SwarmSnapshot:
        """One look with those that it doesn't show, although there is a line to them and the last looks did."""
        shown = {server.peer_id for server in snapshot.servers}
        known = self._snapshot.servers if self._snapshot is not None else ()
        missed = [server for server in known if server.peer_id not in shown and server.peer_id in lines]
        self._misses = {server.peer_id: self._misses.get(server.peer_id, 0) + 1 for server in missed}
        kept = tuple(server for server in missed if self._misses[server.peer_id] < MISSES)
        return replace(snapshot, servers=(*snapshot.servers, *kept))

    def update(self, snapshot: SwarmSnapshot, contacts: Mapping[str, Contact], at: float) -> list[dict[str, Any]]:
        """Take in one look, made `at` that time (Unix seconds); returns what has happened since the last one."""
        before = {s.peer_id: s for s in self._snapshot.servers} if self._snapshot is not None else None
        now = {server.peer_id: server for server in snapshot.servers}
        found: list[dict[str, Any]] = []

        def note(kind: str, server: ServerInfo, **more: Any) -> None:
            found.append(
                {
                    "at": round(at, 3),
                    "kind": kind,
                    "peer_id": server.peer_id,
                    "public_name": server.public_name,
                    "blocks": [server.start, server.end],
                    **more,
                }
            )

        if before is not None:
            for peer_id, server in now.items():
                old = before.get(peer_id)
                if old is None:
                    note("joined", server)
                elif old.span != server.span:
                    note("moved", server, previous_blocks=[old.start, old.end])
                elif old.state != server.state:
                    note(state_name(server.state), server)
            for peer_id, server in before.items():
                if peer_id not in now:
                    note("expired" if self._reachable(server) is False else "left", server)
        for peer_id, contact in contacts.items():
            was_reachable = self._contacts[peer_id].reachable if peer_id in self._contacts else True
            if peer_id in now and contact.reachable != was_reachable:
                note("reachable" if contact.reachable else "unreachable", now[peer_id])
        self._snapshot, self._contacts = snapshot, {p: c for p, c in contacts.items() if p in now}
        self._most_cache = {p: max(s.cache_tokens_left, self._most_cache.get(p, 0)) for p, s in now.items()}
        self._events.extend(found)
        kinds = ("lost" if one["kind"] == "unreachable" else one["kind"] for one in found)
        self._history.take(self.usable.online(), self.missing_blocks(), kinds, at)
        return found

    @property
    def usable(self) -> SwarmSnapshot:
        """Without the servers that don't answer."""
        snapshot = self._snapshot or SwarmSnapshot(self._num_blocks)
        return replace(snapshot, servers=tuple(s for s in snapshot.servers if self._reachable(s) is not False))

    def missing_blocks(self) -> list[int]:
        """Blocks that nobody serves who can be reached, and that don't run here."""
        return [block for block in self.usable.missing_blocks() if any(block in span for span in self._needed)]

    def counts(self) -> dict[str, int]:
        """How many servers are in which state."""
        counts: dict[str, int] = {}
        for server in self._snapshot.servers if self._snapshot is not None else ():
            name = self._state(server)
            counts[name] = counts.get(name, 0) + 1
        return counts

    def as_json(self) -> dict[str, Any]:
        """For /api/swarm."""
        usable, costs = self.usable, self._costs()
        try:
            route = [hop for span in self._needed for hop in find_route(usable, span, costs=costs)]
        except MissingBlocksError:
            route = []
        servers = sorted(
            self._snapshot.servers if self._snapshot is not None else (), key=lambda s: (s.start, s.end, s.peer_id)
        )
        return {
            "model": self._model,
            "fingerprint": self._fingerprint,
            "num_blocks": self._num_blocks,
            "needed_blocks": sum(map(len, self._needed)),
            "encoder_blocks": self._encoder_blocks,
            "known": self._snapshot is not None,
            "missing_blocks": self.missing_blocks(),
            "held_by_one": self._held_by_one(),
            "bottleneck": _bottleneck(usable),
            "route": describe_route(route),
            "expected_ms_per_token": round(route_cost_ms(route, costs), 3) if route else None,
            "tokens_per_s": self._history.tokens_per_s_now,
            "history": self._history.as_json(),
            "servers": [self._describe(server) for server in servers],
            "events": list(self._events)[::-1],
        }

    def _costs(self) -> RouteCosts:
        """What the gateway has measured of its distance to servers."""
        found = {p: c.round_trip_s for p, c in self._contacts.items() if c.round_trip_s is not None}
        return RouteCosts(round_trips_ms={peer_id: 1000 * seconds for peer_id, seconds in found.items()})

    def _held_by_one(self) -> list[dict[str, Any]]:
        """Stretches of blocks that one server alone can serve: if it is lost, no text can go on."""
        holders: dict[int, list[ServerInfo]] = {}
        for server in self.usable.online():
            for block in server.span:
                holders.setdefault(block, []).append(server)
        found: list[dict[str, Any]] = []
        for block in (block for span in self._needed for block in span):
            if len(holders.get(block, ())) != 1:
                continue
            (server,) = holders[block]
            if found and found[-1]["peer_id"] == server.peer_id and found[-1]["blocks"][1] == block:
                found[-1]["blocks"][1] = block + 1
            else:
                name = {"peer_id": server.peer_id, "public_name": server.public_name}
                found.append({**name, "blocks": [block, block + 1]})
        return found

    def _describe(self, server: ServerInfo) -> dict[str, Any]:
        contact = self._contacts.get(server.peer_id)
        round_trip_s = contact.round_trip_s if contact is not None else None
        most = self._most_cache.get(server.peer_id, 0)
        announced = server.model_dump(mode="json", exclude=_NOT_SHOWN)
        return {
            **{name: round(value, 4) if isinstance(value, float) else value for name, value in announced.items()},
            "state": self._state(server),
            "relayed": server.relayed,
            "throughput": round(server.throughput, 1),
            "cache_in_use": round(1 - server.cache_tokens_left / most, 3) if most else None,
            "reachable": self._reachable(server),
            "tokens_per_s": self._history.tokens_per_s(server.peer_id),
            "round_trip_ms": None if round_trip_s is None else round(1000 * round_trip_s, 1),
        }

    def _state(self, server: ServerInfo) -> str:
        return "unreachable" if self._reachable(server) is False else state_name(server.state)

    def _reachable(self, server: ServerInfo) -> bool | None:
        """None: nobody has tried."""
        contact = self._contacts.get(server.peer_id)
        return None if contact is None or server.state != ServerState.ONLINE else contact.reachable


def _bottleneck(snapshot: SwarmSnapshot) -> dict[str, Any] | None:
    """The first stretch of blocks whose servers together are slowest; None if some block has none."""
    totals = [0.0] * snapshot.num_blocks
    for server in snapshot.online():
        for block in server.span:
            totals[block] += server.throughput
    if not totals or snapshot.missing_blocks():
        return None
    lowest = min(totals)
    start = totals.index(lowest)
    end = start
    while end < len(totals) and totals[end] == lowest:
        end += 1
    return {"blocks": [start, end], "tokens_per_s": round(lowest, 1)}
