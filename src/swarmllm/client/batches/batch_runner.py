"""Forward and backward of a batch through the swarm without KV caches, as one differentiable call.

`BatchRunner` splits the batch into micro-batches that are under way at once, so that several servers work at the same
time. A server with free memory keeps its forward for the backward. `RemoteCall` makes the batch one node of autograd's
graph.

`MicroBatches` takes one micro-batch through a span, server after server, and repeats what fails. The client keeps every
server's inputs, from which any other server can compute the gradients as well (recomputation, as in gradient
checkpointing): nothing is lost with a server.
"""

import itertools
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from swarmllm.client.batches.hop_batches import (
    BatchRequests,
    Gradients,
    HopBatches,
    Kept,
    Part,
    PushedBatches,
    added_up,
)
from swarmllm.client.batches.padding import Excerpt, Layout, PaddingNotices
from swarmllm.client.batches.spot_checks import SpotChecks
from swarmllm.client.view.event_loop import Job, in_turns
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits, RouteHop, Span
from swarmllm.errors import ConfigurationError, MissingBlocksError, SessionLostError, SwarmError
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs
from swarmllm.models.boundary.device_copies import in_host_memory
from swarmllm.models.boundary.inner_states import are_finite
from swarmllm.network.wire.protocol import MessageType
from swarmllm.swarm.retry import Retries
from swarmllm.swarm.route_costs import RouteCosts

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MICRO_BATCHES_PER_HOP = 4
"""Micro-batches per server of the route, all under way at a time: one is computed while others travel. More of them let
the last server begin sooner, and cost more requests."""
MIN_TOKENS = 64
"""Fewest tokens of a micro-batch. Assumed: with fewer rows, a matrix product on a CPU waits for the weights."""


class BatchRunner:
    """Runs batches through the swarm; one object per model, in the client's event loop."""

    def __init__(self, view: SwarmView, traits: BlockTraits) -> None:
        self._view = view
        self.traits = traits.model_copy(update={"skips_padding": ()}) if view.config.compute_padding else traits
        self.padding_notices = PaddingNotices()
        self.waited_s = 0.0
        """Total seconds that callers have waited for servers and the network, in forwards and backwards."""
        self.requests = BatchRequests(view)
        self.pushed = PushedBatches(view, self.requests)
        hops = HopBatches(self.requests, traits)
        self.spot_checks = SpotChecks(view, traits, hops.run_hop) if view.config.verify_fraction else None
        self._micro_batches = MicroBatches(view, hops, self.pushed, self.spot_checks)

    def __call__(self, inputs: BlockInputs, span: Span) -> Tensor:
        """The outputs of the blocks of `span`; differentiable with respect to hidden_states and `BESIDE`.

        Raises:
            SwarmError: it failed, within the retries.
        """
        outputs: Tensor = RemoteCall.apply(  # type: ignore[no-untyped-call]
            self,
            inputs,
            span,
            torch.is_grad_enabled(),
            inputs.hidden_states,
            *(getattr(inputs, name) for name in BESIDE),
            *inputs.trained,
        )
        return outputs

    def _wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        began_at = time.perf_counter()
        try:
            return self._view.loop.run_coroutine(work)
        finally:
            self.waited_s += time.perf_counter() - began_at

    def close(self) -> None:
        """Close the streams; call it in the event loop."""
        self.requests.close()

    def forward(self, inputs: BlockInputs, span: Span, *, keep: bool) -> tuple[Tensor, "Computed"]:
        """The outputs, and the inputs of each server per micro-batch. `keep`: a backward follows."""
        layout = Layout(inputs, self.traits)
        self.padding_notices.of_outputs(layout, inputs)
        excerpts, results = self._wait_for(self._forward(inputs, layout, span, keep))
        outputs = layout.put_back(
            "hidden_states", [(out, excerpt) for (out, _), excerpt in zip(results, excerpts, strict=True)]
        )
        return outputs, Computed(layout, excerpts, [stages for _, stages in results])

    async def _forward(
        self, inputs: BlockInputs, layout: Layout, span: Span, keep: bool
    ) -> "tuple[list[Excerpt], list[tuple[Tensor, list[Stage]]]]":
        """Split the rows, ordered by length, over several routes in proportion to their throughput, and run them."""
        config = self._view.config
        most_routes = min(config.max_parallel_routes, inputs.batch_size)
        costs = self._view.routes.costs(row_tokens=layout.longest, inner_states=inputs.inner is not None)
        routes = await self._view.routes.parallel(span, layout.num_tokens, most_routes, costs)
        groups: list[tuple[int, list[Job[tuple[Tensor, list[Stage]]]]]] = []
        parts: list[tuple[BlockInputs, Excerpt]] = []
        for (route, _), part in zip(routes, layout.split([share for _, share in routes]), strict=True):
            if not part:
                continue
            num_parts = MICRO_BATCHES_PER_HOP * len(route)
            of_route: list[Job[tuple[Tensor, list[Stage]]]] = []
            for rows in layout.micro_batches(part, micro_batch_tokens(layout.tokens_of(part), route, config)):
                cut, excerpt = layout.cut(inputs, rows)
                of_route.append(
                    partial(self._micro_batches.forward, cut, span, route, keep=keep, without_pushed=not keep)
                )
                parts.append((cut, excerpt))
            groups.append((num_parts, of_route))
        results = await in_turns(groups)
        if inputs.inner is not None:
            inputs.inner.join([cut.inner for cut, _ in parts], self.traits.batch_axis)
        return [excerpt for _, excerpt in parts], results

    def backward(self, computed: "Computed", grad_outputs: Tensor) -> Gradients:
        """Gradients of the hidden_states, of the tensors that travel with them, and of the adapter."""
        self.padding_notices.of_gradients(computed.layout, grad_outputs)
        found = self._wait_for(self._backward(computed, grad_outputs))
        whole: Gradients = {}
        for name in found[0]:
            if name in ("hidden_states", *BESIDE):
                parts = [(grads[name], excerpt) for grads, excerpt in zip(found, computed.excerpts, strict=True)]
                whole[name] = computed.layout.put_back(name, parts)
        return added_up(whole, found)

    async def _backward(self, computed: "Computed", grad_outputs: Tensor) -> list[Gradients]:
        groups: list[tuple[int, list[Job[Gradients]]]] = []
        work = zip(computed.excerpts, computed.stages, strict=True)
        for _, of_route in itertools.groupby(work, lambda one: one[1][-1].kept and one[1][-1].kept[0].peer_id):
            jobs: list[Job[Gradients]] = []
            for excerpt, stages in of_route:
                jobs.append(partial(self._micro_batches.backward, stages, computed.layout.take(grad_outputs, excerpt)))
            groups.append((MICRO_BATCHES_PER_HOP * len(stages), jobs))
        return await in_turns(groups)


