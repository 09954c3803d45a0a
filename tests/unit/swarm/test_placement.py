"""Placement of servers: joining, moving, and several servers that claim the same blocks."""

from swarmllm.data_structures import ServerInfo, ServerState, Span, SwarmSnapshot
from swarmllm.swarm.placement import block_throughputs, choose_span, claim_stands, describe_choice, plan_move


def server(
    name: str,
    start: int,
    end: int,
    *,
    throughput: float = 1.0,
    state: ServerState = ServerState.ONLINE,
    claim: tuple[int, int] | None = None,
) -> ServerInfo:
    return ServerInfo(
        peer_id=name.ljust(46, "-"), start=start, end=end, throughput=throughput, state=state, claim=claim
    )


def swarm(num_blocks: int, *servers: ServerInfo) -> SwarmSnapshot:
    return SwarmSnapshot(num_blocks=num_blocks, servers=servers)


def plan(snapshot: SwarmSnapshot, name: str, balance_quality: float = 0.75) -> Span | None:
    return plan_move(snapshot, name.ljust(46, "-"), balance_quality=balance_quality)


def stands(snapshot: SwarmSnapshot, name: str) -> bool:
    return claim_stands(snapshot, name.ljust(46, "-"))


def test_what_counts_at_a_block() -> None:
    snapshot = swarm(
        4,
        server("online", 0, 2, throughput=3),
        server("joining", 1, 3, throughput=5, state=ServerState.JOINING),
        server("leaving", 0, 4, throughput=100, state=ServerState.LEAVING),
        server("beyond", 3, 9, throughput=7),
    )
    assert block_throughputs(snapshot) == [3, 8, 5, 7]


def test_a_claimer_counts_at_its_target() -> None:
    a, b = server("a", 0, 2), server("b", 0, 2, claim=(2, 4))
    assert block_throughputs(swarm(4, a, b)) == [1, 1, 1, 1]
    moving = server("b", 0, 2, claim=(2, 4), state=ServerState.LEAVING)
    assert block_throughputs(swarm(4, a, moving)) == [1, 1, 1, 1]


def test_a_claim_that_harms_the_swarm_is_not_believed() -> None:
    assert block_throughputs(swarm(4, server("a", 0, 2, claim=(2, 4)), server("b", 2, 4))) == [1, 1, 1, 1]


def test_what_a_swarm_has_of_chosen_blocks() -> None:
    half, rest = server("a", 0, 3), server("b", 3, 6)
    assert describe_choice(swarm(6), Span(0, 6)) == "nobody serves them yet (0 other servers)"
    assert describe_choice(swarm(6, half), Span(3, 6)) == "nobody serves them yet (1 other server)"
    assert describe_choice(swarm(6, half), Span(1, 6)) == "nobody serves 3 of them yet (1 other server)"
    assert describe_choice(swarm(6, half, rest), Span(3, 6)).startswith(
        "all blocks are served (2 other servers), these"
    )
    assert describe_choice(swarm(6, half, rest), Span(0, 6)) == "the whole model, which 2 other servers can run already"


def test_a_new_server_takes_the_weakest_stretch_and_no_claimed_blocks() -> None:
    a, b = server("a", 0, 2), server("b", 0, 2)
    assert choose_span(swarm(6, a, b), 2) == Span(2, 4)
    assert choose_span(swarm(6, a, server("b", 0, 2, claim=(2, 4))), 2) == Span(4, 6)
    assert choose_span(swarm(6), 100) == Span(0, 6)


def test_one_of_two_closes_a_gap() -> None:
    snapshot = swarm(4, server("a", 0, 2), server("b", 0, 2))
    assert plan(snapshot, "a") == plan(snapshot, "b") == Span(2, 4)


def test_blocks_that_nobody_else_holds_stay_held() -> None:
    a = server("a", 0, 2)
    assert plan(swarm(4, a), "a") is None
    for other in (
        server("b", 0, 2, state=ServerState.JOINING),
        server("b", 0, 2, state=ServerState.LEAVING),
        server("b", 0, 2, claim=(2, 4)),
    ):
        assert plan(swarm(5, a, other), "a") is None


