"""Servers' own claims, and how much they count: bounds on throughput, and digests of weights. Pure.

A server's throughput attracts no more than a multiple of what others have; called before placement and before batches
are split. Digests tell which servers hold the same weights; called by clients before routes, and by `status`. A digest
shows that two machines have other files by accident, and nothing about who lies.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

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


def agreed_digests(servers: Iterable[ServerInfo], kept: Mapping[int, str] | None = None) -> dict[int, str]:
    """Block → the digest that counts: those `kept`, then those of whole servers, the ones that most agree with first.

    That is, per block and on average. Whole servers, because a majority for each block could make one model of two.
    """
    chosen, told = dict(kept or {}), [(server, server.digests()) for server in servers]
    votes = Counter(said for _, digests in told for said in digests.items())

    def support(one: tuple[ServerInfo, dict[int, str]]) -> tuple[float, int, str]:
        server, digests = one
        return sum(votes[said] for said in digests.items()) / len(digests), len(server.span), server.peer_id

    for _, digests in sorted(((server, said) for server, said in told if said), key=support, reverse=True):
        if not contradicts(digests, chosen):
            chosen.update(digests)
    return chosen


def contradicts(digests: Mapping[int, str], chosen: Mapping[int, str]) -> list[int]:
    """The blocks that are not the same."""
    return [block for block, digest in digests.items() if chosen.get(block, digest) != digest]
