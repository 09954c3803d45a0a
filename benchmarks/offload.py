"""Blocks that don't fit into memory: some or all of them offloaded, beside accelerate's offloading of the same blocks.

    python benchmarks/offload.py [--shape 2048x4] [--shares 0 0.5 1] [--repeats 5]

The shape of figure 13 of Du et al. 2022 (EnergonAI): tokens per second against the share of blocks that lie outside the
device's memory. One process, no network: the blocks as a server runs them (`BlockSpan`), on CUDA if there is some. They
come from pinned host memory then, else from disk; accelerate's `cpu_offload` and `disk_offload` are beside them.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload
from common import SHAPES, median, save_random_model, save_results, table
from torch import Tensor
from transformers import AutoModel

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import FULL_PRECISION
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

WORK = {"decode": (1, 1, 128), "prompt of 512": (1, 512, 0), "batch of 16 x 128": (16, 128, 0)}
"""Rows, positions and those that are in the cache already."""


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The median of some runs after one that doesn't count."""
    times = []
    for _ in range(repeats + 1):
        began_at = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_at)
    return median(times[1:])


def of_span(blocks: BlockSpan, repeats: int) -> dict[str, float]:
    """Tokens per second through the blocks, by the kind of work."""
    rates = {}
    for name, (rows, length, past) in WORK.items():
        hidden = torch.randn(rows, length, blocks.embedding_dim, dtype=blocks.dtype, device=blocks.device)
        inputs = BlockInputs(hidden_states=hidden, batch_size=rows, seq_len=length)
        cache = None
        if past:
            before = hidden.repeat(1, past, 1)
            cache = blocks.new_cache(record_past=True)
            blocks.forward(BlockInputs(hidden_states=before, batch_size=rows, seq_len=past), cache=cache)

        def run(inputs: BlockInputs = inputs, cache: Any = cache) -> None:
            with torch.inference_mode():
                blocks.forward(inputs, cache=cache)

        rates[name] = rows * length / seconds(run, repeats)
    return rates


def of_model(model: Any, repeats: int) -> dict[str, float]:
    """The same of the model's own stack, whose hooks bring its weights."""
    rates, device = {}, "cuda" if torch.cuda.is_available() else "cpu"
    for name, (rows, length, past) in WORK.items():
        embeds: Tensor = torch.randn(rows, length, model.config.hidden_size, dtype=model.dtype, device=device)
        with torch.inference_mode():
            before = model(inputs_embeds=embeds.repeat(1, past, 1), use_cache=True).past_key_values if past else None

        def run(embeds: Tensor = embeds, before: Any = before) -> None:
            with torch.inference_mode():
                model(inputs_embeds=embeds, past_key_values=before, use_cache=before is not None)

        rates[name] = rows * length / seconds(run, repeats)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="2048x4", help="hidden size x blocks")
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.5, 1])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_blocks = int(args.shape.split("x")[1])
    rows: list[dict[str, Any]] = []

    def add(what: str, num_bytes: float | None, rates: dict[str, float]) -> None:
        rows.append({"blocks": what, "MB": "" if num_bytes is None else round(num_bytes / 1e6), **rates})
        print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory() as directory:
        path = save_random_model(args.shape, Path(directory))
        for share in args.shares:
            number = round(share * num_blocks)
            blocks = load_block_span(
                open_checkpoint(str(path)),
                Span(0, num_blocks),
                device=device,
                quantization=FULL_PRECISION,
                progress=False,
                num_offloaded=number,
                offload_dir=Path(directory),
            )
            add(f"{number} of {num_blocks} offloaded", blocks.num_bytes, of_span(blocks, args.repeats))
            del blocks
        for name, way in {"cpu_offload": cpu_offload, "disk_offload": disk_offload}.items():
            if way is cpu_offload and device.type == "cpu":
                continue  # to where it is
            model = AutoModel.from_pretrained(path, dtype="auto").eval()
            where = (str(Path(directory) / "accelerate"),) if way is disk_offload else ()
            way(model, *where, execution_device=device)
            add(f"accelerate's {name}", None, of_model(model, args.repeats))
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"written to {save_results('offload', {'arguments': vars(args), 'device': str(device), 'rows': rows})}")


if __name__ == "__main__":
    main()
