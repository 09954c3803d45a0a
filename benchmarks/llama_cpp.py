"""Beside llama.cpp, on the same GGUF file, with the same threads, taking turns: prefill and decode, tokens per second.

    pip install --target /tmp/gguf gguf                    # writes the file; never a dependency
    cmake -B /tmp/llama -DGGML_RPC=ON … && cmake --build /tmp/llama --target llama-bench ggml-rpc-server
    PYTHONPATH=/tmp/gguf python benchmarks/llama_cpp.py /tmp/llama/bin [--kinds Q8_0 Q4_K] [--shape 2048x16]
        [--depths 0 2048]

One process: our blocks in this process against `llama-bench`, both with one thread. (Ours lacks embeddings and head,
which take 1 % with the small vocabulary of these models.) `--depths`: positions before those that are decoded.
Two servers: two of ours, each with half of the blocks, and a client that generates, against `llama-bench` with two
`rpc-server`s; one thread for each server. The ratio is that of the medians. Writes results/llama_cpp.json.
"""

import argparse
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from common import SHAPES, median, save_results, table, timed_generation

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm
from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import block_search
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.span_cache import SpanCache

VOCABULARY = 4096
DECODED = 32
PIECE = 512
"""Positions before a step are computed so many at a time."""
SEARCHED = ("Q4_K", "Q5_K", "Q6_K")
"""Kinds into which the package gguf rounds nothing."""
MATRICES = {
    "attn_q": ("hidden", "hidden"),
    "attn_k": ("keys", "hidden"),
    "attn_v": ("keys", "hidden"),
    "attn_output": ("hidden", "hidden"),
    "ffn_gate": ("inner", "hidden"),
    "ffn_up": ("inner", "hidden"),
    "ffn_down": ("hidden", "inner"),
}
"""Rows and columns."""


