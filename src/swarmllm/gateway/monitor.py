"""The swarm for `/api/swarm`: looks into the DHT, keeps a connection to each server, and draws the picture.

`SwarmWatch` does the I/O, in the client's event loop; `app` starts and stops it. A record in the DHT outlives its
server by a minute, but a stream notices at once. The client is told of a lost server too, so new sessions avoid it.
`SwarmPicture` and `SwarmHistory` are pure: snapshots and times go in, JSON comes out.

Servers announce from time to time how many tokens they have computed. Tokens between two announcements count as
computed evenly. The tokens of a block are those of all its servers. The tokens of the swarm are those of its slowest
block: a token passes all of them, so a server that boasts changes little.
"""

import asyncio
import hashlib
import json
import logging
import shlex
import time
from collections import Counter, deque
from collections.abc import Container, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swarmllm.api import (
    Connection,
    MissingBlocksError,
    RouteCosts,
    ServerInfo,
    ServerState,
    Span,
    SwarmError,
    SwarmSnapshot,
    SwarmView,
    find_route,
    route_cost_ms,
    state_name,
)
from swarmllm.gateway.engine.generation import describe_route
from swarmllm.gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""Seconds between two looks. Assumed: people want to see a change within a few seconds."""
RETRY_S = 10.0
"""Seconds before a server that couldn't be reached is dialled again."""
MAX_LINES = 128
"""Most servers with a connection. In larger swarms, servers on the best route come first."""
STALLED_S = 60.0
"""Seconds without a finished look after which the client counts as dead. Assumed: several times the longest look."""
MAX_DIALS = 16
"""Dials at a time."""


