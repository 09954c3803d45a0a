"""How long people wait before the first token, and what a server costs: on the embedded model, medians of some runs.

python benchmarks/startup.py [--repeats 3]
python benchmarks/startup.py --shape 2048x8 70b [--quant_type int8 nf4] [--threads 1] [--repeats 3]

With shapes: seconds from the server's command until it is online, the first time and when it has been started before
(what probes find is kept), what of it was reading and quantizing, and the goal: 1.5 times the sum of importing, reading
the bytes and quantizing them at 0.5 GB/s and core. Weights are random; those of 70b are of one block, copied.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from common import save_results, table
from safetensors.torch import save_file
from transformers import LlamaConfig

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.models.architecture import blocks_class
from swarmllm.models.checkpoint.skeleton import on_meta

SHAPES = {
    "2048x8": {"hidden": 2048, "intermediate": 5632, "heads": 32, "kv_heads": 8, "blocks": 8},
    "4096x6": {"hidden": 4096, "intermediate": 11008, "heads": 32, "kv_heads": 8, "blocks": 6},
    "70b": {"hidden": 8192, "intermediate": 28672, "heads": 64, "kv_heads": 8, "blocks": 2},
}
GOAL_GB_S = 0.5
"""Bytes of bfloat16 that a core quantizes in a second."""

CLIENT = """
import sys, time
started = time.perf_counter()
import torch
torch.set_num_threads(1)
from transformers import AutoTokenizer
from swarmllm import AutoDistributedModel
imported = time.perf_counter()
path, peers = sys.argv[1], sys.argv[2:]
with AutoDistributedModel.from_pretrained(path, initial_peers=peers) as model:
    connected = time.perf_counter()
    ids = AutoTokenizer.from_pretrained(path)("Once upon a time", return_tensors="pt").input_ids
    model.generate(ids, max_new_tokens=1)
    print(imported - started, connected - imported, time.perf_counter() - connected)
