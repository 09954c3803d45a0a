"""Identities, and which records of the DHT are believed."""

import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from swarmllm.data_structures import DIGEST_CHARS, MAX_ADDRS, MAX_ROUND_TRIPS, MAX_TTL_S, ModelRecord, ServerInfo
from swarmllm.errors import ConfigurationError, LocalProtocolError
from swarmllm.network.p2p.block_directory import MODELS_KEY, BlockDirectory, Register, models_key, servers_key
from swarmllm.network.p2p.identity import Identity, is_peer_id, verify
from swarmllm.network.p2p.records import (
    CLOCK_TOLERANCE_S,
    MAX_VALUE_BYTES,
    SUPERSEDE_S,
    RecordValidator,
    key_digest,
    largest_value,
)

NOW = 1_000_000.0
KEY = servers_key("abcdefgh")


@dataclass(frozen=True)
class FakeRecord:
    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


ALICE, MALLORY = Identity.generate(), Identity.generate()


def validator(identity: Identity | None = None) -> RecordValidator:
    return RecordValidator(identity, clock=lambda: NOW)


def record(
    *,
    key: str = KEY,
    hashed: str | None = None,
    owner: Any = None,
    signer: Identity = ALICE,
    content: Any = None,
    expiration: float = NOW + 60,
    subkey: bytes | None = None,
) -> FakeRecord:
    """A record as it comes from the network; by default a good one of Alice."""
    unsigned = FakeRecord(
        key_digest(hashed or key),
        subkey if subkey is not None else msgpack.packb(owner or signer.peer_id),
        msgpack.packb([key, "text"] if content is None else content),
        expiration,
    )
    return replace(unsigned, value=validator(signer).sign_value(unsigned))


# Identities


def test_an_identity_survives_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    identity = Identity.load_or_create(path)
    again = Identity.load_or_create(path)
    assert again.peer_id == identity.peer_id
    assert identity.peer_id.startswith("12D3KooW")
    assert path.stat().st_mode & 0o777 == 0o600
    assert verify(identity.peer_id, again.sign(b"data"), b"data")


def test_files_that_hold_no_identity_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    path.write_bytes(b"\x08\x00\x12\x40" + bytes(64))
    with pytest.raises(ConfigurationError, match="not an Ed25519 identity"):
        Identity.load_or_create(path)
    with pytest.raises(ConfigurationError, match="can't be written"):
        Identity.load_or_create(tmp_path / "missing" / "identity")
    with pytest.raises(ConfigurationError, match="can't be read"):
        Identity.load_or_create(tmp_path)


@pytest.mark.parametrize(
    "peer_id",
    ["", "12D3KooW", "x" * 52, "0" * 52, ALICE.peer_id + "1", ALICE.peer_id[:-1], "1" + ALICE.peer_id[:-1]],
    ids=["empty", "prefix", "x", "0", "longer", "shorter", "moved"],  # ALICE is another one in each test process
)
def test_only_ed25519_peer_ids_are_peer_ids(peer_id: str) -> None:
    assert not is_peer_id(peer_id)
    assert not verify(peer_id, bytes(64), b"data")


def test_signatures_of_others_are_not_taken() -> None:
    assert verify(ALICE.peer_id, ALICE.sign(b"data"), b"data")
    assert not verify(ALICE.peer_id, MALLORY.sign(b"data"), b"data")
    assert not verify(ALICE.peer_id, ALICE.sign(b"data"), b"date")
    assert not verify(ALICE.peer_id, b"short", b"data")


# Records


def test_own_records_are_valid_and_come_back_without_their_signature() -> None:
    good = record()
    assert validator().validate(good)
    assert msgpack.unpackb(validator().strip_value(good)) == [KEY, "text"]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(record(owner=ALICE.peer_id, signer=MALLORY), id="signed by another"),
        pytest.param(record(owner="12D3KooWnobody"), id="owner is no peer"),
        pytest.param(record(subkey=msgpack.packb(None)), id="plain record"),
        pytest.param(record(subkey=b""), id="whole dictionary as a record"),
        pytest.param(record(subkey=b"\xda\x00\x34" + ALICE.peer_id.encode()), id="other spelling of owner"),
        pytest.param(replace(record(), subkey=msgpack.packb(MALLORY.peer_id)), id="moved to another owner"),
        pytest.param(replace(record(), expiration_time=NOW + 61), id="prolonged by another"),
        pytest.param(replace(record(), key=key_digest("other")), id="moved to another key"),
        pytest.param(record(key="other.v1.servers"), id="foreign namespace"),
        pytest.param(record(hashed="swarmllm.v1.other"), id="claims another key"),
        pytest.param(record(content=[KEY]), id="no text"),
        pytest.param(record(content=[KEY, 5]), id="text is a number"),
        pytest.param(record(content={"key": KEY}), id="not a list"),
        pytest.param(record(content=[KEY, "x" * MAX_VALUE_BYTES]), id="too long"),
        pytest.param(record(expiration=NOW + MAX_TTL_S + CLOCK_TOLERANCE_S + 1), id="lives too long"),
        pytest.param(record(expiration=float("inf")), id="lives for ever"),
        pytest.param(record(expiration=float("nan")), id="expires at no time"),
        pytest.param(replace(record(), value=record().value[:-64]), id="unsigned"),
        pytest.param(replace(record(), value=record().value[:-1]), id="signature cut"),
        pytest.param(replace(record(), value=b""), id="empty"),
        pytest.param(replace(record(), value="text"), id="value is no bytes"),
        pytest.param(replace(record(), expiration_time=None), id="no expiration"),
    ],
)
def test_other_records_are_refused(bad: FakeRecord) -> None:
    assert not validator().validate(bad)


