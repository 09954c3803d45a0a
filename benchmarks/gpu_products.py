"""One product of a 7B block on a GPU: bf16 beside packed weights, for a few inputs and for many.

    python benchmarks/gpu_products.py [--rows 11008 --columns 4096] [--sweep]

Times of one product within a CUDA graph that goes through several copies of the weight, so that none is in a cache.
`--sweep` tries tiles of the kernel. Prints tables, writes results/gpu_products.json. Needs CUDA.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import median, save_results, table
from torch import Tensor

from swarmllm.models.quantization import cuda
from swarmllm.models.quantization.loading import pack
from swarmllm.models.quantization.packed import Packed

COPIES_BYTES = 400 << 20
"""More than any cache holds."""
FORMATS = ("int8", "nf4")
NUM_INPUTS = (1, 8, 32, 64, 128, 512)
TILES = (
    (16, 256, 4, 3), (16, 256, 4, 6), (16, 512, 4, 3), (32, 64, 4, 6), (32, 128, 2, 6), (32, 128, 4, 4),
    (32, 128, 4, 6), (32, 256, 4, 3), (32, 256, 4, 5), (32, 256, 8, 3), (64, 128, 4, 4), (64, 256, 8, 3),
)  # fmt: skip
"""Rows, columns, warps and stages that `--sweep` tries."""


def graph_us(multiply: Callable[[Any], object], weights: Sequence[Any], repeats: int = 7) -> float:
    """Microseconds of a product with one of the weights, all one after the other in a CUDA graph."""
    for weight in weights[:2]:
        multiply(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [multiply(weight) for weight in weights]
    graph.replay()
    times = []
    for _ in range(repeats):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / len(kept))
    return median(times)


def by_kernel(given: Tensor, tile: dict[str, int] | None, weight: Packed) -> Tensor:
    matrix = weight.cuda_matrix()
    assert matrix is not None
    return cuda.multiply(given, matrix, tile)


def copies_of(packed: Packed) -> list[Packed]:
    tensors = packed.tensors()
    num_copies = max(2, COPIES_BYTES // sum(tensor.nbytes for tensor in tensors.values()))
    return [
        type(packed)(**{name: tensor.clone() for name, tensor in tensors.items()}, dtype=packed.dtype)
        for _ in range(num_copies)
    ]


def compare(rows: int, columns: int) -> dict[str, dict[str, float]]:
    weight = torch.randn(rows, columns, device="cuda").bfloat16()
    wholes = [weight.clone() for _ in range(max(2, COPIES_BYTES // weight.nbytes))]
    packed = {name: copies_of(pack(weight, name, weight.device)) for name in FORMATS}  # type: ignore[arg-type]
    found: dict[str, dict[str, float]] = {}
    for num_inputs in NUM_INPUTS:
        given = torch.randn(num_inputs, columns, device="cuda").bfloat16()
        times = {"bf16": graph_us(partial(F.linear, given), wholes)}
        for name, copies in packed.items():
            times[name] = graph_us(partial(type(copies[0]).multiply, inputs=given), copies)
            if num_inputs > cuda.MOST_INPUTS:
                times[f"{name}, kernel"] = graph_us(partial(by_kernel, given, None), copies)
        found[str(num_inputs)] = times
    return found


def sweep(name: str, rows: int, columns: int, num_inputs: int) -> list[tuple[float, str]]:
    """Times of tiles, the fastest first."""
    weight = torch.randn(rows, columns, device="cuda").bfloat16()
    copies = copies_of(pack(weight, name, weight.device))  # type: ignore[arg-type]
    given = torch.randn(num_inputs, columns, device="cuda").bfloat16()
    matrix = copies[0].cuda_matrix()
    assert matrix is not None
    some_inputs = cuda.usual_tile(num_inputs, matrix, given.dtype)["some_inputs"]
    found: list[tuple[float, str]] = []
    for some_rows, some_columns, num_warps, num_stages in TILES:
        tile = {"some_inputs": some_inputs, "some_rows": some_rows, "columns": some_columns}
        tile |= {"num_warps": num_warps, "num_stages": num_stages}
        try:
            us = graph_us(partial(by_kernel, given, tile), copies[:8], 3)
        except Exception as error:  # noqa: BLE001 - too much shared memory, for one
            print(f"  {tile}: {type(error).__name__}")
            continue
        found.append((us, f"{some_rows}x{some_columns}, {num_warps} warps, {num_stages} stages"))
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=11008)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU with CUDA", file=sys.stderr)
        return 1
    with torch.inference_mode():
        results: dict[str, object] = {}
        for rows, columns in dict.fromkeys([(args.rows, args.columns), (args.columns, args.rows), (4096, 4096)]):
            found = compare(rows, columns)
            names = list(found[str(NUM_INPUTS[-1])])
            lines = [
                [number, *(f"{times[name]:.1f}" if name in times else "" for name in names)]
                for number, times in found.items()
            ]
            print(f"{rows}x{columns}, µs of a product on {torch.cuda.get_device_name()}")
            print(table(["inputs", *names], lines))
            results[f"{rows}x{columns}"] = found
        if args.sweep:
            for name, num_inputs in itertools.product(FORMATS, (1, 32)):
                for rows, columns in ((args.rows, args.columns), (args.columns, args.rows)):
                    best = sweep(name, rows, columns, num_inputs)
                    print(
                        f"{name}, {rows}x{columns}, {num_inputs} inputs: "
                        + "; ".join(f"{us:.1f} {tile}" for us, tile in best[:6])
                    )
                    results[f"{name} {rows}x{columns} {num_inputs}"] = best[:10]
    save_results("gpu_products", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
