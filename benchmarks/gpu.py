"""Decode steps of 7B-shaped blocks on a GPU: as a share of what its memory bandwidth allows, and beside fewer sessions.

    python benchmarks/gpu.py [--blocks 4] [--sessions 1 8 32] [--context 400] [--quant_types none int8 nf4]

Hidden 4096, inter 11008, 32 heads, bf16, random weights; sessions are packed as a server packs them. The limit is the
time in which the weights (and the sessions' keys and values) can be read once, with the bandwidth measured by copying a
gigabyte. Prints a table, writes results/gpu.json. Needs CUDA; `--device cpu` tries the script on tiny blocks.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import median, save_results, table
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import Quantization
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, SessionCall
from swarmllm.models.span.packing_probe import right_ways

SIZES = {"cuda": (4096, 11008, 32), "cpu": (64, 128, 4)}
"""Hidden, inter, heads."""
WARM_UP, STEPS = 5, 30


def seconds(call: Callable[[], object], wait: Callable[[], object]) -> float:
    wait()
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


def waiting(device: str) -> Callable[[], object]:
    """Waits until that device has done what it was given."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def bytes_per_s(device: str) -> float:
    source = torch.empty(1 << 30 if device == "cuda" else 1 << 24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source), waiting(device)) for _ in range(10))


def hidden_states(device: str, seq_len: int) -> BlockInputs:
    hidden = torch.randn(1, seq_len, SIZES[device][0], dtype=torch.bfloat16, device=device)
    return BlockInputs(hidden_states=hidden, batch_size=1, seq_len=seq_len)


def step_s(packer: Packer, device: str, num_sessions: int, context: int) -> float:
    """Median time of one packed decode step."""
    blocks = packer.blocks
    caches = [blocks.new_cache() for _ in range(num_sessions)]
    with torch.inference_mode():
        for cache in caches:
            blocks.forward(hidden_states(device, context), blocks.span, cache)
    times = []
    for _ in range(WARM_UP + STEPS):
        calls = [SessionCall(hidden_states(device, 1), blocks.span, cache) for cache in caches]
        times.append(seconds(lambda calls=calls: packer.run_calls(calls), waiting(device)))
    return median(times[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--quant_types", nargs="+", default=["none", "int8", "nf4"])
    parser.add_argument("--device", choices=SIZES, default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a GPU with CUDA", file=sys.stderr)
        return 1
    bandwidth = bytes_per_s(args.device)
    hidden, inter, heads = SIZES[args.device]
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=args.blocks,
        num_attention_heads=heads,
        dtype="bfloat16",
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(Path(directory))
        for quant_type in args.quant_types:
            blocks = load_block_span(
                open_checkpoint(directory),
                Span(0, args.blocks),
                dtype=torch.bfloat16,
                device=args.device,
                quantization=Quantization(quant_type),
                progress=False,
            )
            packer = Packer(blocks, right_ways(blocks))
            for num_sessions in args.sessions:
                elapsed_s = step_s(packer, args.device, num_sessions, args.context)
                read = blocks.num_bytes + num_sessions * args.context * blocks.cache_sizes.bytes_per_token
                rows.append(
                    {
                        "weights": quant_type,
                        "sessions": num_sessions,
                        "ms per step": elapsed_s * 1e3,
                        "share of the bandwidth": read / bandwidth / elapsed_s,
                        "tokens/s": num_sessions / elapsed_s,
                    }
                )
            del blocks, packer
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"{name}, {bandwidth / 1e9:.0f} GB/s")
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"written to {save_results('gpu', {'gpu': name, 'rows': rows})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
