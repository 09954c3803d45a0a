"""A thousand simulated servers that follow the placement policy: balance, moves, gaps, routes, time per decision.

    python benchmarks/simulate.py [--servers 1000] [--blocks 80] [--qualities 0.75 0.9] [--seed 1]

For each balance_quality the swarm grows from nothing, settles, lives through churn, and then twice loses all servers
of ten blocks: once they leave, once they crash. Prints the table, writes results/simulate.json and a plot of the
bottleneck over time, simulate.svg. Times are simulated, except those of decisions, which are CPU time of this machine.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import plots
from common import save_results, table
from swarm_simulator import (
    SimulationSettings,
    SwarmSimulator,
    grown_swarm,
    mixed_servers,
    route_cost_ratio,
    settle,
)

from swarmllm.data_structures import Span
from swarmllm.swarm.placement import plan_move

GROWTH_S, CHURN_S = 600.0, 900.0


@dataclass
class Outcome:
    """Results of one balance_quality. Qualities are the bottleneck as a share of its upper bound."""

    balance_quality: float
    grown: float = 0.0
    growth_moves: int = 0
    moves_at_rest: int = 0
    churn_mean: float = 0.0
    churn_worst: float = 0.0
    churn_moves_per_hour: float = 0.0
    gap_servers: int = 0
    gap_closed_s: float | None = None
    after_gap: float = 0.0
    gap_moves: int = 0
    crashed_servers: int = 0
    crash_closed_s: float | None = None
    after_crash: float = 0.0
    slowest_decision_ms: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the swarm had grown, quality."""


def live(simulator: SwarmSimulator, for_s: float, outcome: Outcome, started_s: float, *, step_s: float = 10.0) -> None:
    """Let time pass and note the quality."""
    until_s = simulator.now_s + for_s
    while simulator.now_s < until_s:
        simulator.run_until(min(until_s, simulator.now_s + step_s))
        outcome.curve.append((simulator.now_s - started_s, simulator.quality()))


def run(settings: SimulationSettings, num_servers: int, gap: Span) -> Outcome:
    outcome = Outcome(balance_quality=settings.balance_quality)
    specs = mixed_servers(num_servers, max_blocks=settings.num_blocks, seed=settings.seed)
    simulator = grown_swarm(settings, specs, over_s=GROWTH_S)
    outcome.grown, outcome.growth_moves = simulator.quality(), len(simulator.moves)

    started_s = simulator.now_s
    live(simulator, 4 * settings.update_period_s, outcome, started_s)
    outcome.moves_at_rest = simulator.moves_since(started_s)

    churn_s, first = simulator.now_s, len(outcome.curve)
    newcomers = mixed_servers(num_servers // 10, max_blocks=settings.num_blocks, seed=settings.seed + 1)
    simulator.churn(newcomers, for_s=CHURN_S)
    live(simulator, CHURN_S, outcome, started_s)
    during = [quality for _, quality in outcome.curve[first:]]
    outcome.churn_mean, outcome.churn_worst = sum(during) / len(during), min(during)
    outcome.churn_moves_per_hour = simulator.moves_since(churn_s) * 3600 / CHURN_S
    settle(simulator)

    gap_s = simulator.now_s
    outcome.curve.append((gap_s - started_s, simulator.quality()))
    outcome.gap_servers, outcome.gap_closed_s = lose(simulator, gap, simulator.leave)
    outcome.slowest_decision_ms = decision_ms(simulator)
    live(simulator, 8 * settings.update_period_s, outcome, started_s)
    settle(simulator)
    outcome.after_gap, outcome.gap_moves = simulator.quality(), simulator.moves_since(gap_s)

    outcome.crashed_servers, outcome.crash_closed_s = lose(simulator, gap, simulator.crash)
    live(simulator, 8 * settings.update_period_s, outcome, started_s)
    settle(simulator)
    outcome.after_crash = simulator.quality()
    return outcome


def lose(simulator: SwarmSimulator, gap: Span, befalls: Callable[[str], None]) -> tuple[int, float | None]:
    """Let all servers of the gap's blocks go; how many, and seconds until every block is served again."""
    gap_s = simulator.now_s
    lost = [s.peer_id for s in simulator.snapshot().servers if s.start < gap.end and s.end > gap.start]
    for peer_id in lost:
        befalls(peer_id)
    closed_s = simulator.run_until_served(give_up_at_s=gap_s + 20 * simulator.settings.update_period_s)
    return len(lost), None if closed_s is None else closed_s - gap_s


def decision_ms(simulator: SwarmSimulator, num_decisions: int = 50) -> float:
    """CPU milliseconds of the slowest of some decisions; called out of balance, where they are dear."""
    snapshot, slowest = simulator.snapshot(), 0.0
    for server in snapshot.online()[:num_decisions]:
        started = time.process_time()
        plan_move(snapshot, server.peer_id, balance_quality=simulator.settings.balance_quality)
        slowest = max(slowest, time.process_time() - started)
    return slowest * 1000


def small_swarm_routes(seed: int) -> list[tuple[int, int, float, float]]:
    """Servers, blocks, bottleneck quality and route cost ratio of some small swarms."""
    rows = []
    for num_servers, num_blocks in ((10, 16), (30, 32), (60, 48)):
        specs = mixed_servers(num_servers, max_blocks=num_blocks, seed=seed)
        simulator = grown_swarm(SimulationSettings(num_blocks=num_blocks, seed=seed), specs, over_s=120.0)
        rows.append((num_servers, num_blocks, simulator.quality(), route_cost_ratio(simulator.snapshot())))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=80)
    parser.add_argument("--qualities", type=float, nargs="+", default=[0.75, 0.9])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    gap = Span(args.blocks // 2 - 5, args.blocks // 2 + 5)

    outcomes = []
    for quality in args.qualities:
        settings = SimulationSettings(num_blocks=args.blocks, balance_quality=quality, seed=args.seed)
        outcomes.append(run(settings, args.servers, gap))
        print(f"balance_quality {quality}: done", flush=True)
    names = [name for name in asdict(outcomes[0]) if name != "curve"]
    print(
        table(
            ["", *(f"{o.balance_quality:g}" for o in outcomes)],
            [(n, *(getattr(o, n) for o in outcomes)) for n in names],
        )
    )
    routes = small_swarm_routes(args.seed)
    print(table(["servers", "blocks", "quality", "route cost / bound"], routes))
    print(
        save_results("simulate", {"arguments": vars(args), "outcomes": [asdict(o) for o in outcomes], "routes": routes})
    )
    plots.lines(
        "simulate",
        "throughput of the bottleneck as a share of its upper bound",
        "minutes",
        {
            f"balance_quality {outcome.balance_quality:g}": (
                [time_s / 60 for time_s, _ in outcome.curve],
                [quality for _, quality in outcome.curve],
            )
            for outcome in outcomes
        },
        markers=False,
    )


if __name__ == "__main__":
    main()
