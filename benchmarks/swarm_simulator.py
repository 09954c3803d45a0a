"""Simulate a swarm of up to thousands of servers, which decide by the same `placement` as real ones.

Used by `simulate.py` and tests. No I/O, no clock, no torch: an event queue and a seeded random generator, so the same
seed gives the same run. It simulates:

- the loop of each server that `placement` describes: a plan once per update period at a random phase, a claim, a second
  look, draining, loading. A server serves nothing while it moves;
- looks into the DHT, which show the swarm as it was some seconds ago, differently for each look. A server sees only its
  own record as it is;
- records: a leaving server withdraws its record, the record of a crashed one stays until it expires.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from swarmllm.config import BALANCE_QUALITY, RECORD_PERIODS, RENEWAL_PERIODS
from swarmllm.data_structures import ServerInfo, ServerState, Span, SwarmSnapshot
from swarmllm.swarm.placement import block_throughputs, choose_span, claim_stands, plan_move
from swarmllm.swarm.planning import Machine
from swarmllm.swarm.route_costs import HOP_COST_MS
from swarmllm.swarm.routing import find_route, route_cost_ms


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """Settings of a simulated swarm; all times in seconds."""

    num_blocks: int
    update_period_s: float = 30.0
    balance_quality: float = BALANCE_QUALITY
    view_delay_s: float = 2.0
    """A look shows the swarm as it was at most this long ago. A claim is checked after twice this time."""
    drain_s: float = 10.0
    """Assumed: seconds until a moving or leaving server has handed over its sessions."""
    load_s_per_block: float = 2.0
    """Assumed: seconds to load a block of some hundred MB from a local disk."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """The abilities of one server."""

    num_blocks: int
    throughput: float
    """Tokens per second through all of its blocks."""
    decode_ms_per_block: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Move:
    """A server began to move."""

    at_s: float
    peer_id: str
    source: Span
    target: Span


@dataclass
class _Server:
    record: ServerInfo
    load_s: float
    renewed_at_s: float
    period_starts: bool = False
    """True if its periodic decisions have begun. They begin when it is ONLINE for the first time."""


@dataclass
class SwarmSimulator:
    """A swarm in simulated time. `join`, `leave` and `crash` happen now or later; `run_until` lets time pass."""

    settings: SimulationSettings
    now_s: float = 0.0
    moves: list[Move] = field(default_factory=list)
    num_plans: int = 0
    """Decisions of servers, with or without a move."""
    num_withdrawn_claims: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.settings.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._servers: dict[str, _Server] = {}
        self._records: dict[str, ServerInfo] = {}
        self._views: deque[tuple[float, tuple[ServerInfo, ...]]] = deque([(0.0, ())])
        self._num_joined = 0

    # --- events from outside

    def join(self, spec: ServerSpec, *, at_s: float | None = None, span: Span | None = None) -> str:
        """Let a server join with `span`, or with the best blocks; return its peer id."""
        peer_id = f"{self._random.getrandbits(64):016x}-{self._num_joined:031d}"
        self._num_joined += 1
        self._at(at_s, partial(self._join, peer_id, spec, span))
        return peer_id

    def leave(self, peer_id: str, *, at_s: float | None = None) -> None:
        """Let a server drain and withdraw its record."""
        self._at(at_s, partial(self._leave, peer_id))

    def crash(self, peer_id: str, *, at_s: float | None = None) -> None:
        """Let a server vanish at once. Its record stays until it expires."""
        self._at(at_s, partial(self._crash, peer_id))

    def churn(self, specs: Iterable[ServerSpec], *, for_s: float, crash_share: float = 0.5) -> None:
        """Let one server join for each of `specs`, and a random one crash or leave, spread evenly over `for_s`."""
        for spec in specs:
            self.join(spec, at_s=self.now_s + self._random.uniform(0, for_s))
            crashes = self._random.random() < crash_share
            self._at(self.now_s + self._random.uniform(0, for_s), partial(self._lose_one, crashes))

    # --- time

    def run_until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = time_s

    def run_until_served(self, *, give_up_at_s: float) -> float | None:
        """Run until every block has an ONLINE server. Returns that time, or None if it didn't come."""
        while self.snapshot().missing_blocks():
            if not self._events or self._events[0][0] > give_up_at_s:
                return None
            self.run_until(self._events[0][0])
        return self.now_s

    # --- results

    def snapshot(self) -> SwarmSnapshot:
        """The present swarm, without crashed servers."""
        return SwarmSnapshot(
            num_blocks=self.settings.num_blocks,
            servers=tuple(server.record for server in self._servers.values()),
            taken_at=self.now_s,
        )

    def bottleneck(self) -> float:
        """Tokens per second of the worst served block, counting ONLINE servers."""
        online = tuple(record.model_copy(update={"claim": None}) for record in self.snapshot().online())
        return min(block_throughputs(SwarmSnapshot(num_blocks=self.settings.num_blocks, servers=online)))

    def quality(self) -> float:
        """The bottleneck as a share of its upper bound, 0 to 1."""
        bound = bottleneck_bound(self.snapshot())
        return self.bottleneck() / bound if bound else 0.0

    def moves_since(self, time_s: float) -> int:
        return sum(move.at_s >= time_s for move in self.moves)

    # --- events

    def _at(self, time_s: float | None, event: Callable[[], None]) -> None:
        """Let an event happen at a time; None = now."""
        if time_s is None:
            event()
            return
        heapq.heappush(self._events, (time_s, self._num_events, event))
        self._num_events += 1

    def _join(self, peer_id: str, spec: ServerSpec, span: Span | None) -> None:
        span = span or choose_span(self._look(), spec.num_blocks)
        record = ServerInfo(
            peer_id=peer_id,
            start=span.start,
            end=span.end,
            state=ServerState.JOINING,
            throughput=spec.throughput,
            decode_ms_per_block=spec.decode_ms_per_block,
        )
        load_s = self.settings.load_s_per_block * len(span)
        self._servers[peer_id] = _Server(record=record, load_s=load_s, renewed_at_s=self.now_s)
        self._announce(peer_id)
        self._at(self.now_s + load_s, partial(self._loaded, peer_id))

    def _loaded(self, peer_id: str) -> None:
        if not self._announce(peer_id, state=ServerState.ONLINE) or self._servers[peer_id].period_starts:
            return
        self._servers[peer_id].period_starts = True
        phase_s = self._random.uniform(0, self.settings.update_period_s)
        self._at(self.now_s + phase_s, partial(self._update, peer_id))

    def _update(self, peer_id: str) -> None:
        server = self._servers.get(peer_id)
        if server is None:
            return
        self._at(self.now_s + self.settings.update_period_s, partial(self._update, peer_id))
        if server.record.state != ServerState.ONLINE or server.record.claim is not None:
            return
        self.num_plans += 1
        target = plan_move(self._look(server.record), peer_id, balance_quality=self.settings.balance_quality)
        if target is not None:
            self._announce(peer_id, claim=(target.start, target.end))
            self._at(self.now_s + 2 * self.settings.view_delay_s, partial(self._check_claim, peer_id))

    def _check_claim(self, peer_id: str) -> None:
        server = self._servers.get(peer_id)
        if server is None or server.record.claim is None or server.record.state != ServerState.ONLINE:
            return
        if not claim_stands(self._look(server.record), peer_id, balance_quality=self.settings.balance_quality):
            self.num_withdrawn_claims += 1
            self._announce(peer_id, claim=None)
            return
        target = Span(*server.record.claim)
        self.moves.append(Move(at_s=self.now_s, peer_id=peer_id, source=server.record.span, target=target))
        self._announce(peer_id, state=ServerState.LEAVING)
        self._at(self.now_s + self.settings.drain_s, partial(self._drained, peer_id))

    def _drained(self, peer_id: str) -> None:
        server = self._servers.get(peer_id)
        if server is None or server.record.claim is None:
            return
        start, end = server.record.claim
        self._announce(peer_id, state=ServerState.JOINING, start=start, end=end, claim=None)
        self._at(self.now_s + server.load_s, partial(self._loaded, peer_id))

    def _leave(self, peer_id: str) -> None:
        if self._announce(peer_id, state=ServerState.LEAVING, claim=None):
            del self._servers[peer_id]
            self._at(self.now_s + self.settings.drain_s, partial(self._forget, peer_id))

    def _crash(self, peer_id: str) -> None:
        server = self._servers.pop(peer_id, None)
        if server is not None:
            period_s = self.settings.update_period_s
            since_renewal_s = (self.now_s - server.renewed_at_s) % (RENEWAL_PERIODS * period_s)
            self._at(self.now_s - since_renewal_s + RECORD_PERIODS * period_s, partial(self._forget, peer_id))

    def _lose_one(self, crashes: bool) -> None:
        if self._servers:
            peer_id = self._random.choice(list(self._servers))
            (self._crash if crashes else self._leave)(peer_id)

    # --- the DHT

    def _announce(self, peer_id: str, **changes: object) -> bool:
        """False if the server is gone."""
        server = self._servers.get(peer_id)
        if server is None:
            return False
        server.record = server.record.model_copy(update=changes)
        server.renewed_at_s = self.now_s
        self._records[peer_id] = server.record
        self._publish()
        return True

    def _forget(self, peer_id: str) -> None:
        if self._records.pop(peer_id, None) is not None:
            self._publish()

    def _publish(self) -> None:
        self._views.append((self.now_s, tuple(self._records.values())))
        while len(self._views) > 1 and self._views[1][0] < self.now_s - self.settings.view_delay_s:
            self._views.popleft()

    def _look(self, own: ServerInfo | None = None) -> SwarmSnapshot:
        """The swarm as a look shows it: everything as it was a while ago, and `own` as it is."""
        seen_s = self.now_s - self._random.uniform(0, self.settings.view_delay_s)
        servers = next((view for time_s, view in reversed(self._views) if time_s <= seen_s), self._views[0][1])
        if own is not None:
            servers = (*(server for server in servers if server.peer_id != own.peer_id), own)
        return SwarmSnapshot(num_blocks=self.settings.num_blocks, servers=servers, taken_at=seen_s)