def test_any_changed_byte_of_a_value_is_noticed() -> None:
    good = record()
    for idx in range(len(good.value)):
        value = bytearray(good.value)
        value[idx] ^= 1
        assert not validator().validate(replace(good, value=bytes(value)))


# The directory


class FakePeer:
    """A DHT that keeps everything."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.records: dict[str, dict[str, str]] = {}
        self.expirations: list[float] = []
        self.accepts = True

    async def dht_store(self, texts: dict[str, str], expiration: float) -> bool:
        self.expirations.append(expiration)
        if self.accepts:
            for key, text in texts.items():
                self.records.setdefault(key, {})[self.peer_id] = text
        return self.accepts

    async def dht_read(self, key: str) -> dict[str, str]:
        return self.records.get(key, {})


MODEL = ModelRecord(name="tiny", fingerprint="abcdefgh", num_blocks=8)


def info(peer_id: str = ALICE.peer_id, **fields: Any) -> ServerInfo:
    return ServerInfo(**{"peer_id": peer_id, "start": 0, "end": 4, **fields})


@pytest.fixture
def peer() -> FakePeer:
    return FakePeer(ALICE.peer_id)


def directory(peer: Any, swarm_name: str | None = None) -> BlockDirectory:
    return BlockDirectory(peer, swarm_name, clock=lambda: NOW)


async def test_what_is_announced_is_found_and_what_is_withdrawn_is_not(peer: FakePeer) -> None:
    book = directory(peer)
    assert await book.servers("abcdefgh") == ()
    assert await book.announce(MODEL, info(addrs=("/ip4/127.0.0.1/tcp/1",)))
    assert await book.servers("abcdefgh") == (info(addrs=("/ip4/127.0.0.1/tcp/1",)),)
    assert await book.models() == {ALICE.peer_id: MODEL}
    assert await book.withdraw(MODEL)
    assert await book.servers("abcdefgh") == ()
    assert await book.models() == {}
    assert book.num_bad_records == 0


async def test_private_swarms_meet_neither_each_other_nor_the_public_one(peer: FakePeer) -> None:
    names = (None, "ours", "theirs")
    for place, name in enumerate(names):
        book = directory(peer, name)
        assert (await book.servers("abcdefgh"), await book.models()) == ((), {})
        assert await book.announce(MODEL, info(start=place))
        assert len(peer.records) == 2 * (place + 1)
    for place, name in enumerate(names):
        book = directory(peer, name)
        assert [server.start for server in await book.servers("abcdefgh")] == [place]
        assert await book.models() == {ALICE.peer_id: MODEL}
        assert await book.withdraw(MODEL)


@pytest.mark.parametrize("name", ["ours", "x" * 256, "ü"])
def test_keys_of_private_swarms_are_stored_like_others_and_say_nothing(name: str) -> None:
    keys = [servers_key("abcdefgh", name), servers_key("abcdefgi", name), models_key(name)]
    assert len(set(keys)) == 3
    for key in keys:
        assert largest_value(key) == MAX_VALUE_BYTES
        assert name not in key
        assert "abcdefg" not in key
    assert (servers_key("abcdefgh"), models_key()) == ("swarmllm.v1.servers.abcdefgh", "swarmllm.v1.models")


async def test_each_record_outlives_the_one_before(peer: FakePeer) -> None:
    book = directory(peer)
    await book.announce(MODEL, info(), ttl_s=60)
    await book.announce(MODEL, info(), ttl_s=30)
    await book.withdraw(MODEL)
    assert peer.expirations[0] == NOW + 60
    assert peer.expirations == sorted(set(peer.expirations))
    assert peer.expirations[-1] < NOW + 61


async def test_a_clock_that_was_set_back_hides_nobody(peer: FakePeer) -> None:
    """It was wrong at the start, until NTP came. The old record is one that nobody believes any more."""
    now = NOW + 7200
    book = BlockDirectory(cast(Any, peer), clock=lambda: now)
    register = Register(cast(Any, peer), "key", ModelRecord, clock=lambda: now)
    await book.announce(MODEL, info(), ttl_s=60)
    await register.publish(MODEL, 20)
    now = NOW
    peer.expirations.clear()
    for _ in range(2):
        await book.announce(MODEL, info(), ttl_s=60)
        await register.publish(MODEL, 20)
    await book.withdraw(MODEL)
    later = [60, 20, 60 + SUPERSEDE_S, 20 + SUPERSEDE_S, 60 + 2 * SUPERSEDE_S]
    assert peer.expirations == pytest.approx([NOW + one for one in later])
    now = NOW - 600  # a small step back: others still hold the record of before
    peer.expirations.clear()
    await book.announce(MODEL, info(), ttl_s=60)
    assert peer.expirations == pytest.approx([NOW + 60 + 3 * SUPERSEDE_S])


async def test_withdrawing_what_was_never_announced_says_nothing(peer: FakePeer) -> None:
    assert await directory(peer).withdraw(MODEL)
    assert peer.expirations == []


async def test_bad_records_are_skipped_and_counted(peer: FakePeer) -> None:
    others = [Identity.generate().peer_id for _ in range(4)]
    peer.records[KEY] = {
        others[0]: info(others[0]).model_dump_json(),
        others[1]: info(ALICE.peer_id).model_dump_json(),
        others[2]: "{not json",
        others[3]: info(others[3]).model_dump_json().replace('"end":4', '"end":"4"'),
    }
    book = directory(peer)
    assert [server.peer_id for server in await book.servers("abcdefgh")] == [others[0]]
    assert book.num_bad_records == 3


async def test_fields_of_newer_servers_are_ignored(peer: FakePeer) -> None:
    peer.records[MODELS_KEY] = {ALICE.peer_id: MODEL.model_dump_json()[:-1] + ',"licence":"free"}'}
    assert await directory(peer).models() == {ALICE.peer_id: MODEL}


async def test_a_refused_announcement_is_told_in_one_sentence(peer: FakePeer, caplog: pytest.LogCaptureFixture) -> None:
    peer.accepts = False
    assert not await directory(peer).announce(MODEL, info())
    assert "clock" in caplog.text


async def test_what_cannot_be_announced(peer: FakePeer) -> None:
    book = directory(peer)
    with pytest.raises(LocalProtocolError, match="itself"):
        await book.announce(MODEL, info(MALLORY.peer_id))
    with pytest.raises(ConfigurationError, match="at most 900 s"):
        await book.announce(MODEL, info(), ttl_s=MAX_TTL_S + 1)
    with pytest.raises(ConfigurationError, match="too long"):
        await book.announce(MODEL, info(adapters=("x" * 128,) * 64))


async def test_the_longest_announcement_that_is_taken_is_valid(peer: FakePeer) -> None:
    for length in range(128, 0, -1):
        with suppress(ConfigurationError):  # too long
            await directory(peer).announce(MODEL, info(adapters=("x" * length,) * 60))
            break
    (text,) = peer.records[KEY].values()
    assert len(text) > MAX_VALUE_BYTES - 512
    assert validator().validate(record(content=[KEY, text]))


async def test_a_server_of_eighty_blocks_has_room_for_all_it_may_say(peer: FakePeer) -> None:
    crowded = info(
        end=80,
        weights="x" * 80 * DIGEST_CHARS,
        addrs=tuple(f"/ip6/2001:db8:1111:2222:3333:4444:5555:{number}/tcp/31337" for number in range(MAX_ADDRS)),
        round_trips=tuple((MALLORY.peer_id, 123.456) for _ in range(MAX_ROUND_TRIPS)),
        adapters=("x" * 96,) * 32,  # as many and as long as servers offer
        public_name="x" * 64,
        hardware="x" * 64,
        memory_left_bytes=80 << 30,
        num_sessions=256,
    )
    assert await directory(peer).announce(MODEL, crowded)


def test_keys_are_hashed_as_the_dht_does() -> None:
    # SHA-1 of the msgpack string, as hivemind's DHTID.generate; tests/swarm checks it on real nodes.
    assert key_digest("a") == __import__("hashlib").sha1(b"\xa1a").digest()
    assert struct.calcsize(">d") == 8
