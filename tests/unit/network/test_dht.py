"""What nodes of the DHT do for each other, without any daemon."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from swarmllm.network.p2p import dht_protocol
from swarmllm.network.p2p._hivemind import DictionaryDHTValue, ValueWithExpiration
from swarmllm.network.p2p.dht_protocol import MAX_WAITING_OF_ONE, Turns, unpack_records
from swarmllm.network.p2p.record_store import StoredRecord


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
