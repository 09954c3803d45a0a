"""Blocks that run in this process instead of on servers, with their weights in the model's own block list.

`distributed_model` loads them. `remote_blocks` runs them without KV caches, `session/legs` with them. This file knows
neither servers nor sessions.
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
    """Neighbouring blocks in this process; any thread may call it."""

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
        """An empty cache for these blocks; `record_past`: keep what rollbacks need."""
        return self._blocks.new_cache(record_past=record_past)

    def forward(self, inputs: BlockInputs, span: Span | None = None, cache: SpanCache | None = None) -> Tensor:
        """Run the blocks of `span` (default: all); returns hidden states on the device and in the dtype of the inputs.

        With a cache: as `BlockSpan.forward`. Without: gradients flow to inputs, adapter and the blocks' parameters.
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
            output = output.clone()  # a normal tensor, not one of inference mode, as servers' answers are
        return output.to(like.device, like.dtype)

    def _follow_model(self) -> None:
        """Follow the model to another device or dtype, and undo settings that don't fit these blocks."""
        blocks = self._blocks
        weight = blocks.largest_weight
        if weight.device != blocks.device:
            blocks.stack.to(weight.device)  # moves its rotary embedding and the like
        blocks.device, blocks.dtype = weight.device, weight.dtype
        if any(block.training for block in self.modules().values()):
            for part in blocks.slots.modules():  # it would drop the cache, and compute again without adapters
                if getattr(part, "gradient_checkpointing", False):
                    part.gradient_checkpointing = False  # type: ignore[assignment]

    def _adapter(self, inputs: BlockInputs, span: Span) -> BlockAdapter | None:
        """The part of the inputs' adapter for these blocks, in autograd's graph if it is trained."""
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
    """All blocks in this process, in the order of their spans; mostly none."""

    def __init__(self, spans: Sequence[LocalSpan] = ()) -> None:
        self.spans = tuple(spans)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, spans: Sequence[Span], dtype: torch.dtype, *, progress: bool
    ) -> "LocalBlocks":
        """Load these blocks of the checkpoint in the model's `dtype`.

        Raises:
            UnsupportedModelError, WeightsError: the model can't be cut there, or its files are missing or damaged.
        """
        return cls([LocalSpan(load_block_span(checkpoint, span, dtype=dtype, progress=progress)) for span in spans])

    def modules(self) -> dict[int, nn.Module]:
        """The blocks by their indices."""
        return {block_idx: block for here in self.spans for block_idx, block in here.modules().items()}

    def parts(self, span: Span) -> Iterator[tuple[Span, LocalSpan | None]]:
        """(blocks, their `LocalSpan` or None for servers) in order, for all of `span`."""
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
"""All blocks are on servers."""


def wanted_spans(config: ClientConfig, num_blocks: int) -> list[Span]:
    """The spans that `ClientConfig.local_blocks` names.

    Raises:
        ConfigurationError: the model has fewer blocks, servers would have none, or an adapter of servers is wanted.
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
