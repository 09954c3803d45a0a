"""The weights that a client uses where servers hold different ones for the same blocks, and whom that leaves out.

Clients don't mix them: what a session has in its caches was computed with one kind. Used by `view/routes`. Only servers
that have been met have a say, and none that is avoided. One that says a false digest can win all the same; then it is
used, as if it had said what the others say, until it fails or is caught, and what was chosen is forgotten.
"""

import logging
from collections.abc import Collection, Iterable

from swarmllm.data_structures import RouteHop, SwarmSnapshot
from swarmllm.network.p2p.verified_peers import VerifiedPeers
from swarmllm.swarm.block_map import describe_different_weights
from swarmllm.swarm.weight_digests import agreed_digests, contradicts

logger = logging.getLogger(__name__)


class AgreedWeights:
    """The choice, by what servers announce of their blocks."""

    def __init__(self, verified: VerifiedPeers) -> None:
        self._verified = verified
        self._kept: dict[int, str] = {}
        self._snapshot: SwarmSnapshot | None = None
        self._digests: dict[str, dict[int, str]] = {}
        self._together: dict[int, str] = {}
        """What all say, if they agree."""
        self._all_agree = True
        self._told: list[str] = []

    def is_open(self, snapshot: SwarmSnapshot) -> bool:
        """Whether there is something to choose, and nothing has been chosen."""
        self._read(snapshot)
        return not self._all_agree and not self._kept

    def differing(self, snapshot: SwarmSnapshot, avoided: Collection[str]) -> frozenset[str]:
        """Peer ids of servers with other weights than those in use; of the others, those `avoided` have no say."""
        self._read(snapshot)
        if self._all_agree and not contradicts(self._together, self._kept):
            return frozenset()
        met = self._verified.confirmed(snapshot.online())
        chosen = agreed_digests([server for server in met if server.peer_id not in avoided], self._kept)
        return frozenset(peer_id for peer_id, digests in self._digests.items() if contradicts(digests, chosen))

    def keep(self, route: Iterable[RouteHop]) -> None:
        """A route has been found: from now on the weights of those of its servers that were met, and no others."""
        for server in self._verified.confirmed(hop.server for hop in route):
            for block, digest in server.digests().items():
                self._kept.setdefault(block, digest)

    def forget(self) -> None:
        """No route is left with these weights, so what begins from now on may have others."""
        self._kept.clear()

    def _read(self, snapshot: SwarmSnapshot) -> None:
        if snapshot is self._snapshot:
            return
        self._snapshot = snapshot
        self._digests = {server.peer_id: server.digests() for server in snapshot.online()}
        self._together, self._all_agree = {}, True
        for digests in self._digests.values():
            self._all_agree = self._all_agree and not contradicts(digests, self._together)
            self._together.update(digests)
        lines = [] if self._all_agree else describe_different_weights(snapshot)
        for line in lines:
            if line not in self._told:
                logger.warning("%s", line)
        self._told = lines
