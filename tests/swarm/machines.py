"""Machines that pass weights on: real peers on 127.0.0.1, each with a store of its own."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from swarmllm.machines.records import membership
from swarmllm.machines.weights import Giver, WeightStore
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer

SWARM = Identity.generate()
PIECE_BYTES = 4096


class Machines:
    """Peers that know each other, and stores on them, which each test makes anew."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers

    @classmethod
    async def start(cls, count: int, open_: AsyncExitStack) -> "Machines":
        """Start so many peers; they end with `open_`."""
        peers: list[Peer] = []
        for _ in range(count):
            known = [maddr for peer in peers[:1] for maddr in peer.join_maddrs]
            peers.append(await open_.enter_async_context(await Peer.create(initial_peers=known)))
        return cls(peers)

    async def store(self, number: int, directory: Path, **options: Any) -> WeightStore:
        """The store of one of them, which serves from now on."""
        peer = self.peers[number]
        proof = options.pop("member", membership(peer.peer_id, SWARM))
        store = WeightStore(directory / str(number), peer, swarm_id=SWARM.peer_id, member=proof, **options)
        await store.start()
        await peer.serve_streams(store.serve)
        return store

    def givers(self, *numbers: int) -> Callable[[], list[Giver]]:
        """These of the machines."""
        return lambda: [Giver(self.peers[number].peer_id, self.peers[number].addrs) for number in numbers]
