"""Plans: the choice between one machine and several, formats, machines that come and go, and a thousand machines."""

from itertools import pairwise

import pytest
from benchmarks.swarm_simulator import mixed_servers, planned_bound, planned_machines

from swarmllm.data_structures import Span
from swarmllm.swarm.planning import Link, Machine, Plan, PlannedModel, loaded_bytes, make_plan, missing_bytes

GIB = 1 << 30
LAN, FAR = Link(round_trip_ms=0.5), Link(round_trip_ms=64.0)
MODEL = PlannedModel(block_bytes={"int8": [GIB] * 8})


def machine(name: str, gib: float, gib_per_s: float = 64.0) -> Machine:
    return Machine(peer_id=name.ljust(46, "-"), memory_bytes=int(gib * GIB), bytes_per_s=gib_per_s * GIB)


def hosts(plan: Plan | None) -> dict[str, str]:
    assert plan is not None
    return {peer_id.rstrip("-"): str(span) for peer_id, span in plan.hosts}


def test_a_model_that_fits_one_machine_stays_there() -> None:
    plan = make_plan([machine("whole", 8), machine("a", 4), machine("b", 4)], MODEL, assumed_link=LAN)
    assert hosts(plan)["whole"] == "0:8"
    assert plan is not None
    assert [span for _, span in plan.route] == [Span(0, 8)]


def test_machines_that_are_much_faster_together_take_it() -> None:
    plan = make_plan([machine("whole", 8, 16.0), machine("a", 4), machine("b", 4)], MODEL, assumed_link=LAN)
    assert plan is not None
    assert sorted(str(span) for _, span in plan.route) == ["0:4", "4:8"]


def test_a_chain_stays_in_one_home() -> None:
    machines = [machine(name, 4) for name in ("a", "b", "c", "d")]
    links = {(machines[1].peer_id, machines[2].peer_id): LAN}
    plan = make_plan(machines, MODEL, links, assumed_link=FAR)
    assert plan is not None
    assert {peer_id[0] for peer_id, _ in plan.route} == {"b", "c"}
    assert plan.one_tokens_per_s == pytest.approx(1e3 / (8 * 1e3 / 64 + 2 * 1.0 + 0.5), rel=0.05)


def test_of_many_machines_those_of_the_best_home_form_the_chain() -> None:
    machines = [machine(f"{home}{number}", 2, 64.0 if home == "c" else 60.0) for home in "abcd" for number in range(10)]
    near = {
        (one.peer_id, other.peer_id): LAN
        for one in machines
        for other in machines
        if one.peer_id[0] == other.peer_id[0]
    }
    plan = make_plan(machines, MODEL, near, assumed_link=FAR)
    assert plan is not None
    assert [peer_id[0] for peer_id, _ in plan.route] == ["c"] * 4


def test_bandwidth_counts_and_the_slower_direction_of_a_link() -> None:
    model = PlannedModel(block_bytes={"int8": [GIB] * 8}, hidden_bytes=10_000)
    slow = Link(round_trip_ms=0.5, bytes_per_s=1e5)
    machines = [machine(name, 4) for name in ("a", "b", "c")]
    a, b, _ = (one.peer_id for one in machines)
    for links in ({(a, b): slow}, {(a, b): slow, (b, a): LAN}, {(a, b): LAN, (b, a): slow}):
        plan = make_plan(machines, model, links, assumed_link=LAN)
        assert plan is not None
        assert {peer_id for peer_id, _ in plan.route} != {a, b}


