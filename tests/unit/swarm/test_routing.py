"""Routes: the cheapest there is, found as brute force finds it; and what is said when there is none."""

import itertools
import random
import statistics
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import linprog

from swarmllm.data_structures import BlockTraits, RouteHop, ServerInfo, ServerState, Span, SwarmSnapshot
from swarmllm.errors import MissingBlocksError
from swarmllm.swarm.route_costs import RouteCosts, route_tokens_per_s, seconds_per_token
from swarmllm.swarm.routing import SHARE_WORTH_IT, describe_blocks, find_parallel_routes, find_route, route_cost_ms

NUM_BLOCKS = 5


def server(name: str, start: int, end: int, *, ms: float = 1.0, state: int = ServerState.ONLINE, cuts=()) -> ServerInfo:
    return ServerInfo(
        peer_id=name.ljust(46, "x"),
        start=start,
        end=end,
        state=state,
        decode_ms_per_block=ms,
        traits=BlockTraits(forbidden_cuts=cuts),
    )


def spans(*servers: ServerInfo, span: Span | None = None, num_blocks: int = NUM_BLOCKS, **options) -> list[str]:
    route = find_route(SwarmSnapshot(num_blocks, servers), span, **options)
    return [f"{hop.server.peer_id.rstrip('x')}{hop.span}" for hop in route]


def test_fewer_hops_are_cheaper() -> None:
    assert spans(server("a", 0, 2), server("b", 2, 5), server("c", 0, 5)) == ["c0:5"]


def test_a_fast_pair_beats_a_slow_single_server() -> None:
    assert spans(server("a", 0, 2), server("b", 2, 5), server("c", 0, 5, ms=2)) == ["a0:2", "b2:5"]


def test_the_faster_of_two_overlapping_servers_runs_what_both_hold() -> None:
    assert spans(server("a", 0, 4, ms=9), server("b", 2, 5)) == ["a0:2", "b2:5"]


def test_a_part_of_the_model() -> None:
    assert spans(server("a", 0, 4), server("b", 3, 5), span=Span(1, 3)) == ["a1:3"]


def test_avoided_and_leaving_and_joining_servers_are_not_used() -> None:
    good = server("z", 0, 5, ms=50)
    bad = server("a", 0, 5)
    others = [server(name, 0, 5, state=state) for name, state in (("b", 0), ("c", 2), ("d", 77))]
    assert spans(good, bad, *others, avoid={bad.peer_id}) == ["z0:5"]


def test_where_all_are_to_be_avoided_the_one_with_the_least_time_left_is_taken() -> None:
    fast, slow, late = server("a", 0, 5, ms=0.1), server("b", 0, 3, ms=50), server("c", 3, 5)
    left_s = {fast.peer_id: 9.0, slow.peer_id: 8.9}
    assert spans(fast, slow, late, costs=RouteCosts(avoided_s=left_s)) == ["b0:3", "c3:5"]
    assert spans(fast, slow, late, costs=RouteCosts(avoided_s=left_s | {late.peer_id: 0.2})) == ["a0:5"]


def test_servers_that_round_otherwise_come_after_the_others_and_before_those_to_avoid() -> None:
    alike = server("a", 0, 5, ms=500)
    other = server("b", 0, 5).model_copy(update={"quant_type": "nf4"})
    text = RouteCosts(rounding=dict.fromkeys(range(3), alike.rounding))
    assert spans(alike, other) == ["b0:5"]
    assert spans(alike, other, costs=text) == ["a0:5"]
    assert spans(alike, other, span=Span(3, 5), costs=RouteCosts()) == ["b3:5"]
    assert spans(alike, other, costs=replace(text, avoided_s={alike.peer_id: 1.0})) == ["b0:5"]
    assert spans(other, costs=text) == ["b0:5"]


def test_among_equals_those_behind_relays_are_neither_first_nor_last() -> None:
    relayed = {"addrs": ("/ip4/203.0.113.7/tcp/1/p2p/R/p2p-circuit",)}
    hidden = [server(name, 0, 5).model_copy(update=relayed) for name in "ab"]
    assert spans(*hidden, server("z", 0, 5)) == ["z0:5"]
    assert spans(*hidden) == ["a0:5"]
    ends = [server("y", 0, 2), server("z", 3, 5)]
    middle = [server("m", 2, 3).model_copy(update=relayed)]
    assert spans(*ends, *middle) == ["y0:2", "m2:3", "z3:5"]
    nearer = {one.peer_id: 5.0 for one in hidden}
    assert spans(*hidden, server("z", 0, 5), costs=RouteCosts(round_trips_ms={"z".ljust(46, "x"): 20.0} | nearer)) == [
        "a0:5"
    ]


