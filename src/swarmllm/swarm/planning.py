"""A plan for a swarm: the blocks of each machine, their format, and the expected speed. Pure.

Used by `swarmllm models` and by machines of `swarmllm up`. All machines that see the same facts make the same plan: the
order of inputs doesn't matter, inputs are rounded, and ties are broken by peer id. Two machines may still round a noisy
speed differently, if it is between two steps. So the present plan stays unless another one is clearly better.

How a plan is made:

1. A format and a chain for one text (`_choose_chain`). Options in the order of preference: one machine, in each format
   that fits, the most precise first; then several machines, in each format. A later option wins only if it is
   `WORTH_IT` times as fast. So one machine is enough unless more are clearly faster, or none holds the model.
2. All other machines keep the blocks of the present plan. Machines without blocks hold as many as fit, where the swarm
   is weakest (`placement.weakest_window`).
3. If the swarm is out of balance, single machines move, as `placement.plan_move` says.

The chain of step 1 replaces a present plan only if the swarm gets clearly faster, and soon makes up for the time of
loading. Otherwise all machines keep their blocks, and missing blocks go to the machines that load the fewest bytes.

Speeds are those of `swarm/routing` and `swarm/placement` for servers at these blocks. The client is on the machine of
the first blocks.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from swarmllm.data_structures import MAX_ROUND_TRIPS, BlockTraits, ServerInfo, Span, SwarmSnapshot
from swarmllm.swarm.placement import block_throughputs, plan_move, weakest_window
from swarmllm.swarm.route_costs import HOP_COST_MS, RouteCosts
from swarmllm.swarm.routing import find_route, route_cost_ms

WORTH_IT = 2.0
"""An option must be this many times as fast to be chosen in place of one that comes before it: a chain in place of one
machine, or fewer bits in place of more. Assumed: 4 bits in place of 8 are 1.9 times as fast, which isn't enough."""
MIN_GAIN = 1.25
"""A new plan must be this many times as fast to replace a present one. Assumed, as `min_gain_to_move` of sessions."""
HORIZON_S = 3600.0
"""Seconds for which a plan is made: within these, it must save more time than its loading takes. Assumed."""
LOAD_BYTES_PER_S = 100e6
"""Bytes of blocks that a machine loads in a second. Assumed: a disk, or a network of 1 Gbit/s."""
SPEED_STEPS = 8
"""Speeds and round trips are rounded to so many steps in each doubling: by 4.4 % at most."""
MEMORY_BITS = 7
"""Leading bits of the offered memory that count: at most 1.6 % are left unused."""
BEAM_WIDTH = 64
"""Beginnings of a chain that are continued at each block. Measured with 4 machines: no faster chain was missed
(tests/properties/test_planning.py)."""
NUM_REFINED = 16
"""Complete chains whose borders are moved."""
NUM_SEEDS = 4
"""Machines around which a chain is searched, if there are more than `NUM_CANDIDATES`."""
NUM_CANDIDATES = 12
"""A chain is searched among this many machines more than it needs."""
NUM_CLIENTS = 8
"""Machines with the first block that are tried as the place of the client; the fastest ones."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, or one device of a machine with several: their links have a round trip of 0."""

    peer_id: str
    memory_bytes: int
    """Memory offered for blocks and caches."""
    bytes_per_s: float
    """Bytes of weights that a decode step of one text reads in a second."""
    ms_per_block: float = 0.0
    """Milliseconds that a step takes in each block besides reading its weights."""
    block_tokens_per_s: float = 0.0
    """Tokens × blocks that many texts together compute in a second; 0 = not known, as fast as one text."""
    format_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """`bytes_per_s` of weights in these formats, where it was measured."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network between two machines."""

    round_trip_ms: float
    bytes_per_s: float = math.inf

    def way_ms(self, num_bytes: int) -> float:
        """Milliseconds of one way for a message of this size."""
        return self.round_trip_ms / 2 + 1e3 * num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The sizes of a model."""

    block_bytes: Mapping[str, Sequence[int]]
    """Bytes of each block, by format. The formats are in the order of preference, the most precise first."""
    cache_bytes_per_token: int = 0
    """Bytes of one token in the KV cache of one block."""
    cache_tokens: int = 0
    """Tokens for which each block gets a cache."""
    read_share: float = 1.0
    """Share of the blocks' bytes that a token reads: less than 1 for a mixture of experts."""
    hidden_bytes: int = 0
    """Bytes of one token's hidden states, which pass from machine to machine."""
    head_bytes: int = 0
    """Bytes of the head, which the client reads for each token."""
    forbidden_cuts: frozenset[int] = frozenset()
    """Blocks before which the model can't be cut."""

    @property
    def num_blocks(self) -> int:
        return len(next(iter(self.block_bytes.values())))

    def needed_bytes(self, name: str) -> int:
        """Memory that all blocks and their caches take in this format."""
        return sum(self.block_bytes[name]) + self.num_blocks * self.cache_bytes_per_token * self.cache_tokens


