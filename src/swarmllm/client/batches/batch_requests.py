"""Requests for batches, one server at a time: FORWARD and BACKWARD, on one stream per server that all of them share.

Used by `batches/hop_batches`, where the client carries everything from server to server, and `batches/pushed_batches`,
where the servers pass on to each other what they have computed.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swarmllm.client.view.connection import Connection, Result, new_request_id
from swarmllm.client.view.inner_answers import wanted_header
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import RouteHop, ServerInfo
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.messages import BatchHeader, Predecessor, Target
from swarmllm.network.wire.protocol import MessageType


@dataclass(frozen=True)
class Neighbours:
    """The part of a request about the servers before and after its own, if they pass things on."""

    source: Predecessor | None = None
    target: Target | None = None
    without_pushed: bool = False


ALONE = Neighbours()
"""All comes from the client and goes to it."""


class BatchRequests:
    """The streams, and what is asked on them; one object per model, in the client's event loop."""

    def __init__(self, view: SwarmView) -> None:
        self._view = view
        self._connections: dict[str, Connection] = {}
        self._dialling: dict[str, asyncio.Task[Connection | SwarmError]] = {}

    def close(self) -> None:
        """Close the streams."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def opened(self, peer_id: str) -> Connection | None:
        """The stream to that peer, if there is one."""
        return self._connections.get(peer_id)

    async def connection(self, hop: RouteHop) -> Connection:
        """The stream to that server, opened now if there is none; requests at the same time share one attempt.

        Raises:
            PeerError: it can't be reached.
        """
        peer_id = hop.server.peer_id
        connection = self._connections.get(peer_id)
        if connection is not None and connection.error is None:
            return connection
        dialling = self._dialling.get(peer_id)
        if dialling is None:
            dialling = self._dialling[peer_id] = self._view.loop.spawn(self._dial(hop), name=f"dial {peer_id}")
        found = await asyncio.shield(dialling)
        if isinstance(found, SwarmError):
            raise found
        return found

    async def _dial(self, hop: RouteHop) -> Connection | SwarmError:
        server, peer_id = hop.server, hop.server.peer_id
        try:
            connection = self._connections[peer_id] = await self._view.open_connection(server, None, hop.span)
            return connection
        except SwarmError as error:
            return error
        finally:
            del self._dialling[peer_id]

    async def send(
        self,
        kind: MessageType,
        hop: RouteHop,
        inputs: BlockInputs,
        grad_outputs: Tensor | None = None,
        *,
        keep: bool = False,
        forward: int | None = None,
        neighbours: Neighbours = ALONE,
        timeout_s: float | None = None,
    ) -> Result:
        """The server's answer, within `timeout_s` (by default that of a step).

        Raises:
            SwarmError: the server can't or doesn't do it.
        """
        config = self._view.config
        if inputs.num_positions > hop.server.max_batch_tokens:
            raise _too_long(inputs, hop.server)
        tensors, ones_mask = _tensors(kind, inputs if forward is None else None, grad_outputs, neighbours)
        connection = await self.connection(hop)
        step_s = config.step_timeout_s
        adapter = await self._view.adapters.header_fields(connection, inputs.adapter, hop.span, timeout_s=step_s)
        inner = wanted_header(inputs, hop.span) if kind == MessageType.FORWARD else None
        more = {"ones_mask": ones_mask, "keep": keep, "forward": forward, "inner": inner}
        header = _header(hop, inputs, neighbours, config.compression, **more, **adapter)
        answer = await connection.request(
            kind,
            header,
            await connection.compressed(tensors),
            timeout_s=timeout_s or step_s,
            may_accuse=None if neighbours.source is None else neighbours.source.peer_id,
        )
        self._view.health.succeeded(hop.server.peer_id)
        return answer


def _too_long(inputs: BlockInputs, server: ServerInfo) -> ConfigurationError:
    return ConfigurationError(
        f"one sample of {inputs.num_positions} tokens is above the servers' limit of {server.max_batch_tokens}: "
        "use shorter sequences, or servers with a larger --max_batch_tokens"
    )


def _tensors(
    kind: MessageType, inputs: BlockInputs | None, grad_outputs: Tensor | None, neighbours: Neighbours
) -> tuple[dict[str, Tensor], bool]:
    """The tensors to send, and whether a mask of ones was left out: the server makes it itself."""
    tensors = {} if inputs is None else inputs.tensors()
    if ones_mask := inputs is not None and inputs.has_ones_mask(0):
        del tensors["attention_mask"]
    if grad_outputs is not None:
        tensors["grad_outputs"] = grad_outputs
    if neighbours.source is not None:
        tensors.pop("hidden_states" if kind == MessageType.FORWARD else "grad_outputs", None)
    return tensors, ones_mask


def _header(hop: RouteHop, inputs: BlockInputs, neighbours: Neighbours, compression: str, **fields: Any) -> BatchHeader:
    return BatchHeader(
        id=new_request_id(),
        start=hop.span.start,
        end=hop.span.end,
        batch_size=inputs.batch_size,
        seq_len=inputs.seq_len,
        tensors=(),
        source=neighbours.source,
        target=neighbours.target,
        without_pushed=neighbours.without_pushed,
        compression=compression,
        **fields,
    )
