"""The swarm's records in the DHT: which server serves which blocks. Servers write them, clients read them.

`BlockDirectory` is for servers and their blocks, `Register` for any other records of peers under one key.

One key per checkpoint holds its servers. One key for the whole swarm holds the register of checkpoints. Each server has
its own record under both, found by its peer id. A private swarm has keys of its own instead. They look like keys of
unknown checkpoints. `p2p/records` decides what the DHT accepts. Everything read from it is checked again here, field by
field.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from pydantic import ValidationError

from swarmllm.data_structures import MAX_TTL_S, ModelRecord, PeerModel, ServerInfo
from swarmllm.errors import ConfigurationError, LocalProtocolError
from swarmllm.network.p2p.records import MAX_VALUE_BYTES, MODELS_KEY, SERVERS_PREFIX, expiration_after

if TYPE_CHECKING:
    from swarmllm.network.p2p.peer import Peer

logger = logging.getLogger(__name__)

DEFAULT_TTL_S = 60.0
WITHDRAWN = ""
"""Text of a withdrawn record. The DHT knows no deletion."""
VALUE_OVERHEAD_BYTES = 256
"""Room for a value's key name, msgpack and signature besides its text."""

RECORDS_PER_TURN = 32
"""Records parsed in one turn of the event loop. Each takes some hundredths of a millisecond."""

PeerRecord = TypeVar("PeerRecord", bound=PeerModel)


def servers_key(fingerprint: str, swarm_name: str | None = None) -> str:
    """Name of the key for the servers of a checkpoint, in the public swarm or a private one of this name."""
    return f"{SERVERS_PREFIX}{fingerprint if swarm_name is None else _private(swarm_name, fingerprint)}"


def models_key(swarm_name: str | None = None) -> str:
    """Name of the key for the register of checkpoints, in the public swarm or a private one."""
    return MODELS_KEY if swarm_name is None else f"{SERVERS_PREFIX}{_private(swarm_name, 'register')}"


def machines_key(swarm_id: str) -> str:
    """Name of the key for the records of machines in the swarm with this id."""
    return f"{SERVERS_PREFIX}{_private(swarm_id, 'machines')}"


def run_key(run: str) -> str:
    """Name of the key for the members of a run of training, by its public key."""
    return f"{SERVERS_PREFIX}{_private(run, 'run')}"


def _private(swarm_name: str, what: str) -> str:
    """A key that reveals neither the swarm's name nor its other keys."""
    secret = hashlib.blake2b(swarm_name.encode()).digest()
    return hashlib.blake2b(what.encode(), key=secret, digest_size=32, person=b"swarmllm.v1").hexdigest()


class BlockDirectory:
    """The DHT as servers and clients use it, for the public swarm or a private one of this name."""

    def __init__(self, peer: "Peer", swarm_name: str | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._peer = peer
        self._swarm_name = swarm_name
        self._clock = clock
        self._last_expiration = 0.0
        self.num_bad_records = 0
        """Records skipped since the start because they make no sense."""

    async def announce(self, record: ModelRecord, info: ServerInfo, ttl_s: float = DEFAULT_TTL_S) -> bool:
        """Announce this server's blocks until `ttl_s` from now. True if some node keeps the record.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
        """
        if info.peer_id != self._peer.peer_id:
            raise LocalProtocolError("a server can only announce itself")
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ConfigurationError(f"a record lives for at most {MAX_TTL_S:g} s, not {ttl_s:g}")
        texts = (info.model_dump_json(exclude_none=True), record.model_dump_json())
        return await self._store(record, texts, self._clock() + ttl_s)

    async def withdraw(self, record: ModelRecord) -> bool:
        """Withdraw the announcement. True if some node was told."""
        if not self._last_expiration:
            return True
        return await self._store(record, (WITHDRAWN, WITHDRAWN), self._clock())

    async def servers(self, fingerprint: str) -> tuple[ServerInfo, ...]:
        """The servers of a checkpoint, sorted by peer id.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
        """
        records = await self._read(servers_key(fingerprint, self._swarm_name), ServerInfo)
        honest = {peer_id: info for peer_id, info in records.items() if info.peer_id == peer_id}
        self.num_bad_records += len(records) - len(honest)
        return tuple(honest[peer_id] for peer_id in sorted(honest))

    async def models(self) -> dict[str, ModelRecord]:
        """The checkpoint that each server of the swarm serves, by peer id.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
        """
        return await self._read(models_key(self._swarm_name), ModelRecord)

    async def _store(self, record: ModelRecord, said: tuple[str, str], expiration: float) -> bool:
        """Store texts under the key of the checkpoint's servers and in the register."""
        keys = (servers_key(record.fingerprint, self._swarm_name), models_key(self._swarm_name))
        texts = dict(zip(keys, said, strict=True))
        if max(len(text.encode()) for text in said) > MAX_VALUE_BYTES - VALUE_OVERHEAD_BYTES:
            raise ConfigurationError("the announcement is too long; shorten public_name, adapters or addresses")
        self._last_expiration = expiration_after(self._last_expiration, expiration, self._clock())
        stored = await self._peer.dht_store(texts, self._last_expiration)
        if not stored:
            logger.warning(
                "no peer accepted this server's announcement, so clients can't find it; "
                "check that this machine's clock is right (NTP) and that initial peers can be reached"
            )
        return stored

    async def _read(self, key: str, record_type: type[PeerRecord]) -> dict[str, PeerRecord]:
        records, num_bad = await _read_records(self._peer, key, record_type)
        self.num_bad_records += num_bad
        return records


class Register(Generic[PeerRecord]):
    """Records of one type under one key: each peer writes its own, and reads all."""

    def __init__(
        self, peer: "Peer", key: str, record_type: type[PeerRecord], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._peer, self._key, self._record_type, self._clock = peer, key, record_type, clock
        self._last_expiration = 0.0

    async def publish(self, record: PeerRecord | None, ttl_s: float) -> bool:
        """Publish this peer's record until `ttl_s` from now; None withdraws it. True if some node keeps it.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
            ConfigurationError: the record is too long for the DHT.
        """
        text = WITHDRAWN if record is None else record.model_dump_json(exclude_defaults=True)
        if len(text.encode()) > MAX_VALUE_BYTES - VALUE_OVERHEAD_BYTES:
            raise ConfigurationError(f"the record is too long for the DHT, with {len(text.encode())} bytes")
        now = self._clock()
        self._last_expiration = expiration_after(self._last_expiration, now + ttl_s, now)
        return await self._peer.dht_store({self._key: text}, self._last_expiration)

    async def read(self) -> dict[str, PeerRecord]:
        """The valid records by the peer id of their owner.

        Raises:
            PeerUnreachableError: this peer is closed, or its daemon died.
        """
        records, _ = await _read_records(self._peer, self._key, self._record_type)
        return records


async def _read_records(peer: "Peer", key: str, record_type: type[PeerRecord]) -> tuple[dict[str, PeerRecord], int]:
    """The valid records under a key by the peer id of their owner, and the number of invalid ones."""
    records: dict[str, PeerRecord] = {}
    num_bad = 0
    for number, (peer_id, text) in enumerate((await peer.dht_read(key)).items()):
        if number % RECORDS_PER_TURN == RECORDS_PER_TURN - 1:
            await asyncio.sleep(0)
        if text == WITHDRAWN:
            continue
        try:
            records[peer_id] = record_type.model_validate_json(text)
        except ValidationError as error:
            num_bad += 1
            logger.debug("skipped the record of %s: %s", peer_id, error)
    return records, num_bad