@dataclass(frozen=True)
class Plan:
    """The blocks of each machine."""

    format: str
    hosts: tuple[tuple[str, Span], ...]
    """(peer id, blocks), in the order of the blocks."""
    one_tokens_per_s: float = field(default=0.0, compare=False)
    """Expected tokens per second of one text."""
    all_tokens_per_s: float = field(default=0.0, compare=False)
    """Expected tokens per second of many texts together."""
    route: tuple[tuple[str, Span], ...] = field(default=(), compare=False)
    """(peer id, blocks) of the fastest way of one text."""


@dataclass(frozen=True)
class _Task:
    """Rounded machines, ordered by peer id, and the sizes of the model in one format. Machines are indices here."""

    machines: tuple[Machine, ...]
    model: PlannedModel
    format: str
    way_ms: Floats
    """Milliseconds from machine to machine."""

    @cached_property
    def weights(self) -> list[int]:
        """Bytes of all blocks before each one."""
        return [0, *accumulate(self.model.block_bytes[self.format])]

    @cached_property
    def needs(self) -> list[int]:
        """The same with caches."""
        cache_bytes = self.model.cache_bytes_per_token * self.model.cache_tokens
        return [total + block * cache_bytes for block, total in enumerate(self.weights)]

    @cached_property
    def ends(self) -> list[list[int]]:
        """For each machine and first block, the end of the longest span that fits; the first block: nothing fits."""
        return [
            [self._end(machine.memory_bytes, start) for start in range(self.model.num_blocks)]
            for machine in self.machines
        ]

    def _end(self, memory_bytes: int, start: int) -> int:
        if start in self.model.forbidden_cuts:
            return start
        end = bisect_right(self.needs, self.needs[start] + memory_bytes) - 1
        while end > start and end in self.model.forbidden_cuts:
            end -= 1
        return end

    def start_before(self, index: int, end: int) -> int:
        """The first block of the longest span up to `end` that fits on the machine; `end` if nothing fits."""
        return next((start for start in range(end) if self.ends[index][start] >= end), end)

    def holds(self, index: int, span: Span) -> bool:
        """True if the machine can hold these blocks, and isn't paused."""
        inside = span.end <= self.model.num_blocks and span.end not in self.model.forbidden_cuts
        return inside and span.end <= self.ends[index][span.start] and self.is_usable(index)

    def is_usable(self, index: int) -> bool:
        return self.bytes_per_s(index) > 0 and self.most_blocks(index) > 0

    def most_blocks(self, index: int) -> int:
        return max(end - start for start, end in enumerate(self.ends[index]))

    def compute_ms(self, index: int, start: int, end: int) -> float:
        read = self.model.read_share * (self.weights[end] - self.weights[start])
        return 1e3 * read / self.bytes_per_s(index) + self.machines[index].ms_per_block * (end - start)

    def bytes_per_s(self, index: int) -> float:
        machine = self.machines[index]
        return machine.format_bytes_per_s.get(self.format, machine.bytes_per_s)

    def head_ms(self, index: int) -> float:
        return 1e3 * self.model.head_bytes / self.bytes_per_s(index)

    def throughput(self, index: int, span: Span) -> float:
        """Tokens per second of many texts through the span, if the machine does nothing else."""
        known = self.machines[index].block_tokens_per_s
        return known / len(span) if known else 1e3 / self.compute_ms(index, span.start, span.end)


Hosts = dict[int, Span]
Chain = tuple[tuple[int, int, int], ...]
"""(machine, first block, end) of each hop."""


