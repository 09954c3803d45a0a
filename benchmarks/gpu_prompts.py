"""Prompts and forwards of 7B-shaped blocks on a GPU, in one process: where their time goes before any network.

    python benchmarks/gpu_prompts.py [--blocks 16] [--quant_types none int8] [--device cpu]

Milliseconds until the GPU has done a new session's prompt, and until everything is launched, by the model's own code
and by `fused_step`; of a second piece of the same length; and of forwards without a session, whose inputs are on the
GPU already. What the server measures at its start is printed as well: it decides how many tokens clients send at once.
"new memory" is the time of writing to 4 MiB that the system has just given, which messages often need.
`--device cpu` tries the script on tiny blocks. Writes results/gpu_prompts.json.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import median, save_results, table
from gpu_step import SIZES, save_blocks, wait

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import QUANT_TYPES, Quantization
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.server.device.throughput import least_worth_asking_for, measure_throughput

LENGTHS = {"cuda": (64, 128, 256, 512, 1024, 2048), "cpu": (17, 40)}
REPEATS = 5


def new_memory_ms(num_bytes: int = 4 << 20) -> float:
    kept, times = [], []
    for _ in range(8):
        started = time.perf_counter()
        kept.append(torch.empty(num_bytes, dtype=torch.uint8).fill_(1))
        times.append(time.perf_counter() - started)
    return 1e3 * median(times)


def timed(call: Callable[[], object]) -> str:
    """Milliseconds of a call until the GPU has done it, and until the call returns."""
    rows = []
    for _ in range(1 + REPEATS):
        wait()
        started = time.perf_counter()
        call()
        launched = time.perf_counter()
        wait()
        rows.append((time.perf_counter() - started, launched - started))
    done, launched = (1e3 * median(row[idx] for row in rows[1:]) for idx in range(2))
    return f"{done:.1f} ({launched:.1f})"


def prompts(packer: Packer, length: int) -> tuple[str, str]:
    """`timed` of a new session's prompt, and of as many tokens after it."""
    blocks = packer.blocks
    hidden = torch.randn(1, length, blocks.embedding_dim).to(blocks.dtype)
    inputs = BlockInputs(hidden_states=hidden, batch_size=1, seq_len=length)

    def run(cache: Any) -> Any:
        (output,) = packer.run_calls([SessionCall(inputs, blocks.span, cache)])
        if isinstance(output, Exception):
            raise output
        return cache

    first = timed(lambda: run(blocks.new_cache()))
    begun = [run(blocks.new_cache()) for _ in range(1 + REPEATS)]
    return first, timed(lambda: run(begun.pop()))


def measured(packer: Packer, device: str) -> dict[str, Any]:
    """Figures of one kind of weights."""
    blocks, forward = packer.blocks, packer.forward
    packer.record()
    fused = forward.fused
    throughput = measure_throughput(packer)
    found: dict[str, Any] = {"at start": asdict(throughput)}
    found["tokens at once"] = least_worth_asking_for(throughput.batch_ms_per_block)
    for length in LENGTHS[device]:
        row: dict[str, str] = {}
        for name, step in (("own code", None), ("fused", fused)):
            if name == "own code" or fused is not None:
                forward.fused = step
                row[name], row[f"{name}, second piece"] = prompts(packer, length)
        hidden = torch.randn(1, length, blocks.embedding_dim, device=blocks.device).to(blocks.dtype)
        given = BlockInputs(hidden_states=hidden, batch_size=1, seq_len=length)
        row["forward"] = timed(lambda given=given: blocks.forward(given))  # type: ignore[misc]
        found[str(length)] = row
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--quant_types", nargs="+", choices=QUANT_TYPES, default=["none", "int8"])
    parser.add_argument("--device", choices=SIZES, default="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        args.blocks = 2
    elif not torch.cuda.is_available():
        print("this benchmark needs a GPU with CUDA", file=sys.stderr)
        return 1
    torch.backends.cuda.enable_cudnn_sdp(False)
    results: dict[str, Any] = {"new memory, ms": new_memory_ms()}
    print(f"new memory: {results['new memory, ms']:.2f} ms for 4 MiB")
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory, torch.inference_mode():
        with torch.inference_mode(False):
            save_blocks(Path(directory), args.device, args.blocks)
        for quant_type in args.quant_types:
            blocks = load_block_span(
                open_checkpoint(directory),
                Span(0, args.blocks),
                dtype=torch.bfloat16,
                device=args.device,
                quantization=Quantization(quant_type),
                progress=False,
            )
            blocks.pool = blocks.new_pool(2 + (2 + REPEATS) * 2 * max(LENGTHS[args.device]) // 64)
            found = results[quant_type] = measured(Packer(blocks, [Packing.PAGED, Packing.ONE_BY_ONE]), args.device)
            print(f"{quant_type}: {found['at start']}; tokens at once: {found['tokens at once']}")
            rows = {name: row for name, row in found.items() if name.isdigit()}
            names = list(next(iter(rows.values())))
            print(table(["tokens, ms (launched)", *names], [[name, *row.values()] for name, row in rows.items()]))
            save_results("gpu_prompts", results)
            del blocks
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