def micro_batch_tokens(num_tokens: int, route: Sequence[RouteHop], config: ClientConfig) -> int:
    """Tokens per micro-batch, for a batch of `num_tokens` along `route`."""
    wanted = -(-num_tokens // (MICRO_BATCHES_PER_HOP * len(route)))
    # Half of what a server computes efficiently at once: two forwards in turn hide the transfers between them.
    least = max(MIN_TOKENS, *(hop.server.batch_tokens // 2 for hop in route))
    return min(config.max_batch_tokens, *(hop.server.max_batch_tokens for hop in route), max(wanted, least))


@dataclass(frozen=True, eq=False)
class Computed:
    """A forward, ready for its backward: the places of its micro-batches, and the inputs of each server."""

    layout: Layout
    excerpts: list[Excerpt]
    stages: "list[list[Stage]]"


class Runner(Protocol):
    """Computes a batch, and later its gradients."""

    def forward(self, inputs: BlockInputs, span: Span, *, keep: bool) -> tuple[Tensor, Any]:
        """The outputs, and the argument `stages` of `backward` (`keep`: it will be called)."""
        ...

    def backward(self, stages: Any, grad_outputs: Tensor) -> dict[str, Tensor]:
        """Gradients by name; `adapter.INDEX` is the gradient of the adapter's parameter of that index."""
        ...


class RemoteCall(torch.autograd.Function):
    """A batch of a `Runner` as a node of autograd's graph, with gradients of its inputs and of the adapter."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: Runner,
        inputs: BlockInputs,
        span: Span,
        grad_enabled: bool,
        hidden_states: Tensor,
        *more: Tensor | None,
    ) -> Tensor:
        keep = grad_enabled and any(ctx.needs_input_grad)
        # Copies, because callers may change their tensors before the backward. Adapters, and tensors that were on a
        # device, are copies already.
        here = inputs.on_host()
        here = here.copied() if keep and here is inputs else here.detached()
        outputs, stages = runner.forward(here, span, keep=keep)
        if inputs.inner is not None:
            inputs.inner.move(hidden_states.device)
        if keep:
            ctx.runner, ctx.stages = runner, stages
            ctx.devices = [None if t is None else t.device for t in (hidden_states, *more[: len(BESIDE)])]
            ctx.like = [(t.shape, t.device, t.dtype) for t in more[len(BESIDE) :] if t is not None]
            ctx.may_overflow = _scales_losses()
        return outputs.to(hidden_states.device)

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "servers answer gradients, and no gradients of gradients: call backward() or grad() without "
                "create_graph=True"
            )
        if not ctx.may_overflow and not are_finite(grad_outputs):
            raise ConfigurationError(
                "the loss is NaN or infinite, so it has no gradient: call zero_grad(), and leave this batch out or "
                "lower the learning rate"
            )
        (grad_outputs,) = in_host_memory([grad_outputs.contiguous()])
        grads = ctx.runner.backward(ctx.stages, grad_outputs)
        _, _, _, _, hidden, *more = ctx.needs_input_grad
        beside, trained = more[: len(BESIDE)], more[len(BESIDE) :]
        of_adapter: list[Tensor | None] = []
        for index, (wanted, (shape, device, dtype)) in enumerate(zip(trained, ctx.like, strict=True)):
            grad = grads.get(f"adapter.{index}") if wanted else None  # None: of a block outside this span
            of_adapter.append(None if grad is None else grad.view(shape).to(device, dtype))
        names = zip(("hidden_states", *BESIDE), (hidden, *beside), ctx.devices, strict=True)
        of_inputs = (grads[name].to(device) if wanted else None for name, wanted, device in names)
        return (None, None, None, None, *of_inputs, *of_adapter)


def _scales_losses() -> bool:
    """True if a gradient scaler may let losses overflow, as under float16 autocast; it skips those steps itself."""
    return any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        for device in ("cuda", "cpu")
    )


@dataclass(frozen=True)
class Stage:
    """One server's part of a forward."""

    span: Span
    inputs: BlockInputs
    kept: Kept | None = None
    """The server that may have kept this forward."""


@dataclass
class _Forward:
    """Progress of a forward."""

    inputs: BlockInputs
    start: int
    """The next block to run."""
    keep: bool
    without_pushed: bool
    pushing: bool = True
    """Servers may pass tensors on to each other; after a failure the client relays everything."""
    stages: list[Stage] = field(default_factory=list)

    def advance(self, span: Span, outputs: Tensor, kept: Kept | None) -> None:
        self.stages.append(Stage(span, self.inputs, kept))
        self.inputs, self.start = self.inputs.with_hidden(outputs), span.end


class MicroBatches:
    """Runs micro-batches; one object per model, in the client's event loop."""

    def __init__(
        self, view: SwarmView, hops: HopBatches, pushed: PushedBatches, spot_checks: SpotChecks | None
    ) -> None:
        self._view, self._hops, self._pushed, self._spot_checks = view, hops, pushed, spot_checks

    async def forward(
        self,
        inputs: BlockInputs,
        span: Span,
        route: list[RouteHop] | None = None,
        *,
        keep: bool = False,
        without_pushed: bool = False,
    ) -> tuple[Tensor, list[Stage]]:
        """(outputs, stages), first along `route`; when a server fails, the remaining blocks run on another route.

        `without_pushed`: the stages may lack tensors that servers have passed on.
        """
        run = _Forward(inputs, span.start, keep, without_pushed)
        retries = self._view.retries()
        while run.start < span.end:
            try:
                hops, route = route or await self._find(Span(run.start, span.end), inputs), None
                while hops:
                    hops = self._view.routes.without_blamed(hops, self._costs(inputs))
                    pieces = self._hops.pieces(hops, run.inputs)
                    run.pushing = run.pushing and len(pieces) == len(hops)
                    hops = pieces
                    servers = [hop.server for hop in hops]
                    length = self._pushed.chain_length(servers, run.inputs) if run.pushing else 1
                    if length == 1:
                        await self._forward_hop(run, hops[0])
                    else:
                        await self._forward_chain(run, hops[:length])
                    hops = [hop for hop in hops if hop.span.start >= run.start]
            except SwarmError as error:
                run.pushing = False
                await self._pause(retries, error, Span(run.start, span.end))
        return run.inputs.hidden_states, run.stages

    async def _find(self, span: Span, inputs: BlockInputs) -> list[RouteHop]:
        return await self._view.routes.find(span, self._costs(inputs))

    def _costs(self, inputs: BlockInputs) -> RouteCosts:
        return self._view.routes.costs(row_tokens=inputs.row_tokens, inner_states=inputs.inner is not None)

    async def _forward_hop(self, run: _Forward, hop: RouteHop) -> None:
        outputs, kept = await self._hops.forward(hop, run.inputs, keep=run.keep)
        if self._spot_checks is not None and self._spot_checks.due():
            await self._spot_checks.check_hop(hop, run.inputs, outputs)
        run.advance(hop.span, outputs, kept)

    async def _forward_chain(self, run: _Forward, chain: list[RouteHop]) -> None:
        """Servers that pass on to each other; if one can't, the rest is left to be relayed."""
        parts = [Part(hop, run.inputs) for hop in chain]
        outcome = await self._pushed.run_pushed(
            MessageType.FORWARD, parts, keep=run.keep, without_pushed=run.without_pushed
        )
        for hop, answer in zip(chain, outcome.answers, strict=False):
            self._hops.show(answer, hop, run.inputs)
            if run.without_pushed and answer.header.pushed and hop is not chain[-1]:
                continue
            kept = (hop.server, answer.header.id) if run.keep else None
            run.advance(hop.span, self._hops.outputs(answer, run.inputs), kept)
        if outcome.error is not None:
            raise outcome.error
        run.pushing = len(outcome.answers) == len(chain)

    async def backward(self, stages: list[Stage], grad_outputs: Tensor) -> Gradients:
        """Gradients of the first stage's inputs, and of an adapter where there is one."""
        grads = {"hidden_states": grad_outputs}
        left, pushing = list(stages), True
        while left:
            blamed = self._view.blamed
            left = [replace(one, kept=None) if one.kept and one.kept[0].peer_id in blamed else one for one in left]
            kept = [stage.kept[0] for stage in takewhile(lambda stage: stage.kept, reversed(left)) if stage.kept]
            length = self._pushed.chain_length(kept, left[-1].inputs) if pushing else 1
            if length == 1:
                found = [await self._backward_stage(left.pop(), grads["hidden_states"])]
            else:
                chain = [left.pop() for _ in range(length)]
                found, again = await self._backward_chain(chain, grads["hidden_states"])
                left += reversed(again)
                pushing = not again
            for of_stage in found:
                for name in of_stage.keys() & grads.keys() & {*BESIDE}:
                    of_stage[name] = of_stage[name] + grads[name]
                grads = {**grads, **of_stage}
        return grads

    async def _backward_chain(self, chain: list[Stage], grad_outputs: Tensor) -> tuple[list[Gradients], list[Stage]]:
        """(gradients, stages left) of stages whose servers pass gradients on to each other, the last stage first.

        The client doesn't know tensors that were passed on. So when a server fails, all stages are left, and those
        that have begun are computed from their inputs.
        """
        parts = [
            Part(RouteHop(stage.kept[0], stage.span), stage.inputs, stage.kept[1]) for stage in chain if stage.kept
        ]
        outcome = await self._pushed.run_pushed(MessageType.BACKWARD, parts, grad_outputs, without_pushed=True)
        num_done = len(outcome.answers)
        try:
            if outcome.error is not None:
                raise outcome.error
            found = []
            for stage, answer in zip(chain, outcome.answers, strict=False):
                is_last = answer is outcome.answers[-1]
                found.append(self._hops.gradients(answer, stage.inputs, stage.span, grad_outputs if is_last else None))
            return found, chain[num_done:]
        except SwarmError as error:
            self._note(error, "gradients are relayed after: %s")
            if not error.retriable:
                raise
            return [], [*(replace(stage, kept=None) for stage in chain[: num_done + 1]), *chain[num_done + 1 :]]

    async def _backward_stage(self, stage: Stage, grad_outputs: Tensor) -> Gradients:
        """The gradients of one stage's inputs; in several stages if no server has the whole span any more."""
        retries = self._view.retries()
        if stage.kept is not None:
            try:
                return await self._hops.backward_of_kept(stage.kept, stage.span, stage.inputs, grad_outputs)
            except SessionLostError:
                pass  # the server has dropped this forward
            except SwarmError as error:
                await self._pause(retries, error, stage.span)
        while True:
            try:
                costs = self._view.routes.costs(row_tokens=stage.inputs.row_tokens)
                route = await self._view.routes.find(stage.span, costs)
                if len(route) > 1:
                    _, parts = await self.forward(stage.inputs, stage.span)
                    if len(parts) > 1:
                        return await self.backward(parts, grad_outputs)
                return await self._hops.backward(route[0], stage.inputs, grad_outputs)
            except SwarmError as error:
                await self._pause(retries, error, stage.span)

    async def _pause(self, retries: Retries, error: SwarmError, span: Span) -> None:
        """Wait until another try for the blocks of `span` makes sense.

        Raises:
            SwarmError: none does.
        """
        if not isinstance(error, MissingBlocksError):
            self._note(error, "trying again after: %s")
        await self._view.wait_after(error, retries, span)

    def _note(self, error: SwarmError, message: str) -> None:
        """Log a failure. Many micro-batches meet the failure of one server, so only the first one is logged as news."""
        logger.log(logging.INFO if self._view.report(error) else logging.DEBUG, message, error)