def make_plan(
    machines: Sequence[Machine],
    model: PlannedModel,
    links: Mapping[tuple[str, str], Link] | None = None,
    *,
    assumed_link: Link,
    present: Plan | None = None,
) -> Plan | None:
    """Plan the blocks of all machines; None: the model doesn't fit.

    Args:
        links: by pairs of peer ids. One direction is enough; of two, the slower one counts.
        assumed_link: between machines that `links` doesn't name.
        present: the plan that the machines follow now.
    """
    machines = tuple(_rounded(machine) for machine in sorted(machines, key=lambda machine: machine.peer_id))
    way_ms = _ways(machines, model, links or {}, assumed_link)
    tasks = [_Task(machines, model, name, way_ms) for name in model.block_bytes]
    kept = renewed = None
    if (chosen := _choose_chain(tasks)) is not None:
        task, chain = chosen
        chained = {index: Span(start, end) for index, start, end in chain}
        renewed = _finished(task, _held(task, present) | chained)
    for task in tasks:
        if present is not None and present.format == task.format:
            mended = _mended(task, _held(task, present))
            kept = None if mended is None else _finished(task, mended)
    if present is None or kept is None or renewed is None:
        return kept or renewed
    return renewed if _is_worth_moving(model, present, kept, renewed) else kept


def missing_bytes(machines: Sequence[Machine], model: PlannedModel) -> int:
    """Memory that is missing for all blocks in the last format, the one of fewest bits; 0: nothing is missing.

    Counts whole blocks only: what is left of a machine's memory is too little for one more.
    """
    task = _Task(tuple(map(_rounded, machines)), model, list(model.block_bytes)[-1], np.zeros((0, 0)))
    left = model.num_blocks - sum(task.most_blocks(index) for index in range(len(machines)))
    return max(0, left) * math.ceil(model.needed_bytes(task.format) / model.num_blocks)


def loaded_bytes(present: Plan | None, plan: Plan, model: PlannedModel) -> dict[str, int]:
    """Bytes of blocks that each machine, by its peer id, loads to follow `plan` after `present`."""
    before = dict(present.hosts) if present is not None and present.format == plan.format else {}
    sizes = model.block_bytes[plan.format]
    return {peer_id: _loaded_bytes(sizes, before.get(peer_id), span) for peer_id, span in plan.hosts}


def _loaded_bytes(sizes: Sequence[int], before: Span | None, span: Span) -> int:
    return sum(sizes[block] for block in span if before is None or block not in before)


# --- rounding


def _rounded(machine: Machine) -> Machine:
    memory_bytes = max(0, machine.memory_bytes)
    unit = 1 << max(0, memory_bytes.bit_length() - MEMORY_BITS)
    return replace(
        machine,
        memory_bytes=memory_bytes // unit * unit,
        bytes_per_s=_in_steps(machine.bytes_per_s),
        ms_per_block=_in_steps(machine.ms_per_block),
        block_tokens_per_s=_in_steps(machine.block_tokens_per_s),
        format_bytes_per_s={name: _in_steps(speed) for name, speed in machine.format_bytes_per_s.items()},
    )


def _in_steps(value: float) -> float:
    """The nearest power of 2^(1 / SPEED_STEPS). A number that isn't positive becomes 0; infinity stays."""
    return 2.0 ** (round(math.log2(value) * SPEED_STEPS) / SPEED_STEPS) if 0 < value < math.inf else max(0.0, value)


def _ways(
    machines: Sequence[Machine], model: PlannedModel, links: Mapping[tuple[str, str], Link], assumed: Link
) -> Floats:
    index_of = {machine.peer_id: index for index, machine in enumerate(machines)}
    ways = np.full((len(machines), len(machines)), _in_steps(assumed.way_ms(model.hidden_bytes)))
    known: dict[tuple[int, int], float] = {}
    for (one, other), link in links.items():
        if one in index_of and other in index_of:
            pair = min(index_of[one], index_of[other]), max(index_of[one], index_of[other])
            known[pair] = max(known.get(pair, 0.0), _in_steps(link.way_ms(model.hidden_bytes)))
    for (first, second), way_ms in known.items():
        ways[first, second] = ways[second, first] = way_ms
    np.fill_diagonal(ways, 0.0)
    return ways


# --- step 1: a chain


def _choose_chain(tasks: Sequence[_Task]) -> tuple[_Task, Chain] | None:
    """The best option of step 1, where one machine is a chain of one hop; None: the model doesn't fit."""
    best: tuple[float, _Task, Chain] | None = None
    for search in (_best_alone, _best_chain):
        for task in tasks:
            limit_ms = best[0] / WORTH_IT if best is not None else math.inf
            found = search(task, limit_ms)
            if found is not None and found[0] < limit_ms:
                best = (found[0], task, found[1])
    return None if best is None else best[1:]


