"""A swarm of machines without processes: each decides by what it sees, a little late, and its servers start later.

Used by tests of `machines/decisions`. Time is a number. Each machine looks every `LOOK_S` at its own moment, and sees
records that are up to `lag_s` old.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmllm.data_structures import Span
from swarmllm.machines.decisions import Child, Decider, Facts, Target, next_steps, span_bytes
from swarmllm.machines.records import Hosted, MachineRecord, Wanted
from swarmllm.swarm.planning import PlannedModel

LOOK_S = 2.0
START_S = 5.0
MIB = 1 << 20
MODEL = PlannedModel(
    block_bytes={"int8": [8 * MIB] * 8, "q4_k": [4 * MIB] * 8}, cache_bytes_per_token=16, cache_tokens=8192
)


def manifest(name: str) -> str:
    return name.ljust(64, "0").replace("z", "0")


def wanted(*names: str) -> tuple[Wanted, ...]:
    return tuple(Wanted(name=name, manifest=manifest(name)) for name in names)


def record(name: str, mib: int, *, gb_per_s: float = 1.0, hosted: tuple[Hosted, ...] = ()) -> MachineRecord:
    speed = gb_per_s * 1e9
    return MachineRecord(
        peer_id=name.ljust(46, "-"),
        member="0" * 128,
        name=name,
        memory_bytes=mib * MIB,
        bytes_per_s=speed,
        hosted=hosted,
    )


@dataclass
class SimulatedMachine:
    """One machine. `lies` changes its record before others see it."""

    name: str
    mib: int
    gb_per_s: float = 1.0
    lies: Callable[[MachineRecord, float], MachineRecord] | None = None
    decider: Decider = field(default_factory=Decider)
    servers: dict[Target, float] = field(default_factory=dict)
    """Servers with the moment from which each is online."""
    targets: tuple[Target, ...] = ()
    moves: list[float] = field(default_factory=list)
    """Moments at which a server was started."""
    is_dead: bool = False

    @property
    def peer_id(self) -> str:
        return self.name.ljust(46, "-")

    def record(self, now: float) -> MachineRecord:
        hosted = []
        for target, online_at in self.servers.items():
            state = "leaving" if target not in self.targets else "online" if now >= online_at else "loading"
            hosted.append(as_hosted(target, state))
        hosted += [as_hosted(one, "waiting") for one in self.targets if one not in self.servers]
        honest = record(self.name, self.mib, gb_per_s=self.gb_per_s, hosted=tuple(hosted))
        return honest if self.lies is None else self.lies(honest, now)

    def look(self, facts: Facts, now: float) -> None:
        self.targets = self.decider.look(facts, now).targets
        children = [
            Child(target=one, memory_bytes=memory(facts, one), is_online=now >= online_at, idle_s=1e9, leaving_s=1e9)
            for one, online_at in self.servers.items()
        ]
        targets = {one: memory(facts, one) for one in self.targets}
        covered = [one.manifest for one in facts.wanted if self._is_covered(facts, one.manifest)]
        steps = next_steps(
            targets,
            children,
            offered_bytes=self.mib * MIB,
            wanted=[one.manifest for one in facts.wanted],
            elsewhere=covered,
        )
        for one in steps.end:
            del self.servers[one]
        for one in steps.start:
            self.servers[one] = now + START_S
            self.moves.append(now)

    def _is_covered(self, facts: Facts, name: str) -> bool:
        blocks = {
            block
            for peer_id, one in facts.records.items()
            if peer_id != self.peer_id
            for hosted in one.hosted
            if hosted.manifest == name and hosted.state == "online"
            for block in range(hosted.start, hosted.end)
        }
        return len(blocks) == MODEL.num_blocks


def as_hosted(target: Target, state: str) -> Hosted:
    return Hosted(
        manifest=target.manifest, start=target.span.start, end=target.span.end, quant_type=target.quant_type,
        state=state,  # type: ignore[arg-type]
    )  # fmt: skip


def memory(facts: Facts, target: Target) -> int:
    return span_bytes(facts.sizes.get(target.manifest, MODEL), target.quant_type, target.span)


class SimulatedSwarm:
    """Machines that look in turns, in an order and with delays that `seed` decides."""

    def __init__(self, machines: list[SimulatedMachine], names: tuple[str, ...], *, seed: int = 0, lag_s: float = 3.0):
        self.machines, self.wanted, self.lag_s = machines, wanted(*names), lag_s
        self.command, self.now = 1, 0.0
        self._random = random.Random(seed)
        self._published: dict[str, list[tuple[float, MachineRecord]]] = {}
        self._next_look = {one.name: self._random.uniform(0, LOOK_S) for one in machines}

    def use(self, *names: str) -> None:
        """Give a command."""
        self.wanted, self.command = wanted(*names), self.command + 1

    def add(self, machine: SimulatedMachine) -> None:
        self.machines.append(machine)
        self._next_look[machine.name] = self.now

    def kill(self, machine: SimulatedMachine) -> None:
        machine.is_dead = True
        self._published.pop(machine.peer_id, None)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while True:
            alive = [one for one in self.machines if not one.is_dead]
            machine = min(alive, key=lambda one: self._next_look[one.name])
            if self._next_look[machine.name] > end:
                break
            self.now = self._next_look[machine.name]
            self._next_look[machine.name] += LOOK_S * self._random.uniform(0.9, 1.1)
            machine.look(self._facts(machine), self.now)
            history = self._published.setdefault(machine.peer_id, [])
            history.append((self.now, machine.record(self.now)))
            del history[:-8]
        self.now = end

    def _facts(self, machine: SimulatedMachine) -> Facts:
        records = {machine.peer_id: machine.record(self.now)}
        for peer_id, history in self._published.items():
            age_s = self._random.uniform(0, self.lag_s)
            seen = [one for at, one in history if at <= self.now - age_s]
            if peer_id != machine.peer_id and seen:
                records[peer_id] = seen[-1]
        sizes = {one.manifest: MODEL for one in self.wanted}
        return Facts(own=machine.peer_id, records=records, wanted=self.wanted, sizes=sizes, command=self.command)

    def served(self, name: str) -> set[int]:
        """Blocks of a model that honest machines serve now, all in one format."""
        by_format: dict[str, set[int]] = {}
        for machine in self.machines:
            for target, online_at in machine.servers.items():
                if target.manifest == manifest(name) and online_at <= self.now and not machine.is_dead:
                    by_format.setdefault(target.quant_type, set()).update(target.span)
        return max(by_format.values(), key=len, default=set())

    @property
    def num_moves(self) -> int:
        """Servers that honest machines have started."""
        return sum(len(one.moves) for one in self.machines if one.lies is None)


ALL = set(Span(0, MODEL.num_blocks))
