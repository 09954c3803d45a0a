"""What one peer may have on this server at a time: streams, and bytes of requests under way.

Called by `streams/handler` and whatever takes requests in. While a request waits for room its stream isn't read, so
that the rest stays with the peer. Sessions have limits of their own (`session_table`, `kv_cache`).
"""

import asyncio
import resource
from collections import Counter

from swarmllm.errors import ServerOverloadedError
from swarmllm.server.peers.standing import Standing

MAX_STREAMS_PER_PEER = 256
MAX_STREAMS = 4096
"""Streams of all peers, whose ids cost nothing; as many as p2pd has connections (`p2p/daemon`), and at most three
quarters of the files that this process may open."""
MAX_BYTES_PER_PEER = 512 << 20
"""Assumed: four of the largest batches (8192 tokens × 4096 floats); a client keeps about two per server busy."""


class PeerLimits:
    """Streams and bytes by peer id."""

    def __init__(self, standing: Standing | None = None) -> None:
        self.standing = standing or Standing()
        """Who may have it first."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_streams = min(MAX_STREAMS, files * 3 // 4)
        self._streams: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._freed = asyncio.Event()

    def num_streams(self) -> int:
        """Streams of all peers."""
        return self._streams.total()

    def enter(self, peer_id: str) -> None:
        """One more stream of that peer.

        Raises:
            ServerOverloadedError: it has too many, or all together have.
        """
        if self.num_streams() >= self._max_streams:
            raise ServerOverloadedError(f"this server has {self.num_streams()} streams open")
        if self._streams[peer_id] >= MAX_STREAMS_PER_PEER:
            raise ServerOverloadedError(f"one peer may have {MAX_STREAMS_PER_PEER} streams open")
        self._streams[peer_id] += 1

    def leave(self, peer_id: str) -> None:
        """One stream less of that peer."""
        _subtract(self._streams, peer_id, 1)
        if peer_id not in self._streams:
            self.standing.forget(peer_id)

    async def take(self, peer_id: str, num_bytes: int) -> None:
        """Wait for room; a request that is larger than all of it goes alone."""
        while not self.take_now(peer_id, num_bytes):
            self._freed.clear()
            await self._freed.wait()

    def take_now(self, peer_id: str, num_bytes: int) -> bool:
        """Whether there is room, which is taken then."""
        if self._bytes[peer_id] and self._bytes[peer_id] + num_bytes > MAX_BYTES_PER_PEER:
            return False
        self._bytes[peer_id] += num_bytes
        return True

    def give_back(self, peer_id: str, num_bytes: int) -> None:
        """Free what an answered request took."""
        _subtract(self._bytes, peer_id, num_bytes)
        self._freed.set()


def _subtract(counts: "Counter[str]", key: str, amount: int) -> None:
    """Subtracts, and forgets peers that have nothing."""
    counts[key] -= amount
    if not counts[key]:
        del counts[key]