def _best_alone(task: _Task, limit_ms: float) -> tuple[float, Chain] | None:
    """The fastest machine that holds all blocks, and its time for a token."""
    num_blocks = task.model.num_blocks
    usable = (index for index, ends in enumerate(task.ends) if ends[0] == num_blocks and task.is_usable(index))
    times = [(HOP_COST_MS + task.head_ms(index) + task.compute_ms(index, 0, num_blocks), index) for index in usable]
    return min(((ms, ((index, 0, num_blocks),)) for ms, index in times), default=None)


def _best_chain(task: _Task, limit_ms: float) -> tuple[float, Chain] | None:
    """The fastest chain of several machines that was found, and its time for a token."""
    usable = [index for index in range(len(task.machines)) if task.is_usable(index)]
    if min((task.compute_ms(index, 0, task.model.num_blocks) for index in usable), default=math.inf) > limit_ms:
        return None  # not even the fastest machine would be fast enough
    found = [one for candidates in _candidates(task) for one in _search_chains(task, candidates)]
    return min(found, default=None)


def _candidates(task: _Task) -> Iterator[list[int]]:
    """Sets of machines that may form a chain: all, or the fastest and nearest ones around some seeds."""
    usable = [index for index in range(len(task.machines)) if task.is_usable(index)]
    if len(usable) <= NUM_CANDIDATES:
        yield usable
        return
    rooms = np.array([task.most_blocks(index) for index in usable])
    ms_per_block = np.array([task.compute_ms(i, 0, task.model.num_blocks) for i in usable]) / task.model.num_blocks
    # Time per block of each machine (column) in a chain around each seed (row), if it is as full as it can be.
    scores = ms_per_block + (HOP_COST_MS + task.way_ms[np.ix_(usable, usable)]) / rooms
    order = np.argsort(scores, axis=1, kind="stable")
    ordered_rooms = rooms[order]
    before = np.cumsum(ordered_rooms, axis=1) - ordered_rooms
    taken = np.clip(task.model.num_blocks - before, 0, ordered_rooms)
    estimates = (taken * np.take_along_axis(scores, order, axis=1)).sum(axis=1)
    counts = (taken > 0).sum(axis=1)
    for seed in np.argsort(estimates, kind="stable")[:NUM_SEEDS]:
        yield sorted(usable[place] for place in order[seed, : counts[seed] + NUM_CANDIDATES])


def _search_chains(task: _Task, candidates: Sequence[int]) -> list[tuple[float, Chain]]:
    """The fastest chain through these machines, found block by block; empty: there is none.

    First every machine takes as many blocks as fit, and the last one takes the rest. Then the borders are moved: slow
    machines get fewer blocks, and fast ones more.
    """
    num_blocks = task.model.num_blocks
    labels: list[dict[tuple[int, int, int], tuple[float, Chain]]] = [{} for _ in range(num_blocks + 1)]
    for place, index in enumerate(candidates):
        if (end := task.ends[index][0]) > 0:
            ms = task.head_ms(index) + HOP_COST_MS + task.compute_ms(index, 0, end)
            labels[end][index, index, 1 << place] = (ms, ((index, 0, end),))
    for start in range(1, num_blocks):
        for (first, last, used), (ms, chain) in sorted(labels[start].items(), key=lambda item: item[1])[:BEAM_WIDTH]:
            for place, index in enumerate(candidates):
                end = task.ends[index][start]
                if used >> place & 1 or end == start:
                    continue
                arrival_ms = ms + task.way_ms[last, index] + HOP_COST_MS + task.compute_ms(index, start, end)
                key, label = (first, index, used | 1 << place), (float(arrival_ms), (*chain, (index, start, end)))
                labels[end][key] = min(label, labels[end].get(key, label))
    complete = [
        (ms + float(task.way_ms[last, first]), chain)
        for (first, last, _), (ms, chain) in labels[num_blocks].items()
        if len(chain) > 1
    ]
    refined = [_with_best_borders(task, [hop[0] for hop in chain]) for _, chain in sorted(complete)[:NUM_REFINED]]
    return [min(refined)] if refined else []


