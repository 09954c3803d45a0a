"""Requests of micro-batches to servers, and checks of their answers.

Used by `batches/batch_runner` and, to compare servers, by `batches/spot_checks`. They decide what to do when a server
fails. `BatchRequests` has the streams, one per server, and sends FORWARD and BACKWARD. `HopBatches` asks one server, in
pieces that it accepts; the client carries the results to the next one.

With `PushedBatches`, servers pass tensors on to each other, as they do with steps of sessions. Every server of a route
gets its request at once. The first request brings the tensors. Requests name the previous and the next server, with a
secret for each pair. So hidden states travel once between two servers, instead of twice by way of the client.
Gradients do the same, from the last server to the first.

    a server                                     what the client does
    answers, and has passed the tensors on       waits for the next one
    answers, but can't reach the next one        relays from there on, and remembers the pair
    fails, is lost, or doesn't answer in time    stops there, and tells the later servers
    falls silent before its turn                 the same: the previous server would try for seconds to reach it

The caller then relays, from the last hidden states that it has. Answers also bring the tensors that were passed on,
unless the request says `without_pushed`.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from swarmllm.client.view.connection import Connection, Result, new_request_id, parts_at_once, take_inner, wanted_header
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import BlockTraits, RouteHop, ServerInfo, Span
from swarmllm.errors import (
    ConfigurationError,
    CorruptActivationsError,
    PeerError,
    PeerTimeoutError,
    SessionLostError,
    SwarmError,
)
from swarmllm.models.boundary.block_inputs import BESIDE, SOURCE, BlockInputs, decisive_rows
from swarmllm.models.boundary.inner_states import MAX_ABS, checked
from swarmllm.network.wire.messages import BatchHeader, Predecessor, PushHeader, Target
from swarmllm.network.wire.protocol import MessageType

Gradients = dict[str, Tensor]
"""Gradients of `hidden_states` and `BESIDE`, and those of the adapter's tensors as `adapter.0`, `adapter.1`, …"""
Kept = tuple[ServerInfo, int]
"""(a server that has kept a forward for its backward, the id of that request)."""


@dataclass(frozen=True)
class Neighbours:
    """The fields of a request about its previous server (`source`) and its next one (`target`), if they push."""

    source: Predecessor | None = None
    target: Target | None = None
    without_pushed: bool = False


ALONE = Neighbours()
"""All tensors come from the client and go to it."""


class BatchRequests:
    """The streams of sessionless requests; one object per model, in the client's event loop."""

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
        """The stream to that server, opened now if there is none; concurrent calls share one attempt.

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
        """Send a request, and return the answer, within `timeout_s` (default: that of a step).

        Raises:
            SwarmError: the server failed or refused.
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
    """(the tensors to send, whether a mask of ones was left out for the server to make)."""
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


