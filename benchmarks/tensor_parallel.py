"""Blocks spread over two processes beside the same blocks in one: a decode step, a step of 8 sessions, and a prompt.

The blocks are of a llama with hidden size 2048, and called directly: no network, no swarm. Each process has one thread.
The blocks of both processes run together, and once more so that followers only multiply. Runs alternate, so that what
else the machine does meets all of them; medians and quartiles are printed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.data_structures import Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.parallel.shared import Group
from swarmllm.models.quantization import resolve_quantization
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.trials import random_inputs

CONTEXT = 64
"""Positions in each session's cache."""


def save_model(directory: Path, args: argparse.Namespace) -> None:
    """A llama of random weights."""
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.blocks,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        vocab_size=128,
        dtype=getattr(torch, args.dtype),
    )
    LlamaForCausalLM(config).to(config.dtype).save_pretrained(directory)


class Runs:
    """The measurements of one span; `alone`: followers only multiply."""

    def __init__(self, blocks: BlockSpan, prompt: int, *, alone: bool = False) -> None:
        self._packer = Packer(blocks, right_ways(blocks))
        self._blocks, self._alone = blocks, alone
        self._prompt = random_inputs(blocks, prompt)
        with self._way():
            self._caches = [blocks.new_cache() for _ in range(8)]
            for cache in self._caches:
                blocks.forward(random_inputs(blocks, CONTEXT), cache=cache)
        self._token = random_inputs(blocks, 1)

    def _way(self) -> AbstractContextManager[None]:
        return self._blocks.alone() if self._alone else nullcontext()

    def seconds(self, name: str) -> float:
        """Time one of the methods below."""
        with self._way():
            began_at = time.perf_counter()
            getattr(self, name)()
            return time.perf_counter() - began_at

    def decode(self) -> None:
        """A step of one session."""
        self._blocks.forward(self._token, cache=self._caches[0])
        self._caches[0].rollback(CONTEXT)

    def sessions(self) -> None:
        """A step of eight."""
        self._packer.run_calls([SessionCall(self._token, self._blocks.span, cache) for cache in self._caches])
        for cache in self._caches:
            cache.rollback(CONTEXT)

    def prefill(self) -> None:
        """A prompt."""
        self._blocks.forward(self._prompt, cache=self._blocks.new_cache())


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="positions")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quant_type", default="none")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), args)
        checkpoint, span = open_checkpoint(directory), Span(0, args.blocks)
        group = Group([torch.device("cpu")] * args.processes)
        options = {"quantization": resolve_quantization(args.quant_type), "progress": False}
        one, several = (load_block_span(checkpoint, span, group=which, **options) for which in (None, group))
    runs = Runs(one, args.prompt), Runs(several, args.prompt), Runs(several, args.prompt, alone=True)
    print(f"{args.blocks} blocks of hidden size {args.hidden}, {args.dtype}, {args.quant_type}; ms, median (quartiles)")
    several_processes = f"{args.processes} processes"
    print(f"{'':10} {'1 process':>24} {several_processes:>24} {'by command':>24} {'faster by':>18}")
    for name in ("decode", "sessions", "prefill"):
        times: tuple[list[float], ...] = ([], [], [])
        for _ in range(args.repeats + 2):
            for one_of_them, found in zip(runs, times, strict=True):
                found.append(one_of_them.seconds(name))
        quartiles = [[1e3 * value for value in statistics.quantiles(found[2:], n=4)] for found in times]
        cells = [f"{middle:>9.1f} ({low:.1f}–{high:.1f})" for low, middle, high in quartiles]
        faster = [f"{quartiles[0][1] / other[1]:.2f}x" for other in quartiles[1:]]
        print(f"{name:10}", *(f"{cell:>24}" for cell in cells), *(f"{one:>8}" for one in faster), flush=True)
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
