"""Records of the DHT: which ones a node believes, and which it keeps when there are too many.

Every node of the swarm runs this code, bootstrap peers too. A valid record is a peer's own, signed, small and
short-lived. It has a key, a subkey (the peer id of its owner), and a value: msgpack of [name of the key, text], and a
signature. The DHT keeps only a hash of the key, so the value holds the name. That closes the namespace without a list
of all models. There are two kinds of keys: the register of checkpoints, and the servers of one checkpoint.

`dht_node` uses `RecordStore` twice: for records that this node stores for others, and for the results of one look-up.
Its number of bytes is limited. When a key or the whole store is full, random records are dropped, but never those of
peers that this process prefers: peers that it has dialled, and itself. So invented identities push out each other.
Pure: the time is an argument, in seconds of the DHT's clock.
"""

import hashlib
import re
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import msgpack

from swarmllm.data_structures import MAX_TTL_S
from swarmllm.network.p2p.identity import SIGNATURE_BYTES, Identity, verify

MODELS_KEY = "swarmllm.v1.models"
"""Name of the key for the register of checkpoints."""
SERVERS_PREFIX = "swarmllm.v1.servers."
"""Prefix of the keys for the servers of a checkpoint. Its fingerprint follows."""
CLOCK_TOLERANCE_S = 5.0
"""hivemind's nodes accept each other if their clocks differ by at most 3 s."""
SUPERSEDE_S = 0.01
"""A record must expire later than the one that it replaces, by at least this much."""
MAX_VALUE_BYTES = 8 << 10
MAX_MODEL_VALUE_BYTES = 2 << 10
"""Most bytes of an entry in the register of checkpoints: a name and a fingerprint."""
NUM_REMEMBERED = 8192
"""Number of checked signatures to remember. A look-up gets each record from several nodes, and the next look-up gets
most of them again. Checking one costs 0.13 ms, recognizing it 0.01 (measured on one machine)."""

_SERVERS_KEY = re.compile(re.escape(SERVERS_PREFIX) + r"[0-9A-Za-z]{8,128}")
_DOMAIN = b"swarmllm dht record 1\x00"

MAX_KEY_BYTES = 2 << 20
"""Most bytes under one key. An answer holds them all, and a message of the DHT carries 4 MiB."""
MAX_BYTES = 16 << 20
"""Most bytes in all."""
MAX_KEYS_PER_OWNER = 4
"""Most keys of one owner. A server needs two, for its checkpoint and for the register, and two more after a restart."""
RECORD_OVERHEAD_BYTES = 256
"""Bytes of a record besides its value: Python's objects, its owner and its place in a message. Assumed."""
SWEEP_S = 1.0
"""Seconds between two searches for expired records, which look at each record."""
SHARE_DROPPED = 16
"""One of this many records is dropped to make room. Choosing among all would look at each of them."""


class Record(Protocol):
    """hivemind's DHTRecord."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def largest_value(key: str) -> int:
    """Most bytes of a value under the key of this name; 0: there is no such key."""
    if key == MODELS_KEY:
        return MAX_MODEL_VALUE_BYTES
    return MAX_VALUE_BYTES if _SERVERS_KEY.fullmatch(key) else 0


def may_expire_at(expiration: float, now: float) -> bool:
    """True unless a record expires later than any that is made now: its maker's clock was wrong, or ours was."""
    return expiration <= now + MAX_TTL_S + CLOCK_TOLERANCE_S


def expiration_after(last: float, wanted: float, now: float) -> float:
    """The expiration of a record that replaces one of this peer's own, which expires at `last`.

    It must be later, unless this machine's clock was set back: nobody believes the old record then, nor a later one.
    """
    later = last + SUPERSEDE_S
    return max(wanted, later) if may_expire_at(later, now) else wanted


def key_digest(name: str) -> bytes:
    """The hash that the DHT uses for a key."""
    packed: bytes = msgpack.packb(name)
    return hashlib.sha1(packed, usedforsecurity=False).digest()


def _signed_bytes(record: Record, payload: bytes) -> bytes:
    parts = (record.key, record.subkey, struct.pack(">d", record.expiration_time), payload)
    return _DOMAIN + b"".join(struct.pack(">I", len(part)) + part for part in parts)


