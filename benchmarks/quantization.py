"""Weights in 2 to 8 bits: what they cost in accuracy, and whole servers with them: decode tokens per second and memory.

    python benchmarks/quantization.py [--shape 2048x4] [--quant_types none int8 nf4] [--tokens 30] [--repeats 5]
    python benchmarks/quantization.py --without_servers
    python benchmarks/quantization.py --products int8 q8_0

First, for each type, on the embedded model in float32: bits of a weight with its scales, relative error of the
weights, perplexity of the held-out texts, and the divergence (KL, in nats per token) of the next token's probabilities
from those of the model in full precision. Then one matrix of 5632×2048 in bfloat16 times 1, 8 and 128 tokens, taking
turns with the same in full precision: how many times as fast, by CPU time, the median of the turns, also with inputs
that are rounded to 8 bits (`--activations int8`); and how long packing takes while blocks are loaded. `--products`
measures the products of these types and nothing else.

Then one server per way, each with all blocks, each with a client of its own; they take turns, so that all meet the same
machine. A token is the whole way: client, network, blocks, head. Memory is what the server's processes have to
themselves (USS) beyond those of a server with next to no weights. Writes results/quantization.json.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from common import median, save_random_model, save_results, table, timed_generation
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm, embedded_model_path
from swarmllm.data_structures import Span
from swarmllm.demo.local_swarm import LocalServer, embedded_heldout_texts
from swarmllm.machine_memory import into_huge_pages, separate_weights
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import QUANT_TYPES, Quantization, QuantizedWeight
from swarmllm.models.quantization.loading import pack
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

MATRIX = (5632, 2048)
CPU = torch.device("cpu")
TURNS = 15
PROMPT_TOKENS = 16


def embedded_blocks(quant_type: str) -> BlockSpan:
    checkpoint, quantization = open_checkpoint(embedded_model_path()), Quantization(quant_type)
    return load_block_span(checkpoint, Span(0, 8), dtype=torch.float32, quantization=quantization, progress=False)


def weights_error(full: BlockSpan, blocks: BlockSpan) -> tuple[float, float]:
    """(bits of a quantized weight, relative error of them all)."""
    weights = dict(full.slots.named_parameters())
    bits = count = wrong = right = 0.0
    for name, module in blocks.slots.named_modules():
        if isinstance(module, QuantizedWeight):
            weight = weights[name]
            count += weight.numel()
            bits += sum(tensor.nbytes for tensor in module.packed.tensors().values()) * 8
            wrong += float((module.dequantize() - weight).double().square().sum())
            right += float(weight.double().square().sum())
    return (bits / count, math.sqrt(wrong / right)) if count else (32.0, 0.0)


@torch.inference_mode()
def log_probabilities(model: Any, blocks: BlockSpan, ids: Tensor) -> Tensor:
    """Log probabilities of each token after each position, `[seq, vocabulary]`."""
    hidden = blocks.forward(
        BlockInputs(hidden_states=model.model.embed_tokens(ids), batch_size=1, seq_len=ids.shape[1])
    )
    return model.lm_head(model.model.norm(hidden))[0].log_softmax(-1)


def quality() -> list[list[Any]]:
    """Rows of (type, bits, error of weights, perplexity, change in %, KL)."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    texts = [tokenizer(text, return_tensors="pt").input_ids for text in embedded_heldout_texts()]
    num_tokens = sum(ids.shape[1] - 1 for ids in texts)
    full = embedded_blocks("none")
    expected = [log_probabilities(model, full, ids) for ids in texts]
    rows: list[list[Any]] = []
    unquantized = math.nan
    for quant_type in ("none", *(name for name in QUANT_TYPES if name != "none")):
        blocks = embedded_blocks(quant_type)
        loss = divergence = 0.0
        for ids, wanted in zip(texts, expected, strict=True):
            found = log_probabilities(model, blocks, ids)
            loss -= float(found[:-1].gather(1, ids[0, 1:, None]).double().sum())
            divergence += float((wanted.exp() * (wanted - found))[:-1].double().sum())
        bits, error = weights_error(full, blocks)
        perplexity = math.exp(loss / num_tokens)
        unquantized = perplexity if quant_type == "none" else unquantized
        change = 100 * (perplexity / unquantized - 1)
        rows.append([quant_type, bits, error, f"{perplexity:.4f}", change, divergence / num_tokens])
    return rows


def seconds_of(do: Callable[[], object]) -> float:
    """CPU time of this thread, the least of three: others disturb, nobody helps."""
    times = []
    for _ in range(3):
        began_at = time.thread_time()
        do()
        times.append(time.thread_time() - began_at)
    return min(times)


@torch.inference_mode()
def products(names: Sequence[str]) -> list[list[Any]]:
    """Rows of (type, ms to pack a million weights, how many times as fast as bfloat16 with 1, 8, 128 tokens)."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(MATRIX, generator=generator).mul_(0.02).bfloat16()
    packed, rows = {}, list[list[Any]]()
    with separate_weights():
        for name in names:
            packed[name] = pack(weight, name, CPU).for_device(CPU).mapped(into_huge_pages)
            seconds = seconds_of(lambda name=name: pack(weight, name, CPU).for_device(CPU))
            rows.append([name, seconds * 1e9 / weight.numel()])
            if packed[name].can_round_inputs():
                packed[f"{name}, inputs in 8 bits"] = packed[name].as_rounding()
                rows.append([f"{name}, inputs in 8 bits", ""])
    for tokens in (1, 8, 128):
        inputs = torch.randn(tokens, MATRIX[1], generator=generator).bfloat16()
        ratios: dict[str, list[float]] = {name: [] for name in packed}
        for _ in range(TURNS):
            whole = seconds_of(lambda inputs=inputs: inputs @ weight.T)
            for name, matrix in packed.items():
                ratios[name].append(whole / seconds_of(lambda matrix=matrix, inputs=inputs: matrix.linear(inputs)))
        for row in rows:
            row.append(median(ratios[row[0]]))
    return rows


def memory_mib(server: LocalServer) -> float:
    """Memory of the server and its daemon."""
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
    parser.add_argument("--without_servers", action="store_true", help="accuracy and single products only")
    parser.add_argument("--products", nargs="+", choices=QUANT_TYPES[1:], help="products of these types only")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"arguments": vars(args)}
    if args.products is None:
        results["quality"] = quality()
        print(table(["weights", "bits", "error", "perplexity", "change, %", "KL"], results["quality"]))
    results["products"] = products(args.products or [name for name in QUANT_TYPES if name != "none"])
    header = ["weights", "packing, ms a million", "times as fast as bf16, 1 token", "8", "128"]
    print(table(header, results["products"]))
    if not args.without_servers and args.products is None:
        results["rows"] = servers(args)
    print(f"written to {save_results('quantization', results)}")


def servers(args: argparse.Namespace) -> list[list[Any]]:
    """Measure whole servers and print the results."""
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        rows = measure(args, Path(directory))
    header = ["weights", "tokens/s", f"to {args.quant_types[0]}", "MiB", f"to {args.quant_types[0]}"]
    print(table(header, rows))
    return rows


if __name__ == "__main__":
    main()
