"""Hostile nodes of the DHT: floods, stalls, false places and replayed records. Real nodes with real daemons."""

import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from raw_peer import dht_node

from swarmllm.data_structures import ModelRecord, ServerInfo
from swarmllm.network.p2p import dht_protocol
from swarmllm.network.p2p.block_directory import BlockDirectory, servers_key
from swarmllm.network.p2p.dht_protocol import node_id_of
from swarmllm.network.p2p.identity import SIGNATURE_BYTES, Identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.p2p.records import (
    MAX_KEYS_PER_OWNER,
    RECORD_OVERHEAD_BYTES,
    RecordValidator,
    StoredRecord,
    key_digest,
)

pytestmark = pytest.mark.rotates(3)

FINGERPRINT = "abcdefgh"
KEY = servers_key(FINGERPRINT)
MODEL = ModelRecord(name="tiny", fingerprint=FINGERPRINT, num_blocks=4)


class Swarm:
    """Two honest nodes, one of which is a server, and a hostile one."""

    def __init__(self, first: Peer, server: Peer, mallory: Peer, identity: Identity) -> None:
        self.first, self.server, self.mallory, self.mallorys_identity = first, server, mallory, identity
        self.info = ServerInfo(peer_id=server.peer_id, addrs=server.addrs, start=0, end=4)

    async def flood(self, target: Peer, records: Iterable[dht_protocol.SentRecord], *, in_one: int = 256) -> list[bool]:
        """Store these at one node, that many in a message."""
        protocol, taken = dht_node(self.mallory).protocol, []
        records = list(records)
        for start in range(0, len(records), in_one):
            some = records[start : start + in_one]
            stored = await protocol.call_store(
                dht_node(target).peer_id,
                [dht_protocol.DHTID.from_bytes(one.key) for one in some],
                [one.value for one in some],
                [one.expiration_time for one in some],
                [msgpack.unpackb(one.subkey) for one in some],
            )
            taken += [False] * len(some) if stored is None else stored
        return taken

    async def found(self, reader: Peer) -> tuple[ServerInfo, ...]:
        return await BlockDirectory(reader).servers(FINGERPRINT)


def ghost(key: str = KEY, *, identity: Identity | None = None, num_bytes: int = 8000, ttl_s: float = 800.0) -> Any:
    """A record as the validator wants it, of an invented server."""
    identity = identity or Identity.generate()
    padding = "x" * max(0, num_bytes - SIGNATURE_BYTES - len(key) - 16)
    owner, expiration = msgpack.packb(identity.peer_id), time.time() + ttl_s
    unsigned = dht_protocol.SentRecord(key_digest(key), owner, msgpack.packb([key, padding]), expiration)
    value = RecordValidator(identity).sign_value(unsigned)
    return dht_protocol.SentRecord(unsigned.key, owner, value, expiration)


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    async with await Peer.create() as first:
        server = await Peer.create(initial_peers=first.join_maddrs)
        identity = Identity.load_or_create(tmp_path / "mallory")
        mallory = await Peer.create(initial_peers=first.join_maddrs, identity_path=tmp_path / "mallory")
        async with server, mallory:
            swarm = Swarm(first, server, mallory, identity)
            await BlockDirectory(server).announce(MODEL, swarm.info, ttl_s=600)
            yield swarm


async def test_key_flood(swarm: Swarm) -> None:
    """700 records of invented identities, which together fit no message: nobody keeps what others own."""
    ghosts = [ghost() for _ in range(700)]
    for target in (swarm.first, swarm.server):
        assert not any(await swarm.flood(target, ghosts))
    for reader in (swarm.first, swarm.server):
        assert swarm.info in await swarm.found(reader)
    async with await Peer.create(initial_peers=swarm.first.join_maddrs, client_mode=True) as client:
        assert swarm.info in await swarm.found(client)


