"""One micro-batch through a span, forward and backward: server after server, run again where one fails.

Used by `batches/batch_runner`. The client keeps every server's inputs, from which any other can compute the gradients
as well (recomputation, as gradient checkpointing does): nothing is lost with a server.
"""

import logging
from dataclasses import dataclass, field, replace
from itertools import takewhile

from torch import Tensor

from swarmllm.client.batches.hop_batches import Gradients, HopBatches, Kept
from swarmllm.client.batches.pushed_batches import Part, PushedBatches
from swarmllm.client.batches.spot_checks import SpotChecks
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import RouteHop, Span
from swarmllm.errors import MissingBlocksError, SessionLostError, SwarmError
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs
from swarmllm.network.wire.protocol import MessageType
from swarmllm.swarm.retry import Retries
from swarmllm.swarm.route_costs import RouteCosts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """The inputs of one server in the forward pass."""

    span: Span
    inputs: BlockInputs
    kept: Kept | None = None
    """Server that may have kept this forward."""


@dataclass
class _Forward:
    """Progress of a forward."""

    inputs: BlockInputs
    start: int
    """The block that comes next."""
    keep: bool
    without_pushed: bool
    pushing: bool = True
    """Whether servers may pass on to each other; after a failure everything is relayed."""
    stages: list[Stage] = field(default_factory=list)

    def advance(self, span: Span, outputs: Tensor, kept: Kept | None) -> None:
        self.stages.append(Stage(span, self.inputs, kept))
        self.inputs, self.start = self.inputs.with_hidden(outputs), span.end


class MicroBatches:
    """Runs micro-batches; one object per model, in the client's event loop."""

    def __init__(self, view: SwarmView, hops: HopBatches, pushed: PushedBatches, spot_checks: SpotChecks) -> None:
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
        """Outputs and stages, first along `route`; when a server fails, the rest takes another one from there on.

        `without_pushed`: the stages aren't needed, and what was passed on is not among them.
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
        if self._spot_checks.due():
            await self._spot_checks.check_hop(hop, run.inputs, outputs)
        run.advance(hop.span, outputs, kept)

    async def _forward_chain(self, run: _Forward, chain: list[RouteHop]) -> None:
        """Servers that pass on to each other; if one can't, the rest is left to be relayed."""
        parts = [Part(hop, run.inputs) for hop in chain]
        outcome = await self._pushed.run(MessageType.FORWARD, parts, keep=run.keep, without_pushed=run.without_pushed)
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
        """The gradients of stages whose servers pass them on to each other, last stage first, and what is left to do.

        What has been passed on is not known here, so when a server fails all of them are left, and those that have
        begun are to be computed from their inputs.
        """
        parts = [
            Part(RouteHop(stage.kept[0], stage.span), stage.inputs, stage.kept[1]) for stage in chain if stage.kept
        ]
        outcome = await self._pushed.run(MessageType.BACKWARD, parts, grad_outputs, without_pushed=True)
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
        """The gradients of one stage's inputs; if nobody holds the whole span any more, by way of its parts."""
        retries = self._view.retries()
        if stage.kept is not None:
            try:
                return await self._hops.backward_of_kept(stage.kept, stage.span, stage.inputs, grad_outputs)
            except SessionLostError:
                pass  # it has forgotten this forward
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
        """Many micro-batches meet the failure of one server; the first one tells it."""
        logger.log(logging.INFO if self._view.report(error) else logging.DEBUG, message, error)
