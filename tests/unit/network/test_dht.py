"""Requests between nodes of the DHT, without any daemon."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from swarmllm.network.p2p import dht_protocol
from swarmllm.network.p2p._hivemind import DHTID, DictionaryDHTValue, ValueWithExpiration, dht_pb2
from swarmllm.network.p2p.dht_node import Dht
from swarmllm.network.p2p.dht_protocol import (
    ANSWER_GRACE_S,
    MAX_WAITING_OF_ONE,
    BoundedProtocol,
    Finds,
    Storage,
    Turns,
    unpack_records,
)
from swarmllm.network.p2p.identity import SIGNATURE_BYTES, Identity
from swarmllm.network.p2p.records import RecordStore, StoredRecord, nobody


def packed(items: Any, *, code: int = 0x50) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb([float("inf"), 9.0, items])))


GOOD = ["alice", b"value", 5.0]


def test_records_are_unpacked_as_hivemind_packs_them() -> None:
    dictionary = DictionaryDHTValue()
    dictionary.data = {"alice": ValueWithExpiration(b"value", 5.0), "bob": ValueWithExpiration(b"other", 7.0)}
    ours = list(unpack_records(msgpack.packb(msgpack.ExtType(0x50, dictionary.packb()))))
    assert ours == [("alice", StoredRecord(b"value", 5.0)), ("bob", StoredRecord(b"other", 7.0))]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({}),
        packed([GOOD], code=0x40),
        packed(7),
        msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([1.0]))),
        packed([GOOD])[:-3],
        packed([["alice", b"value"]]),
        packed([[["alice"] * 1000, b"value", 5.0]]),
        packed([["alice", {"a": 1}, 5.0]]),
        packed([[7, b"value", 5.0], ["alice", "text", 5.0], ["alice", b"value", 5]]),
        b"\x91" * 100_000,
        packed([[b"\x91" * 1000] * 3]),
        msgpack.packb(msgpack.ExtType(0x50, b"\x93\x01\x02\xdd\xff\xff\xff\xff")),  # says that four billions follow
    ],
)
def test_what_makes_no_sense_holds_no_records(value: bytes) -> None:
    assert list(unpack_records(value)) == []


def test_what_came_before_the_nonsense_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [owner for owner, _ in unpack_records(packed([GOOD, 7, GOOD]))] == ["alice"]
    monkeypatch.setattr(dht_protocol, "MAX_RECORDS_PER_ANSWER", 3)
    assert len(list(unpack_records(packed([GOOD] * 1000)))) == 3


async def test_calls_of_others_take_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other; nobody has more than some in the line, however many he sends."""
    rested: list[float] = []
    sleep = asyncio.sleep

    async def rest(seconds: float) -> None:
        rested.append(seconds)
        await sleep(0)

    monkeypatch.setattr(dht_protocol.asyncio, "sleep", rest)
    monkeypatch.setattr(dht_protocol, "MAX_WAITING", 2 * MAX_WAITING_OF_ONE)
    turns = Turns()
    under_way = 0

    async def handler(request: int, context: Any) -> int:
        nonlocal under_way
        under_way += 1
        assert under_way == 1
        await sleep(0)
        under_way -= 1
        return request

    async def call(caller: str, request: int) -> int:
        return await turns.answer(handler, request, SimpleNamespace(remote_id=caller))

    calls = [("mallory", number) for number in range(100)] + [("alice", number) for number in range(3)]
    answers = await asyncio.gather(*(call(*one) for one in calls), return_exceptions=True)
    assert [answer for answer in answers if not isinstance(answer, OverflowError)] == [*range(16), 0, 1, 2]
    assert len(rested) == 19
    answers = await asyncio.gather(*(call(str(number // 4), number) for number in range(100)), return_exceptions=True)
    assert sum(not isinstance(answer, OverflowError) for answer in answers) == 32
    assert await call("mallory", 7) == 7


class Nodes(BoundedProtocol):
    """A node that knows some others: of these one answers what it keeps, and the rest are frozen."""

    def __init__(self, num_frozen: int) -> None:
        self.looks, self.is_preferred, self.storage = [], nobody, Storage(RecordStore())
        self.node_info, self.wait_timeout, self.bucket_size = dht_pb2.NodeInfo(), 3.0, 20
        self.routing_table = SimpleNamespace(uid_to_peer_id={})
        self.peers = ["lives", *(f"frozen {number}" for number in range(num_frozen))]
        self.thaw = asyncio.Event()

    def get_stub(self, peer: Any) -> Any:
        async def rpc_find(request: Any, timeout: float) -> Any:
            if peer != "lives":
                await self.thaw.wait()
            found = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=peer.encode())
            return dht_pb2.FindResponse(results=[found])

        return SimpleNamespace(rpc_find=rpc_find)

    async def update_routing_table(self, node_id: Any, peer_id: Any, responded: bool = True) -> None:
        pass

    async def _collect(self, value: bytes, look: Finds) -> None:
        signed = msgpack.packb(["key", value.decode()]) + bytes(SIGNATURE_BYTES)
        look.records.put(look.key, value.decode(), StoredRecord(signed, time.time() + 60), time.time())

    async def find_nearest_nodes(self, keys: list[Any], **_: Any) -> None:
        await asyncio.gather(*(self.call_find(peer, keys) for peer in self.peers))


def node_among(protocol: Nodes) -> Dht:
    dht = Dht(SimpleNamespace(), Identity.generate(), (), client_mode=True)  # type: ignore[arg-type]
    dht._node, dht._protocol = (
        SimpleNamespace(protocol=protocol, find_nearest_nodes=protocol.find_nearest_nodes, num_workers=4),
        protocol,
    )
    return dht


@pytest.fixture(autouse=True)
def node_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_protocol, "node_id_of", DHTID.generate)


async def test_a_look_does_not_wait_for_the_frozen_when_the_others_have_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dht_protocol, "ANSWER_GRACE_S", 0.01)
    nodes = Nodes(num_frozen=2)
    async with asyncio.timeout(60):
        assert await node_among(nodes).read("key") == {"lives": "lives"}
    assert not nodes.thaw.is_set()
    nodes.thaw.set()


async def test_a_look_waits_for_the_frozen_while_they_may_hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All who ask wait for one of them, so there may be nodes that nobody has asked yet."""
    monkeypatch.setattr(dht_protocol, "ANSWER_GRACE_S", 0.0)
    nodes = Nodes(num_frozen=4)
    look = asyncio.create_task(node_among(nodes).read("key"))
    done, _ = await asyncio.wait([look], timeout=0.15)
    assert not done
    nodes.thaw.set()
    assert len(await look) == 5


def test_a_look_that_nobody_has_answered_waits() -> None:
    look = Finds(b"key", RecordStore())
    assert not look.waits_in_vain(100.0, 4), "nobody was asked"
    look.asked_at = {"a": 0.0, "b": 1.0}
    assert not look.waits_in_vain(100.0, 4)
    look.answered("a", 0.5)
    assert look.waits_in_vain(1.0 + ANSWER_GRACE_S + 4 * 0.5 + 0.01, 4)
    assert not look.waits_in_vain(1.0 + ANSWER_GRACE_S + 4 * 0.5 - 0.01, 4)
    look.answered("b", 1.2)
    assert not look.waits_in_vain(100.0, 4), "nobody is left to wait for"