"""


def save_blocks(shape: str, directory: Path) -> Path:
    """A Llama in bfloat16 with one shard for each block, whose bytes are the same."""
    sizes, path = SHAPES[shape], directory / shape
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["blocks"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        dtype=torch.bfloat16,
    )
    config.save_pretrained(path)
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    files: dict[str, dict[str, torch.Tensor]] = {}
    weight_map = {}
    for name, tensor in on_meta(blocks_class(config), config).state_dict().items():
        block = name.split(".layers.")[1].partition(".")[0] if ".layers." in name else "ends"
        weight_map[name] = f"{block}.safetensors"
        if block in ("0", "ends"):
            values = noise.repeat(-(-tensor.numel() // len(noise)))[: tensor.numel()].view(tensor.shape)
            files.setdefault(weight_map[name], {})[name] = values.clone()
    for filename, tensors in files.items():
        save_file(tensors, path / filename, {"format": "pt"})
    size = int.from_bytes((path / "0.safetensors").read_bytes()[:8], "little")
    for block in range(1, sizes["blocks"]):  # less than ten of them, so that names in the header stay as long
        shutil.copyfile(path / "0.safetensors", path / f"{block}.safetensors")
        with (path / f"{block}.safetensors").open("r+b") as file:
            file.seek(8)
            header = file.read(size).replace(b".layers.0.", f".layers.{block}.".encode())
            file.seek(8)
            file.write(header)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def online(path: Path, blocks: int, quant_type: str, threads: int) -> dict[str, float]:
    """Seconds until a server of these blocks is online, and what its log says of them."""
    began_at = time.perf_counter()
    with LocalSwarm(path, spans=[(0, blocks)], quant_type=quant_type, num_threads=threads, dtype="bfloat16") as swarm:
        found = {"online": time.perf_counter() - began_at}
        log = swarm.servers[0].log_path.read_text()
    for part, words in (("reading", "reading blocks"), ("checking", "comparing"), ("probing", "looking at")):
        times = re.findall(rf"{words}.* took ([0-9.]+) s", log)
        found[part] = sum(map(float, times))
    return found


def seconds_of_import() -> float:
    began_at = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import swarmllm.server.server, transformers"], check=True)
    return time.perf_counter() - began_at


def starts_of(shape: str, quant_type: str, args: argparse.Namespace, directory: Path) -> list[object]:
    """A row of the table; times are medians."""
    path = directory / shape
    if not path.exists():
        save_blocks(shape, directory)
    sizes = SHAPES[shape]
    files = [path / f"{block}.safetensors" for block in range(sizes["blocks"])]
    num_bytes = sum(file.stat().st_size for file in files)
    firsts, others, imports, reads = [], [], [], []
    for number in range(args.repeats):
        began_at = time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.read(16 << 20):
                    pass
        reads.append(time.perf_counter() - began_at)
        imports.append(seconds_of_import())
        os.environ["SWARMLLM_CACHE"] = str(directory / f"cache-{shape}-{quant_type}-{number}")
        firsts.append(online(path, sizes["blocks"], quant_type, args.threads))
        others.append(online(path, sizes["blocks"], quant_type, args.threads))
    first, other = (
        {part: statistics.median(run[part] for run in runs) for part in runs[0]} for runs in (firsts, others)
    )
    import_s, read_s = statistics.median(imports), statistics.median(reads)
    goal = 1.5 * (import_s + read_s + num_bytes / 1e9 / GOAL_GB_S / args.threads)
    speed = num_bytes / 1e9 / max(other["reading"], 0.05) / args.threads
    times = [first["online"], other["online"], goal, import_s, read_s, other["reading"], first["probing"], speed]
    return [shape, quant_type, f"{num_bytes / 1e9:.2f}", *times]


def starts(args: argparse.Namespace) -> None:
    """Print how long servers of these shapes need."""
    header = ["shape", "weights", "GB", "online, first time", "online", "goal", "import", "read", "read and quantize"]
    header += ["probes, first time", "GB/s and core"]
    with tempfile.TemporaryDirectory() as directory:
        rows = [starts_of(shape, kind, args, Path(directory)) for shape in args.shape for kind in args.quant_type]
    print(f"{args.threads} thread(s), load of the machine {os.getloadavg()[0]:.1f}, seconds")
    print(table(header, rows))
    print(f"written to {save_results('starts', [dict(zip(header, row, strict=True)) for row in rows])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, help="servers of random weights in place of the embedded model"
    )
    parser.add_argument("--quant_type", nargs="+", default=["int8", "nf4"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.shape:
        starts(args)
    else:
        waits(args)


def waits(args: argparse.Namespace) -> None:
    """Print what people wait for with the embedded model."""
    path = embedded_model_path()
    runs: list[dict[str, float]] = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        with LocalSwarm(path, spans=[(0, 8)], quant_type="none", num_threads=1) as swarm:
            online_s = time.perf_counter() - started
            command = [sys.executable, "-c", CLIENT, path, *swarm.initial_peers]
            started = time.perf_counter()
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            imports_s, connect_s, first_s = map(float, output.split())
            server = psutil.Process(swarm.servers[0].pid)
            family = [server, *server.children(recursive=True)]
            runs.append(
                {
                    "server command to ONLINE, s": online_s,
                    "client: imports, s": imports_s,
                    "connect, s": connect_s,
                    "first token, s": first_s,
                    "whole client process, s": time.perf_counter() - started,
                    "server processes": len(family),
                    "server memory (PSS), MiB": sum(process.memory_full_info().pss for process in family) / 2**20,
                }
            )
    imports = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import swarmllm"], check=True)
        imports.append(time.perf_counter() - started)
    result = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    result["import swarmllm, whole process, s"] = statistics.median(imports)
    print(table(["", "median"], [[name, value] for name, value in result.items()]))
    print(f"written to {save_results('startup', result)}")


if __name__ == "__main__":
    main()
