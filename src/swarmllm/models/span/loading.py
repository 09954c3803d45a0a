"""Blocks of a checkpoint: read, with no other large tensor. Called by the server, in its device thread."""

from collections.abc import Collection
from typing import Any

import torch

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.models.architecture import blocks_class
from swarmllm.models.checkpoint.block_digests import BlockDigests
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.skeleton import (
    load_pruned,
    needed_tensors,
    on_meta,
    prune_to_span,
    pruned,
    unused_before_blocks,
)
from swarmllm.models.free_memory import separate_weights
from swarmllm.models.quantization import FULL_PRECISION, Quantization
from swarmllm.models.quantization.check import check_quantized
from swarmllm.models.quantization.loading import LoadingConfig
from swarmllm.models.quantization.whole import hold_whole
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.probes import probe


def span_tensor_names(checkpoint: Checkpoint, span: Span) -> list[str]:
    """The checkpoint's tensors that `load_block_span` reads."""
    cls = pruned(blocks_class(checkpoint.config), prune_to_span(span, unused_before_blocks(checkpoint.config)))
    return needed_tensors(on_meta(cls, checkpoint.config), checkpoint.weight_map())


def load_block_span(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantization: Quantization = FULL_PRECISION,
    progress: bool = True,
) -> BlockSpan:
    """Read the blocks of `span`, and nothing else of weight, from the checkpoint; dtype None = as the config says.

    Raises:
        ConfigurationError: the model has no such blocks, or it can't quantize them that way.
        UnsupportedModelError: it can't be split, or not there.
        WeightsError: its files are missing, damaged or of another model.
    """
    if span.end > checkpoint.num_blocks:
        raise ConfigurationError(f"{checkpoint.name} has blocks [0, {checkpoint.num_blocks}), which lack {span}")
    dtype = dtype or checkpoint.stored_dtype()
    options: dict[str, Any] = {}
    if quantization != FULL_PRECISION or checkpoint.comes_packed:
        options["quantization_config"] = LoadingConfig(quantization, torch.device(device), checkpoint.comes_packed)

    def load(unused: Collection[str]) -> BlockSpan:
        cls = pruned(blocks_class(checkpoint.config), prune_to_span(span, unused))
        with separate_weights(), BlockDigests() as digests:
            model = load_pruned(cls, checkpoint, dtype=dtype, progress=progress, digests=digests, **options).to(device)
            hold_whole(model)
            check_quantized(model.modules())
            blocks = BlockSpan(model, span, digests.of(span))
            probe(blocks)
            return blocks

    unused = unused_before_blocks(checkpoint.config)
    try:
        return load(unused)
    except UnsupportedModelError:
        if unused:  # perhaps one of those parts is called between the blocks
            return load(())
        raise
