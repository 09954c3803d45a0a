"""The records that a DHT node of the swarm stores and believes: a peer's own, signed, small and short-lived ones.

Every node of the swarm runs this, bootstrap peers too. A record has a key, a subkey = the peer id of its owner, and a
value = msgpack of [name of the key, text] and a signature. The DHT keeps only a hash of the key, so the name
travels in the value: that closes the namespace without a list of the models that exist. There are two kinds of keys:
the register of checkpoints, and the servers of one checkpoint.
"""

import hashlib
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import msgpack

from swarmllm.data_structures import MAX_TTL_S
from swarmllm.network.p2p.identity import SIGNATURE_BYTES, Identity, verify

MODELS_KEY = "swarmllm.v1.models"
"""Name of the key that holds the register of checkpoints."""
SERVERS_PREFIX = "swarmllm.v1.servers."
"""Begins the names of keys that hold the servers of a checkpoint; its fingerprint follows."""
CLOCK_TOLERANCE_S = 5.0
"""hivemind's nodes accept each other with clocks up to 3 s apart."""
MAX_VALUE_BYTES = 8 << 10
MAX_MODEL_VALUE_BYTES = 2 << 10
"""Bytes of a line in the register of checkpoints: a name and a fingerprint."""
NUM_REMEMBERED = 8192
"""Signatures that were checked and needn't be checked again: a look meets each record at several nodes, and the next
look meets most of them once more. Checking one costs 0.13 ms, recognizing it 0.01 (measured on one machine)."""

_SERVERS_KEY = re.compile(re.escape(SERVERS_PREFIX) + r"[0-9A-Za-z]{8,128}")
_DOMAIN = b"swarmllm dht record 1\x00"


class Record(Protocol):
    """hivemind's DHTRecord."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def largest_value(key: str) -> int:
    """Bytes that a value under the key of this name may have; 0: there is no such key."""
    if key == MODELS_KEY:
        return MAX_MODEL_VALUE_BYTES
    return MAX_VALUE_BYTES if _SERVERS_KEY.fullmatch(key) else 0


def key_digest(name: str) -> bytes:
    """The hash by which the DHT knows a key."""
    packed: bytes = msgpack.packb(name)
    return hashlib.sha1(packed, usedforsecurity=False).digest()


def _signed_bytes(record: Record, payload: bytes) -> bytes:
    parts = (record.key, record.subkey, struct.pack(">d", record.expiration_time), payload)
    return _DOMAIN + b"".join(struct.pack(">I", len(part)) + part for part in parts)


class RecordValidator:
    """hivemind's RecordValidatorBase by shape. With an identity it signs what this peer stores."""

    priority = 0

    def __init__(self, identity: Identity | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._identity = identity
        self._clock = clock
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self.num_checked = 0
        """Signatures, since the start."""

    def validate(self, record: Record) -> bool:
        """Whether to store or believe this record. Never raises, whatever the record holds."""
        value: object = record.value
        expiration: object = record.expiration_time
        if not isinstance(value, bytes) or not SIGNATURE_BYTES < len(value) <= MAX_VALUE_BYTES:
            return False
        if not isinstance(expiration, float) or not expiration <= self._clock() + MAX_TTL_S + CLOCK_TOLERANCE_S:
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
        """The value with this peer's signature."""
        if self._identity is None:
            return record.value
        return record.value + self._identity.sign(_signed_bytes(record, record.value))

    def strip_value(self, record: Record) -> bytes:
        """The value without its signature."""
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
