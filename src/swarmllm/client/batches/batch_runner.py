"""Batches without KV caches: forward and backward through the swarm, as one differentiable call.

The batch is split into micro-batches that are under way at once, so that several servers work at the same time. A
server that has room keeps what it has computed for the backward that comes.

`RemoteCall` makes a batch one node of autograd's graph.
"""

import itertools
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from swarmllm.client.batches.hop_batches import BatchRequests, Gradients, HopBatches, added_up
from swarmllm.client.batches.micro_batches import MicroBatches, Stage
from swarmllm.client.batches.padding import Excerpt, Layout, PaddingNotices
from swarmllm.client.batches.pushed_batches import PushedBatches
from swarmllm.client.batches.spot_checks import SpotChecks
from swarmllm.client.view.event_loop import Job, in_turns
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import ClientConfig
from swarmllm.data_structures import BlockTraits, RouteHop, Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs
from swarmllm.models.boundary.host_copies import in_host_memory

Result = TypeVar("Result")

MICRO_BATCHES_PER_HOP = 4
"""Micro-batches per server of the route, made of a batch and under way at a time: one is computed while the others are
on their way. The more, the sooner the last server begins, and the more often each pays for a request."""
MIN_TOKENS = 64
"""Smaller micro-batches are not made for the sake of many. Assumed: with fewer rows a matrix product on a CPU waits for
the weights."""


class BatchRunner:
    """Runs batches through the swarm; one object per model, in the client's event loop."""

    def __init__(self, view: SwarmView, traits: BlockTraits) -> None:
        self._view = view
        self.traits = traits.model_copy(update={"skips_padding": ()}) if view.config.compute_padding else traits
        self.padding_notices = PaddingNotices()
        self.waited_s = 0.0
        """Seconds, in all, that callers have waited for servers and the network, forwards and backwards."""
        self.requests = BatchRequests(view)
        self.pushed = PushedBatches(view, self.requests)
        hops = HopBatches(self.requests, traits)
        self.spot_checks = SpotChecks(view, traits, hops.run)
        self._micro_batches = MicroBatches(view, hops, self.pushed, self.spot_checks)

    def __call__(self, inputs: BlockInputs, span: Span) -> Tensor:
        """The outputs of the blocks of `span`; differentiable with respect to hidden_states and `BESIDE`.

        Raises:
            SwarmError: the swarm can't do it within the retries.
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
            return self._view.loop.run(work)
        finally:
            self.waited_s += time.perf_counter() - began_at

    def close(self) -> None:
        """Close the streams; call it in the event loop."""
        self.requests.close()

    def forward(self, inputs: BlockInputs, span: Span, *, keep: bool) -> tuple[Tensor, "Computed"]:
        """Outputs, and per micro-batch what each server was given; `keep` if a backward will come."""
        layout = Layout(inputs, self.traits)
        self.padding_notices.of_outputs(layout, inputs)
        excerpts, results = self._wait_for(self._forward(inputs, layout, span, keep))
        outputs = layout.put_back(
            "hidden_states", [(out, excerpt) for (out, _), excerpt in zip(results, excerpts, strict=True)]
        )
        return outputs, Computed(layout, excerpts, [stages for _, stages in results])

    async def _forward(
        self, inputs: BlockInputs, layout: Layout, span: Span, keep: bool
    ) -> tuple[list[Excerpt], list[tuple[Tensor, list[Stage]]]]:
        """The rows by length, split over several routes in proportion to their throughput."""
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
        """Gradients of the first span's hidden_states, and of what travels beside them, an adapter included."""
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
    """Tokens of the micro-batches into which that many go along a route."""
    wanted = -(-num_tokens // (MICRO_BATCHES_PER_HOP * len(route)))
    # Half of what is worth asking a server for: two forwards one after the other hide what is on its way meanwhile.
    least = max(MIN_TOKENS, *(hop.server.batch_tokens // 2 for hop in route))
    return min(config.max_batch_tokens, *(hop.server.max_batch_tokens for hop in route), max(wanted, least))


@dataclass(frozen=True, eq=False)
class Computed:
    """A forward, ready for its backward: micro-batches, where they belong, and what each server was given."""

    layout: Layout
    excerpts: list[Excerpt]
    stages: list[list[Stage]]


class Runner(Protocol):
    """The computation of a batch, and later of its gradients."""

    def forward(self, inputs: BlockInputs, span: Span, *, keep: bool) -> tuple[Tensor, Any]:
        """Outputs, and what `backward` needs if it will come (`keep`)."""
        ...

    def backward(self, stages: Any, grad_outputs: Tensor) -> dict[str, Tensor]:
        """Gradients by name; `adapter.INDEX` is that of the adapter's parameter of this index."""
        ...


class RemoteCall(torch.autograd.Function):
    """Outputs of a `Runner`, and gradients of its floating-point inputs and of the adapter's parameters."""

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
        # The backward is of this forward, whatever becomes of the tensors until then; adapters are copies already, and
        # so is what was on a device.
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
        if not ctx.may_overflow and not bool(grad_outputs.isfinite().all()):
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
    """Under float16 autocast a gradient scaler multiplies losses until they overflow, and skips those steps itself."""
    return any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        for device in ("cuda", "cpu")
    )
