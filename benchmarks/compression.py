"""Hidden states of 8 bits: their bytes, error and time, what they do to perplexity, and what they gain on a slow link.

    python benchmarks/compression.py [--mbit_s 100] [--batch 16] [--sequence 128] [--servers 2] [--repeats 3]

The error is that of one boundary between servers, relative to the exact values: of random values, of ones with a few
large channels, and of the embedded model's own hidden states. Its perplexity is measured as if each block were on
another server. The link's figures are forward and backward passes of a batch through servers behind proxies of that
bandwidth, the settings alternating on one swarm. The blocks there are as wide as a 1B model's and thin inside, so that
computing takes as little of the time as on a GPU; with blocks that compute for longer than their bytes travel, nothing
would be gained. Writes results/compression.json.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from common import median, save_random_model, save_results, table
from delay_proxy import SlowNetwork
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmllm import AutoDistributedModel, ClientConfig, embedded_model_path
from swarmllm.demo.local_swarm import embedded_heldout_texts
from swarmllm.network.wire import compression
from swarmllm.network.wire.compression import CompressedTensor, compress

SETTINGS = ("none", "int8", "auto")


def small(tensor: Tensor) -> CompressedTensor:
    """Compress finite values."""
    result = compress(tensor)
    if result is None:
        raise ValueError("not finite")
    return result


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def measure_codec(name: str, tensor: Tensor, repeats: int) -> list[Any]:
    """One row: share of the bytes, error, and of large channels and all others apart, ns per value."""
    of_channels = tensor.float().abs().mean(dim=0)
    large = of_channels > 6 * of_channels.median()
    compress_s, decompress_s = [], []
    for _ in range(repeats):
        started_at = time.perf_counter()
        result = small(tensor)
        compress_s.append(time.perf_counter() - started_at)
        started_at = time.perf_counter()
        received = result.decompress()
        decompress_s.append(time.perf_counter() - started_at)
    share = sum(part.nbytes for part in result.parts) / tensor.nbytes
    per_value = 1e9 / tensor.numel()
    return [
        name,
        share,
        error(received, tensor),
        error(received[:, large], tensor[:, large]) if bool(large.any()) else "",
        error(received[:, ~large], tensor[:, ~large]),
        median(compress_s) * per_value,
        median(decompress_s) * per_value,
    ]


def random_states(num_tokens: int, hidden: int, large_channels: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_tokens, hidden, generator=generator)
    states[:, torch.randperm(hidden, generator=generator)[:large_channels]] *= 60
    return states.bfloat16()


class EmbeddedModel:
    """The embedded model in fp32, whose blocks can be given hidden states of 8 bits."""

    def __init__(self) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
        self.texts = [tokenizer(text, return_tensors="pt").input_ids for text in embedded_heldout_texts()]

    @torch.no_grad()
    def perplexity(self) -> float:
        loss = sum(float(self.model(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in self.texts)
        return math.exp(loss / sum(ids.shape[1] - 1 for ids in self.texts))

    def compressed_perplexity(self) -> float:
        blocks = self.model.get_decoder().layers
        hooks = [
            block.register_forward_pre_hook(lambda _, args: (small(args[0]).decompress(), *args[1:]))
            for block in blocks
        ]
        try:
            return self.perplexity()
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def states(self) -> Tensor:
        """In the middle of the model, `[tokens, hidden]`."""
        of_texts = [self.model(ids, output_hidden_states=True).hidden_states for ids in self.texts[:8]]
        return torch.cat([states[len(states) // 2][0] for states in of_texts]).bfloat16()


def forward(model: Any, ids: Tensor) -> None:
    with torch.no_grad():
        model.get_decoder()(input_ids=ids, use_cache=False)


def backward(model: Any, ids: Tensor) -> Tensor:
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    outputs = model.get_decoder()(inputs_embeds=embeds, use_cache=False).last_hidden_state
    (outputs * random_states(outputs.shape[1], outputs.shape[2], 0)).sum().backward()
    return embeds.grad


def over_a_link(args: argparse.Namespace, directory: Path) -> tuple[list[list[Any]], float]:
    """Rows of (what, setting, seconds, gain, megabytes), and the error of the gradient."""
    path = save_random_model("thin", directory)
    ids = torch.randint(3, 4000, (args.batch, args.sequence), generator=torch.Generator().manual_seed(0))
    jobs: dict[str, Callable[[Any, Tensor], object]] = {"forward": forward, "forward and backward": backward}
    seconds: dict[tuple[str, str], list[float]] = {(job, setting): [] for job in jobs for setting in SETTINGS}
    carried: dict[tuple[str, str], int] = {}
    models: dict[str, Any] = {}
    options = {"quant_type": "none", "num_threads": 1}
    with SlowNetwork() as network, network.swarm(path, num_servers=args.servers, **options) as swarm:
        network.set(delay_ms=2, mbit_s=args.mbit_s)
        try:
            for setting in SETTINGS:
                config = ClientConfig(compression=setting)
                models[setting] = AutoDistributedModel.from_pretrained(
                    str(path), initial_peers=swarm.initial_peers, client_config=config, progress=False
                )
                for _ in range(2 if setting == "auto" else 1):  # "auto" has to learn what the links carry
                    backward(models[setting], ids)
            for _ in range(args.repeats):
                for (job, setting), times in seconds.items():
                    before, started_at = network.bytes_carried(), time.perf_counter()
                    jobs[job](models[setting], ids)
                    times.append(time.perf_counter() - started_at)
                    carried[job, setting] = network.bytes_carried() - before
            gradients = {setting: backward(models[setting], ids) for setting in ("none", "int8")}
        finally:
            for model in models.values():
                model.close()
    rows = []
    for (job, setting), times in seconds.items():
        gain = median(seconds[job, "none"]) / median(times)
        rows.append([job, setting, median(times), gain, carried[job, setting] / 1e6])
    return rows, error(gradients["int8"], gradients["none"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mbit_s", type=float, default=100.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    embedded = EmbeddedModel()
    codec = []
    for compression.BLOCK in (64, 128):  # the module reads it anew at each call
        for name, states in {
            "random": random_states(512, 2048, 0),
            "random, 6 channels of 2048 are 60 times as large": random_states(512, 2048, 6),
            "embedded model": embedded.states(),
        }.items():
            codec.append(measure_codec(f"{name}, blocks of {compression.BLOCK}", states, 5))
    compression.BLOCK = 64
    header = [
        "hidden states (bfloat16)",
        "bytes",
        "error",
        "of large channels",
        "of the others",
        "compress ns",
        "decompress ns",
    ]
    print(table(header, codec))
    perplexity = {"exact": embedded.perplexity(), "8 bits at every block": embedded.compressed_perplexity()}
    print(f"perplexity: {perplexity}, changed by {perplexity['8 bits at every block'] / perplexity['exact'] - 1:.3%}")
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        rows, gradient_error = over_a_link(args, Path(directory))
    print(table([f"{args.batch} × {args.sequence} at {args.mbit_s:g} Mbit/s", "", "s", "gain", "MB"], rows))
    print(f"error of the gradient of the inputs: {gradient_error:.4f}")
    results = {
        "arguments": vars(args),
        "codec": codec,
        "perplexity": perplexity,
        "link": rows,
        "gradient_error": gradient_error,
    }
    print(f"written to {save_results('compression', results)}")


if __name__ == "__main__":
    main()