def test_no_cut_where_blocks_belong_together() -> None:
    assert spans(server("a", 0, 3, cuts=(2,)), server("b", 2, 5, cuts=(2,))) == ["a0:3", "b3:5"]
    with pytest.raises(MissingBlocksError, match="can't be joined") as caught:
        spans(server("a", 0, 3, cuts=(1, 2)), server("b", 2, 5, cuts=(3, 4)), server("c", 3, 5, cuts=(3,)))
    assert caught.value.block_idxs == ()


def test_missing_blocks_are_named() -> None:
    with pytest.raises(MissingBlocksError, match=r"nobody serves blocks 0:1, 3:5$") as caught:
        spans(server("a", 1, 3))
    assert caught.value.block_idxs == (0, 3, 4)
    assert describe_blocks([7]) == "blocks 7:8"


def throughputs(*servers: tuple[str, int, int, float]) -> SwarmSnapshot:
    """A swarm of servers by name, span and tokens per second."""
    num_blocks = max(end for _, _, end, _ in servers)
    found = [server(name, start, end).model_copy(update={"throughput": speed}) for name, start, end, speed in servers]
    return SwarmSnapshot(num_blocks, tuple(found))


def parallel(snapshot: SwarmSnapshot, max_routes: int = 4) -> tuple[float, list[tuple[list[RouteHop], float]]]:
    """Tokens per second of the swarm by the routes and shares that are found, and these."""
    costs = RouteCosts(forward_tokens=1000)
    routes = find_parallel_routes(snapshot, Span(0, snapshot.num_blocks), costs=costs, max_routes=max_routes)
    assert sum(share for _, share in routes) == pytest.approx(1)
    busy: Counter[str] = Counter()
    for route, share in routes:
        assert [hop.span.start for hop in route] == [0, *(hop.span.end for hop in route[:-1])]
        assert all(hop.span in hop.server.span for hop in route)
        for hop in route:
            busy[hop.server.peer_id] += share * seconds_per_token(hop)
    return 1 / max(busy.values()), routes


def most_tokens_per_s(snapshot: SwarmSnapshot) -> float:
    """The tokens that all routes could carry: servers compute each block for each token, as much as they can."""
    loads = [(place, block) for place, one in enumerate(snapshot.servers) for block in one.span]
    of_servers, of_blocks = (
        np.zeros((count, len(loads) + 1)) for count in (len(snapshot.servers), snapshot.num_blocks)
    )
    for idx, (place, block) in enumerate(loads):
        of_servers[place, idx] = of_blocks[block, idx] = 1
    of_blocks[:, -1] = -1  # the tokens
    tokens = np.zeros(len(loads) + 1)
    tokens[-1] = -1
    can_do = [one.throughput * len(one.span) for one in snapshot.servers]
    return float(linprog(tokens, of_servers, can_do, of_blocks, np.zeros(snapshot.num_blocks)).x[-1])


def test_a_fast_server_keeps_several_slow_ones_busy() -> None:
    speed, routes = parallel(throughputs(("a", 0, 4, 300), ("b", 4, 8, 100), ("c", 4, 8, 100), ("d", 4, 8, 100)))
    assert speed == pytest.approx(300)
    assert [share for _, share in routes] == pytest.approx([1 / 3] * 3)


def test_a_server_of_all_blocks_leaves_those_of_another_one_to_it() -> None:
    speed, _ = parallel(throughputs(("a", 0, 8, 100), ("b", 0, 4, 100)))
    assert speed == pytest.approx(150)


def test_one_server_or_one_that_announced_nothing_is_one_route() -> None:
    assert [share for _, share in parallel(throughputs(("a", 0, 5, 100)))[1]] == [1.0]
    costs = RouteCosts(forward_tokens=1000)
    (one,) = find_parallel_routes(throughputs(("a", 0, 5, 0)), Span(0, 5), costs=costs, max_routes=4)
    assert one[1] == 1.0


