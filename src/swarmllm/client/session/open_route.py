"""The servers of a chain, in the order of their blocks: opening them, linking them, judging and leaving them.

A `Hop` is one session on one server, and sends the chain's messages to it. `OpenRoute` holds all hops. Used by
`session/chain`, which decides when, and by `in_flight`, which relays between servers.

A server's complaint about another one is never believed. One of them lies or their link is broken, and the client can't
know which. It looks itself instead:

    complaint about a neighbour              what the client does
    it can't be reached, or is lost          pings both; the one that doesn't answer is lost, and to blame
    the same, but both answer                links them once more; the second time it relays between them
    it is silent, but answers pings          relays between them: a new link would be as silent
    it passes on what can't be right         relays between them, and so sees what it passes on
    anything more after that                 blames the accuser, as it does for a complaint about a stranger
"""

import asyncio
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Self, overload

from swarmllm.client.view.connection import Connection, OnAnswer, attended, baseless, new_request_id, wanted_header
from swarmllm.client.view.event_loop import gather
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import RouteHop, Span
from swarmllm.errors import (
    CorruptActivationsError,
    LocalProtocolError,
    PeerError,
    PeerTimeoutError,
    RemoteProtocolError,
    SwarmError,
)
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.network.wire.compression import as_received
from swarmllm.network.wire.messages import LinkHeader, OpenHeader, ReplayHeader, StepHeader, Successor
from swarmllm.network.wire.protocol import MessageType
from swarmllm.swarm.route_costs import RouteCosts

logger = logging.getLogger(__name__)

MAX_DOUBTS = 2
"""Complaints about two neighbours after which the client relays between them."""


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
        whole: bool = False,
    ) -> BlockInputs:
        """Send a step, which the last hop of the chain answers; returns the inputs as this server decodes them.

        `exactly`: don't compress, because another server has computed on these very values. `whole`: it must be
        computed in one piece, as another server has computed it.

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
            whole=whole,
            inner=wanted_header(inputs),
        )
        async with self._sending:
            outgoing = await self.connection.compressed(tensors, exactly=exactly)
            await self.connection.send(MessageType.STEP, header, outgoing)
        return inputs.with_tensors(as_received(outgoing))

    async def send_replay(
        self,
        request: int,
        state: ChainState,
        length: int,
        replay_hops: int,
        *,
        steps: tuple[int, int] | None = None,
        cuts: Sequence[int] = (),
    ) -> None:
        """Have the outputs that the server kept for positions [0, length) sent through the next `replay_hops` servers.

        `steps`: only those of steps that began in this range of positions, step by step, and cut at `cuts`.

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
            steps=steps,
            cuts=tuple(cuts),
        )
        await self.connection.send(MessageType.REPLAY, header)

    def __str__(self) -> str:
        return str(self.route_hop)


