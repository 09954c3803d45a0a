"""One stream through 1, 2 and 4 local servers, beside local `generate()` on the same weights and threads.

    python benchmarks/inference.py [--shapes 512x8 2048x16] [--servers 1 2 4] [--repeats 5] [--quant_type int8]

Prints tokens per second and time to first token, also as ratios to the local model of the same run (the runs alternate,
the medians count), and where one step's time goes. The local model's weights are never quantized. (Several clients at
once: `concurrency.py`.) Writes results/inference.json.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import plots
import torch
import transformers
from common import median, save_random_model, save_results, table, timed_generation
from transformers import AutoModelForCausalLM

from swarmllm import AutoDistributedModel, LocalSwarm
from swarmllm.models.quantization import QUANT_TYPES

PREFIX, LONG_PREFIX, NEW_TOKENS = 128, 512, 32
SPEEDS = {
    "rate": "tokens/s",
    "rate_ratio": "ratio to local",
    "first_128_s": "first token of 128, s",
    "first_128_ratio": "ratio to local",
    "first_512_s": "first token of 512, s",
    "first_512_ratio": "ratio to local",
}
"""The measurements and their names in the table."""


def measure(path: Path, num_servers: int, args: argparse.Namespace) -> dict[str, float]:
    """Speeds of the swarm, and their ratios to the local model: medians over alternating runs."""
    local = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    options = {"quant_type": args.quant_type, "num_threads": args.threads}
    with (
        LocalSwarm(path, num_servers=num_servers, **options) as swarm,
        AutoDistributedModel.from_pretrained(str(path), initial_peers=swarm.initial_peers) as remote,
    ):
        runs: dict[str, list[float]] = {name: [] for name in SPEEDS}
        for model in (local, remote):
            timed_generation(model, LONG_PREFIX, 4)  # warm-up
        for _ in range(args.repeats):
            here, there = (timed_generation(model, PREFIX, NEW_TOKENS) for model in (local, remote))
            runs["rate"].append(there.tokens_per_s)
            runs["rate_ratio"].append(there.tokens_per_s / here.tokens_per_s)
            runs["first_128_s"].append(there.first_token_s)
            runs["first_128_ratio"].append(there.first_token_s / here.first_token_s)
            here, there = (timed_generation(model, LONG_PREFIX, 2) for model in (local, remote))
            runs["first_512_s"].append(there.first_token_s)
            runs["first_512_ratio"].append(there.first_token_s / here.first_token_s)
        result = {name: median(values) for name, values in runs.items()}
        result |= break_down(remote)
        return result


def break_down(model: Any, steps: int = 40) -> dict[str, float]:
    """Where one decode step goes, in ms: medians over steps of a session at position 128."""
    parts: dict[str, list[float]] = {"step": [], "client": [], "wire": [], "queue": [], "compute": []}
    ids = torch.randint(3, 4000, (1, PREFIX))
    with torch.inference_mode(), model.inference_session(max_length=PREFIX + steps) as session:
        session.step(model.embed(ids))
        for _ in range(steps):
            started = time.perf_counter()
            hidden = model.embed(ids[:, :1])
            embedded = time.perf_counter()
            hidden = session.step(hidden)
            stepped = time.perf_counter()
            model.head(hidden)
            ended = time.perf_counter()
            queue_ms = sum(queue_us for _, queue_us, _ in session.timings) / 1e3
            compute_ms = sum(compute_us for _, _, compute_us in session.timings) / 1e3
            parts["step"].append((ended - started) * 1e3)
            parts["client"].append((embedded - started + ended - stepped) * 1e3)
            parts["queue"].append(queue_ms)
            parts["compute"].append(compute_ms)
            parts["wire"].append((stepped - embedded) * 1e3 - queue_ms - compute_ms)
    return {f"{name}_ms": median(values) for name, values in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["512x8", "2048x16"])
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quant_type", choices=QUANT_TYPES, default="none", help="of the servers")
    parser.add_argument("--threads", type=int, default=1, help="of the local model and of each server")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    rows, results = [], []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
            path = save_random_model(shape, Path(directory))
            for num_servers in args.servers:
                result = measure(path, num_servers, args)
                results.append({"shape": shape, "servers": num_servers, "quant_type": args.quant_type, **result})
                parts = (result[f"{name}_ms"] for name in ("step", "client", "wire", "queue", "compute"))
                speeds = [result[name] for name in SPEEDS]
                rows.append([shape, num_servers, *speeds, *parts])
                print(f"{shape}, {num_servers} servers: {result['rate_ratio']:.2f} of local", flush=True)
    print(
        table(["model", "servers", *SPEEDS.values(), "step ms", "client ms", "wire ms", "queue ms", "compute ms"], rows)
    )
    print(f"written to {save_results('inference', results)}")
    plots.lines(
        "inference",
        "tokens/s of one stream, relative to the local model",
        "servers",
        {
            shape: (args.servers, [result["rate_ratio"] for result in results if result["shape"] == shape])
            for shape in args.shapes
        },
    )


if __name__ == "__main__":
    main()
