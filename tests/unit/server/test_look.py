"""The swarm as a server sees it when it decides where to go."""

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.network.fake_servers import FakePeer, peer_id

from swarmllm.data_structures import BlockTraits, ServedBlocks, ServerInfo, Span, SwarmSnapshot
from swarmllm.errors import PeerUnreachableError
from swarmllm.network.wire.messages import Target
from swarmllm.server.peers.links import Targets
from swarmllm.server.peers.other_servers import OtherServers
from swarmllm.swarm.claims import MAX_TIMES_MEDIAN
from swarmllm.swarm.placement import plan_move

NUM_BLOCKS = 8
"""Blocks of the embedded model."""


def record(name: str, start: int, end: int, throughput: float = 100.0) -> ServerInfo:
    return ServerInfo(peer_id=peer_id(name), start=start, end=end, throughput=throughput)


class Swarm:
    """Records of the DHT, and the peer of one server in it, which is called `own`."""

    def __init__(self) -> None:
        self.peer = FakePeer()
        self.peer.peer_id = peer_id("own")  # type: ignore[attr-defined]
        self.peer.addrs = ()  # type: ignore[attr-defined]
        self.announced: list[ServerInfo] = []

    def add(self, *servers: ServerInfo) -> None:
        """Servers that are there."""
        for one in servers:
            self.announced.append(one)
            self.peer.says[one.peer_id] = ServedBlocks(start=one.start, end=one.end, traits=BlockTraits())

    async def servers(self, _: str) -> list[ServerInfo]:
        return self.announced

    def others(self, allowed: Sequence[str] | None = None) -> OtherServers:
        directory: Any = SimpleNamespace(servers=self.servers)
        peer: Any = self.peer
        return OtherServers(peer, directory, fingerprint="f" * 32, num_blocks=NUM_BLOCKS, allowed=allowed)


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    swarm = Swarm()
    yield swarm
    await swarm.peer.close()


async def test_a_ghost_moves_nobody(swarm: Swarm) -> None:
    """Most blocks with a throughput of 1e8: believed, it makes servers leave those that nobody else has."""
    swarm.add(record("a", 2, 4), record("b", 4, 6), record("c", 6, 8))
    ghost = record("ghost", 0, 6, 1e8)
    swarm.announced.append(ghost)
    looked = await swarm.others().look(record("own", 0, 2))
    assert {one.peer_id for one in looked.servers} == {peer_id(name) for name in ("a", "b", "c", "own")}
    assert plan_move(looked, peer_id("own")) is None
    believed = SwarmSnapshot(NUM_BLOCKS, (*looked.servers, ghost))
    assert plan_move(believed, peer_id("own")) == Span(6, 8)


async def test_a_boaster_that_is_there_counts_as_far_as_it_is_plausible(swarm: Swarm) -> None:
    swarm.add(record("a", 0, 4), record("boaster", 0, NUM_BLOCKS, 1e8))
    looked = await swarm.others().look(record("own", 4, 8))
    assert max(one.throughput for one in looked.servers) == MAX_TIMES_MEDIAN * 100.0 * 4 / NUM_BLOCKS


async def test_allowed_servers(swarm: Swarm) -> None:
    """Others are neither counted nor passed on to; this server itself always counts."""
    swarm.add(record("friend", 0, 4), record("stranger", 0, NUM_BLOCKS))
    others = swarm.others(allowed=[peer_id("friend")])
    looked = await others.look(record("own", 4, 8))
    assert {one.peer_id for one in looked.servers} == {peer_id("friend"), peer_id("own")}
    targets = Targets(others.announced, others.open_stream)
    with pytest.raises(PeerUnreachableError):
        await targets.open(Target(peer_id=peer_id("stranger"), token="t" * 32))
    (await targets.open(Target(peer_id=peer_id("friend"), token="t" * 32))).abort()
    assert set(swarm.peer.dialled) == {"friend"}
