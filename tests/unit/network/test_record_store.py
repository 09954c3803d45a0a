"""Records that a node of the DHT keeps, however many it is given."""

from random import Random

import pytest

from swarmllm.network.p2p import records
from swarmllm.network.p2p.records import MAX_KEYS_PER_OWNER, RECORD_OVERHEAD_BYTES, RecordStore, StoredRecord

NOW = 1000.0
KEY, OTHER = b"k" * 20, b"o" * 20


def record(text: str = "text", ttl_s: float = 60.0, *, num_bytes: int | None = None) -> StoredRecord:
    value = text.encode() if num_bytes is None else bytes(num_bytes - RECORD_OVERHEAD_BYTES)
    return StoredRecord(value, NOW + ttl_s)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_KEY_BYTES", 100 * 1024)
    monkeypatch.setattr(records, "MAX_BYTES", 300 * 1024)


def store(*preferred: str) -> RecordStore:
    return RecordStore(preferred.__contains__, Random(1))


def test_the_latest_record_of_each_owner_is_kept_until_it_expires() -> None:
    kept = store()
    assert kept.put(KEY, "alice", record("one"), NOW)
    assert kept.put(KEY, "bob", record("two"), NOW)
    assert not kept.put(KEY, "alice", record("old", 59), NOW)
    assert not kept.put(KEY, "alice", record("same time"), NOW)
    assert kept.put(KEY, "alice", record("new", 61), NOW)
    assert not kept.put(KEY, "carol", record("late", -1), NOW)
    assert {owner: one.value for owner, one in kept.find(KEY, NOW).items()} == {"alice": b"new", "bob": b"two"}
    assert kept.find(OTHER, NOW) == {}
    assert list(kept.find(KEY, NOW + 60.5)) == ["alice"]
    assert kept.put(OTHER, "dave", record("later", 120), NOW + 62)
    assert (len(kept), kept.num_bytes) == (1, len("later") + RECORD_OVERHEAD_BYTES)


def test_records_of_a_clock_that_was_set_back_make_room_for_new_ones() -> None:
    kept, late = store(), record("of a wrong clock", 7200 + 60)
    assert kept.put(KEY, "alice", late, NOW + 7200)
    assert kept.put(OTHER, "bob", late, NOW + 7200)
    assert kept.find(KEY, NOW) == {}
    assert kept.put(KEY, "alice", record("now"), NOW)
    assert {owner: one.value for owner, one in kept.find(KEY, NOW).items()} == {"alice": b"now"}
    assert len(kept) == 1  # and nothing is left of the wrong clock
    assert not kept.put(KEY, "alice", record("old", 59), NOW)


def test_an_owner_has_a_few_keys() -> None:
    kept = store()
    taken = [kept.put(bytes([number]) * 20, "mallory", record(), NOW) for number in range(10)]
    assert taken == [True] * MAX_KEYS_PER_OWNER + [False] * (10 - MAX_KEYS_PER_OWNER)
    assert kept.put(b"\0" * 20, "mallory", record(ttl_s=61), NOW)  # renewed
    assert kept.put(b"\x09" * 20, "mallory", record(ttl_s=120), NOW + 65)  # the others have expired


def test_a_flood_of_a_key_drives_out_itself() -> None:
    kept = store("alice", "bob")
    assert kept.put(KEY, "alice", record(num_bytes=1024), NOW)
    for number in range(1000):
        assert kept.put(KEY, f"ghost{number}", record(num_bytes=1024), NOW)
        assert kept.num_bytes <= 100 * 1024
    assert kept.put(KEY, "bob", record(num_bytes=1024), NOW)
    assert kept.put(KEY, "alice", record(num_bytes=2048, ttl_s=61), NOW)
    found = kept.find(KEY, NOW)
    assert {"alice", "bob"} < found.keys()
    assert len(found) > 50


def test_a_flood_of_keys_drives_out_itself() -> None:
    kept = store("alice")
    assert kept.put(KEY, "alice", record(num_bytes=1024), NOW)
    for number in range(2000):
        assert kept.put(number.to_bytes(20), f"ghost{number}", record(num_bytes=1024), NOW)
        assert kept.num_bytes <= 300 * 1024
    assert "alice" in kept.find(KEY, NOW)


def test_what_is_full_of_preferred_peers_takes_no_more() -> None:
    kept = RecordStore(lambda owner: owner.startswith("friend"), Random(1))
    for number in range(100):
        assert kept.put(KEY, f"friend{number}", record(num_bytes=1024), NOW)
    assert not kept.put(KEY, "stranger", record(), NOW)
    assert kept.put(OTHER, "stranger", record(), NOW)
    assert len(kept) == 101
