"""Two block spans and a client shell in one process: all the arithmetic of a swarm, none of its network.

What crosses from one side to the other is copied tensor by tensor, as if it had been encoded: no side can lean on the
identity, the strides or the autograd graph of the other's tensors.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm.client.local_blocks import NONE_HERE
from swarmllm.client.remote_blocks import pieces_with_gradient
from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import ConfigurationError, SessionClosedError, UnsupportedModelError
from swarmllm.models.adapters.block_adapter import checked
from swarmllm.models.architecture import Task, blocks_class, stacks, task_class
from swarmllm.models.boundary.activation_log import ActivationLog
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.parallel.shared import Group
from swarmllm.models.shell.loading import load_client_shell
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.span_cache import RollbackUnsupportedError
from swarmllm.server.device.forward_backward import Graph

Route = list[tuple[BlockSpan, Span]]


def over_the_wire(inputs: BlockInputs, server: BlockSpan, span: Span) -> BlockInputs:
    copies = {name: tensor.detach().clone() for name, tensor in inputs.tensors().items()}
    arrived = BlockInputs.from_tensors(copies, batch_size=inputs.batch_size, seq_len=inputs.seq_len)
    if (inner := inputs.inner) is not None:
        arrived.inner = InnerStates(inner.outputs, attentions=inner.attentions, num_heads=inner.num_heads)
    part = None if inputs.adapter is None else inputs.adapter.part(span)
    if part is None:
        return arrived
    hidden_size = inputs.hidden_states.shape[-1]
    adapter = checked(part.patches, part.flat(), server.slots, hidden_size, server.cache_sizes.key_value_shapes)
    return replace(arrived, adapter=adapter)


def run_hop(server: BlockSpan, span: Span, inputs: BlockInputs, cache: Any = None) -> Tensor:
    """The outputs of one hop, and what the client wanted to see of its inside, as a server answers both."""
    arrived = over_the_wire(inputs, server, span)
    past = 0 if cache is None else cache.length
    if inputs.inner is None:
        return server.forward(arrived, span, cache)
    with torch.inference_mode():
        output = server.forward(arrived, span, cache)
    assert arrived.inner is not None
    blocks, described, tensors = arrived.inner.as_answer(span)
    copies = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in tensors.items()}
    inputs.inner.take(
        blocks,
        described,
        copies,
        span=span,
        like=inputs.hidden_states,
        batch_axis=server.traits.batch_axis,
        end=past + inputs.seq_len + inputs.num_prefix,
        mask=inputs.attention_mask,
        peer_id="server",
    )
    return output


def parts_of(route: Route, part: Span | None) -> Route:
    """The hops of these blocks."""
    if part is None:
        return route
    ends = ((server, max(span.start, part.start), min(span.end, part.end)) for server, span in route)
    return [(server, Span(start, end)) for server, start, end in ends if start < end]


class InProcessSession:
    """One span cache per hop; as the client's chain, it keeps its inputs and rebuilds the caches from them.

    Where it is first run in parts, each part has a session of its own.
    """

    def __init__(self, route: Route) -> None:
        self.route = route
        self.caches = [server.new_cache(span) for server, span in route]
        self.closed = False
        self._log = ActivationLog(route[0][0].traits if route else BlockTraits())
        self._remembered = False
        self._parts: dict[Span, InProcessSession] = {}

    def _part(self, part: Span) -> "InProcessSession":
        return self._parts.setdefault(part, InProcessSession(parts_of(self.route, part)))

    @property
    def position(self) -> int:
        if self._parts:
            return min(one.position for one in self._parts.values())
        if self._remembered:
            return self._log.length
        (position,) = {cache.position for cache in self.caches}
        return position

    @position.setter
    def position(self, value: int) -> None:
        for one in self._parts.values():
            one.position = value
        if self._parts:
            return
        self._log.rollback(value)
        try:
            for cache in self.caches if not self._remembered else ():
                cache.rollback(value)
        except RollbackUnsupportedError:
            self._forget()

    def select_batch(self, indices: Sequence[int]) -> None:
        for one in self._parts.values():
            one.select_batch(indices)
        if self._parts:
            return
        self._log.select_batch(indices)
        for cache in self.caches if not self._remembered else ():
            cache.select_batch(indices)

    def record_past(self) -> None:
        for cache in self.caches:
            cache.record_past()

    def remember(self, inputs: BlockInputs, part: Span | None = None) -> None:
        if part is not None:
            self._part(part).remember(inputs)
        else:
            self._log.append(self.position, inputs)
            self._forget()

    def fork(self) -> "InProcessSession":
        twin = InProcessSession(self.route)
        twin._parts = {part: one.fork() for part, one in self._parts.items()}
        for _, past in self._log.calls():
            twin.remember(past)
        return twin

    def close(self) -> None:
        self.closed = True

    def run_step(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        if part is not None:
            return self._part(part).run_step(inputs)
        if self.closed:
            raise SessionClosedError("the session has been closed")
        if self._remembered:
            past = self._log.calls()
            self._remembered = False
            for _, one in past:
                self._step(one)
        position = self.position
        if position and inputs.batch_size != self._log.batch_size:
            raise ConfigurationError(f"the session has {self._log.batch_size} rows, these inputs {inputs.batch_size}")
        output = self._step(inputs)
        own = {name: tensor.clone() for name, tensor in inputs.detached().tensors().items()}
        self._log.append(position, inputs.detached().with_tensors(own))
        return output

    def _forget(self) -> None:
        """The caches are lost, as those of servers that died."""
        self.caches = [server.new_cache(span) for server, span in self.route]
        self._remembered = bool(self._log.length)

    def _step(self, inputs: BlockInputs) -> Tensor:
        hidden = inputs.hidden_states
        for (server, span), cache in zip(self.route, self.caches, strict=True):
            inputs = inputs.with_hidden(hidden)
            output = run_hop(server, span, inputs, cache)
            hidden = torch.empty(output.shape, dtype=output.dtype).copy_(output)
        return hidden


class _Remote(torch.autograd.Function):
    """Forward and backward of one hop; the server recomputes its forward in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hop: Any,
        inputs: BlockInputs,
        hidden: Tensor,
        *more: Tensor | None,
    ) -> Tensor:
        server, span = hop
        trained = [tensor for tensor in more[len(BESIDE) :] if tensor is not None]
        ctx.hop, ctx.inputs, ctx.shapes = hop, inputs, [tensor.shape for tensor in trained]
        with torch.no_grad():
            output = run_hop(server, span, inputs)
        return torch.empty(output.shape, dtype=output.dtype).copy_(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        server, span = ctx.hop
        grads = Graph.record(server, over_the_wire(ctx.inputs, server, span), span).gradients(grad.clone())
        of_adapter: list[Tensor | None] = [None] * len(ctx.shapes)
        if "adapter" in grads:
            parts = ctx.inputs.adapter.part(span).unflatten(grads["adapter"])
            for index, part in zip(ctx.inputs.adapter.indices(span), parts, strict=True):
                of_adapter[index] = part.view(ctx.shapes[index])
        others = (grads.get(name) for name in BESIDE)
        return None, None, grads["hidden_states"], *others, *of_adapter


class InProcessRunner:
    """Runs the hops of a route one after the other."""

    def __init__(self, route: Route) -> None:
        self.route = route

    def run_blocks(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        hidden = inputs.hidden_states
        like = hidden.dtype
        for server, span in parts_of(self.route, part):
            hidden = hidden.to(server.dtype)
            inputs = inputs.with_hidden(hidden)
            for piece in pieces_with_gradient(inputs, span, NONE_HERE, server.traits):
                wanted = inputs if piece is span else replace(inputs, inner=None)
                beside = (*(getattr(inputs, name) for name in BESIDE), *inputs.trained)
                hidden = _Remote.apply((server, piece), wanted, hidden, *beside)
                inputs = inputs.with_hidden(hidden)
                if inputs.inner is not None and piece is not span and piece.end - 1 in inputs.inner.outputs:
                    inputs.inner.found[piece.end - 1] = hidden
        return hidden.to(like)

    def longest_row(self) -> int:
        return 8192

    def new_cache_session(self, batch_size: int, max_length: int | None) -> InProcessSession:
        return InProcessSession(self.route)


class SwarmUser:
    """Stands for the client's mixin."""


class InProcessSwarm:
    """A client and two servers of one checkpoint; `cut` is where the second one takes over.

    The first server holds more than it is used for, the second one exactly its part.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        tolerance: float = 0.0,
        task: Task = Task.CAUSAL_LM,
        user: type = SwarmUser,
        num_offloaded: int = 0,
        group: Group | None = None,
    ) -> None:
        """`num_offloaded` of the first server's blocks are in memory only while they compute; `group` has the matrices
        of both."""
        self.tolerance = tolerance
        """Relative, for comparisons that are exact for nearly all architectures."""
        self.checkpoint: Checkpoint = open_checkpoint(str(directory))
        blocks, dtype = self.checkpoint.num_blocks, self.checkpoint.stored_dtype()
        self._group = group
        first = load_block_span(
            self.checkpoint, Span(0, blocks - 1), dtype=dtype, progress=False, num_offloaded=num_offloaded, group=group
        )
        self.cut, second = self._second_server(first, dtype)
        forbidden = sorted({*first.traits.forbidden_cuts, *second.traits.forbidden_cuts})
        extras = sorted({*first.traits.extra_inputs, *second.traits.extra_inputs})
        self.traits = first.traits.model_copy(
            update={
                "extra_inputs": tuple(extras),
                "forbidden_cuts": tuple(forbidden),
                "chunked_prefill": first.traits.chunked_prefill and second.traits.chunked_prefill,
                "rollback": first.traits.rollback and second.traits.rollback,
            }
        )
        self.route: Route = [(first, Span(0, self.cut)), (second, Span(self.cut, blocks))]
        self.runner = InProcessRunner(self.route)
        self.client: PreTrainedModel = load_client_shell(
            self.checkpoint,
            model_class=task_class(self.checkpoint.config, task),
            mixin=user,
            dtype="auto",
            runner=self.runner,
            traits=self.traits,
            progress=False,
        )

    def _second_server(self, first: BlockSpan, dtype: torch.dtype) -> tuple[int, BlockSpan]:
        """From the middle on, or as near to it as the model can be cut."""
        blocks = self.checkpoint.num_blocks
        allowed = [cut for cut in range(1, blocks - 1) if cut not in first.traits.forbidden_cuts]
        for cut in sorted(allowed, key=lambda cut: abs(cut - blocks // 2)):
            try:
                second = Span(cut, blocks)
                return cut, load_block_span(self.checkpoint, second, dtype=dtype, progress=False, group=self._group)
            except UnsupportedModelError:  # it needs more of the blocks before
                continue
        raise AssertionError(f"no cut is possible: {first.traits}")


def encoder_decoder_client(path: Path, model_class: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """A client with two servers for each stack. The first server has more blocks than it is used for."""
    checkpoint = open_checkpoint(str(path))
    halves = []
    for stack in stacks(checkpoint.config):
        start, end = stack.span.start, stack.span.end
        cut = start + 2
        first = load_block_span(checkpoint, Span(start, end), progress=False)
        second = load_block_span(checkpoint, Span(cut, end), progress=False)
        route = [(first, Span(start, cut)), (second, Span(cut, end))]
        halves.append((InProcessRunner(route), first.traits))
    encoder, (runner, traits) = halves
    return load_client_shell(
        checkpoint,
        model_class=model_class or blocks_class(checkpoint.config),
        mixin=SwarmUser,
        dtype="auto",
        runner=runner,
        traits=traits,
        encoder=encoder,
        progress=False,
    )
