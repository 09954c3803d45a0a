"""The plan follows from what was seen."""

from swarmllm.speculation.planner import PLAIN, Costs, Planner, best_plan, seconds_per_token, survival

FAR = Costs(round_trip_s=0.26, token_s=0.002, stage_s=0.003, stage_token_s=0.001)
NEAR = Costs(round_trip_s=0.01, token_s=0.008, stage_s=0.005, stage_token_s=0.004)


def seen(planner: Planner, *, latency_s: float, compute_s: float = 0.01) -> Planner:
    for _ in range(4):
        planner.saw_step(1, [compute_s / 2] * 2, took_s=latency_s + compute_s, client_s=0.001)
    return planner


def test_far_away_and_well_foreseen_many_are_under_way() -> None:
    plan = best_plan([0.95], FAR)
    assert plan.chunk * plan.depth >= 16
    assert seconds_per_token(plan, survival([0.95]), FAR) < FAR.round_trip_s / 8


def test_the_pipe_is_not_filled_for_guesses_that_are_mostly_wrong() -> None:
    busy = Costs(round_trip_s=0.26, token_s=0.05, stage_s=0.05, stage_token_s=0.012)
    sure, unsure = best_plan([0.97], busy), best_plan([0.4], busy)
    assert 0 < unsure.chunk * unsure.depth < sure.chunk * sure.depth


def test_where_computing_is_what_takes_time_it_stays_plain() -> None:
    assert best_plan([0.5], NEAR) == PLAIN


def test_nothing_is_planned_before_something_was_seen() -> None:
    planner = Planner()
    assert planner.plan([0.9], 100) == PLAIN
    assert not planner.latency_pays
    assert seen(planner, latency_s=0.2).plan([0.9], 100)


def test_auto_stays_plain_on_a_local_network() -> None:
    near, far = (seen(Planner(min_latency_s=0.02), latency_s=latency_s) for latency_s in (0.004, 0.2))
    assert near.plan([0.99], 100) == PLAIN
    assert far.plan([0.99], 100)


def test_one_slow_step_makes_no_wide_area() -> None:
    planner = seen(Planner(min_latency_s=0.02), latency_s=0.004)
    planner.saw_step(1, [0.005], took_s=3.0)
    assert not planner.latency_pays


def test_acceptance_is_learnt_by_kind() -> None:
    planner = seen(Planner(), latency_s=0.2)
    for _ in range(20):
        planner.saw_verdict(3, 0, 1)
        planner.saw_verdict(4, 4, 0)
    assert planner.acceptance(3, 0.75) < 0.1
    assert planner.acceptance(4, 0.75) > 0.9
    assert planner.acceptance(5, 0.75) == 0.75
    assert planner.plan([planner.acceptance(3, 0.75)], 100).chunk <= 2
    planner.new_text()
    assert 0.05 < planner.acceptance(3, 0.75) < 0.5, "the next text may be another one"


def test_never_more_than_there_is_room_for() -> None:
    planner = seen(Planner(), latency_s=0.2)
    for room in range(1, 12):
        assert planner.plan([0.99], room).chunk <= room
    assert planner.plan([0.99], 0) == PLAIN
