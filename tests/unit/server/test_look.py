"""What a server sees of the swarm when it decides where to go."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.network.fake_servers import FakePeer, peer_id

from swarmllm import embedded_model_path
from swarmllm.config import ServerConfig
from swarmllm.data_structures import BlockTraits, ServedBlocks, ServerInfo, ServerState, Span, SwarmSnapshot
from swarmllm.errors import PeerUnreachableError
from swarmllm.models.checkpoint import open_checkpoint
from swarmllm.network.messages import Target
from swarmllm.server import server as server_module
from swarmllm.server.targets import Targets
from swarmllm.swarm.placement import plan_move
from swarmllm.swarm.plausible import MAX_TIMES_MEDIAN

NUM_BLOCKS = 8
"""Of the embedded model."""


def record(name: str, start: int, end: int, throughput: float = 100.0) -> ServerInfo:
    return ServerInfo(peer_id=peer_id(name), start=start, end=end, throughput=throughput)


class Swarm:
    """What the DHT says, and the peer of one server in it, which is called `own`."""

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

    def server(self, span: Span, **config: Any) -> Any:
        model = str(embedded_model_path())
        settings = ServerConfig(model=model, new_swarm=True, throughput=100.0, **config)
        server: Any = server_module._Server(settings, open_checkpoint(model), self.peer, SimpleNamespace())  # type: ignore[arg-type]
        server._directory = SimpleNamespace(servers=self.servers)
        server._span, server._state = span, ServerState.ONLINE
        server._describe = lambda: record("own", span.start, span.end)
        return server


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
    server = swarm.server(Span(0, 2))
    looked = await server._look()
    assert {one.peer_id for one in looked.servers} == {peer_id(name) for name in ("a", "b", "c", "own")}
    assert plan_move(looked, peer_id("own")) is None
    believed = SwarmSnapshot(NUM_BLOCKS, (*looked.servers, ghost))
    assert plan_move(believed, peer_id("own")) == Span(6, 8)


async def test_a_boaster_that_is_there_counts_for_what_is_plausible(swarm: Swarm) -> None:
    swarm.add(record("a", 0, 4), record("boaster", 0, NUM_BLOCKS, 1e8))
    looked = await swarm.server(Span(4, 8))._look()
    assert max(one.throughput for one in looked.servers) == MAX_TIMES_MEDIAN * 100.0 * 4 / NUM_BLOCKS


async def test_allowed_servers(swarm: Swarm) -> None:
    """Others are neither counted nor passed on to; this server itself always counts."""
    swarm.add(record("friend", 0, 4), record("stranger", 0, NUM_BLOCKS))
    server = swarm.server(Span(4, 8), allowed_servers=[peer_id("friend")])
    looked = await server._look()
    assert {one.peer_id for one in looked.servers} == {peer_id("friend"), peer_id("own")}
    targets = Targets(server._announced, server._open_link)
    with pytest.raises(PeerUnreachableError):
        await targets.open(Target(peer_id=peer_id("stranger"), token="t" * 32))
    (await targets.open(Target(peer_id=peer_id("friend"), token="t" * 32))).abort()
    assert set(swarm.peer.dialled) == {"friend"}
