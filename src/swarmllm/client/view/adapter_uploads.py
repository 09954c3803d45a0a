"""Adapters travel once to each server, and again only after they have changed or the server has forgotten them.

Used by batches and by sessions, before a request that names the adapter by its handle; one object per client.
"""

import asyncio
from typing import Any
from weakref import WeakValueDictionary

from swarmllm.client.view.active_adapter import ActiveAdapter
from swarmllm.client.view.connection import Connection, new_request_id
from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, LocalProtocolError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.network.wire.messages import MAX_PATCHES, AdapterHeader
from swarmllm.network.wire.protocol import MessageType

MAX_HANDLES = 1024
"""Parts of adapters on servers that are remembered; of more, what was uploaded longest ago would be uploaded again."""


class AdapterUploads:
    """The handles under which servers know adapters."""

    def __init__(self, active: ActiveAdapter) -> None:
        self._active = active
        self._handles: dict[tuple[str, Span], tuple[int, int]] = {}
        self._locks: WeakValueDictionary[tuple[str, Span], asyncio.Lock] = WeakValueDictionary()
        self.num_uploads = 0

    async def header_fields(
        self, connection: Connection, adapter: BlockAdapter | None, span: Span, *, timeout_s: float
    ) -> dict[str, Any]:
        """The fields of a request on `span` about adapters: the server's, or the client's own, uploaded if need be.

        Raises:
            ConfigurationError: both, or the server can't use this adapter.
            SwarmError: the server can't be reached.
        """
        served = self._active.version
        if served is None:
            return {"adapter": await self.handle(connection, adapter, span, timeout_s=timeout_s)}
        if adapter is not None:
            raise ConfigurationError(
                f"the blocks run with the servers' adapter {served}, so they can't have one of yours as well: leave "
                "active_adapter out, or train prompts and heads only"
            )
        return {"served_adapter": served}

    async def handle(
        self, connection: Connection, adapter: BlockAdapter | None, span: Span, *, timeout_s: float
    ) -> int | None:
        """The handle for the adapter's part on `span`, uploaded if need be; None if it has none there.

        Raises:
            ConfigurationError: the server can't use this adapter.
            SwarmError: the server can't be reached.
        """
        part = None if adapter is None else adapter.part(span)
        if part is None:
            return None
        key = connection.peer_id, span
        async with self._locks.setdefault(key, asyncio.Lock()):
            version, handle = self._handles.get(key, (None, 0))
            if version != part.version:
                handle = await self._upload(connection, part, timeout_s)
                self._handles.pop(key, None)
                self._handles[key] = part.version, handle
                if len(self._handles) > MAX_HANDLES:
                    del self._handles[next(iter(self._handles))]
        return handle

    def forget(self, peer_id: str | None) -> None:
        """After a failure of that server, which may have lost what it was sent."""
        for key in [key for key in self._handles if key[0] == peer_id]:
            del self._handles[key]

    async def _upload(self, connection: Connection, part: BlockAdapter, timeout_s: float) -> int:
        if len(part.patches) > MAX_PATCHES:
            raise ConfigurationError(f"an adapter may change {MAX_PATCHES} modules of one server, not more")
        handle = new_request_id()
        header = AdapterHeader(id=handle, handle=handle, tensors=(), patches=part.patches)
        try:
            await connection.request(MessageType.ADAPTER, header, {"values": part.flat()}, timeout_s=timeout_s)
        except LocalProtocolError as error:
            refusal = ConfigurationError(f"this adapter doesn't fit the model's blocks: {error}")
            refusal.said_by = error.said_by
            raise refusal from None
        self.num_uploads += 1
        return handle