layouts = st.lists(
    st.tuples(st.integers(0, 11), st.integers(1, 12), st.sampled_from([50.0, 100.0, 200.0, 400.0])), max_size=9
)


@given(layouts, st.integers(1, 6), st.sampled_from([25.0, 100.0]))
def test_several_routes_carry_more_than_one_and_no_more_than_there_is(
    layout: list[tuple[int, int, float]], max_routes: int, least: float
) -> None:
    named = [(f"s{idx}", start, min(start + length, 12), speed) for idx, (start, length, speed) in enumerate(layout)]
    snapshot = throughputs(("all", 0, 12, least), *named)
    speed, routes = parallel(snapshot, max_routes)
    assert len(routes) <= max_routes
    assert speed <= most_tokens_per_s(snapshot) * (1 + 1e-6)
    alone = find_route(snapshot, costs=RouteCosts(forward_tokens=1000))
    assert speed >= route_tokens_per_s(alone) * (1 - SHARE_WORTH_IT) or max_routes == 1


def test_four_routes_carry_most_of_what_any_number_could() -> None:
    rng, shares = random.Random(0), []
    for _ in range(60):
        spans = [(start := rng.randrange(12), min(start + rng.randint(2, 12), 12)) for _ in range(9)]
        servers = [(f"s{i}", *span, rng.choice([50.0, 100.0, 200.0, 400.0])) for i, span in enumerate(spans)]
        snapshot = throughputs(("all", 0, 12, 25.0), *servers)
        shares.append(parallel(snapshot)[0] / most_tokens_per_s(snapshot))
    assert statistics.median(shares) > 0.8


servers = st.lists(
    st.builds(
        lambda bounds, ms, cuts, queue, distance, links: (
            min(bounds),
            max(bounds) + 1,
            ms,
            cuts,
            queue,
            distance,
            links,
        ),
        st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1)),
        st.sampled_from([0.25, 1.0, 3.0]),
        st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=2),
        st.sampled_from([0.0, 0.0, 2.0]),
        st.sampled_from([None, 0.5, 4.0, 20.0]),
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.5, 6.0, 30.0])), max_size=2),
    ),
    max_size=4,
)


TOLD_TWICE = [(0, 3, 1.0, set(), 0.0, None, [(1, 0.5), (1, 6.0)]), (0, 2, 0.25, set(), 0.0, None, [])]
"""The first server says of the second that it is near, and that it is far."""


@given(servers, st.integers(0, NUM_BLOCKS - 1), st.integers(1, NUM_BLOCKS), st.booleans())
@example(TOLD_TWICE, 0, 3, False)
def test_as_cheap_as_brute_force(described: list, start: int, length: int, relayed: bool) -> None:
    swarm = [
        server(f"s{i}", a, b, ms=ms, cuts=tuple(cuts)).model_copy(
            update={"queue_ms": queue, "round_trips": tuple((f"s{j}".ljust(46, "x"), way) for j, way in links)}
        )
        for i, (a, b, ms, cuts, queue, _, links) in enumerate(described)
    ]
    distances = {s.peer_id: d for s, (_, _, _, _, _, d, _) in zip(swarm, described, strict=True) if d is not None}
    costs = RouteCosts(round_trips_ms=distances, relayed=relayed)
    span = Span(start, min(start + length, NUM_BLOCKS))
    cheapest = float("inf")
    for owners in itertools.product(swarm, repeat=len(span)):  # who runs each block
        route = [
            RouteHop(owner, Span(run[0], run[-1] + 1))
            for owner, run in (
                (owner, [block for _, block in run])
                for owner, run in itertools.groupby(zip(owners, span, strict=True), lambda pair: pair[0])
            )
        ]
        if all(
            hop.span in hop.server.span and not {hop.span.start, hop.span.end} & set(hop.server.traits.forbidden_cuts)
            for hop in route
        ):
            cheapest = min(cheapest, route_cost_ms(route, costs))

    try:
        route = find_route(SwarmSnapshot(NUM_BLOCKS, tuple(swarm)), span, costs=costs)
    except MissingBlocksError:
        assert cheapest == float("inf")
        return

    assert route_cost_ms(route, costs) == pytest.approx(cheapest)
    assert (route[0].span.start, route[-1].span.end) == (span.start, span.end)
    assert all(before.span.end == after.span.start for before, after in itertools.pairwise(route))
    assert all(hop.span in hop.server.span for hop in route)


