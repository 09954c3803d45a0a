"""For any acceptance, latency and computing time the plan is bounded, and never expected to be slower than none."""

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.speculation.planner import CHUNKS, DEPTHS, PLAIN, Costs, Planner, best_plan, seconds_per_token, survival

seconds = st.floats(1e-6, 10)
probability = st.floats(0, 1)
acceptances = st.lists(probability, min_size=1, max_size=40)


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    stage_s, stage_token_s = draw(seconds), draw(st.floats(0, 1))
    return Costs(
        round_trip_s=stage_s + draw(st.floats(0, 10)),
        token_s=stage_token_s + draw(st.floats(0, 1)),
        stage_s=stage_s,
        stage_token_s=stage_token_s,
        draft_s=draw(st.floats(0, 0.1)),
    )


@given(acceptances, costs(), st.integers(1, 300))
def test_a_plan_is_bounded_and_no_slower_than_none(acceptance: list[float], costs: Costs, room: int) -> None:
    plan = best_plan(acceptance, costs, max_tokens=room)
    assert plan.chunk <= min(room, max(CHUNKS))
    assert plan.depth <= max(DEPTHS)
    plain_s = seconds_per_token(PLAIN, [], costs)
    assert seconds_per_token(plan, survival(acceptance)[:room], costs) <= plain_s


@given(acceptances, costs())
def test_a_token_takes_time_and_at_least_a_share_of_the_round_trip(acceptance: list[float], costs: Costs) -> None:
    alive = survival(acceptance)
    for chunk in CHUNKS:
        for depth in DEPTHS:
            plan_s = seconds_per_token(type(PLAIN)(chunk, depth), alive, costs)
            assert plan_s >= costs.round_trip_s / (len(alive) + 1) * 0.999


@given(costs(), probability, probability)
def test_better_guesses_are_never_slower(costs: Costs, one: float, other: float) -> None:
    worse, better = sorted((one, other))
    times = []
    for acceptance in (worse, better):
        alive = survival([acceptance])
        times.append(seconds_per_token(best_plan([acceptance], costs), alive, costs))
    assert times[1] <= times[0] * (1 + 1e-9)


@given(costs())
def test_wrong_guesses_are_not_worth_a_plan(costs: Costs) -> None:
    assert best_plan([0.0], costs) == PLAIN


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.lists(st.floats(0, 5), max_size=5), st.none() | seconds, st.none() | seconds),
        max_size=30,
    ),
    st.lists(st.tuples(st.integers(-2, 6), st.integers(0, 32), st.integers(0, 1)), max_size=30),
    acceptances,
    st.integers(-5, 300),
)
def test_whatever_was_seen_there_is_a_plan(
    steps: list[tuple[int, list[float], float | None, float | None]],
    verdicts: list[tuple[int, int, int]],
    acceptance: list[float],
    room: int,
) -> None:
    planner = Planner()
    for num_tokens, computes_s, took_s, client_s in steps:
        planner.saw_step(num_tokens, computes_s, took_s=took_s, client_s=client_s)
    for kind, right, wrong in verdicts:
        planner.saw_verdict(kind, right, wrong)
        assert 0 <= planner.acceptance(kind, 0.5) <= 1
    plan = planner.plan(acceptance, room)
    assert 0 <= plan.chunk <= max(0, room)
