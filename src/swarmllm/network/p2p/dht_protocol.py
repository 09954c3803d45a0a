"""The DHT's protocol between nodes, with limits. hivemind's own keeps, answers and believes anything.

`p2p/dht_node` replaces hivemind's protocol by this one. The limits:

- a record is accepted from its owner only, over the owner's own connection, and kept in a `RecordStore`;
- nodes are learned only if their ids are the hashes of their peer ids, so that nobody can choose a place in the DHT;
- calls of others are answered one after the other, and take a quarter of the event loop at most;
- answers of other nodes are read only for a look-up in progress, a few records in each turn of the event loop.

Records aren't handed over to new nodes: owners renew them several times a minute, and every look-up asks all nodes
around the key.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack

from swarmllm.network.p2p._hivemind import (
    DHTID,
    DHTLocalStorage,
    DHTProtocol,
    DictionaryDHTValue,
    P2PContext,
    PeerID,
    ValueWithExpiration,
    dht_pb2,
)
from swarmllm.network.p2p.records import RecordStore, RecordValidator, StoredRecord, nobody

logger = logging.getLogger(__name__)

MAX_CALL_BYTES = 64 << 10
"""Most bytes of another node's request. A server stores two records at a time, of 10 KiB together."""
MAX_RECORDS_PER_CALL = 8
MAX_KEYS_PER_CALL = 2
"""Keys of one call to look up. An answer has room for the records of so many."""
MAX_WAITING = 256
"""Most calls that wait, of all others together."""
MAX_WAITING_OF_ONE = 16
REST = 3
"""Seconds left to everything else for each second that a call took."""
MAX_KNOWN_NODES = 4096
"""hivemind's table keeps 20 nodes in each of its buckets, but all others as their replacements."""
MAX_RECORDS_PER_ANSWER = 4096
"""Most records of one key in an answer."""
MAX_CHECKS_PER_ANSWER = 1024
"""New signatures to check in one answer, for peers that this process doesn't prefer: 0.13 s of a core, in turns of a
millisecond. The next look-up checks the rest of a large swarm."""
WORK_PER_TURN = 100
"""Records to handle in one turn of the event loop. Each takes about 10 µs (measured on one machine)."""
CHECK_WORK = 12
"""Cost of checking a signature, in records."""
ANSWER_GRACE_S = 0.3
SLOWEST_ANSWERS = 4
"""A look-up waits for its last nodes this many times as long as its slowest answer, plus `ANSWER_GRACE_S`. Assumed: a
frozen node costs its 3 s no more, and a slow one answers in time. The grace is that of joining."""
DICTIONARY_EXT = 0x50
"""hivemind's msgpack type for the contents of a key: [number, time, [[owner, value, expiration], …]]."""


@dataclass(slots=True)
class SentRecord:
    """A record in the form that the validator expects."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def node_id_of(peer_id: Any) -> Any:
    """The place of a peer in the DHT. It can't have another one."""
    return DHTID.generate(peer_id.to_bytes())


class Storage(DHTLocalStorage):
    """A `RecordStore` with hivemind's interface."""

    def __init__(self, records: RecordStore) -> None:
        super().__init__()
        self.records = records

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return isinstance(subkey, str) and self.records.put(
            key.to_bytes(), subkey, StoredRecord(value, expiration_time), time.time()
        )

    def get(self, key: Any) -> Any:
        found = self.records.find(key.to_bytes(), time.time())
        if not found:
            return None
        dictionary = DictionaryDHTValue()
        dictionary.data = {owner: ValueWithExpiration(one.value, one.expiration) for owner, one in found.items()}
        dictionary.latest_expiration_time = max(one.expiration for one in found.values())
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)


@dataclass
class Finds:
    """The results so far of one look-up."""

    key: bytes
    records: RecordStore
    asked_at: dict[Any, float] = field(default_factory=dict)
    """Nodes that haven't answered yet, and when they were asked."""
    slowest_s: float | None = None
    """Seconds of the slowest answer; None: no node has answered."""

    def answered(self, peer: Any, now: float) -> None:
        """Note that this node has answered."""
        self.slowest_s = max(self.slowest_s or 0.0, now - self.asked_at.pop(peer, now))

    def waits_in_vain(self, now: float, num_workers: int) -> bool:
        """True if the look-up waits only for nodes that are much slower than the ones that answered.

        Others keep the same records. But as many slow nodes as there are workers could hide nodes that weren't asked
        yet.
        """
        if self.slowest_s is None or not 0 < len(self.asked_at) < num_workers:
            return False
        return now > max(self.asked_at.values()) + ANSWER_GRACE_S + SLOWEST_ANSWERS * self.slowest_s


