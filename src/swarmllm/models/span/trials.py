"""How blocks are tried: random inputs, float32, few threads, and one part of each kind of block.

The probes (`probes`, `packing_probe`, `fused_step`) and the server's measurements use these. Blocks that run the same
code are tried once.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from swarmllm.data_structures import Span
from swarmllm.models.architecture import text_config
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.quantization import QuantizedWeight, kernels
from swarmllm.models.span.block_span import BlockSpan

STRICT = 1e-3
"""Largest error, relative to the error of ignoring the past. Measured: right code is below 1e-5 in float32, wrong code
above 1e-2."""
LENIENT = 0.25
"""The same limit for short floats, and where transformers' own steps and whole prompts differ a little (bamba)."""
SOURCE_LEN = 7
"""Positions of an encoder's outputs; unlikely to be the size of other axes."""


def random_inputs(blocks: BlockSpan, seq_len: int, batch_size: int = 1) -> BlockInputs:
    """Random inputs `[batch_size, seq_len, …]` in the form that these blocks take; longer if they pad a text."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(blocks.device, blocks.dtype)

    embeds = normal(batch_size, seq_len, blocks.embedding_dim)
    ids = torch.randint(blocks.vocab_size, (batch_size, seq_len), generator=random).to(blocks.device)
    extra = blocks.traits.extra_inputs
    inputs = BlockInputs(
        hidden_states=embeds,
        batch_size=batch_size,
        seq_len=seq_len,
        input_ids=ids if "input_ids" in extra else None,
        inputs_embeds=embeds if "inputs_embeds" in extra else None,
        encoder_hidden_states=normal(batch_size, SOURCE_LEN, blocks.source_dim) if blocks.source_dim else None,
    )
    arriving = blocks.preamble(inputs)
    if blocks.is_of_encoder and arriving.shape[1] > seq_len:
        return random_inputs(blocks, arriving.shape[1], batch_size)
    return inputs.with_hidden(normal(*arriving.shape))


def rms(tensor: Tensor) -> float:
    return float(tensor.float().square().mean().sqrt())


@contextmanager
def worthwhile_threads(blocks: nn.Module) -> Iterator[None]:
    """Within: torch computes with at most as many threads as the largest matrix of these blocks can keep busy.

    Threads wait for each other after each operation. If other programs have the cores, they wait longer than a small
    block computes. Measured (hidden 576, 2 cores, load 12): loading and probing 15 blocks took 0.6 s of processor time
    with one thread, and 4.4 to 4.9 s with two. For servers only: threads that begin to compute meanwhile keep the
    small number for good, and a client's process has threads of its user.
    """
    before = torch.get_num_threads()
    shapes = [parameter.shape for parameter in blocks.parameters()]
    shapes += [module.shape for module in blocks.modules() if isinstance(module, QuantizedWeight)]
    largest = max((shape[-2:].numel() for shape in shapes), default=0)
    torch.set_num_threads(min(before, max(1, largest // kernels.WORTH_A_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def in_float32(span: BlockSpan, part: Span) -> Iterator[None]:
    """Within: the blocks of `part` compute in float32. Their own tensors come back unchanged."""
    blocks = [span.slots.block(block_idx) for block_idx in part]
    tensors = [
        tensor
        for block in blocks
        for tensor in (*block.parameters(), *block.buffers())
        if tensor.is_floating_point() and tensor.itemsize > 1  # not codes and scales of 8 bits
    ]
    originals = [tensor.data for tensor in tensors]
    packed = [module for block in blocks for module in block.modules() if isinstance(module, QuantizedWeight)]
    dtypes = [weight.dtype for weight in packed]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        for weight in packed:
            weight.stand_for(torch.float32)  # or experts would round their inputs
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original
        for weight, dtype in zip(packed, dtypes, strict=True):
            weight.stand_for(dtype)


def parts_of_each_kind(span: BlockSpan) -> list[Span]:
    """The smallest parts that can be cut off on both sides, one for each kind of code."""
    hosted = span.span
    bounds = [idx for idx in (*hosted, hosted.end) if idx not in span.traits.forbidden_cuts]
    parts = itertools.starmap(Span, itertools.pairwise(bounds))
    caches = span.new_cache().layers if span.keeps_cache else ()
    return list({_classes(span, part, caches): part for part in parts}.values())


def _classes(span: BlockSpan, part: Span, caches: Sequence[Any]) -> tuple[str, ...]:
    """The classes of modules and of cache layers."""
    of_part = (caches[block_idx - span.slots.first] for block_idx in part if caches)
    modules = (module for block_idx in part for module in span.slots.block(block_idx).modules())
    return tuple(type(one).__name__ for one in (*of_part, *modules))


def kind_of(span: BlockSpan, block_idx: int) -> object:
    """A key that is equal for blocks that differ by their weights only: the same modules with the same settings.

    If the model's code depends on a block's number, it shows in these settings, or in lists of the config that have an
    entry for each block (`layer_types`).
    """
    config = text_config(span.stack.config).to_dict()
    num_blocks, place = len(span.slots), block_idx - span.slots.first
    of_block = (
        (name, str(value[place]))
        for name, value in config.items()
        if isinstance(value, list | tuple) and len(value) == num_blocks
    )
    settings = (
        (name, type(module).__name__, *_settings(module, place))
        for name, module in span.slots.block(block_idx).named_modules()
    )
    return (*of_block, *settings)


def _settings(module: nn.Module, block_idx: int) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        is_number_of_block = name.startswith("layer_") and value == block_idx
        if isinstance(value, bool | int | float | str | None) and not is_number_of_block:
            yield name, value
