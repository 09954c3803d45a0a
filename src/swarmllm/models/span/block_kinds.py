"""Which blocks of a span run the same code, so that a probe of one of them answers for all. Used by the probes."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from swarmllm.data_structures import Span
from swarmllm.models.architecture import text_config
from swarmllm.models.span.block_span import BlockSpan


def parts_of_each_kind(span: BlockSpan) -> list[Span]:
    """The smallest parts that can be cut off on both sides, one for each kind of code that they run."""
    hosted = span.span
    bounds = [idx for idx in (*hosted, hosted.end) if idx not in span.traits.forbidden_cuts]
    parts = itertools.starmap(Span, itertools.pairwise(bounds))
    caches = span.new_cache().layers if span.keeps_cache else ()
    return list({_classes(span, part, caches): part for part in parts}.values())


def _classes(span: BlockSpan, part: Span, caches: Sequence[Any]) -> tuple[str, ...]:
    """The kinds of modules and of caches."""
    of_part = (caches[block_idx - span.slots.first] for block_idx in part if caches)
    modules = (module for block_idx in part for module in span.slots.block(block_idx).modules())
    return tuple(type(one).__name__ for one in (*of_part, *modules))


def kind_of(span: BlockSpan, block_idx: int) -> object:
    """Equal for blocks that differ by their weights only: the same modules with the same settings.

    What the model's code makes of a block's number shows in those, or in lists of the config that have an entry for
    each block (`layer_types`).
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
