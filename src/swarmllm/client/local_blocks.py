"""Blocks that run in this process instead of on servers. Their weights appear in the model's own block list.

`distributed_model` loads them. `remote_blocks` runs them without KV caches, `session/legs` with KV caches. This file
knows neither servers nor sessions.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from swarmllm.config import ClientConfig, parse_block_ranges
from swarmllm.data_structures import BlockTraits, Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.span_cache import SpanCache


class LocalSpan:
    """Neighbouring blocks in this process. Any thread may call it; a lock lets one call run at a time."""

    def __init__(self, blocks: BlockSpan) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()

    @property
    def span(self) -> Span:
        return self._blocks.span

    @property
    def traits(self) -> BlockTraits:
        return self._blocks.traits

    def modules(self) -> dict[int, nn.Module]:
        """The blocks by their indices."""
        return {block_idx: self._blocks.slots.block(block_idx) for block_idx in self.span}

    def new_cache(self, *, record_past: bool) -> SpanCache:
        """Make an empty cache for these blocks; `record_past`: it also keeps what rollbacks need."""
        return self._blocks.new_cache(record_past=record_past)

    def forward(self, inputs: BlockInputs, span: Span | None = None, cache: SpanCache | None = None) -> Tensor:
        """Run the blocks of `span` (default: all); returns hidden states on the device and in the dtype of the inputs.

        With a cache, it does what `BlockSpan.forward` does, without gradients. Without a cache, gradients flow to the
        inputs, the adapter and the parameters of the blocks.
        """
        with self._lock:
            self._follow_model()
            blocks = self._blocks
            moved = replace(inputs.to(blocks.device, blocks.dtype), adapter=self._adapter(inputs, span or self.span))
            output = blocks.forward(moved, span, cache)
        like = inputs.hidden_states
        if inputs.inner is not None:
            inputs.inner.copy(span or self.span, like)
        if cache is not None:
            output = output.clone()  # a copy made outside of inference mode is a normal tensor, like servers' answers
        return output.to(like.device, like.dtype)

    def _follow_model(self) -> None:
        """Move to the device and dtype of the model's weights, and turn gradient checkpointing off."""
        blocks = self._blocks
        weight = blocks.largest_weight
        if weight.device != blocks.device:
            blocks.stack.to(weight.device)  # also moves what isn't a weight, such as rotary embeddings
        blocks.device, blocks.dtype = weight.device, weight.dtype
        if any(block.training for block in self.modules().values()):
            # Checkpointing would drop the cache, and its second forward would run without adapters.
            for module in blocks.slots.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.gradient_checkpointing = False  # type: ignore[assignment]

    def _adapter(self, inputs: BlockInputs, span: Span) -> BlockAdapter | None:
        """Cut the inputs' adapter to the blocks of `span`. If it is trained, it stays in autograd's graph."""
        adapter, trained = inputs.adapter, inputs.trained
        if adapter is None:
            return None
        values = iter(trained or adapter.tensors())
        here = tuple(
            tuple(next(values).reshape(shape).to(self._blocks.device) for shape in patch.shapes)
            for patch in adapter.patches
        )
        return BlockAdapter(adapter.patches, here, version=adapter.version).part(span)


class LocalBlocks:
    """All blocks of a model that run in this process, in order. Usually there are none."""

    def __init__(self, spans: Sequence[LocalSpan] = ()) -> None:
        self.spans = tuple(spans)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, spans: Sequence[Span], dtype: torch.dtype, *, progress: bool
    ) -> "LocalBlocks":
        """Load these blocks of the checkpoint in the model's `dtype`.

        Raises:
            UnsupportedModelError: the model can't be cut there.
            WeightsError: its files are missing or damaged.
        """
        return cls([LocalSpan(load_block_span(checkpoint, span, dtype=dtype, progress=progress)) for span in spans])

    def modules(self) -> dict[int, nn.Module]:
        """The blocks by their indices."""
        return {block_idx: block for here in self.spans for block_idx, block in here.modules().items()}

    def parts(self, span: Span) -> Iterator[tuple[Span, LocalSpan | None]]:
        """Cut `span` where blocks change between this process and servers.

        Yields (blocks, their `LocalSpan`), or (blocks, None) if servers have them, in order.
        """
        start = span.start
        for here in self.spans:
            first, end = max(start, here.span.start), min(span.end, here.span.end)
            if first < end:
                if start < first:
                    yield Span(start, first), None
                yield Span(first, end), here
                start = end
        if start < span.end:
            yield Span(start, span.end), None


NONE_HERE = LocalBlocks()
"""The usual case: no block runs in this process, all are on servers."""


def wanted_spans(config: ClientConfig, num_blocks: int) -> list[Span]:
    """The spans that `ClientConfig.local_blocks` names.

    Raises:
        ConfigurationError: the model has fewer blocks, no block would be left for servers, or `active_adapter` names
            an adapter of servers.
    """
    spans = [Span(*pair) for pair in parse_block_ranges(config.local_blocks or "")]
    if spans and spans[-1].end > num_blocks:
        raise ConfigurationError(
            f"local_blocks={config.local_blocks!r}: the model has blocks 0 to {num_blocks - 1} only"
        )
    if sum(map(len, spans)) == num_blocks:
        raise ConfigurationError(
            f"local_blocks={config.local_blocks!r} leaves no block to servers: name fewer, or load the model with "
            "transformers"
        )
    if spans and config.active_adapter is not None:
        raise ConfigurationError(
            f"active_adapter={config.active_adapter!r} is applied by servers, so local_blocks would run without it: "
            "leave one of them out"
        )
    return spans
