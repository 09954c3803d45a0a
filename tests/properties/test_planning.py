"""Plans of any swarm: as good as brute force finds for small ones, the same on all machines, and at rest."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.data_structures import Span
from swarmllm.swarm.planning import (
    MIN_GAIN,
    WORTH_IT,
    Link,
    Machine,
    Plan,
    PlannedModel,
    loaded_bytes,
    make_plan,
    missing_bytes,
)
from swarmllm.swarm.route_costs import HOP_COST_MS

MIB = 1 << 20
LAN = Link(round_trip_ms=0.5)
NOISE = 0.04
"""Less than half a step of the rounding."""
Pairs = dict[tuple[str, str], Link]


def machine(name: str, num_blocks: int, speed: float) -> Machine:
    """A machine with memory for so many blocks of 1 MiB, which reads `speed` of them in 1/1024 s."""
    return Machine(peer_id=name.ljust(46, "-"), memory_bytes=num_blocks * MIB, bytes_per_s=speed * MIB * 1024)


def model_of(num_blocks: int) -> PlannedModel:
    return PlannedModel(block_bytes={"int8": [MIB] * num_blocks})


@st.composite
def swarms(draw: st.DrawFn, most: int = 4, most_blocks: int = 6) -> list[Machine]:
    return [
        machine(str(index), draw(st.integers(0, most_blocks)), 2.0 ** draw(st.integers(-6, 2)))
        for index in range(draw(st.integers(1, most)))
    ]


@st.composite
def places(draw: st.DrawFn, machines: Sequence[Machine]) -> Pairs:
    """Round trips between homes: near in one of them, far between two."""
    homes = [draw(st.integers(0, 2)) for _ in machines]
    far_ms = 2.0 ** draw(st.integers(0, 6))
    return {
        (one.peer_id, other.peer_id): Link(round_trip_ms=0.5 if homes[i] == homes[j] else far_ms)
        for (i, one), (j, other) in combinations(enumerate(machines), 2)
    }


def chains(machines: Sequence[Machine], num_blocks: int) -> Iterator[list[tuple[Machine, int]]]:
    """All chains of machines, each with the number of its blocks."""
    for length in range(1, min(len(machines), num_blocks) + 1):
        for order in permutations(machines, length):
            for cuts in combinations(range(1, num_blocks), length - 1):
                counts = [end - start for start, end in pairwise((0, *cuts, num_blocks))]
                if all(count * MIB <= one.memory_bytes for one, count in zip(order, counts, strict=True)):
                    yield list(zip(order, counts, strict=True))


def chain_ms(chain: Sequence[tuple[Machine, int]], pairs: Pairs) -> float:
    order = [one.peer_id for one, _ in chain]
    ways = sum(
        (pairs.get((one, other)) or pairs.get((other, one), LAN)).round_trip_ms / 2
        for one, other in zip(order, [*order[1:], order[0]], strict=True)
        if one != other
    )
    return ways + sum(HOP_COST_MS + count * MIB * 1e3 / one.bytes_per_s for one, count in chain)


def is_whole(plan: Plan, num_blocks: int) -> bool:
    return {block for _, span in plan.hosts for block in span} == set(range(num_blocks))


@given(swarms(), st.integers(1, 6))
def test_with_equal_links_the_fastest_chain_is_found(machines: list[Machine], num_blocks: int) -> None:
    model = model_of(num_blocks)
    plan = make_plan(machines, model, assumed_link=LAN)
    found = [(chain_ms(chain, {}), len(chain)) for chain in chains(machines, num_blocks)]
    assert (plan is not None) == bool(found) == (missing_bytes(machines, model) == 0)
    if plan is None:
        return
    best_ms = min(found)[0]
    alone_ms = min((ms for ms, length in found if length == 1), default=math.inf)
    assert is_whole(plan, num_blocks)
    assert 1e3 / plan.one_tokens_per_s >= best_ms * (1 - 1e-9)
    if best_ms < alone_ms / WORTH_IT:
        assert math.isclose(1e3 / plan.one_tokens_per_s, best_ms)
    else:
        assert Span(0, num_blocks) in [span for _, span in plan.hosts]
        assert 1e3 / plan.one_tokens_per_s <= alone_ms * (1 + 1e-9)


@given(st.data(), st.integers(1, 6))
def test_with_homes_far_apart_the_chain_is_nearly_the_fastest(data: st.DataObject, num_blocks: int) -> None:
    machines = data.draw(swarms())
    pairs = data.draw(places(machines))
    plan = make_plan(machines, model_of(num_blocks), pairs, assumed_link=LAN)
    best_ms = min((chain_ms(chain, pairs) for chain in chains(machines, num_blocks)), default=math.inf)
    assert (plan is not None) == (best_ms < math.inf)
    if plan is not None and Span(0, num_blocks) not in [span for _, span in plan.hosts]:
        assert best_ms * (1 - 1e-9) <= 1e3 / plan.one_tokens_per_s <= best_ms * 1.05


@settings(max_examples=40)
@given(st.data(), st.integers(1, 12))
def test_all_machines_make_the_same_plan(data: st.DataObject, num_blocks: int) -> None:
    machines = data.draw(swarms(8, 12))
    pairs = data.draw(places(machines))
    plan = make_plan(machines, model_of(num_blocks), pairs, assumed_link=LAN)
    shuffled = data.draw(st.permutations(machines))
    turned = {(pair[1], pair[0]): pairs[pair] for pair in data.draw(st.permutations(list(pairs)))}
    other = make_plan(shuffled, model_of(num_blocks), turned, assumed_link=LAN)
    assert plan == other
    if plan is not None and other is not None:
        assert (plan.one_tokens_per_s, plan.all_tokens_per_s, plan.route) == (
            other.one_tokens_per_s,
            other.all_tokens_per_s,
            other.route,
        )


@given(st.data(), st.integers(1, 12))
def test_machines_hold_one_span_each_that_fits(data: st.DataObject, num_blocks: int) -> None:
    machines = data.draw(swarms(8, 12))
    sizes = [data.draw(st.integers(1, 3)) * MIB for _ in range(num_blocks)]
    cuts = frozenset(data.draw(st.sets(st.integers(1, num_blocks))).difference([num_blocks]))
    model = PlannedModel(block_bytes={"int8": sizes}, cache_bytes_per_token=1, cache_tokens=1000, forbidden_cuts=cuts)
    plan = make_plan(machines, model, assumed_link=LAN)
    if plan is None:
        return
    memory = {one.peer_id: one.memory_bytes for one in machines}
    assert is_whole(plan, num_blocks)
    assert len(dict(plan.hosts)) == len(plan.hosts)
    assert not cuts.intersection(cut for _, span in plan.hosts for cut in (span.start, span.end))
    for peer_id, span in plan.hosts:
        assert sum(sizes[block] + 1000 for block in span) <= memory[peer_id]


@settings(max_examples=40)
@given(st.data(), st.integers(2, 12))
def test_one_machine_more_or_less_moves_no_more_than_needed(data: st.DataObject, num_blocks: int) -> None:
    model = model_of(num_blocks)
    machines = data.draw(swarms(8, 12))
    present = make_plan(machines, model, assumed_link=LAN)
    leaves = len(machines) > 1 and data.draw(st.booleans())
    changed = machines[1:] if leaves else [*machines, machine("new", data.draw(st.integers(1, 12)), 1.0)]
    plan = make_plan(changed, model, assumed_link=LAN, present=present)
    if present is None or plan is None:
        return
    assert is_whole(plan, num_blocks)
    staying = {peer_id for peer_id, _ in present.hosts}.intersection(one.peer_id for one in changed)
    loaded = {peer_id: num for peer_id, num in loaded_bytes(present, plan, model).items() if peer_id in staying}
    left = Plan("int8", tuple(host for host in present.hosts if host[0] in staying))
    if is_whole(left, num_blocks) and sum(loaded.values()):  # nobody had to move
        kept = make_plan([one for one in changed if one.peer_id in staying], model, assumed_link=LAN, present=left)
        assert kept is not None
        gains = plan.one_tokens_per_s / kept.one_tokens_per_s, plan.all_tokens_per_s / kept.all_tokens_per_s
        # The plan that is left has the new machine beside, so others carry a little less than in `kept` (seen: 1.217).
        assert kept.hosts != left.hosts or max(gains) >= 0.95 * MIN_GAIN
    assert make_plan(changed, model, assumed_link=LAN, present=plan) == plan


@settings(max_examples=40)
@given(st.data(), st.integers(1, 12))
def test_noise_never_brings_back_a_plan_that_was_left(data: st.DataObject, num_blocks: int) -> None:
    machines = data.draw(swarms(6, 12))
    plan, left = None, []
    for _ in range(6):
        noisy = [
            Machine(
                peer_id=one.peer_id,
                memory_bytes=one.memory_bytes,
                bytes_per_s=one.bytes_per_s * data.draw(st.floats(1 - NOISE, 1 + NOISE)),
            )
            for one in machines
        ]
        before, plan = plan, make_plan(noisy, model_of(num_blocks), assumed_link=LAN, present=plan)
        if plan != before:
            assert plan not in left
            left.append(before)