class RecordValidator:
    """Has the shape of hivemind's RecordValidatorBase. With an identity it signs this peer's records."""

    priority = 0

    def __init__(self, identity: Identity | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._identity = identity
        self._clock = clock
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self.num_checked = 0
        """Signatures checked since the start."""

    def validate(self, record: Record) -> bool:
        """True if this record may be stored and believed. Never raises."""
        value: object = record.value
        expiration: object = record.expiration_time
        if not isinstance(value, bytes) or not SIGNATURE_BYTES < len(value) <= MAX_VALUE_BYTES:
            return False
        if not isinstance(expiration, float) or not may_expire_at(expiration, self._clock()):
            return False
        owner = _unpack(record.subkey)
        if not isinstance(owner, str) or msgpack.packb(owner) != record.subkey:
            return False  # a plain record, or a second spelling of a subkey
        payload = value[:-SIGNATURE_BYTES]
        content = _unpack(payload)
        if not (isinstance(content, list) and len(content) == 2 and all(isinstance(part, str) for part in content)):
            return False
        if len(value) > largest_value(content[0]) or key_digest(content[0]) != record.key:
            return False
        return self._is_signed(owner, value[-SIGNATURE_BYTES:], _signed_bytes(record, payload))

    def _is_signed(self, owner: str, signature: bytes, signed: bytes) -> bool:
        name = hashlib.blake2b(signature + signed, digest_size=32).digest()
        if name in self._remembered:
            self._remembered.move_to_end(name)
            return True
        self.num_checked += 1
        if not verify(owner, signature, signed):
            return False
        self._remembered[name] = None
        if len(self._remembered) > NUM_REMEMBERED:
            self._remembered.popitem(last=False)
        return True

    def sign_value(self, record: Record) -> bytes:
        """Add this peer's signature to the value."""
        if self._identity is None:
            return record.value
        return record.value + self._identity.sign(_signed_bytes(record, record.value))

    def strip_value(self, record: Record) -> bytes:
        """Remove the signature from the value."""
        return record.value[:-SIGNATURE_BYTES]

    def merge_with(self, other: object) -> bool:
        return False


def _unpack(data: object) -> Any:
    if not isinstance(data, bytes):
        return None
    try:
        return msgpack.unpackb(data)
    except Exception:  # noqa: BLE001 - msgpack documents no closed list for malformed input
        return None


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The record of one peer under one key."""

    value: bytes
    """The value with its signature."""
    expiration: float

    @property
    def num_bytes(self) -> int:
        return len(self.value) + RECORD_OVERHEAD_BYTES

    def is_current(self, now: float) -> bool:
        """False if it has expired, or if the clock was set back so far that it can't be true."""
        return self.expiration >= now and may_expire_at(self.expiration, now)


def nobody(_: str) -> bool:
    """Prefers no peer."""
    return False


@dataclass
class RecordStore:
    """Records by the hash of their key and the peer id of their owner."""

    is_preferred: Callable[[str], bool] = nobody
    generator: Random = field(default_factory=Random)
    num_bytes: int = 0
    _records: dict[bytes, dict[str, StoredRecord]] = field(default_factory=dict)
    _key_bytes: Counter[bytes] = field(default_factory=Counter)
    _num_keys: Counter[str] = field(default_factory=Counter)
    _swept_at: float = 0.0

    def put(self, key: bytes, owner: str, record: StoredRecord, now: float) -> bool:
        """Keep the record. False if there is a later one of this owner, or no room."""
        if record.expiration < now:
            return False
        if abs(now - self._swept_at) > SWEEP_S:  # also if the clock was set back
            self._sweep(now)
        kept = self._records.get(key, {}).get(owner)
        if kept is not None and kept.expiration >= record.expiration and kept.is_current(now):
            return False
        if kept is not None:
            self._drop(key, owner)
        if self._num_keys[owner] >= MAX_KEYS_PER_OWNER or not self._make_room(key, record.num_bytes):
            return False
        self._records.setdefault(key, {})[owner] = record
        self._count(key, owner, 1, record.num_bytes)
        return True

    def find(self, key: bytes, now: float) -> dict[str, StoredRecord]:
        """The records under this key that haven't expired, by owner."""
        return {owner: record for owner, record in self._records.get(key, {}).items() if record.is_current(now)}

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def _make_room(self, key: bytes, num_bytes: int) -> bool:
        while self._key_bytes[key] + num_bytes > MAX_KEY_BYTES:
            if not self._drop_some([key]):
                return False
        while self.num_bytes + num_bytes > MAX_BYTES:
            if not self._drop_some(self._records):
                return False
        return True

    def _drop_some(self, keys: Iterable[bytes]) -> bool:
        """Drop some records under these keys. False if all belong to preferred peers."""
        others = [(key, owner) for key in keys for owner in self._records.get(key, ()) if not self.is_preferred(owner)]
        for key, owner in self.generator.sample(others, -(-len(others) // SHARE_DROPPED)):
            self._drop(key, owner)
        return bool(others)

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        for key, records in list(self._records.items()):
            for owner in [owner for owner, record in records.items() if not record.is_current(now)]:
                self._drop(key, owner)

    def _drop(self, key: bytes, owner: str) -> None:
        record = self._records[key].pop(owner)
        if not self._records[key]:
            del self._records[key]
        self._count(key, owner, -1, -record.num_bytes)

    def _count(self, key: bytes, owner: str, num_records: int, num_bytes: int) -> None:
        """Count a record that came or went."""
        self.num_bytes += num_bytes
        self._key_bytes[key] += num_bytes
        self._num_keys[owner] += num_records
        if not self._key_bytes[key]:
            del self._key_bytes[key]
        if not self._num_keys[owner]:
            del self._num_keys[owner]