def save_model(shape: str, kind: str, directory: Path) -> Path:
    """A Llama with random weights; all blocks have the same, which changes no speed."""
    sizes, path = SHAPES[shape], directory / f"{shape}-{kind}.gguf"
    head_dim = sizes["hidden"] // sizes["heads"]
    width = {"hidden": sizes["hidden"], "keys": head_dim * sizes["kv_heads"], "inner": sizes["intermediate"]}
    stored, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        weights = random.normal(0, 0.02, (rows, columns)).astype(np.float32)
        if kind in SEARCHED:
            return block_search.quantize(torch.from_numpy(weights), int(stored)).numpy()
        return gguf.quants.quantize(weights, stored)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(sizes["hidden"])
    writer.add_block_count(sizes["blocks"])
    writer.add_feed_forward_length(sizes["intermediate"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    ones = np.ones(sizes["hidden"], np.float32)
    writer.add_tensor("token_embd.weight", matrix(VOCABULARY, sizes["hidden"]), raw_dtype=stored)
    writer.add_tensor("output.weight", matrix(VOCABULARY, sizes["hidden"]), raw_dtype=stored)
    writer.add_tensor("output_norm.weight", ones)
    of_block = {name: matrix(width[rows], width[columns]) for name, (rows, columns) in MATRICES.items()}
    for block in range(sizes["blocks"]):
        for name, data in of_block.items():
            writer.add_tensor(f"blk.{block}.{name}.weight", data, raw_dtype=stored)
        writer.add_tensor(f"blk.{block}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{block}.ffn_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.inference_mode()
def one_process(packer: Packer, hidden_size: int, prompts: list[int], depths: list[int]) -> dict[str, float]:
    """Tokens per second, as a server computes them."""
    blocks = packer.blocks

    def run(count: int, cache: SpanCache) -> None:
        hidden = torch.randn(1, count, hidden_size).to(blocks.dtype)
        inputs = BlockInputs(hidden_states=hidden, batch_size=1, seq_len=count)
        (outcome,) = packer.run_calls([SessionCall(inputs, blocks.span, cache)])
        assert not isinstance(outcome, Exception), outcome

    found = {}
    for count in prompts:
        began_at = time.perf_counter()
        run(count, blocks.new_cache())
        found[f"prefill {count}"] = count / (time.perf_counter() - began_at)
    for depth in depths:
        cache = blocks.new_cache()
        for start in range(0, depth, PIECE):
            run(min(PIECE, depth - start), cache)
        run(1, cache)
        began_at = time.perf_counter()
        for _ in range(DECODED):
            run(1, cache)
        found[decode_at(depth)] = DECODED / (time.perf_counter() - began_at)
    return found


def decode_at(depth: int) -> str:
    return f"decode after {depth}" if depth else "decode"


def llama_bench(
    bin_directory: Path, model: Path, prompts: list[int], depths: list[int], *options: str
) -> dict[str, float]:
    """Tokens per second. Decoding is without flash attention, which takes 1.6 to 3 times as long after 1000 to 4000
    positions."""
    command = [bin_directory / "llama-bench", "-m", model, "-r", "1", "-t", "1", "-o", "json", *options]
    found = {}
    for tests in (
        ("-n", "0", "-p", ",".join(map(str, prompts))),
        ("-p", "0", "-n", str(DECODED), "-d", ",".join(map(str, depths)), "-fa", "0"),
    ):
        for one in json.loads(subprocess.check_output([*command, *tests], stderr=subprocess.DEVNULL)):
            name = f"prefill {one['n_prompt']}" if one["n_prompt"] else decode_at(one["n_depth"])
            found[name] = one["avg_ts"]
    return found


@contextmanager
def rpc_servers(bin_directory: Path) -> Iterator[str]:
    """Two of llama.cpp's workers; their addresses."""
    names = ("rpc-server", "ggml-rpc-server")
    program = next(bin_directory / name for name in names if (bin_directory / name).exists())
    ports = []
    for _ in range(2):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    command = [program, "-H", "127.0.0.1", "-t", "1", "-p"]
    running = [subprocess.Popen([*command, str(port)], stdout=-3, stderr=-3) for port in ports]
    try:
        for port in ports:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
        yield ",".join(f"127.0.0.1:{port}" for port in ports)
    finally:
        for one in running:
            one.kill()
            one.wait()


def two_servers(model: Any, prompts: list[int], depths: list[int]) -> dict[str, float]:
    """Tokens per second."""
    found = {f"prefill {count}": count / timed_generation(model, count, 1).first_token_s for count in prompts}
    return found | {
        decode_at(depth): timed_generation(model, max(depth, 1), DECODED + 1).tokens_per_s for depth in depths
    }


def compare(ours: Any, theirs: Any, repeats: int) -> list[list[Any]]:
    """Rows of (what, ours, theirs, ratio), taking turns; the first turn warms up."""
    turns = [(ours(), theirs()) for _ in range(repeats + 1)][1:]
    rows = []
    for what in turns[0][0]:
        mine, other = (median(turn[side][what] for turn in turns) for side in (0, 1))
        rows.append([what, mine, other, mine / other])
    return rows


def measure(arguments: argparse.Namespace, kind: str, directory: Path) -> dict[str, Any]:
    """Tables of one and of two processes."""
    path, sizes = save_model(arguments.shape, kind, directory), SHAPES[arguments.shape]
    torch.set_num_threads(1)
    span = Span(0, sizes["blocks"])
    blocks = load_block_span(open_checkpoint(str(path)), span, activations=arguments.activations, progress=False)
    packers = [Packer(blocks, right_ways(blocks))]
    packers[0].trace()
    del blocks
    alone = compare(
        lambda: one_process(packers[0], sizes["hidden"], arguments.prompts, arguments.depths),
        lambda: llama_bench(arguments.bin, path, arguments.prompts, arguments.depths),
        arguments.repeats,
    )
    packers.clear()  # the servers need the memory
    middle = sizes["blocks"] // 2
    with (
        LocalSwarm(
            path,
            spans=[(0, middle), (middle, sizes["blocks"])],
            num_threads=1,
            activations=arguments.activations,
        ) as swarm,
        rpc_servers(arguments.bin) as rpc,
    ):
        config = ClientConfig(initial_peers=tuple(swarm.initial_peers), speculation="off")
        with AutoDistributedModel.from_pretrained(str(path), client_config=config) as model:
            together = compare(
                lambda: two_servers(model, arguments.prompts, arguments.depths),
                lambda: llama_bench(
                    arguments.bin, path, arguments.prompts, arguments.depths, "--rpc", rpc, "-ngl", "99"
                ),
                arguments.repeats,
            )
    return {"one process": alone, "two servers": together}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bin", type=Path, help="directory of llama-bench and rpc-server")
    parser.add_argument("--shape", choices=SHAPES, default="2048x16")
    parser.add_argument("--kinds", nargs="+", default=["Q8_0", "Q4_K"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--depths", nargs="+", type=int, default=[0], help="positions before those that are decoded")
    parser.add_argument("--activations", choices=["none", "int8"], default="none", help="of our servers")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory() as directory:
            results[kind] = measure(arguments, kind, Path(directory))
        for where, rows in results[kind].items():
            print(f"\n{kind}, {where}, tokens/s\n")
            print(table(["", "swarmllm", "llama.cpp", "ratio"], rows), flush=True)
    print(f"\n{save_results('llama_cpp', results)}")


if __name__ == "__main__":
    main()
