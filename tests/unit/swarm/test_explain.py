"""Routes in words: the numbers add up, and who would be faster alone is named."""

import pytest

from swarmllm.data_structures import RouteHop, ServerInfo, Span, SwarmSnapshot
from swarmllm.swarm.block_map import explain_route
from swarmllm.swarm.route_costs import HOP_COST_MS, RouteCosts

LEFT = ServerInfo(peer_id="l" * 46, start=0, end=4, decode_ms_per_block=2.0, queue_ms=3.0)
RIGHT = ServerInfo(peer_id="r" * 46, start=4, end=8, decode_ms_per_block=1.0)
ROUTE = [RouteHop(LEFT, Span(0, 4)), RouteHop(RIGHT, Span(4, 8))]
COSTS = RouteCosts(round_trips_ms={LEFT.peer_id: 10.0, RIGHT.peer_id: 30.0})


def test_hops_add_up_to_the_step() -> None:
    route = explain_route(ROUTE, SwarmSnapshot(8, (LEFT, RIGHT)), COSTS)
    ways_ms = 10 / 2 + 30 / 2 + 30 / 2  # there, between (the middle of what the triangle allows), back
    assert route.expected_ms == pytest.approx(ways_ms + 2 * HOP_COST_MS + 3.0 + 4 * 2.0 + 4 * 1.0)
    assert list(route) == ROUTE
    total, left, right, *alone = str(route).splitlines()
    assert f"{route.expected_ms:.1f} ms per token" in total
    assert left.startswith("  0:4 …llllll: network 6.0 ms, queue 3.0 ms, computing 8.0 ms")
    assert right.startswith("  4:8 …rrrrrr: network 31.0 ms, queue 0.0 ms, computing 4.0 ms")
    assert len(alone) == 1
    assert "llllll alone" in alone[0]
    assert "it holds 0:4" in alone[0]


def test_the_client_s_head_counts() -> None:
    snapshot = SwarmSnapshot(8, (LEFT, RIGHT))
    without = explain_route(ROUTE, snapshot, COSTS)
    route = explain_route(ROUTE, snapshot, COSTS, head_ms=85.0)
    assert route.expected_ms == pytest.approx(without.expected_ms + 85)
    assert str(route).splitlines()[0].endswith("computing 12.0 ms, this client's head 85.0 ms")
    assert "head" not in str(without)


def test_announced_distance_between_servers_counts() -> None:
    near = LEFT.model_copy(update={"round_trips": ((RIGHT.peer_id, 2.0),)})
    route = [RouteHop(near, Span(0, 4)), ROUTE[1]]
    snapshot = SwarmSnapshot(8, (near, RIGHT))
    estimated = explain_route(ROUTE, snapshot, COSTS).expected_ms
    assert explain_route(route, snapshot, COSTS).expected_ms == pytest.approx(estimated - 30 / 2 + 2 / 2)


def test_this_machine_is_named_if_it_would_be_faster() -> None:
    snapshot = SwarmSnapshot(8, (LEFT, RIGHT))
    assert "this machine alone would take about 20.0 ms" in str(explain_route(ROUTE, snapshot, COSTS, here_ms=20.0))
    assert "this machine" not in str(explain_route(ROUTE, snapshot, COSTS, here_ms=1000.0))


def test_no_slower_server_is_named() -> None:
    whole = ServerInfo(peer_id="w" * 46, start=0, end=8)
    route = explain_route([RouteHop(whole, Span(0, 8))], SwarmSnapshot(8, (whole,)), RouteCosts())
    assert "alone" not in str(route)
    assert len(str(route).splitlines()) == 1