class BoundedProtocol(DHTProtocol):
    """The protocol of one node. `bound` makes it from hivemind's."""

    looks: list[Finds]
    is_preferred: Callable[[str], bool]

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return f"{DHTProtocol.__name__}.{method_name}"

    # Calls of other nodes

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Answer this node's name and time."""
        await self._meet(request, context)
        return dht_pb2.PingResponse(peer=self.node_info, dht_time=time.time(), available=False)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Keep records of the caller until they expire. Records of others are refused."""
        await self._meet(request, context)
        owner = context.remote_id.to_base58()
        subkey = msgpack.packb(owner)
        parts = (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache)
        if len({len(part) for part in parts}) > 1 or len(request.keys) > MAX_RECORDS_PER_CALL:
            raise ValueError(f"at most {MAX_RECORDS_PER_CALL} records, each with all that belongs to it")
        response = dht_pb2.StoreResponse(peer=self.node_info)
        for key, tag, value, expiration, in_cache in zip(*parts, strict=True):
            response.store_ok.append(
                tag == subkey
                and not in_cache
                and self.record_validator.validate(SentRecord(key, tag, value, expiration))
                and self.storage.records.put(key, owner, StoredRecord(value, expiration), time.time())
            )
        return response

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Answer the records of some keys, and the nodes around them that this node knows."""
        if len(request.keys) > MAX_KEYS_PER_CALL or len(set(request.keys)) < len(request.keys):
            raise ValueError(f"at most {MAX_KEYS_PER_CALL} keys, all different")
        return await super().rpc_find(request, context)

    async def _meet(self, request: Any, context: P2PContext) -> None:
        """Note the caller as a node if it says its node id."""
        own = node_id_of(context.remote_id)
        if request.peer.node_id == own.to_bytes():
            await self.update_routing_table(own, context.remote_id)

    async def update_routing_table(self, node_id: Any, peer_id: Any, responded: bool = True) -> None:
        """Note that a node was heard of, or doesn't answer any more."""
        own = node_id_of(peer_id)
        table = self.routing_table
        if not responded:
            if own in table:
                del table[own]
        elif node_id == own and (own in table or len(table.uid_to_peer_id) < MAX_KNOWN_NODES):
            to_ping = table.add_or_update_node(own, peer_id)
            if to_ping is not None:
                asyncio.create_task(self.call_ping(to_ping[1]))  # noqa: RUF006 - hivemind's tasks have no owner

    # Calls to other nodes

    @contextmanager
    def looking(self, key: Any) -> Iterator[Finds]:
        """While entered, collect other nodes' answers about this key, beginning with the records kept here."""
        look = Finds(key.to_bytes(), RecordStore(self.is_preferred))
        for owner, record in self.storage.records.find(look.key, time.time()).items():
            look.records.put(look.key, owner, record, time.time())
        self.looks.append(look)
        try:
            yield look
        finally:
            self.looks.remove(look)

    async def call_find(self, peer: Any, keys: Collection[Any]) -> dict[Any, tuple[None, dict[Any, Any]]] | None:
        """Ask a node for the nodes that it knows around some keys. Records in its answer go to the look-ups for them.

        None: it doesn't answer, or answers nonsense.
        """
        keys = list(keys)
        looked_for = {look.key for look in self.looks}
        # To find only nodes, for storing, ask for the next key: it has the same nodes and no records.
        asked = [key.to_bytes() if key.to_bytes() in looked_for else DHTID(key ^ 1).to_bytes() for key in keys]
        request = dht_pb2.FindRequest(keys=asked, peer=self.node_info)
        looks = [look for look in self.looks if look.key in {key.to_bytes() for key in keys}]
        for look in looks:
            look.asked_at[peer] = time.monotonic()
        try:
            response = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            if len(response.results) != len(keys):
                raise ValueError(f"{len(response.results)} answers to {len(keys)} questions")
            nearest: dict[Any, tuple[None, dict[Any, Any]]] = {}
            for key, result in zip(keys, response.results, strict=True):
                nearest[key] = None, _nodes(result, self.bucket_size)
                for look in [look for look in looks if look.key == key.to_bytes()]:
                    look.answered(peer, time.monotonic())
                    if result.type == dht_pb2.FOUND_DICTIONARY:
                        await self._collect(result.value, look)
        except Exception as error:  # noqa: BLE001 - of hivemind, p2pd, protobuf, or whatever the answer holds
            logger.debug("no answer from %s: %r", peer, error)
            await self.update_routing_table(None, peer, responded=False)
            return None
        finally:
            for look in looks:
                look.asked_at.pop(peer, None)
        await self.update_routing_table(node_id_of(peer), peer)
        return nearest

    async def _collect(self, value: bytes, look: Finds) -> None:
        """Check the records of an answer, a few at a time."""
        validator: RecordValidator = self.record_validator
        checks_left, work = MAX_CHECKS_PER_ANSWER, 0
        for owner, record in unpack_records(value):
            if record.expiration >= time.time() and (checks_left > 0 or self.is_preferred(owner)):
                before = validator.num_checked
                if validator.validate(SentRecord(look.key, msgpack.packb(owner), record.value, record.expiration)):
                    look.records.put(look.key, owner, record, time.time())
                num_checked = validator.num_checked - before
                checks_left -= num_checked
                work += CHECK_WORK * num_checked
            work += 1
            if work >= WORK_PER_TURN:
                await asyncio.sleep(0)
                work = 0


