"""What measurements of blocks share (`throughput`, `packing_speed`): which blocks take part, and what is timed."""

import time
from collections.abc import Callable

import torch

from swarmllm.data_structures import Span
from swarmllm.models.span.block_span import BlockSpan


def first_blocks(blocks: BlockSpan, num_blocks: int) -> Span:
    """The first of the blocks, at least one; some more than `num_blocks` where the model can't be cut there."""
    end = min(blocks.span.start + max(1, num_blocks), blocks.span.end)
    while end in blocks.traits.forbidden_cuts:
        end += 1
    return Span(blocks.span.start, end)


def seconds(blocks: BlockSpan, run: Callable[[], object]) -> float:
    """Seconds until the device of `blocks` has done what `run` asks of it."""
    started = time.perf_counter()
    run()
    if blocks.device.type != "cpu":
        torch.accelerator.synchronize(blocks.device)  # until here it has only been asked
    return time.perf_counter() - started
