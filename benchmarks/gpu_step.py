"""Ways to run a decode step of 7B-shaped blocks on a GPU, beside each other: time, share of the bandwidth, difference.

    python benchmarks/gpu_step.py [--blocks 8] [--sessions 1 8 32] [--quant_types none int8 nf4] [--context 400]
                                  [--ways graph fused] [--tuning] [--device cpu]

    today    sessions with tensors of their own, in one row (`Packing.RAGGED`)
    paged    one row on pages, launched kernel by kernel
    graph    the same as a CUDA graph, by the model's own code
    fused    the same as a CUDA graph, in few kernels

Sessions are of unlike lengths. The share is the time in which weights, keys and values could be read once, with the
bandwidth measured by copying a gigabyte, over the step's time; "of graph" is over the time of replaying its graph
alone. Outputs are compared with those of the first way, and with `--truth` with those of the same blocks in float32:
what only rounds elsewhere is as far from them as the model's own code. A way that fails is printed with its error, and
the others go on. `--tuning`: also single kernels by size of their tiles. `--device cpu` tries the script on tiny
blocks.
Writes results/gpu_step.json.
"""

import argparse
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, TypeVar

import torch
from common import median, save_results, table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import Quantization
from swarmllm.models.span import page_pool
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.page_pool import Placed
from swarmllm.models.span.span_cache import SpanCache

T = TypeVar("T")
WAYS = ("today", "paged", "graph", "fused")
SIZES = {"cuda": (4096, 11008, 32), "cpu": (64, 128, 4)}
"""Hidden, inter, heads."""
WARM_UP, STEPS, COMPARED = 5, 30, 3
KINDS = {
    "products": ("nvjet", "gemm", "gemv", "splitK", "_multiply", "product", "cutlass"),
    "attention": ("_attend", "_join", "flash", "fmha"),
    "pages": ("_rotate", "_write"),
    "norms, gates": ("_normalize", "_gate"),
}
"""Kernels by what is in their names."""
STARTED = time.monotonic()


