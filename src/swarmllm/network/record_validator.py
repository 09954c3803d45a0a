"""Which records a DHT node of the swarm stores and believes: only a peer's own, signed, small and short-lived ones.

Every node of the swarm runs this, bootstrap peers too. A record has a key, a subkey = the peer id of its owner, and a
value = msgpack of [name of the key, text] and a signature. The DHT keeps only a hash of the key, so the name
travels in the value: that closes the namespace without a list of the models that exist.
"""

import hashlib
import struct
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgpack

from swarmllm.data_structures import MAX_TTL_S
from swarmllm.network.identity import SIGNATURE_BYTES, Identity, verify

KEY_PREFIX = "swarmllm.v1."
"""Begins the names of all keys. Nodes of the swarm store nothing else."""
CLOCK_TOLERANCE_S = 5.0
"""hivemind's nodes accept each other with clocks up to 3 s apart."""
MAX_VALUE_BYTES = 8 << 10

_DOMAIN = b"swarmllm dht record 1\x00"


class Record(Protocol):
    """hivemind's DHTRecord."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


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
        if not content[0].startswith(KEY_PREFIX) or key_digest(content[0]) != record.key:
            return False
        return verify(owner, value[-SIGNATURE_BYTES:], _signed_bytes(record, payload))

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
