"""Memory that loading blocks takes, measured in a process of its own; run as a program by `measure`."""

import json
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from swarmllm.data_structures import Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import Quantization
from swarmllm.models.span.loading import load_block_span

OVERHEAD_BYTES = 40_000_000
"""Measured: up to 25 MB, of any model: threads, kernels' workspaces, modules without weights."""
PRODUCT_BYTES = 700_000
"""Measured: what oneDNN keeps of each product in bfloat16, for each shape, number of inputs and of threads."""


@dataclass(frozen=True)
class Memory:
    """In bytes, beyond what the process took before."""

    peak: int
    end: int
    blocks: int
    """Bytes of the weights."""


def measure(
    large: Path, tiny: Path, dtype: torch.dtype, quant_type: str, num_blocks: int, num_offloaded: int = 0
) -> Memory:
    """Load blocks [0, num_blocks) of the checkpoint `large`, after one of `tiny`, which takes the imports' part."""
    command = [sys.executable, __file__, str(large), str(tiny), str(dtype).removeprefix("torch."), quant_type]
    run = subprocess.run([*command, str(num_blocks), str(num_offloaded)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return Memory(**json.loads(run.stdout))


def _main(large: str, tiny: str, dtype: str, quant_type: str, num_blocks: str, num_offloaded: str) -> None:
    options = {"dtype": getattr(torch, dtype), "progress": False}
    load_block_span(open_checkpoint(tiny), Span(0, 1), quantization=Quantization(quant_type, smallest=0), **options)
    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    quantization = Quantization(quant_type)
    options |= {"quantization": quantization, "num_offloaded": int(num_offloaded)}
    blocks = load_block_span(open_checkpoint(large), Span(0, int(num_blocks)), **options)
    done.set()
    thread.join()
    end = process.memory_info().rss
    print(json.dumps(asdict(Memory(max(peak, end) - before, end - before, blocks.num_bytes))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