class SwarmWatch:
    """From `start` to `stop`, `as_json` is up to date."""

    def __init__(
        self, view: SwarmView, name: str, metrics: GatewayMetrics, about: dict[str, Any], *, may_join: bool = True
    ) -> None:
        """`about`: facts of the model, for people. `may_join`: people start its servers one by one."""
        self._view = view
        self._name = name
        self._metrics = metrics
        self._states: dict[str, int] = {}
        self._picture = SwarmPicture(name, view.fingerprint, view.num_blocks, view.spans, view.look_ups.encoder_blocks)
        self._lines: dict[str, Connection] = {}
        self._failed_at: dict[str, float] = {}
        self._changed: asyncio.Event | None = None
        self._stopping = False
        self._looked_at = time.monotonic()
        peers = view.config.initial_peers or ()
        # Without addresses, a server finds the swarm on the local network.
        server = ["swarmllm", "server", "--model", view.model_place, *(["--initial_peers", *peers] if peers else [])]
        self._beside = {"join": shlex.join(server) if may_join else None, "about": about}
        """Shown beside the picture: the command that adds a server, or None; and facts of the model."""
        self._shown = self._render()

    def as_json(self) -> tuple[str, bytes]:
        """The entity tag and the JSON of the picture."""
        return self._shown

    def missing_blocks(self) -> list[int]:
        """Blocks without a server that can be reached."""
        return self._picture.missing_blocks()

    @property
    def client_is_alive(self) -> bool:
        """The client's event loop is running and looks at the swarm."""
        return self._view.loop.is_running and time.monotonic() - self._looked_at < STALLED_S

    def start(self) -> None:
        """Begin to look at the swarm."""
        self._view.loop.call_soon(self._run())

    def stop(self) -> None:
        """Look no longer."""
        self._stopping = True
        self._view.loop.call_soon(self._wake())

    # ------------------------------------------------------------------ in the client's event loop

    async def _run(self) -> None:
        self._changed = asyncio.Event()
        try:
            while not self._stopping:
                self._changed.clear()
                await self._look()
                self._looked_at = time.monotonic()
                try:
                    async with asyncio.timeout(PERIOD_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            for line in self._lines.values():
                line.close()
            self._metrics.swarm.forget(self._name)

    async def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def _look(self) -> None:
        try:
            snapshot = await self._view.look_ups.refresh()
        except SwarmError as error:
            logger.info("could not look into the DHT: %s", error)
            return
        snapshot = self._picture.completed(snapshot, self._lines)
        online = {server.peer_id: server for server in snapshot.online()}
        for peer_id in self._lines.keys() - online.keys():
            self._lines.pop(peer_id).close()
        self._failed_at = {peer: at for peer, at in self._failed_at.items() if peer in online}
        await self._dial([server for server in self._by_importance(online) if self._wants_line(server.peer_id)])
        contacts = {peer_id: Contact(reachable=False) for peer_id in self._failed_at}
        for peer_id, line in self._lines.items():
            contacts[peer_id] = Contact(True, line.round_trip_s)
        self._picture.head_ms = await self._view.time_of_head()
        self._picture.update(snapshot, contacts, time.time())
        self._shown = await asyncio.to_thread(self._render)
        self._metrics.swarm.missing_blocks.labels(self._name).set(len(self.missing_blocks()))
        self._states = {**dict.fromkeys(self._states, 0), **self._picture.counts()}
        for state, count in self._states.items():
            self._metrics.swarm.servers.labels(self._name, state).set(count)

    def _by_importance(self, online: dict[str, ServerInfo]) -> list[ServerInfo]:
        route = {hop["peer_id"] for hop in json.loads(self._shown[1])["route"]} if len(online) > MAX_LINES else set()
        return sorted(online.values(), key=lambda server: (server.peer_id not in route, server.peer_id))[:MAX_LINES]

    def _wants_line(self, peer_id: str) -> bool:
        return peer_id not in self._lines and time.monotonic() - self._failed_at.get(peer_id, -RETRY_S) >= RETRY_S

    async def _dial(self, servers: list[ServerInfo]) -> None:
        room = asyncio.Semaphore(MAX_DIALS)

        async def dial(server: ServerInfo) -> None:
            async with room:
                try:
                    self._lines[server.peer_id] = await self._view.open_connection(server, self._on_answer)
                    self._failed_at.pop(server.peer_id, None)
                except SwarmError as error:
                    self._lose(server.peer_id, error)

        dials: list[Coroutine[Any, Any, None]] = [dial(server) for server in servers]
        await asyncio.gather(*dials)

    def _on_answer(self, connection: Connection, answer: object, _request: int | None) -> None:
        """Note the end of a connection. Nothing was asked on it, so any answer is its end."""
        if self._lines.get(connection.peer_id) is connection and isinstance(answer, SwarmError):
            del self._lines[connection.peer_id]
            self._lose(connection.peer_id, answer)
            if self._changed is not None:
                self._changed.set()

    def _lose(self, peer_id: str, error: SwarmError) -> None:
        if peer_id not in self._failed_at:
            self._view.report(error)
        self._failed_at[peer_id] = time.monotonic()

    def _render(self) -> tuple[str, bytes]:
        shown = self._picture.as_json() | self._beside
        body = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()
        return f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"', body


MAX_EVENTS = 200
MISSES = 3
"""Looks that may miss a server with a working connection: a DHT under load answers with less than it has."""
_NOT_SHOWN = {"addrs", "traits", "max_batch_tokens"}

MINUTE_S = 60.0
NUM_MINUTES = 60
QUIET_S = 45.0
"""Seconds without a new count after which a server is idle: three times the usual period of announcements."""


@dataclass(frozen=True)
class Contact:
    """The state of a server by its connection, besides its own announcements."""

    reachable: bool
    round_trip_s: float | None = None


class SwarmPicture:
    """The picture of a swarm. It remembers the last look, to tell what has changed."""

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
        self.head_ms = 0.0
        """Time of the model's head, which the gateway computes for each token."""

    def completed(self, snapshot: SwarmSnapshot, lines: Container[str]) -> SwarmSnapshot:
        """Add servers to a look that it missed: those with a connection that some of the last looks showed."""
        shown = {server.peer_id for server in snapshot.servers}
        known = self._snapshot.servers if self._snapshot is not None else ()
        missed = [server for server in known if server.peer_id not in shown and server.peer_id in lines]
        self._misses = {server.peer_id: self._misses.get(server.peer_id, 0) + 1 for server in missed}
        kept = tuple(server for server in missed if self._misses[server.peer_id] < MISSES)
        return replace(snapshot, servers=(*snapshot.servers, *kept))

    def update(self, snapshot: SwarmSnapshot, contacts: Mapping[str, Contact], at: float) -> list[dict[str, Any]]:
        """Take one look at the time `at` (Unix seconds); returns the events since the last one."""
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
        """The last look without servers that don't answer."""
        snapshot = self._snapshot or SwarmSnapshot(self._num_blocks)
        return replace(snapshot, servers=tuple(s for s in snapshot.servers if self._reachable(s) is not False))

    def missing_blocks(self) -> list[int]:
        """Needed blocks without a server that can be reached."""
        return [block for block in self.usable.missing_blocks() if any(block in span for span in self._needed)]

    def counts(self) -> dict[str, int]:
        """Number of servers by state."""
        counts: dict[str, int] = {}
        for server in self._snapshot.servers if self._snapshot is not None else ():
            name = self._state(server)
            counts[name] = counts.get(name, 0) + 1
        return counts

    def as_json(self) -> dict[str, Any]:
        """The picture for /api/swarm."""
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
            "expected_ms_per_token": round(route_cost_ms(route, costs) + self.head_ms, 3) if route else None,
            "tokens_per_s": self._history.tokens_per_s_now,
            "history": self._history.as_json(),
            "servers": [self._describe(server) for server in servers],
            "events": list(self._events)[::-1],
        }

    def _costs(self) -> RouteCosts:
        """Costs of routes with the round trips that the gateway has measured."""
        found = {p: c.round_trip_s for p, c in self._contacts.items() if c.round_trip_s is not None}
        return RouteCosts(round_trips_ms={peer_id: 1000 * seconds for peer_id, seconds in found.items()})

    def _held_by_one(self) -> list[dict[str, Any]]:
        """Stretches of blocks with a single server: if it is lost, no text can go on."""
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
        """The server can be reached; None: nobody has tried."""
        contact = self._contacts.get(server.peer_id)
        return None if contact is None or server.state != ServerState.ONLINE else contact.reachable