@pytest.mark.parametrize("seed", range(4))
def test_in_a_large_swarm_the_beam_misses_nothing_much(seed: int) -> None:
    """Against the exact shortest path, which is the same search with a beam as wide as the swarm."""
    generator = random.Random(seed)
    swarm, num_blocks = [], 40
    names = [f"s{i}".ljust(46, "x") for i in range(250)]
    for name in names:
        length = generator.randint(2, 16)
        start = generator.randint(0, num_blocks - length)
        links = tuple((generator.choice(names), generator.uniform(0.5, 150)) for _ in range(6))
        info = server(name, start, start + length, ms=generator.uniform(0.2, 5))
        swarm.append(info.model_copy(update={"queue_ms": generator.uniform(0, 20), "round_trips": links}))
    costs = RouteCosts(round_trips_ms={name: generator.uniform(1, 200) for name in names[::2]})
    snapshot = SwarmSnapshot(num_blocks, tuple(swarm))

    found = route_cost_ms(find_route(snapshot, costs=costs), costs)
    exact = route_cost_ms(find_route(snapshot, costs=costs, beam_width=len(swarm)), costs)

    assert exact <= found <= 1.02 * exact


def test_a_near_server_beats_a_faster_one_far_away() -> None:
    near, far = server("near", 0, 5, ms=3), server("far", 0, 5, ms=1)
    costs = RouteCosts(round_trips_ms={near.peer_id: 1.0, far.peer_id: 80.0})
    assert spans(near, far, costs=costs) == ["near0:5"]
    assert spans(near, far) == ["far0:5"]


def test_two_servers_beside_each_other_beat_one_step_back_and_forth() -> None:
    a, b, c = server("a", 0, 3), server("b", 3, 5), server("c", 3, 5)
    beside = a.model_copy(update={"round_trips": ((c.peer_id, 1.0),)})
    costs = RouteCosts(round_trips_ms={s.peer_id: 100.0 for s in (a, b, c)})
    assert spans(beside, b, c, costs=costs) == ["a0:3", "c3:5"]


def test_queue_context_batch_and_cache_count() -> None:
    quick, slow = server("quick", 0, 5, ms=1), server("slow", 0, 5, ms=2)

    def chosen(costs: RouteCosts | None = None, **values: object) -> list[str]:
        return spans(quick.model_copy(update=values), slow, costs=costs)

    assert chosen() == ["quick0:5"]
    assert chosen(queue_ms=6.0) == ["slow0:5"]
    assert chosen(RouteCosts(context_tokens=4000), context_ms_per_block_per_1k=0.5) == ["slow0:5"]
    assert chosen(RouteCosts(batch_size=8), decode_ms_per_block_batch8=3.0) == ["slow0:5"]
    room = {"throughput": 1.0, "cache_tokens_left": 1000}
    assert chosen(RouteCosts(cache_tokens=500), **room) == ["quick0:5"]
    assert chosen(RouteCosts(cache_tokens=900), **room) == ["slow0:5"]


def test_work_is_shared_in_proportion_to_throughput() -> None:
    swarm = [
        server(name, start, end).model_copy(update={"throughput": throughput})
        for name, start, end, throughput in (("a", 0, 5, 300.0), ("b", 0, 3, 100.0), ("c", 3, 5, 100.0))
    ]
    costs = RouteCosts(forward_tokens=100)
    shares = find_parallel_routes(SwarmSnapshot(5, tuple(swarm)), Span(0, 5), costs=costs, max_routes=4)
    assert [[str(hop.span) for hop in route] for route, _ in shares] == [["0:5"], ["0:3", "3:5"]]
    assert [share for _, share in shares] == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize(
    ("dtype", "quant_type", "activations", "finely"),
    [
        ("float32", "none", "none", True),
        ("float32", "q8_0", "none", True),
        ("float32", "q8_0", "int8", False),
        ("float32", "none", "int8", False),
        ("bfloat16", "none", "none", False),
    ],
)
def test_rounded_inputs_are_never_fine(dtype: str, quant_type: str, activations: str, finely: bool) -> None:
    """Also those of a checkpoint that comes packed, which stays so without a quantization of the server's."""
    info = ServerInfo(peer_id="x" * 46, start=0, end=1, dtype=dtype, quant_type=quant_type, activations=activations)
    assert info.rounds_finely == finely
