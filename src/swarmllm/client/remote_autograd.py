"""Batches without KV caches: forward and backward through the swarm, as one differentiable call.

The batch is split into micro-batches that are under way at once, so that several servers work at the same time. A
server that has room keeps what it has computed for the backward that comes. The client keeps every span's inputs, from
which any server can compute the gradients as well (recomputation, as gradient checkpointing does): nothing is lost with
a server.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TypeVar

import torch
from torch import Tensor

from swarmllm.client.batch_requests import BatchRequests
from swarmllm.client.concurrency import gather
from swarmllm.client.connection import Answer
from swarmllm.client.pushed_batches import Part, PushedBatches
from swarmllm.client.remote_call import RemoteCall
from swarmllm.client.spot_checks import SpotChecks
from swarmllm.client.swarm_view import SwarmView
from swarmllm.data_structures import BlockTraits, RouteHop, ServerInfo, Span
from swarmllm.errors import CorruptActivationsError, MissingBlocksError, SessionLostError, SwarmError
from swarmllm.models.activation_checks import MAX_ABS, checked
from swarmllm.models.block_inputs import BlockInputs
from swarmllm.network.protocol import MessageType
from swarmllm.swarm.retry import Retries

logger = logging.getLogger(__name__)

T = TypeVar("T")

MICRO_BATCHES_PER_HOP = 4
"""Micro-batches per server of the route, made of a batch and under way at a time: one is computed while the others are
on their way. The more, the sooner the last server begins, and the more often each pays for a request."""
MIN_TOKENS = 64
"""Smaller micro-batches are not made for the sake of many. Assumed: with fewer rows a matrix product on a CPU waits for
the weights."""


@dataclass(frozen=True)
class _Stage:
    """What one span was given in the forward pass."""

    span: Span
    inputs: BlockInputs
    kept: tuple[ServerInfo, int] | None = None
    """Who may have kept this forward, and the request by which it is known there."""


class BatchRunner:
    """Runs batches through the swarm; one object per model, in the client's event loop."""

    def __init__(self, view: SwarmView, traits: BlockTraits) -> None:
        self._view = view
        self._traits = traits
        self.requests = BatchRequests(view)
        self.pushed = PushedBatches(view, self.requests)
        self.spot_checks = SpotChecks(view, traits, self.run_hop)

    # ------------------------------------------------------------------ synchronous

    def __call__(self, inputs: BlockInputs, span: Span) -> Tensor:
        """The outputs of the blocks of `span`; differentiable with respect to hidden_states and inputs_embeds.

        Raises:
            SwarmError: the swarm can't do it within the retries.
        """
        outputs: Tensor = RemoteCall.apply(  # type: ignore[no-untyped-call]
            self, inputs, span, torch.is_grad_enabled(), inputs.hidden_states, inputs.inputs_embeds, *inputs.trained
        )
        return outputs

    def close(self) -> None:
        """Close the streams; call it in the event loop."""
        self.requests.close()

    # ------------------------------------------------------------------ whole batches

    def forward(self, inputs: BlockInputs, span: Span, *, keep: bool) -> tuple[Tensor, list[list[_Stage]]]:
        """Outputs, and per micro-batch what each span was given; `keep` if a backward will come."""

        async def run(rows: BlockInputs, route: list[RouteHop]) -> tuple[Tensor, list[_Stage]]:
            return await self._forward_rows(rows, span, route, keep=keep, lean=not keep)

        results = self._view.loop.run(self._all_rows(inputs, span, run))
        return torch.cat([outputs for outputs, _ in results], dim=self._traits.batch_axis), [s for _, s in results]

    def backward(self, stages: list[list[_Stage]], grad_outputs: Tensor) -> dict[str, Tensor]:
        """Gradients of the first span's hidden_states, and of inputs_embeds and an adapter where there are any."""

        async def all_rows() -> list[dict[str, Tensor]]:
            limit = asyncio.Semaphore(MICRO_BATCHES_PER_HOP * max(len(of_rows) for of_rows in stages))
            axis, start = self._traits.batch_axis, 0
            jobs: list[Callable[[], Awaitable[dict[str, Tensor]]]] = []
            for of_rows in stages:
                count = of_rows[0].inputs.batch_size
                jobs.append(partial(self._backward_rows, of_rows, grad_outputs.narrow(axis, start, count)))
                start += count
            return await gather(jobs, limit)

        return self._joined(self._view.loop.run(all_rows()))

    def _joined(self, grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Of groups of rows: an adapter's gradients add up, all others belong to the rows."""
        axes = {"hidden_states": self._traits.batch_axis, "inputs_embeds": 0}
        joined = {
            name: torch.cat([rows[name] for rows in grads], dim=axis) for name, axis in axes.items() if name in grads[0]
        }
        for rows in grads:
            for name in rows.keys() - axes.keys():
                joined[name] = joined[name] + rows[name] if name in joined else rows[name]
        return joined

    async def _all_rows(
        self, inputs: BlockInputs, span: Span, run: Callable[[BlockInputs, list[RouteHop]], Awaitable[T]]
    ) -> list[T]:
        """The rows in order, split over several routes in proportion to their throughput."""
        config = self._view.config
        num_tokens = inputs.num_positions
        routes = await self._view.parallel_routes(span, num_tokens, min(config.max_parallel_routes, inputs.batch_size))
        jobs: list[Callable[[], Awaitable[T]]] = []
        start = 0
        for (route, _), num_rows in zip(routes, _split(inputs.batch_size, [share for _, share in routes]), strict=True):
            if not num_rows:
                continue
            cap = min(config.max_batch_tokens, *(hop.server.max_batch_tokens for hop in route))
            limit = asyncio.Semaphore(MICRO_BATCHES_PER_HOP * len(route))
            share = inputs.rows(start, start + num_rows, self._traits)
            wanted = -(-share.num_positions // (MICRO_BATCHES_PER_HOP * len(route)))
            of_route = self._micro_batches(share, min(cap, max(wanted, MIN_TOKENS)))
            jobs.extend(partial(_limited, limit, partial(run, rows, route)) for rows in of_route)
            start += num_rows
        return await gather(jobs)

    def _micro_batches(self, inputs: BlockInputs, max_tokens: int) -> Iterator[BlockInputs]:
        """Groups of samples of at most `max_tokens`, about equally large; a longer single sample goes alone."""
        size = max(1, max_tokens // (inputs.seq_len + inputs.num_prefix))
        num_parts = -(-inputs.batch_size // size)
        size = -(-inputs.batch_size // num_parts)
        for start in range(0, inputs.batch_size, size):
            yield inputs.rows(start, min(start + size, inputs.batch_size), self._traits)

    # ------------------------------------------------------------------ one micro-batch

    async def _forward_rows(
        self,
        inputs: BlockInputs,
        span: Span,
        route: list[RouteHop] | None = None,
        *,
        keep: bool = False,
        lean: bool = False,
    ) -> tuple[Tensor, list[_Stage]]:
        """Span after span, first along `route`; when a server fails, the rest takes another one from there on.

        Servers that can pass on to each other do so; after a failure everything is relayed. `lean`: the stages aren't
        needed, and what was passed on is not among them.
        """
        stages: list[_Stage] = []
        retries = self._retries()
        start, pushing = span.start, True
        while start < span.end:
            try:
                hops, route = route or await self._view.find_route(Span(start, span.end)), None
                while hops:
                    hops = self._view.without_blamed(hops)
                    length = self.pushed.chain_length([hop.server for hop in hops], inputs) if pushing else 1
                    chain, hops = hops[:length], hops[length:]
                    if length == 1:
                        outputs, kept = await self._forward_hop(chain[0], inputs, keep=keep)
                        if self.spot_checks.due():
                            await self.spot_checks.check_hop(chain[0], inputs, outputs)
                        stages.append(_Stage(chain[0].span, inputs, kept))
                        inputs, start = inputs.with_hidden(outputs), chain[0].span.end
                        continue
                    parts = [Part(hop, inputs) for hop in chain]
                    outcome = await self.pushed.run(MessageType.FORWARD, parts, keep=keep, lean=lean)
                    for hop, answer in zip(chain, outcome.answers, strict=False):
                        if lean and answer.header.pushed and hop is not chain[-1]:
                            continue
                        outputs = self._checked(answer, inputs, "hidden_states", inputs.hidden_states)
                        stages.append(_Stage(hop.span, inputs, (hop.server, answer.header.id) if keep else None))
                        inputs, start = inputs.with_hidden(outputs), hop.span.end
                    if outcome.error is not None:
                        raise outcome.error
                    if len(outcome.answers) < length:
                        pushing, hops = False, [hop for hop in (*chain, *hops) if hop.span.start >= start]
            except SwarmError as error:
                pushing = False
                await self._pause(retries, error, Span(start, span.end))
        return inputs.hidden_states, stages

    async def run_hop(self, hop: RouteHop, inputs: BlockInputs) -> Tensor:
        """One server's part of a forward pass, in pieces if the server takes no more at once.

        Raises:
            SwarmError: it can't or doesn't do it.
        """
        return (await self._forward_hop(hop, inputs, keep=False))[0]

    async def _forward_hop(
        self, hop: RouteHop, inputs: BlockInputs, *, keep: bool
    ) -> tuple[Tensor, tuple[ServerInfo, int] | None]:
        """`run_hop`, and where its graph is kept if it is to be: not of one in pieces, which are too large."""
        outputs = []
        pieces = list(self._micro_batches(inputs, hop.server.max_batch_tokens))
        keep = keep and len(pieces) == 1
        for rows in pieces:
            answer = await self.requests.send(MessageType.FORWARD, hop, rows, keep=keep)
            outputs.append(self._checked(answer, rows, "hidden_states", rows.hidden_states))
        kept = (hop.server, answer.header.id) if keep else None
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=self._traits.batch_axis), kept

    async def _backward_rows(self, stages: list[_Stage], grad_outputs: Tensor) -> dict[str, Tensor]:
        grads = {"hidden_states": grad_outputs}
        left, pushing = list(stages), True
        while left:
            blamed = self._view.blamed
            left = [replace(one, kept=None) if one.kept and one.kept[0].peer_id in blamed else one for one in left]
            kept = [stage.kept[0] for stage in takewhile(lambda stage: stage.kept, reversed(left)) if stage.kept]
            length = self.pushed.chain_length(kept, left[-1].inputs) if pushing else 1
            if length == 1:
                found = [await self._backward_stage(left.pop(), grads["hidden_states"])]
            else:
                chain = [left.pop() for _ in range(length)]
                found, again = await self._backward_chain(chain, grads["hidden_states"])
                left += reversed(again)
                pushing = not again
            for of_stage in found:
                if "inputs_embeds" in of_stage and "inputs_embeds" in grads:
                    of_stage["inputs_embeds"] = of_stage["inputs_embeds"] + grads["inputs_embeds"]
                grads = {**grads, **of_stage}
        return grads

    async def _backward_chain(
        self, chain: list[_Stage], grad_outputs: Tensor
    ) -> tuple[list[dict[str, Tensor]], list[_Stage]]:
        """The gradients of stages whose servers pass them on to each other, last stage first, and what is left to do.

        What has been passed on is not known here, so when a server fails all of them are left, and those that have
        begun are to be computed from their inputs.
        """
        parts = [
            Part(RouteHop(stage.kept[0], stage.span), stage.inputs, stage.kept[1]) for stage in chain if stage.kept
        ]
        outcome = await self.pushed.run(MessageType.BACKWARD, parts, grad_outputs, lean=True)
        num_done = len(outcome.answers)
        try:
            if outcome.error is not None:
                raise outcome.error
            found = []
            for stage, answer in zip(chain, outcome.answers, strict=False):
                is_last = answer is outcome.answers[-1]
                found.append(self._gradients(answer, stage.inputs, stage.span, grad_outputs if is_last else None))
            return found, chain[num_done:]
        except SwarmError as error:
            self._note(error, "gradients are relayed after: %s")
            if not error.retriable:
                raise
            return [], [*(replace(stage, kept=None) for stage in chain[: num_done + 1]), *chain[num_done + 1 :]]

    async def _backward_stage(self, stage: _Stage, grad_outputs: Tensor) -> dict[str, Tensor]:
        """The gradients of one span's inputs; if nobody holds the whole span any more, by way of its parts."""
        retries = self._retries()
        if stage.kept is not None:
            server, request = stage.kept
            try:
                return await self._backward_hop(RouteHop(server, stage.span), stage.inputs, grad_outputs, request)
            except SessionLostError:
                pass  # it has forgotten this forward
            except SwarmError as error:
                await self._pause(retries, error, stage.span)
        while True:
            try:
                route = await self._view.find_route(stage.span)
                if len(route) > 1:
                    _, parts = await self._forward_rows(stage.inputs, stage.span)
                    if len(parts) > 1:
                        return await self._backward_rows(parts, grad_outputs)
                pieces, first = [], 0
                for rows in self._micro_batches(stage.inputs, route[0].server.max_batch_tokens):
                    grad = grad_outputs.narrow(self._traits.batch_axis, first, rows.batch_size)
                    pieces.append(await self._backward_hop(route[0], rows, grad))
                    first += rows.batch_size
                return pieces[0] if len(pieces) == 1 else self._joined(pieces)
            except SwarmError as error:
                await self._pause(retries, error, stage.span)

    async def _backward_hop(
        self, hop: RouteHop, inputs: BlockInputs, grad_outputs: Tensor, forward: int | None = None
    ) -> dict[str, Tensor]:
        """One server's part of a backward pass; of a `forward` that it has kept, if it is named."""
        answer = await self.requests.send(MessageType.BACKWARD, hop, inputs, grad_outputs, forward=forward)
        return self._gradients(answer, inputs, hop.span, grad_outputs)

    def _gradients(
        self, answer: Answer, inputs: BlockInputs, span: Span, hidden_like: Tensor | None
    ) -> dict[str, Tensor]:
        """What a BACKWARD has answered; without that of hidden_states if there is nothing `like` it."""
        grads = {}
        # A gradient may be of any size, and after a loss of NaN it is NaN: nobody's fault but the caller's.
        if hidden_like is not None:
            grads["hidden_states"] = self._checked(answer, inputs, "hidden_states", hidden_like, math.inf)
        if inputs.inputs_embeds is not None:
            embeds = inputs.inputs_embeds
            grads["inputs_embeds"] = self._checked(answer, inputs, "inputs_embeds", embeds, math.inf)
        return grads | self._adapter_gradients(answer, inputs, span)

    def _adapter_gradients(self, answer: Answer, inputs: BlockInputs, span: Span) -> dict[str, Tensor]:
        """By `adapter.INDEX`, its place among the adapter's tensors."""
        part = None if inputs.adapter is None else inputs.adapter.part(span)
        if inputs.adapter is None or part is None:
            return {}
        found = checked_values(answer.tensors().get("adapter"), part.flat(), answer.peer_id)
        grads = zip(inputs.adapter.indices(span), part.unflatten(found), strict=True)
        return {f"adapter.{index}": grad for index, grad in grads}

    def _retries(self) -> Retries:
        return Retries(self._view.config.max_retries, self._view.config.route_timeout_s)

    async def _pause(self, retries: Retries, error: SwarmError, span: Span) -> None:
        """Wait until another try for the blocks of `span` makes sense.

        Raises:
            SwarmError: none does.
        """
        if isinstance(error, MissingBlocksError):
            raise error  # the look for a route has waited for them
        self._note(error, "trying again after: %s")
        reason = self._view.what_is_wrong(error, span)
        delay_s = retries.next_delay_s(reason, time.monotonic())
        if delay_s is None:
            raise reason from error
        await asyncio.sleep(delay_s)

    def _note(self, error: SwarmError, message: str) -> None:
        """Many micro-batches meet the failure of one server; the first one tells it."""
        logger.log(logging.INFO if self._view.report(error) else logging.DEBUG, message, error)

    def _checked(
        self, answer: Answer, inputs: BlockInputs, name: str, like: Tensor, max_abs: float = MAX_ABS
    ) -> Tensor:
        return checked(
            answer.tensors().get(name),
            like,
            peer_id=answer.peer_id,
            batch_axis=self._traits.batch_axis if name == "hidden_states" else 0,
            attention_mask=inputs.attention_mask,
            max_abs=max_abs,
        )


async def _limited(limit: asyncio.Semaphore, job: Callable[[], Awaitable[T]]) -> T:
    async with limit:
        return await job()


def _split(count: int, shares: Sequence[float]) -> list[int]:
    """`count` things in these proportions, as whole numbers."""
    ends = [round(count * sum(shares[: index + 1])) for index in range(len(shares))]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def checked_values(grad: Tensor | None, like: Tensor, peer_id: str) -> Tensor:
    """The gradient of an adapter's values, if it has their shape.

    Raises:
        CorruptActivationsError: it hasn't.
    """
    if grad is None or grad.shape != like.shape or not grad.is_floating_point():
        raise CorruptActivationsError("the gradient of the adapter is missing or has another shape", peer_id)
    return grad