async def test_key_flood_in_answers(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that answers with ghosts, and all that it names are ghosts: what others know is found all the same."""
    monkeypatch.setattr(dht_protocol, "MAX_CHECKS_PER_ANSWER", 100)
    records = {msgpack.unpackb(one.subkey): one for one in (ghost(num_bytes=500) for _ in range(300))}
    stored = {owner: StoredRecord(one.value, one.expiration_time) for owner, one in records.items()}
    kept = dht_node(swarm.mallory).protocol.storage.records
    monkeypatch.setattr(kept, "find", lambda *_: stored)
    async with await Peer.create(initial_peers=swarm.first.join_maddrs, client_mode=True) as client:
        checked = dht_node(client).protocol.record_validator
        assert swarm.info in await swarm.found(client)
        assert checked.num_checked < 110


async def test_dht_stall(swarm: Swarm) -> None:
    """Megabytes from one identity are neither kept nor handed over to the next node that comes.

    How long such a flood holds the event loop up is measured in docs/security.md.
    """
    identity = Identity.generate()
    flood = [ghost(servers_key(f"{number:08}"), identity=identity) for number in range(2000)]
    await swarm.flood(swarm.first, flood)
    own = [ghost(servers_key(f"{number:08}"), identity=swarm.mallorys_identity) for number in range(64)]
    taken = await swarm.flood(swarm.first, own, in_one=4)
    assert sum(taken) == MAX_KEYS_PER_OWNER
    records = dht_node(swarm.first).protocol.storage.records
    assert records.num_bytes < (MAX_KEYS_PER_OWNER + 2) * (8192 + RECORD_OVERHEAD_BYTES)
    async with await Peer.create(initial_peers=swarm.first.join_maddrs) as late:
        assert await swarm.found(late) == (swarm.info,)
        assert len(dht_node(late).protocol.storage.records) == 0


async def test_keys_of_another_kind_are_not_kept(swarm: Swarm) -> None:
    """Nor are large values in the register of checkpoints, nor what its owner wants cached."""
    identity = swarm.mallorys_identity
    names = ["swarmllm.v1.files", "swarmllm.v1.servers.short", "swarmllm.v1.servers.with a space", "swarmllm.v1.models"]
    assert not any(await swarm.flood(swarm.first, [ghost(name, identity=identity) for name in names], in_one=4))
    protocol, record = dht_node(swarm.mallory).protocol, ghost(identity=identity)
    key = dht_protocol.DHTID.from_bytes(record.key)
    stored = await protocol.call_store(
        dht_node(swarm.first).peer_id, [key], [record.value], [record.expiration_time], [identity.peer_id], True
    )
    assert stored == [False]


async def test_a_node_stands_where_its_peer_id_puts_it(swarm: Swarm) -> None:
    """Nobody chooses a place in the DHT, near a key that it wants to hide, or many of them."""
    mallory, first = dht_node(swarm.mallory), dht_node(swarm.first)
    table = first.protocol.routing_table
    assert table.peer_id_to_uid[mallory.peer_id] == node_id_of(mallory.peer_id)
    for number in range(50):
        mallory.protocol.node_info = dht_protocol.dht_pb2.NodeInfo(node_id=number.to_bytes(20))
        await mallory.protocol.call_ping(first.peer_id)
    assert swarm.first.is_neighbour(swarm.server.peer_id)
    assert not swarm.first.is_neighbour(Identity.generate().peer_id)
    assert table.uid_to_peer_id == {
        node_id_of(node.peer_id): node.peer_id for node in (mallory, dht_node(swarm.server))
    }


# ---------------------------------------------------------------------- replayed records


class Replayer(RecordValidator):
    """Stores a record with its owner's own signature, recorded earlier."""

    def __init__(self, recorded: bytes) -> None:
        super().__init__()
        self._recorded = recorded

    def validate(self, record: Any) -> bool:
        return True

    def sign_value(self, record: Any) -> bytes:
        return self._recorded


async def test_replayed_record() -> None:
    """An old record of a peer, with its own signature, replaces neither a newer record nor its withdrawal."""
    key, model = servers_key(FINGERPRINT), ModelRecord(name="tiny", fingerprint=FINGERPRINT, num_blocks=2)
    async with await Peer.create() as first:
        victim = await Peer.create(initial_peers=first.join_maddrs)
        mallory = await Peer.create(initial_peers=first.join_maddrs)
        async with victim, mallory:
            said, reader = BlockDirectory(victim), BlockDirectory(first)
            earlier = ServerInfo(peer_id=victim.peer_id, addrs=victim.addrs, start=0, end=1)
            await said.announce(model, earlier)
            assert await reader.servers(FINGERPRINT) == (earlier,)
            storage, node = dht_node(first).protocol.storage, dht_node(mallory)
            recorded = storage.get(type(node.node_id).generate(key)).value.get(victim.peer_id)

            async def replay(ttl_s: float) -> None:
                node.protocol.record_validator = Replayer(recorded.value)
                await node.store(key, "", recorded.expiration_time + ttl_s, subkey=victim.peer_id)

            later = earlier.model_copy(update={"end": 2})
            await said.announce(model, later)
            await replay(0)
            assert await reader.servers(FINGERPRINT) == (later,)
            await replay(300)  # the signature covers the time as well
            assert await reader.servers(FINGERPRINT) == (later,)
            await said.withdraw(model)
            await replay(0)
            assert await reader.servers(FINGERPRINT) == ()
