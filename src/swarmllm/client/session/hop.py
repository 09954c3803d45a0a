"""One server of a chain, and the messages that a chain sends to its session there.

Used by `chain`, `open_route` and `in_flight`, which decide what to ask for and what to do when it fails.
"""

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Self

from swarmllm.client.view.connection import Connection, OnAnswer, new_request_id, wanted_header
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import RouteHop, Span
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.compression import as_received
from swarmllm.network.wire.messages import LinkHeader, OpenHeader, ReplayHeader, StepHeader, Successor
from swarmllm.network.wire.protocol import MessageType


@dataclass(frozen=True)
class ChainState:
    """The state of a chain that each request names: its version, and the selection of rows of its batch."""

    chain_version: int
    num_choices: int = 0
    batch_index: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a chain's sessions, the same on every server."""

    on_answer: OnAnswer
    batch_size: int
    max_length: int
    record_past: bool = False
    adapter: BlockAdapter | None = None
    source_length: int = 0


@dataclass(eq=False)
class Hop:
    """A session on one server. While it is `new`, its cache is empty and a repair has to fill it."""

    route_hop: RouteHop
    connection: Connection
    session: str
    token: str
    timeout_s: float
    new: bool = True
    lost: bool = False
    """The server may answer, but this session is not used any more."""
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Keeps steps in order while a thread compresses a long one."""

    @classmethod
    async def open(cls, view: SwarmView, route_hop: RouteHop, settings: SessionSettings, *, chain_version: int) -> Self:
        """Connect, and open a session with a lease of KV cache.

        Raises:
            SwarmError: the server can't be reached or refuses.
        """
        connection = await view.open_connection(route_hop.server, settings.on_answer, route_hop.span)
        session, token, timeout_s = secrets.token_hex(16), secrets.token_hex(16), view.config.connect_timeout_s
        hop = cls(route_hop, connection, session, token, timeout_s)
        try:
            await hop._lease(view, settings, chain_version)
        except BaseException:
            connection.close()
            raise
        view.health.succeeded(hop.peer_id)
        return hop

    async def _lease(self, view: SwarmView, settings: SessionSettings, chain_version: int) -> None:
        adapter = await view.adapters.header_fields(
            self.connection, settings.adapter, self.span, timeout_s=view.config.step_timeout_s
        )
        header = OpenHeader(
            id=new_request_id(),
            session=self.session,
            token=self.token,
            start=self.span.start,
            end=self.span.end,
            batch_size=settings.batch_size,
            max_length=settings.max_length,
            epoch=chain_version,
            record_past=settings.record_past,
            source_length=settings.source_length,
            compression=view.config.compression,
            **adapter,
        )
        # A server loads blocks first that were not used for long.
        timeout_s = view.config.step_timeout_s if self.connection.asleep else self.timeout_s
        await self.connection.request(MessageType.OPEN, header, timeout_s=timeout_s)

    @property
    def span(self) -> Span:
        return self.route_hop.span

    @property
    def peer_id(self) -> str:
        return self.route_hop.server.peer_id

    @property
    def usable(self) -> bool:
        return not self.lost and self.connection.error is None

    async def link(self, successor: "Hop | None", chain_version: int) -> int:
        """Have outputs sent to `successor`, or to this client if it is None. Return the end of the outputs sent so far.

        Raises:
            SwarmError: it can't reach the successor (the error's peer is the successor then), or doesn't answer.
        """
        target = None
        if successor is not None:
            server = successor.route_hop.server
            target = Successor(
                peer_id=server.peer_id, addrs=server.addrs, session=successor.session, token=successor.token
            )
        header = LinkHeader(id=new_request_id(), session=self.session, epoch=chain_version, successor=target)
        # Meanwhile the server dials its successor, with a timeout of its own.
        timeout_s = self.timeout_s if successor is None else 2 * self.timeout_s
        others = [] if successor is None else [successor.connection]
        answer = await self.connection.request(
            MessageType.LINK,
            header,
            timeout_s=timeout_s,
            others=others,
            may_accuse=None if successor is None else successor.peer_id,
        )
        return answer.header.position

    async def send_step(
        self,
        request: int,
        state: ChainState,
        position: int,
        inputs: BlockInputs,
        *,
        replay_hops: int = 0,
        exactly: bool = False,
    ) -> BlockInputs:
        """Send a step, which the last hop of the chain answers; returns the inputs as this server decodes them.

        `exactly`: don't compress, because another server has computed on these very values.

        Raises:
            PeerError: the connection is broken.
        """
        if position:  # servers got the encoder outputs with the first step
            inputs = inputs.without_source()
        tensors = inputs.tensors()
        if ones_mask := inputs.has_ones_mask(position):
            del tensors["attention_mask"]
        header = StepHeader(
            id=request,
            session=self.session,
            epoch=state.chain_version,
            position=position,
            batch_size=inputs.batch_size,
            seq_len=inputs.seq_len,
            tensors=(),
            num_choices=state.num_choices,
            batch_index=state.batch_index,
            ones_mask=ones_mask,
            replay_hops=replay_hops,
            inner=wanted_header(inputs),
        )
        async with self._sending:
            outgoing = await self.connection.compressed(tensors, exactly=exactly)
            await self.connection.send(MessageType.STEP, header, outgoing)
        return inputs.with_tensors(as_received(outgoing))

    async def send_replay(self, request: int, state: ChainState, length: int, replay_hops: int) -> None:
        """Have the outputs that the server kept for positions [0, length) sent through the next `replay_hops` servers.

        Raises:
            PeerError: the connection is broken.
        """
        header = ReplayHeader(
            id=request,
            session=self.session,
            epoch=state.chain_version,
            length=length,
            replay_hops=replay_hops,
            num_choices=state.num_choices,
            batch_index=state.batch_index,
        )
        await self.connection.send(MessageType.REPLAY, header)

    def __str__(self) -> str:
        return str(self.route_hop)