class OpenRoute(Sequence[Hop]):
    """The hops of one chain. Empty at first; with gaps between the loss of a server and the next `complete`."""

    def __init__(self, view: SwarmView, span: Span) -> None:
        self._view = view
        self._span = span
        self._hops: list[Hop] = []
        self._doubts: dict[tuple[Hop, Hop], int] = {}
        """Complaints between a server and its successor since the last step that went well."""
        self._rounding: dict[int, tuple[str, str, str]] = {}
        """`ServerInfo.rounding` of each block of the text so far."""

    def __len__(self) -> int:
        return len(self._hops)

    @overload
    def __getitem__(self, index: int) -> Hop: ...
    @overload
    def __getitem__(self, index: slice) -> list[Hop]: ...
    def __getitem__(self, index: int | slice) -> Hop | list[Hop]:
        return self._hops[index]

    @property
    def route(self) -> list[RouteHop]:
        """The servers in use, and their blocks."""
        return [hop.route_hop for hop in self._hops]

    @property
    def usable(self) -> bool:
        """True if no server is known to be lost."""
        return all(hop.usable for hop in self._hops)

    def hop_of(self, connection: Connection) -> Hop | None:
        """The hop of that connection; None if it has left the route."""
        return next((hop for hop in self._hops if hop.connection is connection), None)

    def lose(self, peer_id: str) -> None:
        """Don't use that server's sessions any more."""
        for hop in self._hops:
            if hop.peer_id == peer_id:
                hop.lost = True

    def leave_out_old(self, inner: InnerStates) -> None:
        """Lose servers of older versions, which can't answer the inner states that are wanted of their blocks."""
        for hop in self._hops:
            if inner.wants(hop.span) and not hop.route_hop.server.inner_states:
                hop.lost = True

    def close(self) -> None:
        """Leave all servers. They free the sessions when the streams end."""
        for hop in self._hops:
            hop.connection.close()
        self._hops = []
        self._forget_doubts()

    # ------------------------------------------------------------------ complaints of servers about each other

    def is_neighbour(self, hop: Hop, peer_id: str | None) -> bool:
        """True if that peer is right before or right behind this hop."""
        index = self._hops.index(hop)
        return any(other is not hop and other.peer_id == peer_id for other in self._hops[max(0, index - 1) : index + 2])

    def judged(self, accuser: Hop, error: SwarmError) -> SwarmError:
        """Return the error to act on: a complaint about a neighbour, to be checked, or a fault of `accuser` itself."""
        index = self._hops.index(accuser)
        before = self._hops[index - 1] if index else None
        after = self._hops[index + 1] if index + 1 < len(self._hops) else None
        if isinstance(error, LocalProtocolError) and before is not None and self._passes_on(before, accuser):
            # It doesn't understand what `before` has sent it.
            error = RemoteProtocolError(str(error), before.peer_id)
            error.accused_by = accuser.peer_id
        if not isinstance(error, PeerError) or not error.is_hearsay:
            return error
        if before is not None and before.peer_id == error.peer_id and self._passes_on(before, accuser):
            pair = before, accuser
        elif after is not None and after.peer_id == error.peer_id and self._passes_on(accuser, after):
            pair = accuser, after
        else:
            return baseless(error)
        may_link_again = not isinstance(error, CorruptActivationsError | RemoteProtocolError | PeerTimeoutError)
        self._doubts[pair] = self._doubts.get(pair, 0) + 1 if may_link_again else MAX_DOUBTS
        return error

    def step_went_well(self) -> None:
        """Forget complaints: links that failed once work again."""
        if self._doubts:
            self._doubts = {pair: count for pair, count in self._doubts.items() if count >= MAX_DOUBTS}

    async def look_after_accused(self, timeout_s: float) -> None:
        """Ping all servers in complaints; those that don't answer are lost."""
        accused = list(dict.fromkeys(hop for pair in self._doubts for hop in pair if not hop.lost))
        with attended((hop.connection for hop in accused), usual_wait_s=0.0):  # the step has waited long enough
            await asyncio.gather(*(self._look_after(hop, timeout_s) for hop in accused))

    async def _look_after(self, hop: Hop, timeout_s: float) -> None:
        try:
            if hop.connection.error is not None:  # it broke after the complaint and was not reported
                raise hop.connection.error
            async with asyncio.timeout(timeout_s):
                await hop.connection.ping()
        except PeerError as error:
            hop.lost = True
            self._view.report(error)
        except (SwarmError, TimeoutError):
            pass  # closed by this side; or slow, which is not lost

    def _passes_on(self, hop: Hop, successor: Hop) -> bool:
        return self._view.config.push and self._doubts.get((hop, successor), 0) < MAX_DOUBTS

    def _forget_doubts(self) -> None:
        """Forget complaints about servers that have been left."""
        hops = set(self._hops)
        self._doubts = {pair: count for pair, count in self._doubts.items() if hops.issuperset(pair)}

    # ------------------------------------------------------------------ opening

    async def complete(self, settings: SessionSettings, chain_version: int, costs: RouteCosts) -> None:
        """Leave unusable servers. For each gap, find a new route and open sessions on its servers.

        Raises:
            SwarmError: a server could not be opened; the others are kept.
        """
        for hop in self._hops:
            if not hop.usable:
                hop.connection.close()
        self._hops = [hop for hop in self._hops if hop.usable]
        self._forget_doubts()
        for gap in self._gaps():
            await self._open(gap, settings, chain_version, costs)

    def _gaps(self) -> list[Span]:
        gaps: list[Span] = []
        start = self._span.start
        for hop in self._hops:
            if start < hop.span.start:
                gaps.append(Span(start, hop.span.start))
            start = hop.span.end
        if start < self._span.end:
            gaps.append(Span(start, self._span.end))
        return gaps

    async def _open(self, span: Span, settings: SessionSettings, chain_version: int, costs: RouteCosts) -> None:
        async def open_hop(route_hop: RouteHop) -> None:
            hop = await Hop.open(self._view, route_hop, settings, chain_version=chain_version)
            self._hops = sorted([*self._hops, hop], key=lambda hop: hop.span)
            self._note_rounding([route_hop])  # also if another server of this route can't be opened

        route = await self._view.routes.find(span, self.preferring_alike(costs, span))
        opening = await asyncio.gather(*map(open_hop, route), return_exceptions=True)
        errors = [error for error in opening if isinstance(error, BaseException)]
        for error in errors[1:]:
            if isinstance(error, SwarmError):
                self._view.report(error)
        if errors:
            raise errors[0]

    def preferring_alike(self, costs: RouteCosts, span: Span) -> RouteCosts:
        """The costs for a text that should go on as it began: servers that round otherwise come last."""
        return replace(costs, rounding={block: self._rounding[block] for block in span if block in self._rounding})

    def _note_rounding(self, route: Sequence[RouteHop]) -> None:
        for hop in route:
            own = hop.server.rounding
            before = {self._rounding.get(block, own) for block in hop.span} - {own}
            if before:
                logger.warning(
                    "blocks %s go on with %s in place of %s, as no other server has them: the text may go on otherwise",
                    hop.span, _in_words(own), _in_words(min(before)),
                )  # fmt: skip
            self._rounding.update(dict.fromkeys(hop.span, own))

    async def exchange(self, route: Sequence[RouteHop], settings: SessionSettings, chain_version: int) -> bool:
        """Open the new servers of `route`, then leave those not on it. If one can't be opened, nothing changes."""
        held = {(hop.peer_id, hop.span): hop for hop in self._hops}
        kept = [held[hop.server.peer_id, hop.span] for hop in route if (hop.server.peer_id, hop.span) in held]
        wanted = [hop for hop in route if (hop.server.peer_id, hop.span) not in held]
        opened: list[Hop] = []

        async def open_hop(route_hop: RouteHop) -> None:
            opened.append(await Hop.open(self._view, route_hop, settings, chain_version=chain_version))

        try:
            await gather([partial(open_hop, hop) for hop in wanted])
        except BaseException as error:
            for hop in opened:
                hop.connection.close()
            if not isinstance(error, SwarmError):
                raise
            self._view.report(error)
            logger.info("staying on the route, because a better one can't be taken: %s", error)
            return False
        logger.info("moving to a better route: %s", ", ".join(map(str, route)))
        left = [hop for hop in self._hops if hop not in kept]
        self._note_rounding(route)
        self._hops = sorted([*kept, *opened], key=lambda hop: hop.span)
        self._forget_doubts()
        for hop in left:
            hop.connection.close()
        return True

    async def link(self, chain_version: int) -> None:
        """Tell every hop where its outputs go; where a link fails, the client relays.

        Raises:
            SwarmError: a server doesn't answer.
        """
        pairs = [
            (hop, successor if self._passes_on(hop, successor) else None) for hop, successor in pairwise(self._hops)
        ]
        if self._hops:
            pairs.append((self._hops[-1], None))
        await gather([partial(self._link, hop, successor, chain_version) for hop, successor in pairs])

    async def _link(self, hop: Hop, successor: Hop | None, chain_version: int) -> None:
        if hop.new and successor is None:
            return  # outputs of a new session go to the client anyway
        try:
            await hop.link(successor, chain_version)
        except PeerError as error:
            is_own = error.peer_id == hop.peer_id
            if successor is not None and successor.peer_id == hop.peer_id:
                # One server has both sessions, and doesn't say which is lost: relayed steps will show it.
                is_own = error.accused_by is None and successor.connection.error is None
            if successor is None or hop.connection.error is not None or is_own:
                hop.lost = True
                raise
            logger.info("%s can't reach its successor, so hidden states go through this client: %s", hop, error)

    def new_runs(self) -> Iterator[tuple[Hop | None, list[Hop]]]:
        """(the hop before them, the new hops) for each run of neighbouring new hops."""
        before: Hop | None = None
        run: list[Hop] = []
        for hop in self._hops:
            if hop.new:
                run.append(hop)
                continue
            if run:
                yield before, run
            before, run = hop, []
        if run:
            yield before, run


def _in_words(rounding: tuple[str, str, str]) -> str:
    dtype, quant_type, activations = rounding
    weights = dtype if quant_type == "none" else f"{quant_type} ({dtype})"
    return weights if activations == "none" else f"{weights}, activations in {activations}"
