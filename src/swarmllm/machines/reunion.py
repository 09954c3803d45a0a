"""Find members again: after an outage, at new addresses, or when a network that was split is whole again.

A part of a split swarm goes on by itself: its machines know each other, so none is alone, and nothing in the DHT would
look for the others. So each machine remembers members whose records have gone, and dials some of them now and then.
One that answers connects both parts: records pass between them, and all follow the newest command of both. On a local
network, it also looks for announcements of the swarm, because addresses may change.
"""

import asyncio
from collections.abc import Mapping
from itertools import islice

from swarmllm.machines.records import MachineRecord
from swarmllm.network.p2p.discovery import find_machines, initial_peers_of, lan_addresses
from swarmllm.network.p2p.peer import Peer

LOOK_S = 20.0
"""Seconds between two looks for members, while some are missing."""
DIALLED = 4
"""Most lost members that are dialled at a look."""
MAX_LOST = 64
LOST_S = 86400.0
"""Seconds for which a member is looked for. Assumed: who comes back later starts anew."""


class Reunion:
    """Looks for the lost members of one swarm. Run `look_forever` as a task."""

    def __init__(self, peer: Peer, swarm_id: str, *, on_lan: bool) -> None:
        self._peer, self._swarm_id, self._on_lan = peer, swarm_id, on_lan
        self.lost: dict[str, tuple[list[str], float]] = {}
        """Addresses of members that can't be found, and since when; those that were dialled last at the end."""

    def note(self, before: Mapping[str, MachineRecord], now: Mapping[str, MachineRecord], at: float) -> None:
        """Note the members of two looks."""
        for peer_id in before.keys() - now.keys():
            self.lost[peer_id] = before[peer_id].initial_peers[:2], at
        for peer_id, (_, since) in tuple(self.lost.items()):
            if peer_id in now or at - since > LOST_S:
                del self.lost[peer_id]
        while len(self.lost) > MAX_LOST:
            del self.lost[next(iter(self.lost))]

    async def look_forever(self) -> None:
        """Look for members while some are missing, or none is known."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.lost or self._peer.is_alone:
                await self.look()

    async def look(self) -> None:
        """Dial some lost members, and those of the local network.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
        """
        addresses = []
        for peer_id in tuple(islice(self.lost, DIALLED)):
            addrs, since = self.lost.pop(peer_id)
            self.lost[peer_id] = addrs, since
            addresses += addrs
        if self._on_lan and lan_addresses(self._peer.addrs)[0]:
            found = await find_machines(lambda peer: peer.fingerprint == self._swarm_id)
            addresses += initial_peers_of([peer for peer in found if peer.fingerprint == self._swarm_id])
        self._peer.join_by(addresses)
        await self._peer.meet(addresses)