def _nodes(result: Any, limit: int) -> dict[Any, Any]:
    """The nodes in an answer whose ids are the hashes of their peer ids."""
    pairs = zip(result.nearest_node_ids[:limit], result.nearest_peer_ids[:limit], strict=False)
    nodes = ((DHTID.from_bytes(node_id), PeerID(peer_id)) for node_id, peer_id in pairs)
    return {node_id: peer_id for node_id, peer_id in nodes if node_id == node_id_of(peer_id)}


def unpack_records(value: bytes) -> Iterator[tuple[str, StoredRecord]]:
    """Unpack a dictionary of records one at a time. Stops at malformed bytes."""
    limits: dict[str, Any] = {"max_array_len": 0, "max_map_len": 0}
    try:
        packed = msgpack.unpackb(value, ext_hook=lambda code, data: data if code == DICTIONARY_EXT else None, **limits)
        unpacker = msgpack.Unpacker(max_buffer_size=len(packed), max_ext_len=0, **limits)
        unpacker.feed(packed)
        if unpacker.read_array_header() != 3:
            return
        unpacker.skip()
        unpacker.skip()
        for _ in range(min(unpacker.read_array_header(), MAX_RECORDS_PER_ANSWER)):
            if unpacker.read_array_header() != 3:
                return
            owner, signed, expiration = unpacker.unpack(), unpacker.unpack(), unpacker.unpack()
            if isinstance(owner, str) and isinstance(signed, bytes) and isinstance(expiration, float):
                yield owner, StoredRecord(signed, expiration)
    except Exception as error:  # noqa: BLE001 - msgpack documents no closed list for malformed input
        logger.debug("an answer of the DHT is malformed: %r", error)


class Turns:
    """Lets other nodes' calls in one after the other, with rests between them."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting: Counter[Any] = Counter()
        self._rested_at = 0.0

    async def answer(self, handler: Callable[[Any, Any], Awaitable[Any]], request: Any, context: P2PContext) -> Any:
        """Answer a call in its turn.

        Raises:
            OverflowError: too many wait already.
        """
        caller = context.remote_id
        if self._waiting[caller] >= MAX_WAITING_OF_ONE or self._waiting.total() >= MAX_WAITING:
            raise OverflowError("this node is busy")
        self._waiting[caller] += 1
        try:
            async with self._lock:
                await asyncio.sleep(max(0.0, self._rested_at - time.perf_counter()))
                began = time.perf_counter()
                try:
                    return await handler(request, context)
                finally:
                    ended = time.perf_counter()
                    self._rested_at = ended + REST * (ended - began)
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]


def bound(node: Any, is_preferred: Callable[[str], bool] = nobody) -> BoundedProtocol:
    """Replace the protocol of hivemind's new node by this one. Call it before the node has met any other."""
    protocol = node.protocol
    protocol.__class__ = BoundedProtocol
    protocol.storage = Storage(RecordStore(is_preferred))
    protocol.looks = []
    protocol.is_preferred = is_preferred
    handlers = node.p2p._client.control.unary_handlers
    turns = Turns()
    for name, request_type in (
        ("rpc_ping", dht_pb2.PingRequest),
        ("rpc_store", dht_pb2.StoreRequest),
        ("rpc_find", dht_pb2.FindRequest),
    ):
        if not protocol.client_mode:
            handlers[f"{DHTProtocol.__name__}.{name}"] = _handler(getattr(protocol, name), request_type, turns)
    return protocol  # type: ignore[no-any-return]


def _handler(rpc: Any, request_type: Any, turns: Turns) -> Callable[[bytes, Any], Awaitable[bytes]]:
    """Wrap a call for p2pd: bytes in, bytes out."""

    async def handle(data: bytes, caller: Any) -> bytes:
        if len(data) > MAX_CALL_BYTES:
            raise ValueError(f"a call of the DHT has at most {MAX_CALL_BYTES} bytes")
        context = P2PContext(handle_name=rpc.__name__, local_id=None, remote_id=caller)
        response: bytes = (await turns.answer(rpc, request_type.FromString(data), context)).SerializeToString()
        return response

    return handle