class HopBatches:
    """Forward and backward of single servers; one object per model."""

    def __init__(self, requests: BatchRequests, traits: BlockTraits) -> None:
        self._requests, self._traits = requests, traits

    async def run_hop(self, hop: RouteHop, inputs: BlockInputs) -> Tensor:
        """The hop's outputs.

        Raises:
            SwarmError: the server failed or refused.
        """
        return (await self.forward(hop, replace(inputs, inner=None), keep=False))[0]

    async def forward(self, hop: RouteHop, inputs: BlockInputs, *, keep: bool) -> tuple[Tensor, Kept | None]:
        """(outputs, the server that keeps the forward). No server keeps a forward that was sent in pieces."""
        outputs = []
        pieces = list(micro_batches(inputs, hop.server.max_batch_tokens, self._traits))
        keep = keep and len(pieces) == 1
        for rows in pieces:
            answer = await self._requests.send(MessageType.FORWARD, hop, rows, keep=keep)
            outputs.append(self.outputs(answer, rows))
            take_inner(answer, hop.span, rows, self._traits)
        if inputs.inner is not None:
            inputs.inner.join([rows.inner for rows in pieces], self._traits.batch_axis)
        kept = (hop.server, answer.header.id) if keep else None
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=self._traits.batch_axis), kept

    async def backward(self, hop: RouteHop, inputs: BlockInputs, grad_outputs: Tensor) -> Gradients:
        """The gradients of the hop's inputs; the server computes the forward again."""
        pieces, first = [], 0
        for rows in micro_batches(inputs, hop.server.max_batch_tokens, self._traits):
            grad = grad_outputs.narrow(self._traits.batch_axis, first, rows.batch_size)
            answer = await self._requests.send(MessageType.BACKWARD, hop, rows, grad)
            pieces.append(self.gradients(answer, rows, hop.span, grad))
            first += rows.batch_size
        return joined(pieces, self._traits)

    async def backward_of_kept(self, kept: Kept, span: Span, inputs: BlockInputs, grad_outputs: Tensor) -> Gradients:
        """The gradients of a forward that the server has kept."""
        server, forward = kept
        hop = RouteHop(server, span)
        answer = await self._requests.send(MessageType.BACKWARD, hop, inputs, grad_outputs, forward=forward)
        return self.gradients(answer, inputs, span, grad_outputs)

    def pieces(self, route: list[RouteHop], inputs: BlockInputs) -> list[RouteHop]:
        """The route, with hops cut so that no answer has too many inner states."""
        if inputs.inner is None:
            return route
        return [RouteHop(hop.server, part) for hop in route for part in parts_at_once(inputs, hop.span, self._traits)]

    def show(self, answer: Result, hop: RouteHop, inputs: BlockInputs) -> None:
        """Take the inner states of a FORWARD's answer, if they are wanted.

        Raises:
            CorruptActivationsError: they can't be right.
        """
        take_inner(answer, hop.span, inputs, self._traits)

    def outputs(self, answer: Result, inputs: BlockInputs) -> Tensor:
        """The outputs in a FORWARD's answer.

        Raises:
            CorruptActivationsError: they can't be right.
        """
        return self._checked(answer, inputs, "hidden_states", inputs.hidden_states)

    def gradients(self, answer: Result, inputs: BlockInputs, span: Span, hidden_like: Tensor | None) -> Gradients:
        """The gradients in a BACKWARD's answer; those of hidden_states only if `hidden_like` is given.

        Raises:
            CorruptActivationsError: they can't be right.
        """
        grads = {}
        # Gradients have no bound, and are NaN after a loss of NaN, which is not the server's fault.
        if hidden_like is not None:
            grads["hidden_states"] = self._checked(answer, inputs, "hidden_states", hidden_like, math.inf)
        for name in BESIDE:
            if (given := getattr(inputs, name)) is not None:
                grads[name] = self._checked(answer, inputs, name, given, math.inf)
        part = None if inputs.adapter is None else inputs.adapter.part(span)
        if inputs.adapter is None or part is None:
            return grads
        like = part.flat()
        if not len(like):
            return grads
        found = answer.tensors().get("adapter")
        if found is None or found.shape != like.shape or not found.is_floating_point():
            raise CorruptActivationsError("the gradient of the adapter is missing or has another shape", answer.peer_id)
        of_adapter = zip(inputs.adapter.indices(span), part.unflatten(found), strict=True)
        return grads | {f"adapter.{index}": grad for index, grad in of_adapter}

    def _checked(
        self, answer: Result, inputs: BlockInputs, name: str, like: Tensor, max_abs: float = MAX_ABS
    ) -> Tensor:
        return checked(
            answer.tensors().get(name),
            like,
            peer_id=answer.peer_id,
            batch_axis=self._traits.batch_axis if name == "hidden_states" else 0,
            attention_mask=inputs.encoder_attention_mask if name in SOURCE else inputs.attention_mask,
            max_abs=max_abs,
        )