def _bottleneck(snapshot: SwarmSnapshot) -> dict[str, Any] | None:
    """The first stretch of blocks whose servers together are slowest; None if some block has no server."""
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


@dataclass
class Minute:
    """The figures of one minute."""

    number: int
    """Minutes since 1970."""
    blocks: int
    """Blocks that were served all the time."""
    events: Counter[str] = field(default_factory=Counter)
    tokens: dict[int, float] = field(default_factory=dict)
    """Tokens by block."""


@dataclass
class _Count:
    """A server's last count of tokens, and its speed until then."""

    tokens: int
    at: float
    per_s: float | None = None


class SwarmHistory:
    """The last hour, by the minute, from the gateway's start on."""

    def __init__(self, needed: Sequence[Span]) -> None:
        """`needed`: the blocks that servers have to run."""
        self._needed = [block for span in needed for block in span]
        self.minutes: deque[Minute] = deque(maxlen=NUM_MINUTES)
        self._counts: dict[str, _Count] = {}
        self._now: float | None = None

    def take(self, servers: Iterable[ServerInfo], missing: Sequence[int], kinds: Iterable[str], at: float) -> None:
        """Take one look at the time `at` (Unix seconds): the servers, the missing blocks, and the kinds of new
        events. If the clock was set back, the history begins anew."""
        if self.minutes and at < MINUTE_S * (self.minutes[-1].number - 1):
            self.minutes.clear()
            self._counts.clear()
        minute = self._minute(at, len(self._needed) - len(missing))
        minute.events.update(kinds)
        servers = tuple(servers)
        known = self._counts
        self._counts = {server.peer_id: self._counted(server, known.get(server.peer_id), at) for server in servers}
        by_block: dict[int, float] = {}
        for server in servers:
            _add(by_block, server.span, self._counts[server.peer_id].per_s or 0.0)
        self._now = self._through_all(by_block)

    def _minute(self, at: float, served: int) -> Minute:
        number = int(at // MINUTE_S)
        if not self.minutes or self.minutes[-1].number < number:
            first = self.minutes[-1].number + 1 if self.minutes else number
            for one in range(max(first, number - NUM_MINUTES + 1), number + 1):
                self.minutes.append(Minute(one, served))
        self.minutes[-1].blocks = min(self.minutes[-1].blocks, served)
        return self.minutes[-1]

    def _counted(self, server: ServerInfo, known: _Count | None, at: float) -> _Count:
        if known is None or server.tokens_served < known.tokens:  # a new server, or one that was restarted
            return _Count(server.tokens_served, at)
        if server.tokens_served > known.tokens and at > known.at:
            per_s = (server.tokens_served - known.tokens) / (at - known.at)
            for minute in self.minutes:
                begin = MINUTE_S * minute.number
                within_s = min(at, begin + MINUTE_S) - max(known.at, begin)
                if within_s > 0:
                    _add(minute.tokens, server.span, per_s * within_s)
            return _Count(server.tokens_served, at, per_s)
        if at - known.at > QUIET_S:
            known.per_s = 0.0
        return known

    def _through_all(self, by_block: dict[int, float]) -> float:
        """Tokens through all blocks. Blocks without any are left out: an encoder's blocks run outside of sessions,
        uncounted."""
        return min((by_block[block] for block in self._needed if by_block.get(block)), default=0.0)

    def tokens_per_s(self, peer_id: str) -> float | None:
        """Speed of a server now; None: not known yet."""
        count = self._counts.get(peer_id)
        return None if count is None or count.per_s is None else round(count.per_s, 1)

    @property
    def tokens_per_s_now(self) -> float | None:
        """Speed through all blocks now; None before two announcements."""
        known = any(count.per_s is not None for count in self._counts.values())
        return None if self._now is None or not known else round(self._now, 1)

    def as_json(self) -> list[dict[str, Any]]:
        """The minutes, oldest first. The last one isn't over: it has the speed of now."""
        shown = [
            {
                "at": int(MINUTE_S * minute.number),
                "blocks": minute.blocks,
                "tokens_per_s": round(self._through_all(minute.tokens) / MINUTE_S, 1),
                **{kind: minute.events[kind] for kind in ("joined", "left", "lost")},
            }
            for minute in self.minutes
        ]
        if shown:
            shown[-1]["tokens_per_s"] = self.tokens_per_s_now or 0.0
        return shown


def _add(by_block: dict[int, float], span: Span, amount: float) -> None:
    for block in span:
        by_block[block] = by_block.get(block, 0.0) + amount
