"""The other servers of the swarm, as this one sees them: what they announce, and whether they are there.

Used by whatever chooses blocks, measures successors or dials them.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.network.p2p.block_directory import BlockDirectory
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.p2p.reachability import RelayPeer
from swarmllm.network.p2p.verified_peers import VerifiedPeers
from swarmllm.network.wire.protocol import FrameStream
from swarmllm.server.peers.twins import Twins
from swarmllm.swarm.claims import plausible

CONNECT_TIMEOUT_S = 5.0
"""Seconds to dial another server and greet it."""


class OtherServers:
    """The servers of one checkpoint; `allowed` are the peer ids of those that count, None: all of them."""

    def __init__(
        self,
        peer: Peer,
        directory: BlockDirectory,
        *,
        fingerprint: str,
        num_blocks: int,
        allowed: Collection[str] | None,
        twins: Twins | None = None,
    ) -> None:
        self._own_peer_id = peer.peer_id
        self._directory = directory
        self._fingerprint, self._num_blocks = fingerprint, num_blocks
        self._allowed, self._twins = allowed, twins or Twins()
        self._met: tuple[ServerInfo, ...] = ()
        self.verified = VerifiedPeers(lambda: peer, fingerprint)
        self.on_seen: Callable[[Sequence[ServerInfo]], None] | None = None
        """Told of all records, whenever they are read."""

    async def announced(self) -> SwarmSnapshot:
        """What servers say of themselves, this one included; they may not be there."""
        found = await self._directory.servers(self._fingerprint)
        for own in (server for server in found if server.peer_id == self._own_peer_id):
            self._twins.note_record(own)
        counted = None if self._allowed is None else {*self._allowed, self._own_peer_id}
        servers = tuple(server for server in found if counted is None or server.peer_id in counted)
        if self.on_seen is not None:
            self.on_seen(servers)
        return SwarmSnapshot(num_blocks=self._num_blocks, servers=servers)

    async def look(self, *own: ServerInfo) -> SwarmSnapshot:
        """The swarm now: those of the others that serve what they announce, and this server as it knows itself."""
        announced = (await self.announced()).servers
        others = await self.verified.verify([server for server in announced if server.peer_id != self._own_peer_id])
        self._met = others
        return SwarmSnapshot(num_blocks=self._num_blocks, servers=plausible((*others, *own)))

    def relays(self, round_trips_ms: Mapping[str, float]) -> list[RelayPeer]:
        """Those of the last look that may relay for this server, the nearest first."""
        public = [server for server in self._met if not server.relayed]
        public.sort(key=lambda server: round_trips_ms.get(server.peer_id, math.inf))
        return [RelayPeer(server.peer_id, server.addrs) for server in public]

    async def open_stream(self, other: ServerInfo) -> FrameStream:
        """A stream to one of them, after the greetings.

        Raises:
            SwarmError: it can't be reached, or isn't what it says.
        """
        stream, _ = await self.verified.open_stream(other, timeout_s=CONNECT_TIMEOUT_S)
        return stream
