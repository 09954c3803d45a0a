"""Which servers hold the same weights, as far as their digests tell: called by clients before routes, and by `status`.

A digest is a claim. It shows that two machines have other files by accident, and nothing about who lies.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from swarmllm.data_structures import ServerInfo


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