def wait() -> None:
    """Until the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], object]) -> float:
    wait()
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


def bytes_per_s(device: str) -> float:
    source = torch.empty(1 << 30 if device == "cuda" else 1 << 24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(10))


def inputs(blocks: BlockSpan, seq_len: int, seed: int) -> BlockInputs:
    random = torch.Generator(blocks.device).manual_seed(seed)
    hidden = torch.randn(1, seq_len, blocks.embedding_dim, generator=random, device=blocks.device)
    hidden = hidden.bfloat16().to(blocks.dtype)
    return BlockInputs(hidden_states=hidden, batch_size=1, seq_len=seq_len)


def save_blocks(directory: Path, device: str, num_blocks: int) -> None:
    """A checkpoint of random blocks of `SIZES`, made on that device."""
    hidden, inter, heads = SIZES[device]
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=num_blocks,
        num_attention_heads=heads,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    with torch.device(device):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def tried(what: str, call: Callable[[], Any]) -> Any:
    """The result, or None with the error printed."""
    started = time.perf_counter()
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - the other ways shall go on
        print(f"FAILED {what}: {type(error).__name__}: {str(error)[:500]}")
        print("    " + "\n    ".join(traceback.format_exc().strip().splitlines()[-8:]), flush=True)
        return None
    print(f"ok {what} ({time.perf_counter() - started:.1f} s)", flush=True)
    return result


def sessions_of(blocks: BlockSpan, number: int, context: int) -> list[SpanCache]:
    caches = [blocks.new_cache() for _ in range(number)]
    with torch.inference_mode():
        for idx, cache in enumerate(caches):
            blocks.forward(inputs(blocks, context - idx, idx), blocks.span, cache)
    return caches


def step(packer: Packer, caches: Sequence[SpanCache], seed: int) -> list[Tensor]:
    calls = [
        SessionCall(inputs(packer.blocks, 1, 1000 * seed + idx), packer.blocks.span, cache)
        for idx, cache in enumerate(caches)
    ]
    outputs = run_calls(packer, calls)
    for output in outputs:
        if isinstance(output, Exception):
            raise output
    return [output for output in outputs if isinstance(output, Tensor)]


def run_calls(packer: Packer, calls: Sequence[SessionCall]) -> Sequence[Any]:
    """Pack as a server does, but report a failure on pages instead of trying another way."""
    return packer.forward.run_packed(calls, packer.way) if packer.way == Packing.PAGED else packer.run_calls(calls)


def outputs_of(packer: Packer, caches: Sequence[SpanCache]) -> Tensor:
    """Inputs of the first steps of all sessions."""
    return torch.cat([one.flatten(0, -2) for seed in range(COMPARED) for one in step(packer, caches, seed)]).float()


def difference(found: Tensor, expected: Tensor | None) -> float:
    return float("nan") if expected is None else float((found - expected).norm() / expected.norm())


def truths(load: Callable[..., BlockSpan], numbers: Sequence[int], context: int) -> dict[int, Tensor]:
    """Outputs in float32, with the same weights and inputs."""
    packer = packer_of(load(dtype=torch.float32), "today", 0)
    return {number: outputs_of(packer, sessions_of(packer.blocks, number, context)) for number in numbers}


def measured(
    packer: Packer, number: int, context: int, expected: Tensor | None, truth: Tensor | None
) -> dict[str, Any]:
    blocks = packer.blocks
    caches = sessions_of(blocks, number, context)
    outputs = outputs_of(packer, caches)
    row: dict[str, Any] = {
        "outputs": outputs,
        "difference": difference(outputs, expected),
        "from truth": difference(outputs, truth),
    }
    given = [SessionCall(inputs(blocks, 1, idx), blocks.span, cache) for idx, cache in enumerate(caches)]
    run = partial(run_calls, packer, given)
    times, queued = [], []
    for _ in range(WARM_UP + STEPS):
        times.append(seconds(run))
        started = time.perf_counter()
        run()
        queued.append(time.perf_counter() - started)
    row["ms"], row["host ms"] = 1e3 * median(times[WARM_UP:]), 1e3 * median(queued[WARM_UP:])
    graphs = packer.forward.graphs
    size = graphs.size_for(number) if graphs is not None else None
    if graphs is not None and size is not None:
        replay = graphs._recorded[size].graph.replay
        row["replay ms"] = 1e3 * median([seconds(replay) for _ in range(STEPS)])
        wait()
        started = time.perf_counter()
        replay()
        row["launch ms"] = 1e3 * (time.perf_counter() - started)
    return row if blocks.device.type == "cpu" else row | profiled(run, len(blocks.span))


def profiled(run: Callable[[], object], num_blocks: int) -> dict[str, Any]:
    """Kernels of a step, and their times in each block. A kernel that starts early counts while it waits, too."""
    row: dict[str, Any] = {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    on_device = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    row["launches"] = len(on_device) / num_blocks
    row["gpu ms"] = sum(event.device_time for event in on_device) / 1e3
    of_kind = dict.fromkeys((*KINDS, "others"), 0.0)
    for event in on_device:
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.name for part in parts)), "others")
        of_kind[kind] += event.device_time / num_blocks
    row |= {f"{kind}, us": us for kind, us in of_kind.items()}
    names: dict[str, list[float]] = {}
    for event in on_device:
        names.setdefault(event.name[:70], []).append(event.device_time)
    row["kernels"] = {
        name: (len(each), round(sum(each), 1)) for name, each in sorted(names.items(), key=lambda pair: -sum(pair[1]))
    }
    return row


def packer_of(blocks: BlockSpan, way: str, num_pages: int) -> Packer:
    """The blocks, run in one way."""
    blocks.pool = None
    if way == "today":
        return Packer(blocks, [Packing.RAGGED, Packing.ONE_BY_ONE])
    blocks.pool = blocks.new_pool(num_pages)
    packer = Packer(blocks, [Packing.PAGED, Packing.ONE_BY_ONE])
    if way in ("graph", "fused"):
        free = torch.cuda.mem_get_info()[0]
        packer.record(fused=way == "fused")
        graphs = packer.forward.graphs
        if graphs is None:
            raise RuntimeError("no graph was recorded")
        taken = (free - torch.cuda.mem_get_info()[0]) >> 20
        print(f"   recorded {graphs.sizes}, {taken} MiB", flush=True)
        if way == "fused" and type(graphs.step).__name__ != "FusedStep":
            raise RuntimeError("the fused kernels are not used: see the line above")
    return packer


def in_time(limit_s: float, rows: Sequence[T]) -> Iterator[T]:
    """The measurements that begin before the limit."""
    for row in rows:
        if time.monotonic() - STARTED > limit_s:
            print("   the rest is left out: it has taken long enough", flush=True)
            return
        yield row


def attention_times(bandwidth: float, limit_s: float) -> list[dict[str, Any]]:
    """Attention of single positions on pages, by number of splits and keys at a time."""
    from swarmllm.models.span import paged_kernels as kernels

    usual, usual_splits, rows = kernels.KEYS_OF_TILE, kernels.num_splits, []
    shapes = ((1, 400, 32, 1), (32, 400, 32, 1), (1, 8000, 8, 4))
    for sessions, context, heads, shared in in_time(limit_s, shapes):
        pages = sessions * (context // 64 + 1)
        keys, values = (torch.randn(pages + 1, heads, 64, 128, device="cuda").bfloat16() for _ in range(2))
        tables = 1 + torch.arange(pages, device="cuda", dtype=torch.int32).view(sessions, -1)
        placed = Placed.of([(row, context - 1) for row in range(sessions)], torch.device("cuda"))
        query = torch.randn(1, heads * shared, sessions, 128, device="cuda").bfloat16()
        for size in (32, 64):
            for splits in (4, 8, 16):
                kernels.KEYS_OF_TILE, kernels.num_splits = size, lambda _, splits=splits: splits
                run = partial(page_pool.attend_pages, query, keys, values, tables, placed, 128**-0.5, 0)
                ms = tried_ms(run)
                share = 4 * sessions * context * heads * 128 / bandwidth / ms * 1e3
                rows.append(
                    {
                        "sessions": sessions,
                        "context": context,
                        "heads": f"{heads} x {shared}",
                        "keys": size,
                        "splits": splits,
                        "us": 1e3 * ms,
                        "share": share,
                    }
                )
    kernels.KEYS_OF_TILE, kernels.num_splits = usual, usual_splits
    return rows


def product_times(bandwidth: float, limit_s: float) -> list[dict[str, Any]]:
    """Products of one position by tiles, beside torch's own."""
    from swarmllm.models.span import fused_kernels as kernels

    rows = []
    shapes = (
        ("gate and up", (22016, 4096), True),
        ("down", (4096, 11008), False),
        ("qkv", (12288, 4096), False),
        ("output", (4096, 4096), False),
    )
    for name, shape, gated in in_time(limit_s, shapes):
        norm = name in ("gate and up", "qkv")
        weight, inputs_ = (
            torch.randn(shape, device="cuda").bfloat16(),
            torch.randn(1, shape[1], device="cuda").bfloat16(),
        )
        for tile in (
            None, (4, 1024, 4), (8, 512, 4), (2, 2048, 4), (8, 1024, 8), (2, 1024, 2), (1, 1024, 1)
        ):  # fmt: skip
            usual = (inputs_[0], 1e-5) if norm else None
            run = (
                partial(torch.nn.functional.linear, inputs_, weight)
                if tile is None
                else partial(kernels.multiply, inputs_, weight, norm=usual, gated=gated, tile=tile)
            )
            ms = tried_ms(run)
            rows.append(
                {"product": name, "tile": str(tile), "us": 1e3 * ms, "share": weight.nbytes / bandwidth / ms * 1e3}
            )
    return rows


