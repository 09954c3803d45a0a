"""Peers that count: only those that were met, and serve the blocks of their records."""

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest
from tests.unit.network.fake_servers import LOADED, FakePeer, info, peer_id

from swarmllm.data_structures import BlockTraits, ServedBlocks, ServerInfo, ServerState
from swarmllm.errors import (
    BlocksNotServedError,
    PeerUnreachableError,
    RemoteProtocolError,
    ServerOverloadedError,
    WeightsMismatchError,
)
from swarmllm.network.p2p import verified_peers
from swarmllm.network.p2p.verified_peers import AGAIN_S, CHANGED_S, CONFIRMED_S, REFUTED_S, VerifiedPeers

FINGERPRINT = "0123456789abcdef"


@pytest.fixture
async def peer() -> AsyncIterator[FakePeer]:
    peer = FakePeer()
    yield peer
    await peer.close()


@pytest.fixture
async def verified(peer: FakePeer) -> AsyncIterator[VerifiedPeers]:
    verified = VerifiedPeers(lambda: peer, FINGERPRINT, clock=lambda: peer.now, generator=Random(1))  # type: ignore[arg-type,return-value]
    yield verified
    await verified.close()


async def test_ghosts_are_not_counted(peer: FakePeer, verified: VerifiedPeers) -> None:
    """Neither who can't be dialled, nor who serves other blocks than announced, nor who serves none."""
    peer.says = {
        peer_id("honest"): LOADED,
        peer_id("boaster"): LOADED,
        peer_id("loading"): ServedBlocks(start=0, end=4),
        peer_id("early"): ServedBlocks(start=0, end=4),
        peer_id("idle"): None,
    }
    ghosts = [info(f"ghost{number}", throughput=1e8) for number in range(40)]
    honest, loading = info("honest"), info("loading", state=ServerState.JOINING)
    liars = [info("boaster", end=24), info("early"), info("idle")]
    assert await verified.verify([*ghosts, honest, *liars, loading]) == (honest, loading)
    assert peer_id("honest") in verified
    assert peer_id("ghost1") not in verified
    assert all(verified.is_refuted(one) for one in [*ghosts, *liars])
    assert not verified.is_refuted(honest)


async def test_a_greeting_that_cannot_be_true_refutes_its_server(peer: FakePeer) -> None:
    def check(server: ServerInfo, served: ServedBlocks) -> None:
        if served.traits is not None and served.traits.batch_axis:
            raise RemoteProtocolError("which is not so", server.peer_id)

    lie = ServedBlocks(start=LOADED.start, end=LOADED.end, traits=BlockTraits(batch_axis=1))
    peer.says = {peer_id("honest"): LOADED, peer_id("liar"): lie}
    verified = VerifiedPeers(lambda: peer, FINGERPRINT, check=check, clock=lambda: peer.now)  # type: ignore[arg-type,return-value]
    honest, liar = info("honest"), info("liar")
    assert await verified.verify([honest, liar]) == (honest,)
    assert verified.is_refuted(liar)
    with pytest.raises(RemoteProtocolError, match="which is not so"):
        await verified.open_stream(liar)
    await verified.close()


async def test_nobody_is_dialled_twice_until_it_is_time(peer: FakePeer, verified: VerifiedPeers) -> None:
    peer.says[peer_id("honest")] = LOADED
    servers = [info("honest"), info("ghost")]
    await asyncio.gather(verified.verify(servers), verified.verify(servers))
    assert sorted(peer.dialled) == ["ghost", "honest"]
    verified.verify_soon([info("third")])
    with pytest.raises(PeerUnreachableError):
        await verified.greet(info("third"))
    peer.says[peer_id("fourth")] = LOADED
    verified.verify_soon([info("fourth")])
    assert await verified.greet(info("fourth")) == LOADED
    assert peer.dialled[2:] == ["third", "third", "fourth"]
    del peer.dialled[2:]
    await verified.verify(servers)
    peer.now += REFUTED_S
    await verified.verify(servers)
    assert sorted(peer.dialled) == ["ghost", "ghost", "honest"]
    peer.now += CONFIRMED_S - REFUTED_S - 1
    verified.renew(servers[0])  # which a ping over a stream in use does
    peer.now += CONFIRMED_S - 1
    assert verified.confirmed(servers) == (servers[0],)
    peer.now += 1
    peer.says.clear()
    assert await verified.verify(servers) == ()
    assert sorted(peer.dialled) == ["ghost", "ghost", "ghost", "honest", "honest"]
    peer.now += CONFIRMED_S + 1
    verified.forget_others([])
    assert not verified._verdicts


