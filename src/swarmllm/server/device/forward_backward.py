"""Forward and backward without a session: outputs, and gradients of the inputs.

A backward needs what its forward has computed. If the client says that a backward will come, the forward's graph is
kept for it. If the graph isn't there (any more), it is made again from the inputs. So a server may forget a graph at
any moment, and any other server can take over.

Both run in short turns, between which the device serves decode steps (`scheduler`): one block after the other, on a
GPU some at a time, backward from the last to the first; while there are sessions, some rows at a time. A forward for
which a backward will come is always cut so: a session may be opened before the backward comes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import RemoteProtocolError, SessionLostError
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs, decisive_rows
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.server.device.device import block_errors_translated, on_device

TURN_TOKENS = 128
"""Tokens of one turn, unless one row is longer. Assumed: with fewer, matrix products on a CPU wait for the weights."""
TURN_BLOCK_TOKENS = 4096
"""Tokens times blocks of one turn on a device; the thread waits for the device after each turn. Assumed: some 8 ms, of
which beginning the turn and waiting take one."""

T = TypeVar("T")
Turns = Generator[None, None, T]
"""Work for the device thread that yields between its turns, and returns its result after the last one."""

KEEP_S = 60.0
"""Seconds that a forward is kept for its backward. Assumed: a client that hasn't asked by then has gone, or is so busy
that a second forward makes no difference."""


@dataclass(frozen=True, eq=False)
class Graph:
    """The recorded forward of some blocks, ready for its backward; made and used in the device thread."""

    outputs: Tensor
    inputs: dict[str, Tensor]
    """Inputs that get gradients, by name: hidden_states, perhaps inputs_embeds."""
    trained: list[Tensor]
    """Tensors of an adapter that get gradients."""
    span: Span
    num_tokens: int

    @classmethod
    def record(cls, blocks: BlockSpan, inputs: BlockInputs, span: Span) -> "Graph":
        """Run the blocks, and record the graph.

        Raises:
            SwarmError: they can't run on these inputs.
        """
        with block_errors_translated(), torch.enable_grad():
            inputs = on_device(inputs, blocks)
            floats = {name: tensor for name, tensor in inputs.tensors().items() if tensor.is_floating_point()}
            wanted = {name: tensor.requires_grad_() for name, tensor in floats.items() if name != "attention_mask"}
            adapter, trained = inputs.adapter, []
            if adapter is not None and not adapter.name:  # the client's own
                adapter = adapter.leaves()
                trained = adapter.tensors()
            outputs = blocks.forward(replace(inputs, adapter=adapter), span)
            return cls(outputs, wanted, trained, span, inputs.num_positions)

    def gradients(self, grad_outputs: Tensor) -> dict[str, Tensor]:
        """Compute the gradients of the inputs by name, and of the adapter's values as one tensor `adapter`. Works once.

        Raises:
            SwarmError: they can't be computed.
        """
        with block_errors_translated():
            grads = torch.autograd.grad(
                self.outputs,
                [*self.inputs.values(), *self.trained],
                grad_outputs.to(self.outputs),
                allow_unused=True,
                materialize_grads=True,
            )
        found = dict(zip(self.inputs, grads, strict=False))
        if self.trained:
            found["adapter"] = torch.cat([grad.flatten() for grad in grads[len(self.inputs) :]])
        return found


class KeptForward:
    """A whole forward, kept for its backward: for each group of rows, one graph for each group of blocks."""

    def __init__(self, groups: list[list[Graph]], batch_axis: int = 0) -> None:
        self._groups = groups
        self._batch_axis = batch_axis
        self.outputs = _joined([graphs[-1].outputs.detach() for graphs in groups], batch_axis)
        self.num_tokens = sum(graphs[0].num_tokens for graphs in groups)

    def gradients(self, grad_outputs: Tensor) -> Turns[dict[str, Tensor]]:
        """Compute the gradients of the inputs, as `Graph.gradients` gives them. Works once.

        Raises:
            SwarmError: the gradient of the outputs has another shape than the outputs.
        """
        if grad_outputs.shape != self.outputs.shape:
            raise RemoteProtocolError(
                f"grad_outputs must be of shape {list(self.outputs.shape)}, got {list(grad_outputs.shape)}"
            )
        of_rows: list[dict[str, Tensor]] = []
        sizes = [graphs[-1].outputs.shape[self._batch_axis] for graphs in self._groups]
        for graphs, grad in zip(
            self._groups, torch.split_with_sizes(grad_outputs, sizes, dim=self._batch_axis), strict=True
        ):
            if of_rows:
                yield
            of_rows.append((yield from _backward(graphs, grad)))
        axes = {"hidden_states": self._batch_axis, **dict.fromkeys(BESIDE, 0)}
        result = {name: _joined([found[name] for found in of_rows], axes[name]) for name in axes if name in of_rows[0]}
        if "adapter" in of_rows[0]:
            result["adapter"] = sum((found["adapter"] for found in of_rows[1:]), start=of_rows[0]["adapter"])
        return result


def _backward(graphs: list[Graph], grad_outputs: Tensor) -> Turns[dict[str, Tensor]]:
    """Compute the gradients of one group of rows; each graph is freed after its turn."""
    found = graphs.pop().gradients(grad_outputs)
    while graphs:
        yield
        before, found = found, graphs.pop().gradients(found["hidden_states"])
        for name in before.keys() - {"hidden_states"}:  # all blocks have used them
            found[name] = found[name] + before[name]
    return found


def forward(
    blocks: BlockSpan, inputs: BlockInputs, span: Span, *, short_turns: bool = False
) -> Turns[dict[str, Tensor]]:
    """Compute the outputs and keep nothing; without `short_turns`, in one turn.

    Raises:
        SwarmError: the blocks can't run on these inputs.
    """
    outputs: list[Tensor] = []
    groups = _groups(blocks, inputs, short_turns)
    for rows in groups:
        hidden = rows.hidden_states
        for turn_span in _turn_spans(blocks, span, rows.num_positions) if short_turns else [span]:
            if outputs or turn_span.start != span.start:
                yield
            with torch.inference_mode(), block_errors_translated():
                hidden = blocks.forward(on_device(rows.with_hidden(hidden), blocks), turn_span)
        outputs.append(hidden)
    if inputs.inner is not None:
        inputs.inner.join([rows.inner for rows in groups], blocks.traits.batch_axis)
    return {"hidden_states": _joined(outputs, blocks.traits.batch_axis)}


def record(blocks: BlockSpan, inputs: BlockInputs, span: Span, *, short_turns: bool = False) -> Turns[KeptForward]:
    """Compute a forward, and record it for the backward that will come.

    Raises:
        SwarmError: the blocks can't run on these inputs.
    """
    groups: list[list[Graph]] = []
    for rows in _groups(blocks, inputs, short_turns):
        graphs: list[Graph] = []
        for turn_span in _turn_spans(blocks, span, rows.num_positions):
            if groups or graphs:
                yield
            hidden = graphs[-1].outputs.detach() if graphs else rows.hidden_states
            graphs.append(Graph.record(blocks, rows.with_hidden(hidden), turn_span))
        groups.append(graphs)
    return KeptForward(groups, blocks.traits.batch_axis)


def gradients(
    blocks: BlockSpan, inputs: BlockInputs, span: Span, grad_outputs: Tensor, *, short_turns: bool = False
) -> Turns[dict[str, Tensor]]:
    """Compute the gradients that `KeptForward.gradients` gives, from the inputs alone."""
    kept = yield from record(blocks, inputs, span, short_turns=short_turns)
    yield
    return (yield from kept.gradients(grad_outputs))


def _turn_spans(blocks: BlockSpan, span: Span, num_tokens: int) -> list[Span]:
    """Cut the span into the smallest spans that can run alone; on a device, into as many blocks as fit one turn.

    Each begins with the code that the model runs before its blocks: 0.3 ms, measured.
    """
    size = 1 if blocks.device.type == "cpu" else max(1, TURN_BLOCK_TOKENS // num_tokens)
    cuts = [span.start]
    for cut in range(span.start + 1, span.end):
        if cut - cuts[-1] >= size and cut not in blocks.traits.forbidden_cuts:
            cuts.append(cut)
    return [Span(start, end) for start, end in pairwise((*cuts, span.end))]


def _groups(blocks: BlockSpan, inputs: BlockInputs, short_turns: bool) -> list[BlockInputs]:
    """Group the rows into turns; on a GPU, whose turns are short anyway, all rows go together."""
    cut = short_turns and blocks.device.type == "cpu" and decisive_rows(inputs, blocks.traits) is None
    size = max(1, TURN_TOKENS // inputs.seq_len) if cut else inputs.batch_size
    if size >= inputs.batch_size:
        return [inputs]
    starts = range(0, inputs.batch_size, size)
    return [inputs.rows(start, min(start + size, inputs.batch_size), blocks.traits) for start in starts]


def _joined(tensors: list[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=axis)


class KeptForwards:
    """Kept forwards by peer and request; the oldest go when there are too many tokens, each goes after `KEEP_S`.

    `max_tokens` is the most that one request may have: a server has room to compute its gradients anyway.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: OrderedDict[tuple[str, int], tuple[KeptForward, asyncio.TimerHandle]] = OrderedDict()

    def put(self, peer_id: str, request: int, forward: KeptForward) -> None:
        """Keep a forward for a while."""
        key = peer_id, request
        self._drop(key)
        num_tokens = forward.num_tokens + sum(kept.num_tokens for kept, _ in self._kept.values())
        while self._kept and num_tokens > self._max_tokens:
            num_tokens -= self._drop(next(iter(self._kept)))
        timer = asyncio.get_running_loop().call_later(KEEP_S, self._drop, key)
        self._kept[key] = forward, timer

    def take(self, peer_id: str, request: int) -> KeptForward:
        """Take a forward out.

        Raises:
            SessionLostError: it isn't here.
        """
        key = peer_id, request
        if key not in self._kept:
            raise SessionLostError("this server doesn't have that forward (any more): send its inputs")
        forward = self._kept[key][0]
        self._drop(key)
        return forward

    def clear(self) -> None:
        """Drop all forwards, as their blocks are going."""
        for key in list(self._kept):
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> int:
        """Drop a forward, and return its number of tokens."""
        if key not in self._kept:
            return 0
        forward, timer = self._kept.pop(key)
        timer.cancel()
        return forward.num_tokens