def test_in_a_broken_swarm_blocks_may_be_taken_along() -> None:
    snapshot = swarm(8, server("x", 0, 4), server("y", 2, 6))
    assert plan(snapshot, "y") == Span(4, 8)
    assert plan(snapshot, "x") is None


def test_in_a_whole_swarm_they_may_not() -> None:
    servers = (server("x", 0, 4, throughput=9), server("y", 2, 6, throughput=9))
    assert plan(swarm(8, *servers, server("slow", 6, 8)), "y") is None


def test_a_balanced_swarm_stays_as_it_is() -> None:
    snapshot = swarm(4, *(server(name, start, start + 2) for name, start in (("a", 0), ("b", 0), ("c", 2), ("d", 2))))
    assert all(plan(snapshot, name, balance_quality=1.0) is None for name in "abcd")


def test_balance_quality_decides_whether_a_gain_is_enough() -> None:
    servers = [server(f"a{i}", 0, 2) for i in range(6)] + [server(f"b{i}", 2, 4) for i in range(4)]
    assert plan(swarm(4, *servers), "a0", balance_quality=0.75) is None  # 4 → 5 is 0.8
    assert plan(swarm(4, *servers), "a0", balance_quality=0.85) == Span(2, 4)


def test_gains_of_the_others_count() -> None:
    servers = [server(f"a{i}", 0, 2) for i in range(12)] + [server(f"b{i}", 2, 4) for i in range(6)]
    assert plan(swarm(4, *servers), "a0", balance_quality=0.75) == Span(2, 4)  # alone 6 → 7, all together 6 → 9


def test_only_servers_that_are_online_plan() -> None:
    held = server("a", 0, 2)
    for state in (ServerState.JOINING, ServerState.LEAVING):
        assert plan(swarm(4, held, server("b", 0, 2, state=state)), "b") is None
    assert plan(swarm(4, held, server("b", 0, 2, claim=(2, 4))), "b") is None
    assert plan(swarm(4, held), "unknown") is None


def test_of_two_claimers_for_one_gap_the_first_stands() -> None:
    snapshot = swarm(4, *(server(name, 0, 2, claim=(2, 4)) for name in "ba"))
    assert stands(snapshot, "a")
    assert not stands(snapshot, "b")


def test_a_claim_yields_to_a_server_on_the_way_whatever_its_id() -> None:
    for state, span in ((ServerState.LEAVING, (0, 2)), (ServerState.JOINING, (2, 4))):
        claim = (2, 4) if state == ServerState.LEAVING else None
        snapshot = swarm(
            4, server("a", 0, 2, claim=(2, 4)), server("c", 0, 2), server("z", *span, state=state, claim=claim)
        )
        assert not stands(snapshot, "a")


def test_two_claims_elsewhere_do_not_both_leave_shared_blocks() -> None:
    snapshot = swarm(6, server("a", 0, 2, claim=(2, 4)), server("b", 0, 2, claim=(4, 6)))
    assert stands(snapshot, "a")
    assert not stands(snapshot, "b")


def test_a_claim_falls_when_its_reason_is_gone() -> None:
    claimer, other = server("a", 0, 2, claim=(2, 4)), server("b", 0, 2)
    assert stands(swarm(4, claimer, other), "a")
    assert not stands(swarm(4, claimer, other, server("c", 2, 4)), "a")
    assert not stands(swarm(4, claimer), "a")
    assert not stands(swarm(4, server("a", 0, 2), other), "a")


def test_claims_that_make_no_sense_never_stand() -> None:
    other = server("b", 0, 2)
    for claim in ((0, 2), (2, 3), (3, 5), (2, 5)):
        assert not stands(swarm(4, server("a", 0, 2, claim=claim), other), "a")