async def test_a_server_that_has_moved_is_met_again(peer: FakePeer, verified: VerifiedPeers) -> None:
    peer.says[peer_id("mover")] = LOADED
    assert await verified.verify([info("mover")])
    peer.says[peer_id("mover")] = ServedBlocks(start=4, end=8, traits=BlockTraits())
    peer.now += CHANGED_S
    moved = info("mover", 4, 8)
    assert await verified.verify([moved]) == (moved,)
    assert await verified.verify([info("mover")]) == ()  # an old record, and the greeting is new
    assert len(peer.dialled) == 2


async def test_a_peer_that_is_asked_again_counts_when_it_answers(peer: FakePeer, verified: VerifiedPeers) -> None:
    """They were met a while ago, and some of them may have died since."""
    servers = [info("alive"), info("dead"), info("frozen"), info("busy")]
    peer.says = {server.peer_id: LOADED for server in servers}
    assert await verified.verify(servers) == tuple(servers)
    assert not verified.verify_soon(servers, again=True), "they were met just now"
    peer.now += AGAIN_S
    assert not verified.verify_soon(servers), "they were met"
    del peer.says[peer_id("dead")]
    peer.silent = {peer_id("frozen")}
    peer.says[peer_id("busy")] = ServerOverloadedError("too many streams")
    dials = verified.verify_soon(servers, again=True)
    assert verified.confirmed(servers) == ()
    assert not any(map(verified.is_refuted, servers))
    while len(verified._dials) > 1:
        await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED)
        dials = [dial for dial in dials if not dial.done()]
    assert verified.confirmed(servers) == (servers[0], servers[3])
    assert verified.is_refuted(servers[1])
    await verified.close()
    await asyncio.sleep(0)
    assert servers[2] in verified.confirmed(servers), "nothing bad is known of it"


async def test_a_look_dials_so_many_and_waits_so_long(
    peer: FakePeer, verified: VerifiedPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_peers, "MAX_DIALS_PER_LOOK", 10)
    peer.says = {peer_id("neighbour"): LOADED, peer_id("met"): LOADED}
    peer.near = {peer_id("neighbour")}
    await verified.greet(info("met"))
    peer.now += CHANGED_S
    peer.says[peer_id("met")] = ServedBlocks(start=4, end=8, traits=BlockTraits())
    ghosts = [info(f"ghost{number}") for number in range(1000)]
    expected = (info("neighbour"), info("met", 4, 8))
    assert set(await verified.verify([*ghosts, *expected])) == set(expected)
    assert len(peer.dialled) == 11
    peer.silent = {peer_id("frozen")}
    assert await verified.verify([info("frozen"), *expected], timeout_s=0.01) == expected


async def test_every_stream_verifies_or_refutes(peer: FakePeer, verified: VerifiedPeers) -> None:
    honest = info("honest")
    peer.says[honest.peer_id] = LOADED
    _, served = await verified.open_stream(honest)
    assert served == LOADED
    assert verified.confirmed([honest]) == (honest,)
    peer.says[honest.peer_id] = ServerOverloadedError("too many streams")
    with pytest.raises(ServerOverloadedError):
        await verified.open_stream(honest)
    assert verified.confirmed([honest]) == (honest,)
    peer.says.clear()
    with pytest.raises(PeerUnreachableError):
        await verified.open_stream(honest)
    assert verified.is_refuted(honest)


@pytest.mark.parametrize("says", [None, WeightsMismatchError("another checkpoint"), LOADED])
async def test_what_a_server_is_not_is_told_in_one_sentence(
    peer: FakePeer, verified: VerifiedPeers, says: ServedBlocks | Exception | None
) -> None:
    peer.says[peer_id("liar")] = says
    with pytest.raises(BlocksNotServedError, match=peer_id("liar")) as caught:
        await verified.greet(info("liar", end=24))
    assert caught.value.peer_id == peer_id("liar")