def _with_best_borders(task: _Task, order: Sequence[int]) -> tuple[float, Chain]:
    """The fastest way to divide the blocks between these machines in this order, each with one block at least."""
    num_blocks, cuts = task.model.num_blocks, task.model.forbidden_cuts
    best: dict[int, tuple[float, Chain]] = {0: (0.0, ())}
    for index in order:
        longer: dict[int, tuple[float, Chain]] = {}
        for start, (ms, chain) in best.items():
            for end in range(start + 1, task.ends[index][start] + 1 if start < num_blocks else 0):
                if end not in cuts:
                    label = (ms + task.compute_ms(index, start, end), (*chain, (index, start, end)))
                    longer[end] = min(label, longer.get(end, label))
        best = longer
    network_ms = sum(float(task.way_ms[pair]) for pair in zip(order, [*order[1:], order[0]], strict=True))
    ms, chain = best[num_blocks]
    return ms + task.head_ms(order[0]) + HOP_COST_MS * len(order) + network_ms, chain


# --- steps 2 and 3: the other machines, and the present plan


def _finished(task: _Task, hosts: Hosts) -> Plan:
    """The plan of these hosts and of all other machines, which are placed where the swarm is weakest, in balance."""
    totals = [0.0] * task.model.num_blocks
    for index, span in hosts.items():
        for block in span:
            totals[block] += task.throughput(index, span)
    others = [index for index in range(len(task.machines)) if index not in hosts and task.is_usable(index)]
    hosts = dict(hosts)
    for index in sorted(others, key=lambda index: (-task.most_blocks(index), -task.bytes_per_s(index), index)):
        spans = [
            span
            for start, end in enumerate(task.ends[index])
            if end > start and (start == 0 or task.ends[index][start - 1] < end)
            for span in [Span(start, end)]
        ]
        hosts[index] = weakest_window(totals, spans)
        for block in hosts[index]:
            totals[block] += task.throughput(index, hosts[index])
    return _balanced(task, _measured(task, hosts))


def _balanced(task: _Task, plan: Plan) -> Plan:
    """Move single machines while `placement` finds that this pays, but none of the fastest way of one text."""
    index_of = {machine.peer_id: index for index, machine in enumerate(task.machines)}
    while True:
        hosts = {index_of[peer_id]: span for peer_id, span in plan.hosts}
        servers = {index: _as_server(task, index, hosts) for index in sorted(hosts)}
        needed = {index_of[peer_id] for peer_id, _ in plan.route}
        moved = {}
        for index in sorted(hosts.keys() - needed):
            snapshot = SwarmSnapshot(task.model.num_blocks, tuple(servers.values()))
            target = plan_move(snapshot, servers[index].peer_id, balance_quality=1 / MIN_GAIN)
            if target is not None and task.holds(index, target):
                moved[index] = target
                servers[index] = _as_server(task, index, hosts | moved)
        if not moved:
            return plan
        plan = _measured(task, hosts | moved)


def _measured(task: _Task, hosts: Hosts) -> Plan:
    """The plan of these hosts with its expected speeds."""
    indices = {task.machines[index].peer_id: index for index in hosts}
    snapshot = SwarmSnapshot(task.model.num_blocks, tuple(_as_server(task, index, hosts) for index in sorted(hosts)))
    ordered = sorted(hosts.items(), key=lambda item: (item[1], item[0]))
    clients = sorted(
        (index for index, span in hosts.items() if span.start == 0),
        key=lambda index: (-task.bytes_per_s(index), index),
    )
    ways = []
    for client in clients[:NUM_CLIENTS]:
        costs = RouteCosts(round_trips_ms={one: 2 * float(task.way_ms[client, i]) for one, i in indices.items()})
        route = find_route(snapshot, costs=costs)
        ways.append((route_cost_ms(route, costs) + task.head_ms(client), route))
    ms, route = min(ways, key=lambda way: way[0])
    return Plan(
        task.format,
        tuple((task.machines[index].peer_id, span) for index, span in ordered),
        1e3 / ms,
        min(block_throughputs(snapshot)),
        tuple((hop.server.peer_id, hop.span) for hop in route),
    )