def test_the_first_format_that_fits_one_machine_wins() -> None:
    model = PlannedModel(block_bytes={"int8": [GIB] * 8, "q4_k": [GIB // 2] * 8})
    assert make_plan([machine("a", 9)], model, assumed_link=LAN).format == "int8"  # type: ignore[union-attr]
    two = make_plan([machine("a", 4), machine("b", 4)], model, assumed_link=LAN)
    assert two is not None
    assert (two.format, hosts(two)["a"]) == ("q4_k", "0:8")
    three = make_plan([machine("a", 3), machine("b", 3), machine("c", 3)], model, assumed_link=LAN)
    assert three is not None
    assert three.format == "int8"


def test_caches_take_memory() -> None:
    model = PlannedModel(block_bytes={"int8": [GIB] * 8}, cache_bytes_per_token=1 << 20, cache_tokens=1024)
    assert make_plan([machine("a", 8)], model, assumed_link=LAN) is None
    assert missing_bytes([machine("a", 8)], model) == 8 * GIB
    assert hosts(make_plan([machine("a", 16)], model, assumed_link=LAN)) == {"a": "0:8"}


def test_missing_memory_is_told_for_the_smallest_format() -> None:
    model = PlannedModel(block_bytes={"int8": [GIB] * 8, "q4_k": [GIB // 2] * 8})
    assert missing_bytes([machine("a", 1.2), machine("b", 1.2)], model) == 2 * GIB
    assert missing_bytes([], model) == 4 * GIB
    assert missing_bytes([machine("a", 4)], model) == 0


def test_paused_and_tiny_machines_get_nothing() -> None:
    plan = make_plan([machine("a", 8), machine("paused", 8, 0.0), machine("tiny", 0.5)], MODEL, assumed_link=LAN)
    assert hosts(plan) == {"a": "0:8"}


def test_others_take_the_blocks_of_a_machine_that_left() -> None:
    """`b` has room for two more blocks. `spare` has room for more, but it serves others."""
    present = Plan(
        "int8",
        tuple(
            (name.ljust(46, "-"), span)
            for name, span in (("a", Span(0, 4)), ("b", Span(4, 6)), ("spare", Span(0, 4)), ("gone", Span(6, 8)))
        ),
    )
    machines = [machine("a", 4), machine("b", 4), machine("spare", 4)]
    plan = make_plan(machines, MODEL, assumed_link=LAN, present=present)
    assert hosts(plan) == {"a": "0:4", "b": "4:8", "spare": "0:4"}
    assert plan is not None
    assert sum(loaded_bytes(present, plan, MODEL).values()) == 2 * GIB


def test_a_new_machine_leaves_the_others_alone() -> None:
    old = [machine("a", 4), machine("b", 4)]
    present = make_plan(old, MODEL, assumed_link=LAN)
    plan = make_plan([*old, machine("0 first in order", 4)], MODEL, assumed_link=LAN, present=present)
    assert hosts(plan).items() > hosts(present).items()


@pytest.mark.parametrize(("far_ms", "hosted"), [(64.0, "4:8"), (8.0, "0:4")])
def test_only_a_clearly_faster_plan_replaces_the_present_one(far_ms: float, hosted: str) -> None:
    """`a` and `b` are near each other and could form the chain, but `a` and `c` hold the blocks now."""
    machines = [machine(name, 4) for name in ("a", "b", "c")]
    near = {(machines[0].peer_id, machines[1].peer_id): LAN}
    present = Plan("int8", ((machines[0].peer_id, Span(0, 4)), (machines[2].peer_id, Span(4, 8))))
    plan = make_plan(machines, MODEL, near, assumed_link=Link(round_trip_ms=far_ms), present=present)
    assert hosts(plan) == {"a": "0:4", "b": hosted, "c": "4:8"}


def test_a_faster_plan_that_loads_for_hours_does_not() -> None:
    """Machines of 16 times the memory, and blocks of 16 times the size at 16 times the speed."""
    model = PlannedModel(block_bytes={"int8": [128 * GIB] * 8})
    machines = [machine(name, 512, 64.0 * 128) for name in ("a", "c", "b")]
    near = {(machines[0].peer_id, machines[2].peer_id): LAN}
    split = Plan(
        "int8", tuple((one.peer_id, span) for one, span in zip(machines, (Span(0, 4), Span(4, 8)), strict=False))
    )
    everywhere = Plan("int8", (*split.hosts, (machines[2].peer_id, Span(0, 4))))
    assert hosts(make_plan(machines, model, near, assumed_link=FAR, present=everywhere))["b"] == "0:4"
    assert hosts(make_plan(machines, model, near, assumed_link=FAR, present=split))["b"] == "4:8"


def test_a_plan_of_another_format_is_followed_no_longer() -> None:
    present = Plan("nf4", ((machine("a", 8).peer_id, Span(0, 8)),))
    plan = make_plan([machine("a", 8)], MODEL, assumed_link=LAN, present=present)
    assert plan is not None
    assert plan.format == "int8"


def machines_that_come_and_go(num_machines: int, num_blocks: int, num_changes: int) -> None:
    """Check that plans use the machines well, and that each change moves few blocks."""
    model = PlannedModel(block_bytes={"int8": [GIB] * num_blocks})
    machines = planned_machines(mixed_servers(num_machines + num_changes, max_blocks=num_blocks, seed=1), GIB, seed=1)
    plans: list[tuple[Plan, list[Machine]]] = []
    for change in range(num_changes):
        present = plans[-1][0] if plans else None
        now = machines[change : change + num_machines]  # one has left, another one has joined
        plan = make_plan(now, model, assumed_link=LAN, present=present)
        assert plan is not None
        assert plan.all_tokens_per_s >= 0.6 * planned_bound(now, num_blocks)
        plans.append((plan, now))
    for (present, before), (plan, now) in pairwise(plans):
        stayed = {one.peer_id for one in before}.intersection(one.peer_id for one in now)
        loaded = [peer_id for peer_id, num in loaded_bytes(present, plan, model).items() if num and peer_id in stayed]
        assert len(loaded) <= 0.1 * num_machines


def test_machines_that_come_and_go_move_few_blocks() -> None:
    machines_that_come_and_go(20, 16, 3)


@pytest.mark.slow
def test_a_thousand_machines_come_to_a_plan_and_stay() -> None:
    machines_that_come_and_go(1000, 80, 4)
