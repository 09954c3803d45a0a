"""Requests for batches, one server at a time: FORWARD and BACKWARD, on one stream per server that all of them share.

Used by `client/remote_autograd`, which relays from server to server, and `client/pushed_batches`, where the servers
pass on to each other what they have computed.
"""

import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmllm.client.connection import Answer, Connection, new_request_id
from swarmllm.client.swarm_view import SwarmView
from swarmllm.data_structures import RouteHop, ServerInfo
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.models.block_inputs import BlockInputs
from swarmllm.network.messages import BatchHeader, Source, Target
from swarmllm.network.protocol import MessageType


@dataclass(frozen=True)
class Between:
    """What a request says about the servers before and after its own, if they pass things on."""

    source: Source | None = None
    target: Target | None = None
    lean: bool = False


ALONE = Between()
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

    async def connection(self, server: ServerInfo) -> Connection:
        """The stream to that server, opened now if there is none; requests at the same time share one attempt.

        Raises:
            PeerError: it can't be reached.
        """
        connection = self._connections.get(server.peer_id)
        if connection is not None and connection.error is None:
            return connection
        dialling = self._dialling.get(server.peer_id)
        if dialling is None:
            dialling = self._view.loop.spawn(self._dial(server), name=f"dial {server.peer_id}")
            self._dialling[server.peer_id] = dialling
        found = await asyncio.shield(dialling)
        if isinstance(found, SwarmError):
            raise found
        return found

    async def _dial(self, server: ServerInfo) -> Connection | SwarmError:
        try:
            connection = self._connections[server.peer_id] = await self._view.open_connection(server)
            return connection
        except SwarmError as error:
            return error
        finally:
            del self._dialling[server.peer_id]

    async def send(
        self,
        kind: MessageType,
        hop: RouteHop,
        inputs: BlockInputs,
        grad_outputs: Tensor | None = None,
        *,
        keep: bool = False,
        forward: int | None = None,
        between: Between = ALONE,
        timeout_s: float | None = None,
    ) -> Answer:
        """The server's answer, within `timeout_s` (by default that of a step).

        Raises:
            SwarmError: the server can't or doesn't do it.
        """
        config = self._view.config
        num_tokens = inputs.num_positions
        if num_tokens > hop.server.max_batch_tokens:
            raise ConfigurationError(
                f"one sample of {num_tokens} tokens is above the servers' limit of {hop.server.max_batch_tokens}: "
                "use shorter sequences, or servers with a larger --max_batch_tokens"
            )
        tensors = inputs.tensors() if forward is None else {}
        ones_mask = _is_all_ones(tensors.get("attention_mask"))
        if ones_mask:
            del tensors["attention_mask"]
        if grad_outputs is not None:
            tensors["grad_outputs"] = grad_outputs
        if between.source is not None:
            tensors.pop("hidden_states" if kind == MessageType.FORWARD else "grad_outputs", None)
        header = BatchHeader(
            id=new_request_id(),
            start=hop.span.start,
            end=hop.span.end,
            batch_size=inputs.batch_size,
            seq_len=inputs.seq_len,
            tensors=(),
            ones_mask=ones_mask,
            keep=keep,
            forward=forward,
            source=between.source,
            target=between.target,
            lean=between.lean,
            compression=config.compression,
        )
        connection = await self.connection(hop.server)
        fields = await self._view.adapters.header_fields(
            connection, inputs.adapter, hop.span, timeout_s=config.step_timeout_s
        )
        header = header.model_copy(update=fields)
        answer = await connection.request(
            kind,
            header,
            await connection.compressed(tensors),
            timeout_s=timeout_s or config.step_timeout_s,
            may_accuse=None if between.source is None else between.source.peer_id,
        )
        self._view.health.succeeded(hop.server.peer_id)
        return answer


def _is_all_ones(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.int64 and mask.ndim == 2 and bool(mask.all())
