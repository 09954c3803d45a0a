"""Loading of blocks from a checkpoint, and of no other large tensor. The server calls it in its device thread."""

import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.machine_memory import into_huge_pages, return_free_memory, separate_weights
from swarmllm.models.architecture import blocks_class, find_blocks, stack_of
from swarmllm.models.block_slots import BlockSlots
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.skeleton import (
    BlockDigests,
    load_pruned,
    prune_to_span,
    pruned,
    tensors_of_span,
    unused_before_blocks,
)
from swarmllm.models.parallel.shared import Group, share
from swarmllm.models.quantization import FULL_PRECISION, Quantization, QuantizedWeight
from swarmllm.models.quantization.loading import (
    LoadingConfig,
    Whole,
    check_quantized,
    check_rounding,
    hold_whole,
    round_inputs,
)
from swarmllm.models.quantization.whole import hasten, likely_threads
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.offload import OffloadedBlocks, spread
from swarmllm.models.span.probe_results import ProbeResults
from swarmllm.models.span.probes import probe
from swarmllm.models.span.together import Pairs, run_together

logger = logging.getLogger(__name__)


@contextmanager
def stage(doing: str) -> Iterator[None]:
    """Log a line when a stage of the start begins, and one with its time when it has ended."""
    logger.info("%s …", doing)
    began_at = time.monotonic()
    yield
    logger.info("%s took %.1f s", doing, time.monotonic() - began_at)


def span_tensor_names(checkpoint: Checkpoint, span: Span) -> list[str]:
    """The names of the checkpoint's tensors that `load_block_span` reads."""
    unused = unused_before_blocks(checkpoint.config, stack_of(checkpoint.config, span))
    return tensors_of_span(checkpoint, span, unused)


def load_block_span(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantization: Quantization = FULL_PRECISION,
    activations: str = "none",
    progress: bool = True,
    num_offloaded: int = 0,
    offload_dir: Path | None = None,
    probes_dir: Path | None = None,
    group: Group | None = None,
) -> BlockSpan:
    """Read the blocks of `span`, which are all of one stack, and no other large tensor; dtype None: the config's.

    `num_offloaded` of them are in the device's memory only while they compute (`offload`). A processor's are kept in a
    file in `offload_dir`, by default among temporary files. Results of probes are kept in `probes_dir` for the next
    start. Each process of `group` gets parts of all matrices, and runs the blocks with them if that fits (`together`).
    `activations`: "int8" rounds inputs of quantized weights, "auto" those of weights that gain by it.

    Raises:
        ConfigurationError: the model has no such blocks, can't quantize them that way, or there is no room to offload.
        UnsupportedModelError: the model can't be split, or not there.
        WeightsError: files are missing, damaged or of another model.
        GroupLostError: a process of the group has gone.
    """
    _require_blocks(checkpoint, span, num_offloaded)
    read = _reader(checkpoint, dtype or checkpoint.stored_dtype(), torch.device(device), quantization)
    rounding = None if activations == "none" else _Rounding(if_faster=activations == "auto")

    def load(unused: Collection[str]) -> BlockSpan:
        known = None if probes_dir is None else ProbeResults(probes_dir, checkpoint, quantization, unused)
        offloaded = None
        with separate_weights(), BlockDigests() as digests:
            parts = (read(Span(idx, idx + 1), unused, digests, progress=False) for idx in span)  # all may not fit
            if num_offloaded:
                offloaded = OffloadedBlocks(torch.device(device), offload_dir or Path(tempfile.gettempdir()))
                model = _joined(parts, span, partial(_offload, offloaded, spread(span, num_offloaded), rounding))
            elif group is not None:
                pairs = Pairs(group.size)
                model = _joined((_shared(part, idx, pairs, group) for idx, part in zip(span, parts, strict=True)), span)
            else:
                model = read(span, unused, digests, progress=progress)
                _into_huge_pages(model)
            blocks = BlockSpan(model, span, digests.of(span), offloaded, group)
        _probed(blocks, known)  # not within separate_weights: products decode in pieces
        if rounding is not None:  # after the probes, which look for smaller differences
            rounding.begin(blocks.slots)
        return blocks

    unused = unused_before_blocks(checkpoint.config, stack_of(checkpoint.config, span))
    try:
        return load(unused)
    except UnsupportedModelError:
        if unused:  # perhaps the model calls one of these modules between blocks
            return load(())
        raise


