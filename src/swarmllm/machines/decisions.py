"""Decide which blocks this machine serves, and which servers it starts and ends. Pure: time is an argument.

Each machine looks at the records of all members every few seconds, and makes the plans of all wanted models
(`plan_models`). All machines that see the same records make the same plans, and each does its own part of them. There
is no leader and no vote. A machine's record says which blocks it has chosen. These are the present plan of the next
look, which stays unless another one is clearly better (`swarm/planning`). So a choice that was made once holds.

Machines may see different records for some seconds. `Decider` therefore follows a new plan only

    after two looks with the same result    if blocks are missing, or the command is new, or nothing is served here yet
    after `SETTLE_S` with the same result   else: the swarm works, and the move would only make it faster. The time
                                            doubles with each move of the last hour

So records that change all the time, by noise or on purpose, cause fewer and fewer moves.

A member's record may say anything. A machine that doesn't start its part of the plan, or makes no progress, is left out
of the plans for a while (`Progress`). One that reports a failure is left out for that model.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmllm.data_structures import Span
from swarmllm.machines.catalogue import NEAR
from swarmllm.machines.records import Hosted, MachineRecord, Wanted
from swarmllm.swarm.planning import Link, Machine, Plan, PlannedModel, make_plan

LOOKS = 2
"""Looks with the same result before a machine follows a plan that is needed."""
SETTLE_S = 30.0
"""Seconds with the same result before it moves only to make the swarm faster. Assumed: longer than all machines need to
see a new record."""
REMEMBERED_S = 3600.0
"""Seconds for which a move counts."""
MOST_DOUBLINGS = 7
IGNORED_S = 45.0
"""Seconds for which a machine may ignore its part of the plan while blocks are missing. Assumed."""
STUCK_S = {"waiting": 180.0, "fetching": 180.0, "loading": 1800.0}
"""Seconds without progress in each state after which a machine is left out. Assumed: to pack large blocks in few bits
takes minutes, and nothing is counted meanwhile."""
LEFT_OUT_S = 600.0
"""Seconds for which it is left out then."""
BUSY_S = 90.0
"""Seconds for which sessions of such a server may go on although its memory is needed. Assumed: a long answer."""
BYTES_PER_S, BLOCK_MS, ROUND_TRIP_MS = (1e8, 1e14), (1e-3, 1e3), (1e-3, 1e4)
"""Least and most that a record may claim. A slower machine isn't used. Assumed: the slowest memory of today reads ten
times as fast."""
QUIET_S = 6.0
"""Seconds until sessions that began before have been announced. Assumed: twice the time between two announcements of a
server of the agent, and a bit."""
IDLE_S = 60.0
"""Seconds without a session after which a server of a model that nobody wants any more ends."""


@dataclass(frozen=True, order=True)
class Target:
    """Blocks that a machine serves in one process."""

    manifest: str
    span: Span
    quant_type: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that a machine knows at one look."""

    own: str
    """Its peer id."""
    records: Mapping[str, MachineRecord]
    """Records of the members by peer id, its own included."""
    wanted: Sequence[Wanted] = ()
    sizes: Mapping[str, PlannedModel] = field(default_factory=dict)
    """Sizes of the models by manifest. Models without sizes aren't planned yet."""
    command: int = 0
    """Number of the newest command."""


def span_bytes(model: PlannedModel, quant_type: str, span: Span) -> int:
    """Memory that blocks and their caches take."""
    cache_bytes = model.cache_bytes_per_token * model.cache_tokens
    return sum(model.block_bytes[quant_type][span.start : span.end]) + len(span) * cache_bytes


# --- plans


def chosen_by(record: MachineRecord, manifest: str) -> Hosted | None:
    """The blocks of this model that a machine has chosen, there or on their way; None: none."""
    found = [one for one in record.hosted if one.manifest == manifest and one.state not in ("leaving", "failed")]
    return found[-1] if found else None


def has_failed(record: MachineRecord, manifest: str) -> bool:
    """True if the machine says that it can't serve this model."""
    return any(one.manifest == manifest and one.state == "failed" for one in record.hosted)


