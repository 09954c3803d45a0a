"""One session's decode step in half precision after a long past: transformers' attention, and `attention.attend_few`.

    python benchmarks/long_context.py [--shape 2048x4] [--contexts 128 512 2000] [--quant_type int8] [--steps 15]

Alternating in one process, medians. A server on a CPU takes the second, but never with --quant_type none, which means
exactly.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import transformers
from common import median, save_random_model, save_results, table

from swarmllm.data_structures import Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import resolve_quantization
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.trials import random_inputs

PROMPT_PIECE = 500


@torch.inference_mode()
def measure(blocks: BlockSpan, context: int, steps: int) -> tuple[float, float]:
    """(ms per step as transformers computes it, with shared keys)."""
    cache = blocks.new_cache()
    while cache.length < context:
        blocks.forward(random_inputs(blocks, min(PROMPT_PIECE, context - cache.length)), cache=cache)
    inputs = random_inputs(blocks, 1)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(steps):
        for shares_keys, times in taken.items():
            blocks.shares_keys = shares_keys
            started = time.perf_counter()
            blocks.forward(inputs, cache=cache)
            times.append((time.perf_counter() - started) * 1e3)
            cache.rollback(context)
    return median(taken[False]), median(taken[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="2048x4")
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 512, 2000])
    parser.add_argument("--quant_type", default="int8")
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        checkpoint = open_checkpoint(str(save_random_model(args.shape, Path(directory))))
        blocks = load_block_span(
            checkpoint,
            Span(0, checkpoint.num_blocks),
            quantization=resolve_quantization(args.quant_type),
            progress=False,
        )
        rows = []
        for context in args.contexts:
            usual_ms, shared_ms = measure(blocks, context, args.steps)
            rows.append([context, usual_ms, shared_ms, usual_ms / shared_ms])
    print(table(["context", "as transformers, ms per step", "shared keys, ms per step", "times as fast"], rows))
    names = ("context", "usual_ms", "shared_ms", "ratio")
    print(f"written to {save_results('long_context', [dict(zip(names, row, strict=True)) for row in rows])}")


if __name__ == "__main__":
    main()