def _as_server(task: _Task, index: int, hosts: Hosts) -> ServerInfo:
    """The announcement of a server that holds the planned blocks."""
    span, ways = hosts[index], task.way_ms[index]
    others = np.array(sorted(hosts.keys() - {index}), np.intp)
    nearest = others[np.argsort(ways[others], kind="stable")]
    return ServerInfo(
        peer_id=task.machines[index].peer_id,
        start=span.start,
        end=span.end,
        throughput=task.throughput(index, span),
        decode_ms_per_block=task.compute_ms(index, span.start, span.end) / len(span),
        traits=BlockTraits(forbidden_cuts=tuple(sorted(task.model.forbidden_cuts.intersection(span)))),
        round_trips=tuple(
            (task.machines[other].peer_id, float(2 * ways[other])) for other in nearest[:MAX_ROUND_TRIPS].tolist()
        ),
    )


def _held(task: _Task, present: Plan | None) -> Hosts:
    """The blocks of the present plan that its machines can go on holding; none if its format is another one."""
    if present is None or present.format != task.format:
        return {}
    index_of = {machine.peer_id: index for index, machine in enumerate(task.machines)}
    return {
        index_of[peer_id]: span
        for peer_id, span in present.hosts
        if peer_id in index_of and task.holds(index_of[peer_id], span)
    }


def _mended(task: _Task, hosts: Hosts) -> Hosts | None:
    """These hosts with the fewest changes by which they hold all blocks; None: no single changes lead there."""
    hosts = dict(hosts)
    holders = [sum(block in span for span in hosts.values()) for block in range(task.model.num_blocks)]
    while 0 in holders:
        mend = _closest_mend(task, hosts, holders)
        if mend is None:
            return None
        index, span = mend
        for block in hosts.get(index, ()):
            holders[block] -= 1
        for block in span:
            holders[block] += 1
        hosts[index] = span
    return hosts


def _closest_mend(task: _Task, hosts: Hosts, holders: Sequence[int]) -> tuple[int, Span] | None:
    """The machine and blocks that leave the fewest blocks missing; of equals, the one that loads and drops the least.

    Machines without blocks come first. None: no single change helps.
    """
    sizes, missing = task.model.block_bytes[task.format], holders.count(0)
    options = []
    for index in range(len(task.machines)):
        if not task.is_usable(index):
            continue
        own = hosts.get(index)
        for span in set(_mends(task, index, own, holders)):
            closed = sum(holders[block] == 0 for block in span)
            opened = sum(holders[block] == 1 and block not in span for block in own or ())
            loaded = _loaded_bytes(sizes, own, span)
            left = missing - closed + opened
            dropped = sum(block not in span for block in own or ())
            if left < missing:
                cost = (left, loaded if own else 0, dropped, loaded)
                options.append((*cost, -task.bytes_per_s(index), index, span))
    return min(options)[-2:] if options else None


def _mends(task: _Task, index: int, own: Span | None, holders: Sequence[int]) -> Iterator[Span]:
    """Blocks that the machine could hold instead of its own to close the first gap, or a part of it."""
    first = holders.index(0)
    end = next((block for block in range(first, len(holders)) if holders[block]), len(holders))
    ends = task.ends[index]
    if ends[first] > first:
        yield Span(first, ends[first])
    if (start := task.start_before(index, end)) < end:
        yield Span(start, end)
    if own is None:
        return
    if own.end <= first and ends[own.start] > first:
        yield Span(own.start, min(ends[own.start], end))
    if own.start >= end and (start := task.start_before(index, own.end)) < end:
        yield Span(max(start, first), own.end)


def _is_worth_moving(model: PlannedModel, present: Plan, kept: Plan, renewed: Plan) -> bool:
    """True if the renewed plan is clearly faster, and makes up for the time of loading in `HORIZON_S`.

    Machines that hold nothing at present don't count, because they load in any case. So a plan that was kept once is
    kept again.
    """
    faster_one = renewed.one_tokens_per_s / kept.one_tokens_per_s
    faster_all = renewed.all_tokens_per_s / kept.all_tokens_per_s
    gain = max(faster_one, faster_all if faster_one >= 1 else 0.0)
    held = {peer_id for peer_id, _ in present.hosts}
    staying = replace(kept, hosts=tuple(host for host in kept.hosts if host[0] in held))
    loaded = max(
        (loaded for peer_id, loaded in loaded_bytes(staying, renewed, model).items() if peer_id in held), default=0
    )
    return gain >= MIN_GAIN and loaded / LOAD_BYTES_PER_S < HORIZON_S * (1 - 1 / gain)