def _reader(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quantization: Quantization
) -> Callable[..., PreTrainedModel]:
    """A function that reads some blocks of the checkpoint in the form in which they are kept."""
    # cuDNN's attention plans anew for each new length of the keys. Measured (H200, torch 2.11): 9 ms a block, where the
    # block takes 0.2 ms; the others plan nothing. All blocks are read here, also those of clients and of MTP heads.
    torch.backends.cuda.enable_cudnn_sdp(False)
    options: dict[str, Any] = {}
    if quantization != FULL_PRECISION or checkpoint.comes_packed:
        options["quantization_config"] = LoadingConfig(quantization, device, checkpoint.comes_packed)

    def read(part: Span, unused: Collection[str], digests: BlockDigests, *, progress: bool) -> PreTrainedModel:
        cls = pruned(blocks_class(checkpoint.config), prune_to_span(part, unused))
        with stage(f"reading blocks {part}" + (" and quantizing them" if options else "")):
            model = load_pruned(cls, checkpoint, dtype=dtype, progress=progress, digests=digests, **options).to(device)
        hold_whole(model)
        hasten(find_blocks(model).blocks.modules(), likely_threads())
        with stage("comparing products of quantized weights with exact ones"):
            check_quantized(model.modules())
        return model

    return read


def _into_huge_pages(model: PreTrainedModel) -> None:
    """Give large weights memory that is read faster, one after the other.

    torch's sums may depend on where in a line of the caches a weight begins, and must be those of the local model.
    """
    for module in find_blocks(model).blocks.modules():
        if isinstance(module, QuantizedWeight):
            is_whole = isinstance(module.packed, Whole)
            for name, tensor in module.named_buffers(recurse=False):
                module._buffers[name] = into_huge_pages(tensor, same_place=is_whole)
        elif isinstance(module, nn.Linear) and isinstance(module.weight, nn.Parameter):
            module.weight.data = into_huge_pages(module.weight.data, same_place=True)


def _probed(blocks: BlockSpan, known: ProbeResults | None) -> None:
    """Give the blocks the results of probes, new or from an earlier start."""
    if known is None or not known.restore(blocks):
        with stage(f"probing blocks {blocks.span}"):
            probe(blocks)
        return_free_memory()
        if known is not None:
            known.keep(blocks)
    run_together(blocks)


def _require_blocks(checkpoint: Checkpoint, span: Span, num_offloaded: int) -> None:
    if span.end > checkpoint.num_blocks:
        raise ConfigurationError(f"{checkpoint.name} has blocks 0:{checkpoint.num_blocks}, which lack {span}")
    if not num_offloaded:
        return
    if len(span) == 1:
        raise ConfigurationError(
            "a single block can't be offloaded, as it is needed in memory all the time: serve more of them"
        )
    if not 1 < num_offloaded <= len(span):
        raise ConfigurationError(
            f"of {len(span)} blocks, 2 to {len(span)} can be offloaded, not {num_offloaded}: one of them is in memory "
            "at any time"
        )


class _Rounding:
    """Makes quantized weights round their inputs, after each kind of them was tested."""

    def __init__(self, *, if_faster: bool) -> None:
        self._if_faster = if_faster
        self._known: set[object] = set()

    def check(self, modules: nn.Module) -> None:
        """Test kinds that aren't known yet. Weights that will be offloaded have values only before."""
        check_rounding(modules.modules(), self._known, if_faster=self._if_faster)

    def begin(self, modules: nn.Module) -> None:
        """Round from now on."""
        self.check(modules)
        round_inputs(modules.modules(), if_faster=self._if_faster)


def _offload(
    offloaded: OffloadedBlocks,
    chosen: Collection[int],
    rounding: _Rounding | None,
    block_idx: int,
    block: nn.Module,
) -> None:
    if block_idx in chosen:
        if rounding is not None:
            rounding.check(block)
        offloaded.take(block_idx, block)


def _shared(part: PreTrainedModel, block_idx: int, pairs: Pairs, group: Group) -> PreTrainedModel:
    share(part, group, pairs.of(part, Span(block_idx, block_idx + 1)))
    return part


def _joined(
    parts: Iterable[PreTrainedModel], span: Span, take: Callable[[int, nn.Module], None] = lambda *_: None
) -> PreTrainedModel:
    """One model made of models with one block each; `take` is called with each block."""
    whole: PreTrainedModel | None = None
    for block_idx, part in zip(span, parts, strict=True):
        slots = find_blocks(part).blocks
        assert isinstance(slots, BlockSlots)
        block = slots.block(block_idx)
        take(block_idx, block)
        if whole is None:
            whole, first = part, slots
        else:
            first.adopt(block)
    assert whole is not None
    return whole
