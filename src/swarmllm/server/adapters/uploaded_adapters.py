"""The adapters that clients have sent: by peer and handle, bounded, the longest unused forgotten first.

Called by `streams/dispatcher`, and by `streams/serving` for requests that name one. A client sends one again when it is
told that it isn't here (any more).
"""

from collections import OrderedDict

from swarmllm.errors import BlocksNotServedError, ServerOverloadedError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.server.device.device import ADAPTERS_BYTES

MAX_BYTES_PER_PEER = 256 << 20
"""At most half of all. Assumed: rank 64 on all linear modules of 20 blocks of a 70B model."""


class AdapterStore:
    """What was uploaded for the blocks that are served now."""

    def __init__(self, max_bytes: int = ADAPTERS_BYTES) -> None:
        """`max_bytes` of all peers together: a share of the memory (`CacheRoom`)."""
        self._max_bytes = max_bytes
        self._max_bytes_per_peer = min(MAX_BYTES_PER_PEER, self._max_bytes // 2)
        self._adapters: OrderedDict[tuple[str, int], tuple[BlockAdapter, int]] = OrderedDict()

    def put(self, peer_id: str, handle: int, adapter: BlockAdapter) -> None:
        """Keep it, in place of older ones if need be.

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
        """The adapter that a request names.

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
