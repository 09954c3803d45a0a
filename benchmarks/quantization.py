"""Whole servers with weights in full precision, 8 and 4 bits: decode tokens per second, and memory.

    python benchmarks/quantization.py [--shape 2048x4] [--quant_types none int8 nf4] [--tokens 30] [--repeats 5]

One server per way, each with all blocks, each with a client of its own; they take turns, so that all meet the same
machine. A token is the whole way: client, network, blocks, head. Memory is what the server's processes have to
themselves (USS) beyond those of a server with next to no weights. Writes results/quantization.json.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from common import median, save_random_model, save_results, table, timed_generation

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm
from swarmllm.demo.local_swarm import LocalServer

PROMPT_TOKENS = 16


def memory_mib(server: LocalServer) -> float:
    """Of the server and its daemon."""
    process = psutil.Process(server.pid)
    family = [process, *process.children(recursive=True)]
    return sum(member.memory_full_info().uss for member in family) / 2**20


def measure(args: argparse.Namespace, directory: Path) -> list[list[Any]]:
    """Rows of (way, tokens/s, to none, MiB of weights, to none)."""
    path, thin = save_random_model(args.shape, directory), save_random_model("thin", directory)
    options = {"num_threads": args.threads, "attn_cache_tokens": 1024}
    with LocalSwarm(thin, num_servers=1, quant_type="none", **options) as swarm:
        nothing_mib = memory_mib(swarm.servers[0])
    rates: dict[str, list[float]] = {quant_type: [] for quant_type in args.quant_types}
    weights_mib: dict[str, float] = {}
    models: dict[str, Any] = {}
    with ExitStack() as stack:
        for quant_type in args.quant_types:
            swarm = stack.enter_context(LocalSwarm(path, num_servers=1, quant_type=quant_type, **options))
            config = ClientConfig(speculation="off", compression="none")
            models[quant_type] = stack.enter_context(
                AutoDistributedModel.from_pretrained(
                    str(path), initial_peers=swarm.initial_peers, client_config=config, progress=False
                )
            )
            timed_generation(models[quant_type], PROMPT_TOKENS, 3)
            weights_mib[quant_type] = memory_mib(swarm.servers[0]) - nothing_mib
        for _ in range(args.repeats):
            for quant_type, model in models.items():
                rates[quant_type].append(timed_generation(model, PROMPT_TOKENS, args.tokens + 1).tokens_per_s)
    first = args.quant_types[0]
    return [
        [
            quant_type,
            median(rates[quant_type]),
            median(rates[quant_type]) / median(rates[first]),
            weights_mib[quant_type],
            weights_mib[quant_type] / weights_mib[first],
        ]
        for quant_type in args.quant_types
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="2048x4")
    parser.add_argument("--quant_types", nargs="+", default=["none", "int8", "nf4"], help="ratios are to the first")
    parser.add_argument("--tokens", type=int, default=30, help="timed per run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        rows = measure(args, Path(directory))
    header = ["weights", "tokens/s", f"to {args.quant_types[0]}", "MiB", f"to {args.quant_types[0]}"]
    print(table(header, rows))
    print(f"written to {save_results('quantization', {'arguments': vars(args), 'rows': rows})}")


if __name__ == "__main__":
    main()