def micro_batches(inputs: BlockInputs, max_tokens: int, traits: BlockTraits) -> Iterator[BlockInputs]:
    """Groups of rows of at most `max_tokens`, of about equal size; a longer row is a group of its own.

    If the longest row decides how the others are computed, all stay together.
    """
    if decisive_rows(inputs, traits) is not None:
        yield inputs
        return
    size = max(1, max_tokens // (inputs.seq_len + inputs.num_prefix))
    num_parts = -(-inputs.batch_size // size)
    size = -(-inputs.batch_size // num_parts)
    for start in range(0, inputs.batch_size, size):
        yield inputs.rows(start, min(start + size, inputs.batch_size), traits)


def joined(grads: list[Gradients], traits: BlockTraits) -> Gradients:
    """Join gradients of groups of rows: those of an adapter are added up, others are concatenated."""
    if len(grads) == 1:
        return grads[0]
    axes = {"hidden_states": traits.batch_axis, **dict.fromkeys(BESIDE, 0)}
    return added_up(
        {name: torch.cat([rows[name] for rows in grads], dim=axis) for name, axis in axes.items() if name in grads[0]},
        grads,
    )


def added_up(of_rows: Gradients, grads: list[Gradients]) -> Gradients:
    """`of_rows`, and for each other name (an adapter's) the sum of its gradients in `grads`."""
    whole = dict(of_rows)
    for part in grads:
        for name in part.keys() - of_rows.keys():
            whole[name] = whole[name] + part[name] if name in whole else part[name]
    return whole


logger = logging.getLogger(__name__)

MAX_CHAINS = 32
"""Most pushed micro-batches at a time; others are relayed. A server takes 64 requests of one stream, and pushed ones
wait there from the beginning."""
MAX_CHAIN_BYTES = 128 << 20
"""Most bytes of hidden states in all pushed micro-batches: a quarter of what a server takes from one peer."""
UNLINKED_S = 600.0
"""Seconds until two servers are asked again, after one could not reach the other. Assumed: mostly because of a NAT."""
WITHDRAWAL_TIMEOUT_S = 1.0
ARRIVAL_S, ARRIVAL_BYTES_PER_S = 15.0, 125e3
"""Seconds, and bytes in each further one, until tensors that a server has sent must have come to the next one. Longer
than a stream between them takes to notice that it is broken: then they are lost, and the server that sent them has
answered already. Assumed: a megabit a second."""


@dataclass(frozen=True, eq=False)
class Part:
    """One server's part of a pushed micro-batch; only the first part's hidden states are sent."""

    hop: RouteHop
    inputs: BlockInputs
    forward: int | None = None

    @property
    def peer_id(self) -> str:
        return self.hop.server.peer_id


@dataclass(frozen=True, eq=False)
class Outcome:
    """The answers of the servers before the first failure, and the error of that failure.

    Without an error, there may be fewer answers than servers: then the last one that answered can't reach the next.
    """

    answers: list[Result]
    error: SwarmError | None = None


class PushedBatches:
    """Micro-batches that servers pass on to each other; one object per model, in the client's event loop."""

    def __init__(self, view: SwarmView, requests: BatchRequests) -> None:
        self._view = view
        self._requests = requests
        self._unlinked: dict[tuple[str, str], float] = {}
        self._num_chains = 0
        self._num_bytes = 0
        self.num_pushed = 0
        """Tensors that have gone from server to server."""

    def chain_length(self, servers: Sequence[ServerInfo], inputs: BlockInputs) -> int:
        """The number of first servers that can pass such a micro-batch on to each other; at least 1.

        With spot checks nothing is pushed: a server could send other tensors to the next one than to this client.
        """
        config = self._view.config
        num_bytes = self._num_bytes + inputs.hidden_states.nbytes
        if not config.push or config.verify_fraction or self._num_chains >= MAX_CHAINS:
            return 1
        if self._num_chains and num_bytes > MAX_CHAIN_BYTES:
            return 1
        num_tokens, now = inputs.num_positions, time.monotonic()
        length = 1
        for one, other in pairwise(servers):
            fits = num_tokens <= min(one.max_batch_tokens, other.max_batch_tokens)
            if not fits or self._unlinked.get((one.peer_id, other.peer_id), now) > now:
                break
            length += 1
        return length

    async def run_pushed(
        self,
        kind: MessageType,
        parts: Sequence[Part],
        grad_outputs: Tensor | None = None,
        *,
        keep: bool = False,
        without_pushed: bool = False,
    ) -> Outcome:
        """FORWARD or BACKWARD through all parts in order; `without_pushed`: answers leave pushed tensors out."""
        timeout_s = 2 * len(parts) * self._view.config.step_timeout_s  # the last server waits for all before it

        def request(part: Part, neighbours: Neighbours) -> Awaitable[Result]:
            return self._requests.send(
                kind,
                part.hop,
                part.inputs,
                grad_outputs,
                keep=keep,
                forward=part.forward,
                neighbours=neighbours,
                timeout_s=timeout_s,
            )

        num_bytes = parts[0].inputs.hidden_states.nbytes
        self._num_chains += 1
        self._num_bytes += num_bytes
        try:
            async with asyncio.TaskGroup() as tasks:
                return await self._follow(
                    [
                        _Link(part, neighbours, tasks.create_task(_outcome(request(part, neighbours))))
                        for part, neighbours in _with_neighbours(parts, without_pushed)
                    ]
                )
        finally:
            self._num_chains -= 1
            self._num_bytes -= num_bytes

    async def _follow(self, chain: Sequence["_Link"]) -> Outcome:
        """Wait for one server after the other. At the end, tell the remaining servers not to wait for tensors."""
        answers: list[Result] = []
        try:
            for index, link in enumerate(chain):
                found = await self._answer(link, chain[index + 1 :])
                if isinstance(found, SwarmError):
                    source = link.neighbours.source
                    if source is not None and isinstance(found, PeerError) and found.is_hearsay:
                        self._unlink(source.peer_id, link.part.peer_id)  # relaying will show which of them fails
                    return Outcome(answers, found)
                answers.append(found)
                if link.neighbours.target is not None:
                    if not found.header.pushed:
                        self._unlink(link.part.peer_id, link.neighbours.target.peer_id)
                        break
                    self.num_pushed += 1
            return Outcome(answers)
        finally:
            await self._withdraw([link for link in chain if not link.answer.done()])
            for link in chain:
                link.answer.cancel()

    async def _answer(self, link: "_Link", behind: Sequence["_Link"]) -> Result | SwarmError:
        """The answer of a server whose tensors were sent to it. If none comes, this server is to blame."""
        config, source = self._view.config, link.neighbours.source
        deadline = time.monotonic() + config.step_timeout_s
        if source is not None:
            arrival_s = ARRIVAL_S + link.part.inputs.hidden_states.nbytes / ARRIVAL_BYTES_PER_S
            found = await self._first_of(link, behind, min(deadline, time.monotonic() + arrival_s))
            if found is not None:
                return found
            await self._withdraw([link])  # has no effect if the server has its tensors
            deadline = max(deadline, time.monotonic() + config.connect_timeout_s)
        found = await self._first_of(link, behind, deadline)
        if source is not None and isinstance(link.error, SessionLostError):
            self._unlink(source.peer_id, link.part.peer_id)
        return found or PeerTimeoutError(f"no answer within {config.step_timeout_s:.0f} s", link.part.peer_id)

    async def _first_of(self, link: "_Link", behind: Sequence["_Link"], deadline: float) -> Result | SwarmError | None:
        """The answer, or the error of a server behind it that has fallen silent; None: neither came by then."""
        under_way = {one.answer for one in (link, *behind)}
        while not link.answer.done() and (left_s := deadline - time.monotonic()) > 0:
            _, under_way = await asyncio.wait(under_way, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for other in behind:
                error = other.error
                if isinstance(error, PeerTimeoutError) and not error.is_hearsay and not link.answer.done():
                    return error
        return link.error or link.answer.result() if link.answer.done() else None

    async def _withdraw(self, chain: Sequence["_Link"]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAWAL_TIMEOUT_S):
                for link in chain:
                    connection = self._requests.opened(link.part.peer_id)
                    if link.neighbours.source is not None and connection is not None:
                        with suppress(PeerError):
                            await connection.send(MessageType.PUSH, PushHeader(token=link.neighbours.source.token))

    def _unlink(self, source: str, target: str) -> None:
        now = time.monotonic()
        if self._unlinked.get((source, target), now) <= now:  # log it once for all micro-batches
            logger.info("%s doesn't pass on to %s, so batches go through this client there", source, target)
        self._unlinked = {pair: until for pair, until in self._unlinked.items() if until > now}
        self._unlinked[source, target] = now + UNLINKED_S


@dataclass(frozen=True, eq=False)
class _Link:
    """A request to one server that is under way."""

    part: Part
    neighbours: Neighbours
    answer: "asyncio.Task[Result | SwarmError]"

    @property
    def error(self) -> SwarmError | None:
        """The error so far. It proves nothing if the server blames the one before it."""
        error = self.answer.result() if self.answer.done() else None
        return error if isinstance(error, SwarmError) else None


def _with_neighbours(parts: Sequence[Part], without_pushed: bool) -> Iterator[tuple[Part, Neighbours]]:
    """Each part, with the fields of its request about its neighbours."""
    source: Predecessor | None = None
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        if after is None:
            yield part, Neighbours(source)
            return
        token = secrets.token_hex(16)
        target = Target(peer_id=after.peer_id, addrs=after.hop.server.addrs, token=token)
        yield part, Neighbours(source, target, without_pushed)
        source = Predecessor(peer_id=part.peer_id, token=token)


async def _outcome(request: Awaitable[Result]) -> Result | SwarmError:
    try:
        return await request
    except SwarmError as error:
        return error
