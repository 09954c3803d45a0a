"""Simulated swarms: the same seed gives the same run, gaps close, and a thousand servers come to a good balance."""

import pytest
from benchmarks.swarm_simulator import (
    ServerSpec,
    SimulationSettings,
    SwarmSimulator,
    bottleneck_bound,
    grown_swarm,
    mixed_servers,
    route_cost_ratio,
    settle,
)

from swarmllm.data_structures import ServerState, Span

SPEC = ServerSpec(num_blocks=4, throughput=10.0)
PERIOD_S = 30.0


def small_swarm(seed: int = 0, num_servers: int = 12) -> SwarmSimulator:
    specs = mixed_servers(num_servers, max_blocks=4, seed=seed)
    return grown_swarm(SimulationSettings(num_blocks=8, seed=seed), specs, over_s=60.0)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [small_swarm(seed) for seed in (1, 1, 2)]
    for run in runs:
        run.churn(mixed_servers(6, max_blocks=4, seed=9), for_s=120.0)
        run.run_until(run.now_s + 180.0)
    assert runs[0].snapshot() == runs[1].snapshot()
    assert runs[0].moves == runs[1].moves
    assert runs[0].snapshot() != runs[2].snapshot()


def test_servers_spread_as_they_join() -> None:
    simulator = grown_swarm(SimulationSettings(num_blocks=8), [SPEC] * 4, over_s=60.0)
    assert simulator.quality() == 1.0
    assert simulator.bottleneck() == bottleneck_bound(simulator.snapshot()) == 20.0


def test_one_of_two_equal_servers_moves_when_a_third_leaves() -> None:
    simulator = SwarmSimulator(SimulationSettings(num_blocks=8))
    for _ in range(2):
        simulator.join(SPEC, span=Span(0, 4))
    third = simulator.join(SPEC, span=Span(4, 8))
    simulator.run_until(PERIOD_S)
    assert not simulator.moves
    simulator.leave(third)
    simulator.run_until(PERIOD_S + 1)
    assert simulator.snapshot().missing_blocks() == (4, 5, 6, 7)
    assert simulator.run_until_served(give_up_at_s=4 * PERIOD_S) is not None
    assert [(move.source, move.target) for move in simulator.moves] == [(Span(0, 4), Span(4, 8))]


def test_a_gap_after_a_crash_closes_when_the_record_has_expired() -> None:
    simulator = SwarmSimulator(SimulationSettings(num_blocks=8))
    for _ in range(2):
        simulator.join(SPEC, span=Span(0, 4))
    third = simulator.join(SPEC, span=Span(4, 8))
    simulator.run_until(PERIOD_S)
    simulator.crash(third)
    assert simulator.run_until_served(give_up_at_s=5 * PERIOD_S) is not None
    assert len(simulator.moves) == 1


def test_a_gap_that_nobody_may_close_stays() -> None:
    simulator = SwarmSimulator(SimulationSettings(num_blocks=8))
    simulator.join(SPEC, span=Span(0, 4))
    assert simulator.run_until_served(give_up_at_s=5 * PERIOD_S) is None
    assert simulator.bottleneck() == 0.0
    assert not simulator.moves


def test_moving_servers_serve_nothing_and_their_blocks_stay_served() -> None:
    simulator = SwarmSimulator(SimulationSettings(num_blocks=8))
    for _ in range(6):
        simulator.join(SPEC, span=Span(0, 4))
    simulator.run_until(PERIOD_S / 2)
    states = set()
    while simulator.now_s < 6 * PERIOD_S:
        simulator.run_until(simulator.now_s + 1.0)
        states |= {server.state for server in simulator.snapshot().servers}
        served = {block for server in simulator.snapshot().online() for block in server.span}
        assert served >= set(range(4))
    assert states == set(ServerState)
    assert simulator.bottleneck() == 30.0
    assert len(simulator.moves) == 3


def test_a_settled_swarm_makes_no_moves() -> None:
    simulator = small_swarm(num_servers=20)
    settled_s, num_plans = simulator.now_s, simulator.num_plans
    simulator.run_until(settled_s + 5 * PERIOD_S)
    assert simulator.moves_since(settled_s) == 0
    assert simulator.num_plans == num_plans + 5 * 20


def test_routes_cost_at_least_what_is_possible() -> None:
    assert route_cost_ratio(small_swarm().snapshot()) >= 1.0
    assert route_cost_ratio(grown_swarm(SimulationSettings(num_blocks=4), [SPEC], over_s=1.0).snapshot()) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_servers_reach_the_bound_rest_and_close_a_gap() -> None:
    settings = SimulationSettings(num_blocks=80)
    simulator = grown_swarm(settings, mixed_servers(1000, max_blocks=80, seed=1), over_s=600.0)
    assert simulator.quality() >= 0.95

    settled_s = simulator.now_s
    simulator.run_until(settled_s + 5 * settings.update_period_s)
    assert simulator.moves_since(settled_s) == 0

    for gap, befalls in ((Span(35, 45), simulator.leave), (Span(10, 20), simulator.crash)):
        for server in simulator.snapshot().servers:
            if server.start < gap.end and server.end > gap.start:
                befalls(server.peer_id)
        assert set(simulator.snapshot().missing_blocks()) >= set(gap)
        closed_s = simulator.run_until_served(give_up_at_s=simulator.now_s + 2 * settings.update_period_s)
        assert closed_s is not None, befalls
        assert settle(simulator)
        assert simulator.quality() >= 0.85
