"""Peers that a server dials for clients, and its answer for those that it can't reach."""

import asyncio
from typing import Any

import pytest

from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.errors import PeerTimeoutError, PeerUnreachableError, SwarmError, WeightsMismatchError
from swarmllm.network.wire.messages import Target
from swarmllm.server.peers import links
from swarmllm.server.peers.links import FAILURES_PER_MINUTE, FRESH_S, Targets

KNOWN, UNKNOWN = "12D3KooW".ljust(52, "k"), "12D3KooW".ljust(52, "u")
ANNOUNCED = ("/ip4/10.0.0.1/tcp/4000",)


class Swarm:
    """One server, what was dialled, and the time."""

    def __init__(self) -> None:
        self.servers = [ServerInfo(peer_id=KNOWN, addrs=ANNOUNCED, start=0, end=1)]
        self.num_looks = 0
        self.dialled: list[ServerInfo] = []
        self.now = 0.0
        self.fails: BaseException | None = None
        self.targets = Targets(self._look, self._open_stream, lambda: self.now)

    async def _look(self) -> SwarmSnapshot:
        self.num_looks += 1
        return SwarmSnapshot(1, tuple(self.servers))

    async def _open_stream(self, server: ServerInfo) -> Any:
        self.dialled.append(server)
        if self.fails is not None:
            raise self.fails
        return "a stream"

    async def open(self, peer_id: str) -> Any:
        named = ("/ip4/127.0.0.1/tcp/22", "/dns4/intranet/tcp/80")
        return await self.targets.open(Target(peer_id=peer_id, addrs=named, token="t" * 32))


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> Swarm:
    monkeypatch.setattr(links, "LOOK_AGAIN_S", 0.0)
    return Swarm()


async def test_servers_are_dialled_where_they_say_that_they_are(swarm: Swarm) -> None:
    assert await swarm.open(KNOWN) == "a stream"
    assert [server.addrs for server in swarm.dialled] == [ANNOUNCED]


async def test_failures_of_a_dial_are_not_described(swarm: Swarm) -> None:
    said = set()
    for error in (PeerUnreachableError("refused", KNOWN), PeerTimeoutError("slow", KNOWN), WeightsMismatchError("x")):
        swarm.fails = error
        with pytest.raises(PeerUnreachableError) as caught:
            await swarm.open(KNOWN)
        said.add(str(caught.value))
        assert caught.value.__cause__ is None
    with pytest.raises(PeerUnreachableError) as caught:
        await swarm.open(UNKNOWN)
    assert caught.value.peer_id == UNKNOWN
    assert {str(caught.value)} == said
    assert UNKNOWN not in {server.peer_id for server in swarm.dialled}


async def test_a_server_that_has_come_lately_is_found(swarm: Swarm) -> None:
    await swarm.open(KNOWN)
    swarm.servers.append(swarm.servers[0].model_copy(update={"peer_id": UNKNOWN}))
    swarm.now += 1
    assert await swarm.open(UNKNOWN) == "a stream"
    assert swarm.num_looks == 2


async def test_records_are_looked_up_anew_when_they_are_old(swarm: Swarm) -> None:
    await swarm.open(KNOWN)
    swarm.servers.clear()
    swarm.now += FRESH_S
    with pytest.raises(PeerUnreachableError):
        await swarm.open(KNOWN)


async def test_a_record_is_good_until_a_dial_fails(swarm: Swarm) -> None:
    """A repair waits for no look into the DHT, which may ask a node that is frozen; who has moved is found."""
    await swarm.open(KNOWN)
    moved = ("/ip4/10.0.0.1/tcp/4001",)
    swarm.servers[0] = swarm.servers[0].model_copy(update={"addrs": moved})
    swarm.now += FRESH_S / 2
    swarm.fails = PeerUnreachableError("refused", KNOWN)
    with pytest.raises(PeerUnreachableError):
        await swarm.open(KNOWN)
    assert swarm.num_looks == 1
    swarm.fails = None
    swarm.now += 1
    await swarm.open(KNOWN)
    assert [server.addrs for server in swarm.dialled] == [ANNOUNCED, ANNOUNCED, moved]


async def test_a_server_that_was_read_of_before_is_dialled_without_a_look(swarm: Swarm) -> None:
    """A look takes seconds while it asks a node that is frozen, and may find nobody."""
    swarm.targets.see(swarm.servers)
    swarm.servers.clear()
    assert await swarm.open(KNOWN) == "a stream"
    assert swarm.num_looks == 0


async def test_a_look_that_finds_fewer_forgets_nobody(swarm: Swarm) -> None:
    swarm.targets.see(swarm.servers)
    swarm.servers.clear()
    with pytest.raises(PeerUnreachableError):
        await swarm.open(UNKNOWN)
    assert await swarm.open(KNOWN) == "a stream"


async def test_many_requests_share_a_look(swarm: Swarm) -> None:
    found = await asyncio.gather(*(swarm.open(UNKNOWN) for _ in range(100)), return_exceptions=True)
    assert all(isinstance(error, SwarmError) for error in found)
    assert swarm.num_looks <= 2


async def test_dials_that_fail_are_limited(swarm: Swarm) -> None:
    swarm.fails = PeerUnreachableError("refused", KNOWN)
    for _ in range(2 * FAILURES_PER_MINUTE):
        swarm.now += 0.01
        with pytest.raises(PeerUnreachableError):
            await swarm.open(KNOWN)
    assert len(swarm.dialled) == FAILURES_PER_MINUTE
    swarm.now, swarm.fails = swarm.now + 60, None
    assert await swarm.open(KNOWN) == "a stream"
