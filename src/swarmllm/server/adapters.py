"""Adapters that requests may name: this server offers some to all clients, and clients send others.

`ServedAdapters` (`--adapters`) are read, checked against the blocks, and kept up to date. A request that has begun
keeps its adapter, whatever happens to the file. `AdapterStore` holds uploaded adapters by peer and handle; it is
bounded, and drops the least recently used ones. A client sends one again when it is told that it isn't here (any
more).
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from swarmllm.errors import (
    BlocksNotServedError,
    ConfigurationError,
    RemoteProtocolError,
    ServerOverloadedError,
    SwarmError,
    WeightsMismatchError,
)
from swarmllm.files import user_path
from swarmllm.models.adapters.adapter_files import CONFIG, PICKLE, WEIGHTS, open_adapter
from swarmllm.models.adapters.block_adapter import BlockAdapter, checked
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.server.device.device import ADAPTERS_BYTES
from swarmllm.server.downloads import in_background

logger = logging.getLogger(__name__)

MAX_BYTES_PER_PEER = 256 << 20
"""Bytes of one peer; at most half of all. Assumed: rank 64 on all linear modules of 20 blocks of a 70B model."""

MAX_ADAPTERS = 32
"""Most adapters of one server; their names have to fit into its record."""

MAX_NAME_LENGTH = 128
MAX_NAMES_BYTES = 3 << 10
"""Most bytes of all names together."""

Stamp = tuple[tuple[int, int], ...]
"""Modification time and size of each file of a directory."""


class AdapterStore:
    """Adapters that clients have sent, for the blocks that are served now."""

    def __init__(self, max_bytes: int = ADAPTERS_BYTES) -> None:
        """`max_bytes` of all peers together: a share of the memory (`CacheRoom`)."""
        self._max_bytes = max_bytes
        self._max_bytes_per_peer = min(MAX_BYTES_PER_PEER, self._max_bytes // 2)
        self._adapters: OrderedDict[tuple[str, int], tuple[BlockAdapter, int]] = OrderedDict()

    def put(self, peer_id: str, handle: int, adapter: BlockAdapter) -> None:
        """Keep an adapter; drop older ones if there is too little room.

        Raises:
            ServerOverloadedError: it alone is larger than one peer may have.
        """
        num_bytes = sum(tensor.nbytes for tensor in adapter.tensors())
        most = self._max_bytes_per_peer
        if num_bytes > most:
            raise ServerOverloadedError(f"one client's adapters may take {most} bytes on this server")
        self._adapters.pop((peer_id, handle), None)
        self._make_room(num_bytes, most, peer_id)
        self._make_room(num_bytes, self._max_bytes, None)
        self._adapters[peer_id, handle] = adapter, num_bytes

    def get(self, peer_id: str, handle: int | None) -> BlockAdapter | None:
        """Return the adapter that a request names; None if it names none.

        Raises:
            BlocksNotServedError: it isn't here.
        """
        if handle is None:
            return None
        if (peer_id, handle) not in self._adapters:
            raise BlocksNotServedError("this server doesn't have that adapter (any more): send it again")
        self._adapters.move_to_end((peer_id, handle))
        return self._adapters[peer_id, handle][0]

    def _make_room(self, num_bytes: int, limit: int, peer_id: str | None) -> None:
        known = [(key, size) for key, (_, size) in self._adapters.items() if peer_id in (None, key[0])]
        total = num_bytes + sum(size for _, size in known)
        for key, size in known:
            if total <= limit:
                return
            del self._adapters[key]
            total -= size


@dataclass(frozen=True)
class _Offer:
    """The last state of one adapter: a hub id or a directory."""

    stamp: Stamp
    adapter: BlockAdapter | None
    """None: it has never been usable."""


class ServedAdapters:
    """Adapters that this server offers; a directory's adapter gets a new name when it changes."""

    def __init__(
        self, places: Sequence[str], checkpoint: Checkpoint, *, token: str | None, cache_dir: str | None
    ) -> None:
        self._places = places
        self._checkpoint = checkpoint
        self._token, self._cache_dir = token, cache_dir
        self._offers: Mapping[str, _Offer] = {}  # by place (hub id or directory); replaced as a whole

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters that are offered now."""
        return tuple(sorted(adapter.name for adapter in _adapters(self._offers).values()))

    @property
    def watches(self) -> bool:
        """True if anything can change: adapters from the hub stay as they were at the start."""
        return any(user_path(place).is_dir() for place in self._places)

    def get(self, name: str) -> BlockAdapter:
        """Return the adapter that a request names.

        Raises:
            BlocksNotServedError: it isn't offered (any more).
        """
        for adapter in _adapters(self._offers).values():
            if adapter.name == name:
                return adapter
        raise BlocksNotServedError(f"this server doesn't offer the adapter {name} (any more)")

    def load(self, blocks: BlockSpan) -> None:
        """Read all adapters anew, for these blocks.

        Raises:
            SwarmError: one of them can't be offered; the message says which.
        """
        offers: dict[str, _Offer] = {}
        for place in self._found():
            stamp = _stamp(place)
            offers[place] = _Offer(stamp, self._read(place, blocks, offers))
        for place in self._places:
            if not _adapters_in(place):
                logger.warning("there is no adapter in %s yet; new ones are offered when they are there", place)
        self._offers = offers

    async def refresh(self, blocks: BlockSpan) -> bool:
        """Look into the directories again; True if anything has changed.

        An adapter that can't be read (any more) stays as it was, and the log says why: perhaps it is half written.
        """
        before = self.names
        known = dict(self._offers)
        self._offers = await in_background(lambda: self._looked_at_again(known, blocks))
        return self.names != before

    def _looked_at_again(self, offers: dict[str, _Offer], blocks: BlockSpan) -> dict[str, _Offer]:
        found = list(self._found())
        for place in offers.keys() - set(found):
            logger.info("the adapter %s is gone, and no longer offered", place)
            del offers[place]
        for place in found:
            stamp, known = _stamp(place), offers.get(place)
            if known is not None and known.stamp == stamp:
                continue
            offers[place] = _Offer(stamp, None if known is None else known.adapter)
            try:
                offers[place] = _Offer(stamp, self._read(place, blocks, offers))
            except SwarmError as error:
                logger.warning("%s", error)
        return offers

    def _read(self, place: str, blocks: BlockSpan, offers: Mapping[str, _Offer]) -> BlockAdapter:
        stored = open_adapter(place, self._checkpoint, token=self._token, cache_dir=self._cache_dir)
        patches, values = stored.values(blocks.span)
        try:
            adapter = replace(checked(patches, values.to(blocks.device), blocks.slots), name=stored.name)
        except RemoteProtocolError as error:
            raise WeightsMismatchError(f"the adapter {place} doesn't fit {self._checkpoint.name}: {error}") from None
        others = [other for key, other in _adapters(offers).items() if key != place]
        plain_name = stored.name.rpartition("@")[0]
        if plain_name in (other.name.rpartition("@")[0] for other in others):
            raise ConfigurationError(f"two adapters are called {plain_name}: rename one")
        if len(others) >= MAX_ADAPTERS:
            raise ConfigurationError(f"a server can offer {MAX_ADAPTERS} adapters, so it can't offer {place}")
        names = [*(other.name for other in others), stored.name]
        if len(stored.name) > MAX_NAME_LENGTH or sum(len(name.encode()) for name in names) > MAX_NAMES_BYTES:
            raise ConfigurationError(f"the adapter {place} can't be announced: names are too long, so shorten its own")
        logger.info("offers the adapter %s, which changes %d modules of these blocks", stored.name, len(patches))
        return adapter

    def _found(self) -> Iterator[str]:
        """List hub ids and directories of adapters; a directory of several adapters is replaced by these."""
        for place in self._places:
            yield from _adapters_in(place)


def _adapters_in(place: str) -> list[str]:
    """The place itself, or the directories of adapters in it."""
    directory = user_path(place)
    if not directory.is_dir() or any((directory / name).is_file() for name in (CONFIG, WEIGHTS, PICKLE)):
        return [place]
    return sorted(str(path.parent) for path in directory.glob(f"*/{CONFIG}"))


def _adapters(offers: Mapping[str, _Offer]) -> dict[str, BlockAdapter]:
    return {place: offer.adapter for place, offer in offers.items() if offer.adapter is not None}


def _stamp(place: str) -> Stamp:
    files = [user_path(place) / name for name in (CONFIG, WEIGHTS)]
    stats = [file.stat() for file in files if file.is_file()]
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)
