"""In any swarm, servers that follow the plan never lose a block, never reload the same blocks, and come to rest."""

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.data_structures import ServerInfo, ServerState, Span, SwarmSnapshot
from swarmllm.swarm.placement import block_throughputs, choose_span, claim_stands, plan_move

QUALITIES = st.sampled_from((0.5, 0.75, 0.95, 1.0))


@st.composite
def swarms(draw: st.DrawFn, only_online: bool = False) -> SwarmSnapshot:
    num_blocks = draw(st.integers(1, 12))
    servers = []
    for index in range(draw(st.integers(0, 10))):
        start = draw(st.integers(0, num_blocks - 1))
        state = ServerState.ONLINE if only_online else draw(st.sampled_from((0, 1, 1, 1, 2)))
        claim = None
        if not only_online and draw(st.integers(0, 3)) == 0:
            first = draw(st.integers(0, num_blocks - 1))
            claim = (first, draw(st.integers(first + 1, num_blocks)))
        servers.append(
            ServerInfo(
                peer_id=f"{index:046d}",
                start=start,
                end=draw(st.integers(start + 1, num_blocks)),
                throughput=draw(st.sampled_from((0.0, 0.1, 0.3, 1.0, 2.5, 40.0)) | st.floats(0, 100)),
                state=state,
                claim=claim,
            )
        )
    return SwarmSnapshot(num_blocks=num_blocks, servers=tuple(servers))


def changed(snapshot: SwarmSnapshot, peer_id: str, **changes: object) -> SwarmSnapshot:
    servers = tuple(s.model_copy(update=changes) if s.peer_id == peer_id else s for s in snapshot.servers)
    return SwarmSnapshot(num_blocks=snapshot.num_blocks, servers=servers)


def held_by_others(snapshot: SwarmSnapshot, peer_id: str) -> set[int]:
    """Blocks of servers that are ONLINE and have not claimed to go elsewhere."""
    return {b for s in snapshot.online() if s.peer_id != peer_id and s.claim is None for b in s.span}


@given(swarms(), st.integers(1, 14))
def test_joining_servers_get_a_span_of_the_model(snapshot: SwarmSnapshot, num_blocks: int) -> None:
    span = choose_span(snapshot, num_blocks)
    assert len(span) == min(num_blocks, snapshot.num_blocks)
    assert span in Span(0, snapshot.num_blocks)
    assert min(block_throughputs(snapshot)) in [block_throughputs(snapshot)[block] for block in span]


@given(swarms(), QUALITIES)
def test_a_planned_move_is_allowed_and_helps(snapshot: SwarmSnapshot, quality: float) -> None:
    before = block_throughputs(snapshot)
    for server in snapshot.servers:
        target = plan_move(snapshot, server.peer_id, balance_quality=quality)
        if target is None:
            continue
        assert server.state == ServerState.ONLINE
        assert target != server.span
        assert len(target) == len(server.span)
        assert target in Span(0, snapshot.num_blocks)
        kept = held_by_others(snapshot, server.peer_id)
        taken_along = set(target) if min(before) == 0 else set()
        assert set(server.span) <= kept | taken_along
        after = block_throughputs(changed(snapshot, server.peer_id, start=target.start, end=target.end))
        assert sorted(after) > sorted(before)


@given(swarms(only_online=True), QUALITIES)
def test_servers_that_move_one_after_the_other_come_to_rest(snapshot: SwarmSnapshot, quality: float) -> None:
    whole = not snapshot.missing_blocks()
    for _ in range(100):
        moved = False
        for server in snapshot.servers:
            target = plan_move(snapshot, server.peer_id, balance_quality=quality)
            if target is not None:
                snapshot, moved = changed(snapshot, server.peer_id, start=target.start, end=target.end), True
                assert not (whole and snapshot.missing_blocks())
                whole = not snapshot.missing_blocks()
        if not moved:
            return
    raise AssertionError("servers kept moving")


@given(swarms(only_online=True), QUALITIES)
def test_claims_made_at_once_are_served_one_after_the_other(snapshot: SwarmSnapshot, quality: float) -> None:
    """Everybody plans from the same look; those whose claims stand leave no block, and one of them always does."""
    targets = {s.peer_id: plan_move(snapshot, s.peer_id, balance_quality=quality) for s in snapshot.servers}
    claimed = snapshot
    for peer_id, target in targets.items():
        if target is not None:
            claimed = changed(claimed, peer_id, claim=(target.start, target.end))
    standing = [peer_id for peer_id in targets if claim_stands(claimed, peer_id, balance_quality=quality)]
    assert bool(standing) == any(target is not None for target in targets.values())

    before = block_throughputs(snapshot)
    moving = claimed
    for peer_id in standing:
        moving = changed(moving, peer_id, state=ServerState.LEAVING)
    staying = {block for s in snapshot.servers if s.peer_id not in standing for block in s.span}
    arriving = {block for peer_id in standing for block in targets[peer_id] or ()}
    held = set(range(snapshot.num_blocks)).difference(snapshot.missing_blocks())
    assert held <= staying | (arriving if min(before) == 0 else set())


@given(st.integers(2, 3), st.integers(1, 4))
def test_of_claimers_for_a_gap_that_one_fills_exactly_one_stands(num_claimers: int, length: int) -> None:
    """Three replicas or fewer can spare one; the more there are, the more the balance itself asks for."""
    names = [f"{index:046d}" for index in range(num_claimers)]
    servers = tuple(
        ServerInfo(peer_id=name, start=0, end=length, throughput=1.0, claim=(length, 2 * length)) for name in names
    )
    snapshot = SwarmSnapshot(num_blocks=2 * length, servers=servers)
    assert [claim_stands(snapshot, name) for name in names] == [True] + [False] * (len(names) - 1)
