"""Bounds on servers' own claims: nobody's throughput attracts more than a multiple of what others have.

Called before placement and before batches are split. Pure.
"""

from collections.abc import Iterable

from swarmllm.data_structures import ServerInfo

MAX_TIMES_MEDIAN = 16.0
"""Assumed: today's best cards are about this many times as fast as what most of a swarm has. A faster server counts as
if it were not, which costs little: others hold its blocks as well."""


def plausible(servers: Iterable[ServerInfo]) -> tuple[ServerInfo, ...]:
    """The servers, with throughputs of at most `MAX_TIMES_MEDIAN` times the median of them all.

    Compared are tokens per second and block. Of two medians the lesser one counts: one stranger beside one honest
    server must not set the measure.
    """
    servers = tuple(servers)
    speeds = sorted(server.throughput * len(server.span) for server in servers if server.throughput)
    if not speeds:
        return servers
    most = MAX_TIMES_MEDIAN * speeds[(len(speeds) - 1) // 2]
    return tuple(
        server.model_copy(update={"throughput": most / len(server.span)})
        if server.throughput * len(server.span) > most
        else server
        for server in servers
    )
