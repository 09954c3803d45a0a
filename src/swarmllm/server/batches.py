"""Batches without a KV cache: their outputs, and the gradients of their inputs.

A backward needs what its forward has computed. If the client says that a backward will come, the forward's graph is
kept for it; if it isn't there (any more), the graph is made anew from the inputs. So a server may forget it at any
moment, and any other server can take over.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import RemoteProtocolError, SessionLostError
from swarmllm.models.block_inputs import BlockInputs
from swarmllm.models.block_span import BlockSpan
from swarmllm.server.sessions import on_device, translated_errors

KEEP_S = 60.0
"""Assumed: a client that has not called backward by then has gone, or is busy with so much else that the servers'
second forward makes no difference."""


@dataclass(frozen=True, eq=False)
class Graph:
    """One forward, ready for its backward; made and used in the device thread."""

    outputs: Tensor
    inputs: dict[str, Tensor]
    """The leaves by name: hidden_states, perhaps inputs_embeds."""
    trained: list[Tensor]
    """The leaves that are an adapter's."""
    num_tokens: int

    @classmethod
    def record(cls, blocks: BlockSpan, inputs: BlockInputs, span: Span) -> "Graph":
        """Run the blocks, and remember how.

        Raises:
            SwarmError: they can't run on these inputs.
        """
        with translated_errors(), torch.enable_grad():
            inputs = on_device(inputs, blocks)
            floats = {name: tensor for name, tensor in inputs.tensors().items() if tensor.is_floating_point()}
            wanted = {name: tensor.requires_grad_() for name, tensor in floats.items() if name != "attention_mask"}
            adapter, trained = inputs.adapter, []
            if adapter is not None and not adapter.name:  # the client's own
                adapter = adapter.leaves()
                trained = adapter.tensors()
            outputs = blocks.forward(replace(inputs, adapter=adapter), span)
            return cls(outputs, wanted, trained, inputs.batch_size * inputs.seq_len)

    def gradients(self, grad_outputs: Tensor) -> dict[str, Tensor]:
        """Of the inputs by name, and of the adapter's values as one tensor `adapter`. Works once.

        Raises:
            SwarmError: the gradient of the outputs has another shape than they.
        """
        if grad_outputs.shape != self.outputs.shape:
            raise RemoteProtocolError(
                f"grad_outputs must be of shape {list(self.outputs.shape)}, got {list(grad_outputs.shape)}"
            )
        with translated_errors():
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


def forward(blocks: BlockSpan, inputs: BlockInputs, span: Span) -> dict[str, Tensor]:
    """The outputs, and nothing kept.

    Raises:
        SwarmError: the blocks can't run on these inputs.
    """
    with torch.inference_mode(), translated_errors():
        return {"hidden_states": blocks.forward(on_device(inputs, blocks), span)}


def gradients(blocks: BlockSpan, inputs: BlockInputs, span: Span, grad_outputs: Tensor) -> dict[str, Tensor]:
    """As `Graph.gradients`, from the inputs alone."""
    return Graph.record(blocks, inputs, span).gradients(grad_outputs)


class KeptGraphs:
    """Graphs by peer and request; the oldest go when there are too many tokens, each goes after `KEEP_S`.

    `max_tokens` is what one request may have: to compute gradients of so much at once, a server has room anyway.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._graphs: OrderedDict[tuple[str, int], tuple[Graph, asyncio.TimerHandle]] = OrderedDict()

    def put(self, peer_id: str, request: int, graph: Graph) -> None:
        """Keep it for a while."""
        key = peer_id, request
        self._drop(key)
        num_tokens = graph.num_tokens + sum(kept.num_tokens for kept, _ in self._graphs.values())
        while self._graphs and num_tokens > self._max_tokens:
            num_tokens -= self._drop(next(iter(self._graphs)))
        timer = asyncio.get_running_loop().call_later(KEEP_S, self._drop, key)
        self._graphs[key] = graph, timer

    def take(self, peer_id: str, request: int) -> Graph:
        """The graph of that forward, which is gone from here then.

        Raises:
            SessionLostError: it isn't here.
        """
        key = peer_id, request
        if key not in self._graphs:
            raise SessionLostError("this server doesn't have that forward (any more): send its inputs")
        graph = self._graphs[key][0]
        self._drop(key)
        return graph

    def clear(self) -> None:
        """The blocks that they belong to are going."""
        for key in list(self._graphs):
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> int:
        """Forget it; how many tokens it was of."""
        if key not in self._graphs:
            return 0
        graph, timer = self._graphs.pop(key)
        timer.cancel()
        return graph.num_tokens