def bottleneck_bound(snapshot: SwarmSnapshot) -> float:
    """The upper bound for any placement of these servers: all blocks served alike, each server fully used.

    The sum of throughput × blocks over all servers, divided by the blocks of the model. It is not always reachable,
    because servers can't be cut into pieces to fit together.
    """
    return sum(server.throughput * len(server.span) for server in snapshot.servers) / snapshot.num_blocks


def route_cost_bound(snapshot: SwarmSnapshot) -> float:
    """Milliseconds per token that no route through these servers can undercut, wherever they are placed.

    Adds up the cheapest blocks, hops included, server by server, as if any number of them fitted together.
    """
    per_block = sorted((HOP_COST_MS / len(s.span) + s.decode_ms_per_block, len(s.span)) for s in snapshot.online())
    cost_ms, left = 0.0, snapshot.num_blocks
    for block_ms, num_blocks in per_block:
        taken = min(left, num_blocks)
        cost_ms += block_ms * taken
        left -= taken
    return cost_ms


def route_cost_ratio(snapshot: SwarmSnapshot) -> float:
    """Cost of the best route relative to `route_cost_bound`; 1 is the optimum.

    Raises:
        MissingBlocksError: some blocks have no server.
    """
    return route_cost_ms(find_route(snapshot)) / route_cost_bound(snapshot)