def tried_ms(run: Callable[[], object]) -> float:
    """GPU milliseconds of a call within a graph of 20 of them."""
    try:
        with torch.inference_mode():
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = [run() for _ in range(20)]
            graph.replay()
            ms = 1e3 * median([seconds(graph.replay) for _ in range(7)]) / 20
            del kept
    except Exception as error:  # noqa: BLE001 - a tile that doesn't fit this GPU
        print(f"   {type(error).__name__}: {str(error)[:200]}")
        return float("nan")
    return ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--quant_types", nargs="+", default=["none", "int8", "nf4"])
    parser.add_argument("--ways", nargs="+", default=["graph", "fused"], choices=WAYS)
    parser.add_argument("--truth", action="store_true", help="compare with the blocks in float32, too")
    parser.add_argument("--tuning", action="store_true", help="time single kernels by size of their tiles")
    parser.add_argument("--limit_s", type=float, default=90.0, help="begin no more sizes of tiles after this time")
    parser.add_argument("--device", choices=SIZES, default="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        args.ways, args.tuning, args.blocks, args.sessions, args.context = ["today"], False, 2, [1, 2], 20
    elif not torch.cuda.is_available():
        print("this benchmark needs a GPU with CUDA", file=sys.stderr)
        return 1
    logging.basicConfig(level=logging.WARNING, format="   %(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("swarmllm.models.span").setLevel(logging.INFO)
    torch.backends.cuda.enable_cudnn_sdp(False)
    bandwidth = bytes_per_s(args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"{name}, {bandwidth / 1e9:.0f} GB/s, torch {torch.__version__}", flush=True)
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {}
    num_pages = 2 + max(args.sessions) * (args.context // 64 + 4)
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        save_blocks(Path(directory), args.device, args.blocks)
        for quant_type in args.quant_types:
            load = partial(
                load_block_span,
                open_checkpoint(directory),
                Span(0, args.blocks),
                dtype=torch.bfloat16,
                device=args.device,
                quantization=Quantization(quant_type),
                progress=False,
            )
            find = partial(truths, load, args.sessions, args.context)
            truth = (tried(f"{quant_type} in float32", find) or {}) if args.truth else {}
            torch.cuda.empty_cache()
            blocks = tried(f"load {quant_type}", load)
            expected: dict[int, Tensor] = {}
            for way in args.ways if blocks is not None else ():
                packer = tried(f"{quant_type} {way}: prepare", partial(packer_of, blocks, way, num_pages))
                for number in args.sessions if packer is not None else ():
                    label = f"{quant_type} {way} {number}"
                    found = expected.get(number), truth.get(number)
                    row = tried(label, partial(measured, packer, number, args.context, *found))
                    if row is None:
                        continue
                    outputs = row.pop("outputs")
                    expected.setdefault(number, outputs)
                    details[label] = row.pop("kernels", {})
                    read = blocks.num_bytes + number * args.context * blocks.cache_sizes.bytes_per_token
                    ideal_ms = 1e3 * read / bandwidth
                    shares = {"share": ideal_ms / row["ms"], "of graph": ideal_ms / row.get("replay ms", nan)}
                    rows.append({"weights": quant_type, "way": way, "sessions": number, **shares, **row})
                    print(rows[-1], flush=True)
                del packer
                torch.cuda.empty_cache()
            del blocks
            torch.cuda.empty_cache()
    names = list(dict.fromkeys(name for row in rows for name in row))
    print(table(names, [[row.get(name, "") for name in names] for row in rows]))
    for label, kernels in details.items():
        print(
            label, "".join(f"\n   {number:4} {us:9.1f} us  {name}" for name, (number, us) in list(kernels.items())[:14])
        )
    for find in (product_times, attention_times) if args.tuning else ():
        found = tried(find.__name__, partial(find, bandwidth, args.limit_s))
        if found:
            print(table(list(found[0]), [list(row.values()) for row in found]), flush=True)
            details[find.__name__] = found
    print(f"written to {save_results('gpu_step', {'gpu': name, 'rows': rows, **details})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
