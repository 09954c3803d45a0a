"""The records of the DHT that one node keeps: a bounded number of bytes, whoever fills them.

Used twice by `dht_node`: for what this node stores for others, and for what one look collects from other nodes. When
there is no more room under a key, or in all, others are dropped at random to make some, but never the records of peers
that this process prefers: those that it has dialled itself, and its own. So a flood of invented identities drives out
each other. Pure: the time is passed in, in seconds as the DHT counts them.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

MAX_KEY_BYTES = 2 << 20
"""Under one key. An answer holds them all, and a message of the DHT carries 4 MiB."""
MAX_BYTES = 16 << 20
"""Bytes of everything."""
MAX_KEYS_PER_OWNER = 4
"""A server needs two: of its checkpoint, and of the register of checkpoints; and those of before it was restarted."""
RECORD_OVERHEAD_BYTES = 256
"""Bytes that a record costs besides its value: Python's objects, its owner and its place in a message. Assumed."""
SWEEP_S = 1.0
"""Seconds between two looks for what has expired, which costs a look at each record."""
SHARE_DROPPED = 16
"""One of this many records that may be dropped makes room: to choose among all would cost a look at each of them."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The record of one peer under one key."""

    value: bytes
    """The value with its signature."""
    expiration: float

    @property
    def num_bytes(self) -> int:
        return len(self.value) + RECORD_OVERHEAD_BYTES


def nobody(_: str) -> bool:
    """Prefers no peer."""
    return False


@dataclass
class RecordStore:
    """Records by the hash of their key and by the peer id of their owner."""

    is_preferred: Callable[[str], bool] = nobody
    generator: Random = field(default_factory=Random)
    num_bytes: int = 0
    _records: dict[bytes, dict[str, StoredRecord]] = field(default_factory=dict)
    _key_bytes: Counter[bytes] = field(default_factory=Counter)
    _num_keys: Counter[str] = field(default_factory=Counter)
    _swept_at: float = 0.0

    def put(self, key: bytes, owner: str, record: StoredRecord, now: float) -> bool:
        """Keep the record; False if there is a later one of this owner, or no room for it."""
        if record.expiration < now:
            return False
        if now - self._swept_at > SWEEP_S:
            self._sweep(now)
        kept = self._records.get(key, {}).get(owner)
        if kept is not None and kept.expiration >= record.expiration:
            return False
        if kept is not None:
            self._drop(key, owner)
        if self._num_keys[owner] >= MAX_KEYS_PER_OWNER or not self._make_room(key, record.num_bytes):
            return False
        self._records.setdefault(key, {})[owner] = record
        self._count(key, owner, 1, record.num_bytes)
        return True

    def find(self, key: bytes, now: float) -> dict[str, StoredRecord]:
        """The records under this key that hold still, by owner."""
        return {owner: record for owner, record in self._records.get(key, {}).items() if record.expiration >= now}

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
        """Drop some records under these keys; False if they are all of preferred peers."""
        others = [(key, owner) for key in keys for owner in self._records.get(key, ()) if not self.is_preferred(owner)]
        for key, owner in self.generator.sample(others, -(-len(others) // SHARE_DROPPED)):
            self._drop(key, owner)
        return bool(others)

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        for key, records in list(self._records.items()):
            for owner in [owner for owner, record in records.items() if record.expiration < now]:
                self._drop(key, owner)

    def _drop(self, key: bytes, owner: str) -> None:
        record = self._records[key].pop(owner)
        if not self._records[key]:
            del self._records[key]
        self._count(key, owner, -1, -record.num_bytes)

    def _count(self, key: bytes, owner: str, num_records: int, num_bytes: int) -> None:
        """Take note of a record that came or went."""
        self.num_bytes += num_bytes
        self._key_bytes[key] += num_bytes
        self._num_keys[owner] += num_records
        if not self._key_bytes[key]:
            del self._key_bytes[key]
        if not self._num_keys[owner]:
            del self._num_keys[owner]