def present_plan(facts: Facts, wanted: Wanted, left_out: Iterable[str] = ()) -> Plan | None:
    """The plan that the machines follow now, as far as they can; None: there is none.

    Of several formats, the one of the most blocks counts.
    """
    model = facts.sizes[wanted.manifest]
    hosts: dict[str, list[tuple[str, Span]]] = {}
    for peer_id, record in sorted(facts.records.items()):
        one = chosen_by(record, wanted.manifest)
        if one is None or peer_id in left_out or one.quant_type not in _formats(model, wanted):
            continue
        if one.end > model.num_blocks or one.start >= one.end:
            continue
        span = Span(one.start, one.end)
        if span_bytes(model, one.quant_type, span) <= record.memory_bytes:
            hosts.setdefault(one.quant_type, []).append((peer_id, span))
    if not hosts:
        return None
    quant_type = max(sorted(hosts), key=lambda name: len({block for _, span in hosts[name] for block in span}))
    return Plan(quant_type, tuple(sorted(hosts[quant_type], key=lambda host: (host[1], host[0]))))


def is_covered(hosts: Iterable[tuple[str, Span]], num_blocks: int) -> bool:
    """True if these hosts hold all blocks."""
    return len({block for _, span in hosts for block in span}) == num_blocks


def plan_models(facts: Facts, left_out: Iterable[str] = ()) -> dict[str, Plan | None]:
    """Plan all wanted models; None: it doesn't fit. Models whose sizes aren't known are left out.

    Each model gets room for one way of its texts, in the order of the command. Then the models divide the rest evenly.
    """
    left_out = frozenset(left_out)
    wanted = [one for one in facts.wanted if one.manifest in facts.sizes]
    room = {peer_id: record.memory_bytes for peer_id, record in facts.records.items()}
    cores: dict[str, dict[str, int]] = {}
    first: dict[str, Plan | None] = {}
    for one in wanted:
        plan = first[one.manifest] = _plan(facts, one, room, left_out)
        cores[one.manifest] = {}
        if plan is None:
            continue
        hops = {peer_id for peer_id, _ in plan.route}
        for peer_id, span in plan.hosts:
            if peer_id in hops:
                cores[one.manifest][peer_id] = span_bytes(facts.sizes[one.manifest], plan.format, span)
                room[peer_id] -= cores[one.manifest][peer_id]
    if len(wanted) < 2:
        return first
    planned: dict[str, Plan | None] = {}
    for number, one in enumerate(wanted):
        core, sharers = cores[one.manifest], len(wanted) - number
        own = {peer_id: core.get(peer_id, 0) + room[peer_id] // sharers for peer_id in room}
        plan = planned[one.manifest] = first[one.manifest] and _plan(facts, one, own, left_out)
        if plan is None:
            continue
        for peer_id, span in plan.hosts:
            used = span_bytes(facts.sizes[one.manifest], plan.format, span)
            room[peer_id] -= max(0, used - core.get(peer_id, 0))
    return planned


def _plan(facts: Facts, wanted: Wanted, room: Mapping[str, int], left_out: frozenset[str]) -> Plan | None:
    model = facts.sizes[wanted.manifest]
    model = replace(model, block_bytes={name: model.block_bytes[name] for name in _formats(model, wanted)})
    if not model.block_bytes:
        return None
    machines = [
        machine_of(record, 0 if peer_id in left_out or has_failed(record, wanted.manifest) else room[peer_id])
        for peer_id, record in facts.records.items()
    ]
    present = present_plan(facts, wanted, left_out)
    return make_plan(machines, model, links_of(facts.records.values()), assumed_link=NEAR, present=present)


def _formats(model: PlannedModel, wanted: Wanted) -> list[str]:
    """The formats that the command allows."""
    return [name for name in model.block_bytes if wanted.quant_type in ("auto", name)]


def machine_of(record: MachineRecord, memory_bytes: int) -> Machine:
    """A machine as `swarm/planning` sees it, with this much memory. Absurd speeds are replaced by possible ones."""
    return Machine(
        peer_id=record.peer_id,
        memory_bytes=memory_bytes,
        bytes_per_s=_possible(record.bytes_per_s),
        ms_per_block=min(max(record.ms_per_block, BLOCK_MS[0]), BLOCK_MS[1]),
        format_bytes_per_s={name: _possible(speed) for name, speed in record.format_bytes_per_s},
    )


def _possible(bytes_per_s: float) -> float:
    least, most = BYTES_PER_S
    return min(bytes_per_s, most) if bytes_per_s >= least else 0.0


def links_of(records: Iterable[MachineRecord]) -> dict[tuple[str, str], Link]:
    """The network between the machines, as far as they have measured it."""
    return {
        (record.peer_id, other): Link(round_trip_ms=min(max(round_trip_ms, ROUND_TRIP_MS[0]), ROUND_TRIP_MS[1]))
        for record in records
        for other, round_trip_ms in record.round_trips
    }


# --- this machine's part


@dataclass(frozen=True)
class Decision:
    """The result of one look."""

    plans: Mapping[str, Plan | None]
    """By manifest; None: it doesn't fit."""
    targets: tuple[Target, ...]
    """Blocks that this machine should serve, in the order of the command."""


@dataclass
class _Proposal:
    target: Target | None
    since: float
    looks: int = 1


class Decider:
    """Decides for one machine. `targets`: blocks that it served before a restart."""

    def __init__(self, targets: Iterable[Target] = ()) -> None:
        self._targets: dict[str, Target] = {one.manifest: one for one in targets}
        self._commands: dict[str, int] = {}
        """Number of the command at which the target of each model was chosen."""
        self._proposals: dict[str, _Proposal] = {}
        self._command = 0
        """Number of the command of the last look."""
        self._moves: deque[float] = deque()
        self._progress = Progress()
        self._planned: tuple[Facts, frozenset[str], dict[str, Plan | None]] | None = None

    def look(self, facts: Facts, now: float) -> Decision:
        """Look at the swarm. Call it every few seconds."""
        if facts.command != self._command:  # whoever gave it may have mended a machine before
            self._command, self._progress = facts.command, Progress()
        left_out = self._progress.left_out(now)
        if self._planned is None or self._planned[:2] != (facts, left_out):
            self._planned = facts, left_out, plan_models(facts, left_out)
        plans = self._planned[2]
        self._progress.look(facts, plans, now)
        listed = {one.manifest for one in facts.wanted}
        for manifest in self._targets.keys() - listed:
            del self._targets[manifest]
        for manifest in self._proposals.keys() - listed:
            del self._proposals[manifest]
        for one in facts.wanted:
            plan = plans.get(one.manifest)
            if plan is not None:
                self._consider(facts, one, plan, left_out, now)
        order = [one.manifest for one in facts.wanted if one.manifest in self._targets]
        return Decision(plans, tuple(self._targets[manifest] for manifest in order))

    def _consider(self, facts: Facts, wanted: Wanted, plan: Plan, left_out: frozenset[str], now: float) -> None:
        manifest, span = wanted.manifest, dict(plan.hosts).get(facts.own)
        current = self._targets.get(manifest)
        target = None if span is None else Target(manifest, span, plan.format)
        if target == current:
            self._proposals.pop(manifest, None)
            self._commands[manifest] = facts.command
            return
        proposal = self._proposals.get(manifest)
        if proposal is None or proposal.target != target:
            self._proposals[manifest] = _Proposal(target, now)
            return
        proposal.looks += 1
        is_needed = (
            current is None
            or self._commands.get(manifest) != facts.command
            or not self._works(facts, wanted, plan, left_out)
        )
        if proposal.looks < LOOKS or (not is_needed and now - proposal.since < self.patience_s(now)):
            return
        del self._proposals[manifest]
        self._commands[manifest] = facts.command
        if current is not None:
            self._moves.append(now)
        if target is None:
            del self._targets[manifest]
        else:
            self._targets[manifest] = target

    @staticmethod
    def _works(facts: Facts, wanted: Wanted, plan: Plan, left_out: frozenset[str]) -> bool:
        """True if the blocks that the machines have chosen are all blocks of the model."""
        present = present_plan(facts, wanted, left_out)
        if present is None:
            return False
        able = [host for host in present.hosts if not has_failed(facts.records[host[0]], wanted.manifest)]
        return is_covered(able, facts.sizes[wanted.manifest].num_blocks)

    @property
    def is_considering(self) -> bool:
        """True if a new plan waits for the next look."""
        return any(one.looks < LOOKS for one in self._proposals.values())

    def patience_s(self, now: float) -> float:
        """Seconds for which a better plan must stay the same."""
        while self._moves and now - self._moves[0] > REMEMBERED_S:
            self._moves.popleft()
        return SETTLE_S * 2.0 ** min(len(self._moves), MOST_DOUBLINGS)


class Progress:
    """Machines that don't do their part of a plan."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[object, float]] = {}
        """(peer id, manifest) → the last sign of progress, and its time."""
        self._until: dict[str, float] = {}

    def left_out(self, now: float) -> frozenset[str]:
        """Peer ids of the machines to leave out of the plans."""
        return frozenset(peer_id for peer_id, until in self._until.items() if now < until)

    def look(self, facts: Facts, plans: Mapping[str, Plan | None], now: float) -> None:
        """Note the progress of all machines."""
        seen: dict[tuple[str, str], tuple[object, float]] = {}
        for peer_id, manifest, sign, limit_s in self._signs(facts, plans):
            before = self._seen.get((peer_id, manifest))
            since = before[1] if before is not None and before[0] == sign else now
            seen[peer_id, manifest] = sign, since
            if now - since > limit_s:
                self._until[peer_id] = now + LEFT_OUT_S
        self._seen = seen

    @staticmethod
    def _signs(facts: Facts, plans: Mapping[str, Plan | None]) -> Iterator[tuple[str, str, object, float]]:
        """(peer id, manifest, sign of progress, seconds for which it may stay the same) of machines that should be
        busy. This machine itself is not among them."""
        for wanted in facts.wanted:
            plan = plans.get(wanted.manifest)
            if plan is None:
                continue
            present = present_plan(facts, wanted)
            works = present is not None and is_covered(present.hosts, facts.sizes[wanted.manifest].num_blocks)
            for peer_id, span in plan.hosts:
                if peer_id == facts.own:
                    continue
                one = chosen_by(facts.records[peer_id], wanted.manifest)
                if one is None and not works:
                    yield peer_id, wanted.manifest, (span, plan.format), IGNORED_S
                elif one is not None and one.state in STUCK_S:
                    sign = (one.start, one.end, one.quant_type, one.state, one.done_bytes)
                    yield peer_id, wanted.manifest, sign, STUCK_S[one.state]


# --- the servers of this machine


@dataclass(frozen=True, kw_only=True)
class Child:
    """A server process of this machine, or one whose weights are on their way."""

    target: Target
    memory_bytes: int
    is_online: bool = False
    is_ending: bool = False
    idle_s: float = 0.0
    """Seconds since its last session; 0: it has sessions, or nobody knows."""
    leaving_s: float = 0.0
    """Seconds since it isn't wanted any more."""

    @property
    def is_busy(self) -> bool:
        """True if it may have a session, and these haven't had time enough."""
        return self.leaving_s < (QUIET_S if self.idle_s else BUSY_S)


@dataclass(frozen=True)
class Steps:
    """Steps to take now."""

    start: tuple[Target, ...] = ()
    end: tuple[Target, ...] = ()
    leaving: frozenset[Target] = frozenset()
    """Children that go on only until they aren't needed any more."""


def next_steps(
    targets: Mapping[Target, int],
    children: Sequence[Child],
    *,
    offered_bytes: int,
    wanted: Iterable[str],
    elsewhere: Iterable[str] = (),
) -> Steps:
    """Decide which servers to start and to end.

    A server that another one replaces ends when that one is online, if the memory is enough for both. Servers of models
    that nobody wants any more go on until they are idle. If their memory is needed, they end when they have no session
    at the moment, or at the latest after `BUSY_S`.

    Args:
        targets: wanted blocks, with the memory that they take, the most important first.
        wanted: manifests of all wanted models.
        elsewhere: those whose blocks are all served by other machines as well.
    """
    wanted, elsewhere = frozenset(wanted), frozenset(elsewhere)
    running = {child.target: child for child in children}
    online = {child.target.manifest for child in children if child.is_online and child.target in targets}
    planned = {target.manifest for target in targets}
    leaving = [child for child in children if child.target not in targets]
    end = [child for child in leaving if _is_done(child, wanted, planned, online, elsewhere)]
    start: list[Target] = []
    used_bytes = sum(child.memory_bytes for child in children)
    for target, needed_bytes in targets.items():
        if target in running:
            continue
        if used_bytes + needed_bytes <= offered_bytes:
            start.append(target)
            used_bytes += needed_bytes
            continue
        # End others until the memory is enough. It is free when they have ended, so this one starts at a later look.
        freed = sum(child.memory_bytes for child in children if child.is_ending or child in end)
        for child in sorted(leaving, key=lambda one: (one.target.manifest in wanted, -one.idle_s, one.target)):
            if used_bytes + needed_bytes - freed <= offered_bytes:
                break
            if not child.is_ending and child not in end and not (child.target.manifest not in wanted and child.is_busy):
                end.append(child)
                freed += child.memory_bytes
        break  # those behind it wait, too
    ends = tuple(child.target for child in end if not child.is_ending)
    return Steps(tuple(start), ends, frozenset(child.target for child in leaving))


def _is_done(
    child: Child, wanted: frozenset[str], planned: set[str], online: set[str], elsewhere: frozenset[str]
) -> bool:
    """True if nobody needs this server any more, which is not among the targets."""
    manifest = child.target.manifest
    if not child.is_online:
        return True  # it only loads
    if manifest not in wanted:
        return child.idle_s >= IDLE_S
    if manifest in planned:
        return manifest in online  # its successor serves
    return manifest in elsewhere
