"""Limits on servers' claims of throughput, and digests of their weights. Pure.

Throughput counts up to a multiple of the median; used before placement and before splitting a forward over routes.
Digests tell which servers hold the same weights; used by clients before routing, and by `status`. A different digest
shows other files by accident. It doesn't show who lies.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from swarmllm.data_structures import ServerInfo

MAX_TIMES_MEDIAN = 16.0
"""Assumed: today's best cards are about this many times as fast as most of a swarm. A faster server counts as if it
were not, which costs little, because others hold its blocks as well."""


def plausible(servers: Iterable[ServerInfo]) -> tuple[ServerInfo, ...]:
    """The servers, with throughputs limited to `MAX_TIMES_MEDIAN` times the median.

    Compares tokens per second and block. With two servers the lower one is the median, so one stranger can't set the
    measure.
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
    """The digest of each block that counts: first those `kept`, then those of whole servers, in the order of agreement.

    Agreement is the average number of servers with the same digests. Whole servers, because a majority for each block
    could mix two models.
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
    """The blocks whose digests differ."""
    return [block for block, digest in digests.items() if chosen.get(block, digest) != digest]
