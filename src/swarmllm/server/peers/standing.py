"""Who comes first when a server is short of time or room: those whom its owner names, and those who serve as well.

A client that wants to be served as somebody who serves shows, when it greets, a signature of a server
(`network/p2p/identity`). It counts while this server has met that one lately, and found that it serves what it
announces. Asked by whoever computes for a client or leases memory to it, each time: servers come and go.
"""

from collections.abc import Callable, Collection

from swarmllm.network.p2p.identity import is_genuine
from swarmllm.network.wire.protocol import Contribution
from swarmllm.server.device.scheduler import Account


class Standing:
    """Who comes first here, and on whose account."""

    def __init__(self, priority_clients: Collection[str] = (), serves: Callable[[str], bool] = lambda _: False) -> None:
        """`serves` says whether the peer of an id serves this model, as far as this server has met it."""
        self._priority_clients, self._serves = priority_clients, serves
        self._serves_by: dict[str, str] = {}
        """By the peer id of a client: the server by which it serves, or so it has proven."""

    def account(self, peer_id: str) -> Account:
        """The account of this client, as of now."""
        server = self._serves_by.get(peer_id)
        if server is not None and self._serves(server):
            return Account(server, comes_first=True)
        return Account(peer_id, comes_first=peer_id in self._priority_clients)

    def note(self, peer_id: str, contribution: Contribution | None) -> None:
        """Note what a client has shown; a signature that isn't good for it counts for nothing."""
        if contribution is not None and is_genuine(contribution, peer_id):
            self._serves_by[peer_id] = contribution.server

    def forget(self, peer_id: str) -> None:
        """Forget a client that has gone."""
        self._serves_by.pop(peer_id, None)
