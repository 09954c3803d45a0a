"""The part of an announced speed that counts."""

from swarmllm.data_structures import ServerInfo, Span, SwarmSnapshot
from swarmllm.swarm.claims import MAX_TIMES_MEDIAN, plausible
from swarmllm.swarm.placement import plan_move


def server(name: str, start: int, end: int, throughput: float) -> ServerInfo:
    return ServerInfo(peer_id=name.ljust(46, "x"), start=start, end=end, throughput=throughput)


def test_a_boast_counts_as_a_multiple_of_what_others_have() -> None:
    honest = [server("a", 0, 4, 100.0), server("b", 4, 8, 300.0), server("c", 0, 8, 100.0)]
    assert plausible(honest) == tuple(honest)
    *same, boaster = plausible([*honest, server("d", 0, 2, 1e8)])
    assert same == honest
    assert boaster.throughput * 2 == MAX_TIMES_MEDIAN * 100.0 * 8
    assert plausible([server("a", 0, 8, 10.0), server("b", 0, 8, 1e9)])[1].throughput == MAX_TIMES_MEDIAN * 10.0
    assert plausible([server("a", 0, 8, 0.0)]) == (server("a", 0, 8, 0.0),)
    assert plausible([]) == ()


def test_a_boast_moves_nobody_away_from_blocks_that_are_needed() -> None:
    """The greeted boaster holds a part; its 1e8 would make that part look served for ever."""
    servers = [server("a", 0, 4, 100.0), server("b", 0, 4, 100.0), server("c", 4, 8, 150.0), server("d", 0, 4, 1e8)]
    told = SwarmSnapshot(num_blocks=8, servers=tuple(servers))
    assert plan_move(told, servers[0].peer_id) == Span(4, 8)
    counted = SwarmSnapshot(num_blocks=8, servers=plausible(servers))
    assert max(one.throughput for one in counted.servers) == MAX_TIMES_MEDIAN * 100.0
