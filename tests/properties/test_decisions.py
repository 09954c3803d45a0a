"""All machines decide compatibly by the same records, and records that are noisy or lie move few blocks."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.machine_swarm import ALL, MODEL, SimulatedMachine, SimulatedSwarm, manifest, record, wanted

from swarmllm.data_structures import Span
from swarmllm.machines import decisions
from swarmllm.machines.decisions import Decider, Facts, Target, plan_models, span_bytes
from swarmllm.machines.records import Hosted, MachineRecord
from swarmllm.swarm.planning import Plan

SETTLED_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def plans_are_remembered() -> Iterator[None]:
    """Machines of a simulation plan the same facts again and again."""
    known: dict[object, dict[str, Plan | None]] = {}

    def remembered(facts: Facts, left_out: frozenset[str]) -> dict[str, Plan | None]:
        key = frozenset(facts.records.values()), facts.wanted, left_out
        if key not in known:
            known[key] = plan_models(facts, left_out)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "plan_models", remembered)
        yield


def machines(*mib: int) -> list[SimulatedMachine]:
    return [SimulatedMachine(f"m{number}", one, 1.0 + number / 10) for number, one in enumerate(mib)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(8, 90), min_size=1, max_size=5), st.permutations(range(5)), st.integers(1, 3), st.data())
def test_plans_depend_on_records_alone_and_fit_the_memory(
    mib: list[int], order: list[int], num_models: int, data: st.DataObject
) -> None:
    spans = st.sampled_from([(), (Hosted(manifest=manifest("a"), start=2, end=5, quant_type="q4_k", state="online"),)])
    records = {
        one.peer_id: one for one in (record(f"m{i}", size, hosted=data.draw(spans)) for i, size in enumerate(mib))
    }
    facts = Facts(
        own="",
        records=records,
        wanted=wanted(*"abc"[:num_models]),
        sizes={manifest(name): MODEL for name in "abc"},
    )
    plans = plan_models(facts)
    shuffled = {peer_id: records[peer_id] for peer_id in sorted(records, key=lambda one: order[int(one[1])])}
    assert plan_models(replace(facts, records=shuffled)) == plans
    used = dict.fromkeys(records, 0)
    for plan in plans.values():
        for peer_id, span in plan.hosts if plan is not None else ():
            used[peer_id] += span_bytes(MODEL, plan.format, span) if plan is not None else 0
    assert all(used[peer_id] <= one.memory_bytes for peer_id, one in records.items())


NUMBERS = st.sampled_from([0.0, 1e-300, 1e-9, 1.0, 1e9, 1e15])
HELD = st.builds(
    Hosted,
    manifest=st.sampled_from([manifest("a"), manifest("b")]),
    start=st.sampled_from([0, 3, 8, 4096]),
    end=st.sampled_from([1, 3, 8, 4096]),
    quant_type=st.sampled_from(["int8", "q4_k", "none", ""]),
    state=st.sampled_from(["waiting", "fetching", "loading", "online", "leaving", "failed"]),
)
RECORDS = st.builds(
    record,
    st.sampled_from(["m0", "m1", "m2"]),
    st.sampled_from([0, 1, 30, 100, 1 << 33]),
    gb_per_s=NUMBERS.map(lambda number: number / 1e9),
    hosted=st.lists(HELD, max_size=4).map(tuple),
).flatmap(
    lambda one: st.builds(
        lambda ms, round_trips, speeds: one.model_copy(
            update={"ms_per_block": ms, "round_trips": tuple(round_trips), "format_bytes_per_s": tuple(speeds)}
        ),
        st.sampled_from([0.0, 1e-300, 1.0, 1e6]),
        st.lists(
            st.tuples(st.sampled_from(["m0".ljust(46, "-"), "x"]), st.sampled_from([0.0, 1e-300, 1e6])), max_size=2
        ),
        st.lists(st.tuples(st.sampled_from(["int8", "q4_k", "?"]), NUMBERS), max_size=2),
    )
)


@settings(max_examples=60, deadline=None)
@given(st.lists(RECORDS, max_size=4), st.integers(0, 2))
def test_no_record_of_a_member_stops_the_others(records: list[MachineRecord], number: int) -> None:
    known = {one.peer_id: one for one in records} | {record("own", 40).peer_id: record("own", 40)}
    facts = Facts(
        own=record("own", 40).peer_id,
        records=known,
        wanted=wanted(*"ab"[:number]),
        sizes={manifest(name): MODEL for name in "ab"},
        command=number,
    )
    decider = Decider()
    for now in (0.0, 2.0, 1000.0):
        decision = decider.look(facts, now)
        assert {one.manifest for one in decision.targets} <= {one.manifest for one in facts.wanted}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(12, 90), min_size=1, max_size=4), st.integers(0, 99))
def test_all_blocks_are_served_and_then_nothing_moves(mib: list[int], seed: int) -> None:
    swarm = SimulatedSwarm(machines(*mib), ("a",), seed=seed)
    swarm.run(SETTLED_S)
    fits = plan_models(Facts(own="", records={one.peer_id: one.record(0.0) for one in swarm.machines},
                             wanted=swarm.wanted, sizes={manifest("a"): MODEL}))[manifest("a")]  # fmt: skip
    assert (swarm.served("a") == ALL) == (fits is not None)
    before = swarm.num_moves
    swarm.run(1800)
    assert swarm.num_moves <= before + len(mib)


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_dies_or_joins_is_followed(seed: int) -> None:
    swarm = SimulatedSwarm(machines(20, 20, 20), ("a",), seed=seed)
    swarm.run(SETTLED_S)
    assert swarm.served("a") == ALL
    swarm.kill(swarm.machines[seed % 3])
    swarm.run(SETTLED_S)
    assert swarm.served("a") == ALL  # two machines hold it in q4_k
    swarm.kill(swarm.machines[(seed + 1) % 3])
    swarm.run(SETTLED_S)
    assert swarm.served("a") != ALL
    swarm.add(SimulatedMachine("m9", 40))
    swarm.run(SETTLED_S)
    assert swarm.served("a") == ALL


def test_another_model_takes_the_place_of_the_first_or_stands_beside_it() -> None:
    swarm = SimulatedSwarm(machines(100, 100), ("a",), seed=1)
    swarm.run(SETTLED_S)
    swarm.use("a", "b")
    swarm.run(2 * SETTLED_S)
    assert swarm.served("a") == swarm.served("b") == ALL
    swarm.use("c")
    swarm.run(2 * SETTLED_S)
    assert swarm.served("c") == ALL
    assert not swarm.served("a")
    assert not swarm.served("b")


def flips(period_s: float, changed: dict[str, object], honest: MachineRecord, now: float) -> MachineRecord:
    return honest.model_copy(update=changed) if now // period_s % 2 else honest


@pytest.mark.rotates(10)
@pytest.mark.parametrize("period_s", [3.0, 25.0, 70.0, 300.0])
@pytest.mark.parametrize(
    "changed",
    [{"bytes_per_s": 1e12}, {"bytes_per_s": 0.0}, {"memory_bytes": 0}, {"memory_bytes": 1 << 40}, {"hosted": ()}],
    ids=str,
)
def test_a_record_that_flips_moves_few_blocks(period_s: float, changed: dict[str, object]) -> None:
    liar = SimulatedMachine("liar", 60, 2.0, lies=partial(flips, period_s, changed))
    swarm = SimulatedSwarm([*machines(30, 30, 60), liar], ("a",), seed=3)
    swarm.run(3600)
    assert swarm.served("a") == ALL
    assert swarm.num_moves <= 18
    before = swarm.num_moves
    swarm.run(3600)
    assert swarm.num_moves - before <= 12


def test_a_machine_that_promises_and_does_nothing_is_left_out() -> None:
    """It claims to be the best, and never starts its part."""
    idle = SimulatedMachine("idle", 80, 100.0, lies=lambda one, _: one.model_copy(update={"hosted": ()}))
    swarm = SimulatedSwarm([*machines(30, 30), idle], ("a",), seed=2)
    swarm.run(300)
    idle.servers.clear()
    assert swarm.served("a") == ALL


def test_a_machine_that_always_loads_is_left_out() -> None:
    def loads(honest: MachineRecord, _: float) -> MachineRecord:
        stuck = [one.model_copy(update={"state": "fetching", "done_bytes": 1}) for one in honest.hosted]
        return honest.model_copy(update={"hosted": tuple(stuck), "memory_bytes": 1 << 40, "bytes_per_s": 1e12})

    swarm = SimulatedSwarm([*machines(30, 30), SimulatedMachine("stuck", 80, lies=loads)], ("a",), seed=2)
    swarm.run(600)
    swarm.machines[-1].servers.clear()
    assert swarm.served("a") == ALL


def test_a_machine_that_fails_is_planned_around() -> None:
    failed = Hosted(manifest=manifest("a"), start=0, end=8, quant_type="int8", state="failed", problem="no memory")
    records = {one.peer_id: one for one in (record("big", 200, gb_per_s=9, hosted=(failed,)), record("small", 40))}
    plan = plan_models(Facts(own="", records=records, wanted=wanted("a"), sizes={manifest("a"): MODEL}))[manifest("a")]
    assert plan is not None
    assert {peer_id for peer_id, _ in plan.hosts} == {record("small", 1).peer_id}


def test_targets_of_before_a_restart_stay() -> None:
    kept = Target(manifest("a"), Span(2, 8), "q4_k")
    machine = machines(40)[0]
    machine.decider.__init__([kept])  # type: ignore[misc]
    machine.targets = (kept,)
    others = record(
        "m5", 40, hosted=(Hosted(manifest=manifest("a"), start=0, end=2, quant_type="q4_k", state="online"),)
    )
    facts = Facts(
        own=machine.peer_id,
        records={machine.peer_id: machine.record(0.0), others.peer_id: others},
        wanted=wanted("a"),
        sizes={manifest("a"): MODEL},
        command=1,
    )
    assert machine.decider.look(facts, 0.0).targets == (kept,)