def mixed_servers(count: int, *, max_blocks: int, seed: int) -> list[ServerSpec]:
    """Servers from small to large and slow to fast: memory for 2 to 24 blocks, speeds ten times apart, and some noise.

    Assumed: consumer cards to data centre ones, each serving as many blocks as fit.
    """
    rng = random.Random(seed)
    specs = []
    for _ in range(count):
        num_blocks = min(max_blocks, rng.choice((2, 3, 4, 6, 8, 12, 16, 24)))
        block_tokens_per_s = rng.choice((300.0, 800.0, 1500.0, 3000.0)) * rng.lognormvariate(0.0, 0.3)
        specs.append(
            ServerSpec(
                num_blocks=num_blocks,
                throughput=block_tokens_per_s / num_blocks,
                decode_ms_per_block=3000.0 / block_tokens_per_s,
            )
        )
    return specs


def planned_machines(specs: Sequence[ServerSpec], block_bytes: int, *, seed: int) -> list[Machine]:
    """The same servers as machines of a plan, for blocks of this size."""
    rng = random.Random(seed)
    return [
        Machine(
            peer_id=f"{rng.getrandbits(64):016x}-{index:031d}",
            memory_bytes=math.ceil(spec.num_blocks * block_bytes * 1.02),  # memory is rounded down by 1.6 % at most
            bytes_per_s=block_bytes * 1e3 / spec.decode_ms_per_block,
            block_tokens_per_s=spec.throughput * spec.num_blocks,
        )
        for index, spec in enumerate(specs)
    ]


def planned_bound(machines: Sequence[Machine], num_blocks: int) -> float:
    """`bottleneck_bound` of machines that aren't placed yet."""
    return sum(machine.block_tokens_per_s for machine in machines) / num_blocks


def grown_swarm(settings: SimulationSettings, specs: Sequence[ServerSpec], *, over_s: float) -> SwarmSimulator:
    """Make a swarm whose servers join at random times within `over_s`, and run it until all have settled.

    Settled: no server began to move for three update periods. Gives up after 60.
    """
    simulator = SwarmSimulator(settings)
    rng = random.Random(settings.seed)
    for spec in specs:
        simulator.join(spec, at_s=rng.uniform(0.0, over_s))
    simulator.run_until(over_s)
    settle(simulator)
    return simulator


def settle(simulator: SwarmSimulator, *, quiet_periods: int = 3, max_periods: int = 60) -> bool:
    """Run until no server has begun to move for `quiet_periods` update periods and all are ONLINE. False if never."""
    period_s = simulator.settings.update_period_s
    for _ in range(max_periods):
        simulator.run_until(simulator.now_s + period_s)
        servers = simulator.snapshot().servers
        steady = all(server.state == ServerState.ONLINE and server.claim is None for server in servers)
        if steady and not simulator.moves_since(simulator.now_s - quiet_periods * period_s):
            return True
    return False
