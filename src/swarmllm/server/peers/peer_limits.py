"""Limits of one peer on this server: streams, and bytes of requests under way; and which clients come first.

Called by the code that takes streams and requests in. While a request waits for room its stream isn't read, so that
the rest stays with the peer. Sessions have limits of their own (`sessions/session`, `kv_cache`).

When a server is short of time or room, the clients that its owner names come first, and so do clients that serve the
model themselves. Such a client shows, when it greets, a signature of a server (`network/p2p/identity`). It counts
while this server has met that server lately, and found that it serves what it announces. `Standing` is asked each time
that something is computed for a client or memory is leased to it: servers come and go.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable, Collection

from swarmllm.errors import ServerOverloadedError
from swarmllm.network.p2p.identity import is_genuine
from swarmllm.network.wire.protocol import Contribution
from swarmllm.server.device.scheduler import Account

MAX_STREAMS_PER_PEER = 256
MAX_STREAMS = 4096
"""Streams of all peers (peer ids cost nothing): as many as p2pd has connections (`p2p/daemon`), and at most three
quarters of the files that this process may open."""
MAX_BYTES_PER_PEER = 512 << 20
"""Assumed: four of the largest requests (8192 tokens × 4096 floats); a client keeps about two per server busy."""


class Standing:
    """Decides which clients come first, and names the accounts that their device time counts for."""

    def __init__(self, priority_clients: Collection[str] = (), serves: Callable[[str], bool] = lambda _: False) -> None:
        """`serves` tells if a peer id is a server of this model, as far as this server has met it."""
        self._priority_clients, self._serves = priority_clients, serves
        self._serves_by: dict[str, str] = {}
        """The server that a client belongs to, as it has proven, by the client's peer id."""

    def account(self, peer_id: str) -> Account:
        """Return the account of this client, as of now."""
        server = self._serves_by.get(peer_id)
        if server is not None and self._serves(server):
            return Account(server, comes_first=True)
        return Account(peer_id, comes_first=peer_id in self._priority_clients)

    def note(self, peer_id: str, contribution: Contribution | None) -> None:
        """Note a client's proof that it belongs to a server; an invalid signature counts for nothing."""
        if contribution is not None and is_genuine(contribution, peer_id):
            self._serves_by[peer_id] = contribution.server

    def forget(self, peer_id: str) -> None:
        """Forget a client that has gone."""
        self._serves_by.pop(peer_id, None)


class PeerLimits:
    """Streams and bytes under way, by peer id."""

    def __init__(self, standing: Standing | None = None) -> None:
        self.standing = standing or Standing()
        """Decides which clients come first."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_streams = min(MAX_STREAMS, files * 3 // 4)
        self._streams: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._freed = asyncio.Event()

    def num_streams(self) -> int:
        """Number of streams of all peers."""
        return self._streams.total()

    def num_bytes(self, peer_id: str | None = None) -> int:
        """Bytes that are held for this peer, or for all of them."""
        return self._bytes.total() if peer_id is None else self._bytes.get(peer_id, 0)

    def enter(self, peer_id: str) -> None:
        """Count one more stream of that peer.

        Raises:
            ServerOverloadedError: it has too many, or all peers together have.
        """
        if self.num_streams() >= self._max_streams:
            raise ServerOverloadedError(f"this server has {self.num_streams()} streams open")
        if self._streams[peer_id] >= MAX_STREAMS_PER_PEER:
            raise ServerOverloadedError(f"one peer may have {MAX_STREAMS_PER_PEER} streams open")
        self._streams[peer_id] += 1

    def leave(self, peer_id: str) -> None:
        """Count one stream less of that peer."""
        _subtract(self._streams, peer_id, 1)
        if peer_id not in self._streams:
            self.standing.forget(peer_id)

    async def take(self, peer_id: str, num_bytes: int) -> None:
        """Wait for room, and take it; a request that is larger than the limit goes alone."""
        while not self.take_now(peer_id, num_bytes):
            self._freed.clear()
            await self._freed.wait()

    def take_now(self, peer_id: str, num_bytes: int) -> bool:
        """Take room if there is some; False if there is none."""
        if self._bytes[peer_id] and self._bytes[peer_id] + num_bytes > MAX_BYTES_PER_PEER:
            return False
        self._bytes[peer_id] += num_bytes
        return True

    def give_back(self, peer_id: str, num_bytes: int) -> None:
        """Free the room of an answered request."""
        _subtract(self._bytes, peer_id, num_bytes)
        self._freed.set()


def _subtract(counts: "Counter[str]", key: str, amount: int) -> None:
    """Subtract, and forget peers that have nothing left."""
    counts[key] -= amount
    if not counts[key]:
        del counts[key]
