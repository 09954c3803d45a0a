"""A swarm over slow networks, beside offloading the same model, and beside what the network allows.

    python benchmarks/wan.py [--shape 512x12] [--servers 3 12] [--networks fast slow far] [--sequences 128 2048]
                             [--batches 1 64] [--tokens 8]

The scenarios of table 3 in Borzunov et al. 2022 (Petals): 1 Gbit/s and 100 Mbit/s with round trips of 4 ms, 100 Mbit/s
with 100 ms; single-batch inference after prefixes of several lengths, and forward passes of batches of 128 tokens. A
proxy in front of each server delays and limits what goes through it (`delay_proxy`). Accelerate's offloading keeps the
weights in memory or on disk and brings each block to the computing device (a GPU if there is one) when its turn comes;
"local" holds the whole model there. The floor of a token is (servers + 1) ways, the local model's time and the bytes
over the bandwidth; that of a batch, which goes through the client from server to server, 2 ways per server, the local
time, and the bytes over one server's link. Speculation is off. One table, results/wan.json and results/wan.svg.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import plots
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from common import median, save_random_model, save_results, table, timed_generation
from delay_proxy import SlowNetwork
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmllm import AutoDistributedModel, ClientConfig

BATCH_SEQUENCE = 128
MESSAGE_BYTES = 500
"""Assumed bytes of headers and frames per hop."""


@dataclass(frozen=True)
class Network:
    """Options of each server."""

    mbit_s: float
    round_trip_ms: float

    def __str__(self) -> str:
        return f"{self.mbit_s:g} Mbit/s, {self.round_trip_ms:g} ms"


NETWORKS = {"fast": Network(1000, 4), "slow": Network(100, 4), "far": Network(100, 100)}


@dataclass
class Row:
    """One measured figure."""

    what: str
    """`inference N` after a prefix of N tokens, or `forward B` of a batch."""
    where: str
    tokens_per_s: float
    floor_tokens_per_s: float | None = None


@dataclass
class Bench:
    """The measurements of every model."""

    sequences: list[int]
    batches: list[int]
    tokens: int
    repeats: int

    def __call__(self, where: str, model: Any) -> list[Row]:
        rows = []
        for sequence in self.sequences:
            rates = [timed_generation(model, sequence, self.tokens + 1).tokens_per_s for _ in range(self.repeats)]
            rows.append(Row(f"inference {sequence}", where, median(rates)))
        for batch in self.batches:
            ids = torch.randint(3, 4000, (batch, BATCH_SEQUENCE), generator=torch.Generator().manual_seed(batch))
            times = [forward_s(model, ids) for _ in range(self.repeats)]
            rows.append(Row(f"forward {batch}", where, batch * BATCH_SEQUENCE / median(times)))
        print(f"{where}: done", flush=True)
        return rows


def forward_s(model: Any, ids: Tensor) -> float:
    """Seconds of one forward of all blocks, without a cache."""
    on_device = ids if model.device.type == "meta" else ids.to(model.device)  # hooks move the offloaded weights
    started_at = time.perf_counter()
    with torch.no_grad():
        model.get_decoder()(input_ids=on_device, use_cache=False)
    return time.perf_counter() - started_at


def offloaded(path: Path, directory: Path, bench: Bench) -> list[Row]:
    """The whole model in one process, and accelerate's ways to run one that is too large for that."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device)
    rows = bench("local", model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    rows += bench("offload to memory", cpu_offload(model, execution_device=device))
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    rows += bench("offload to disk", disk_offload(model, str(directory), execution_device=device))
    return rows


def over(path: Path, num_servers: int, networks: Sequence[str], bench: Bench, local: dict[str, Row]) -> list[Row]:
    """One swarm over several networks."""
    rows = []
    options = {"quant_type": "none", "num_threads": 1}
    with SlowNetwork() as proxies, proxies.swarm(path, num_servers=num_servers, **options) as swarm:
        for name in networks:
            network = NETWORKS[name]
            proxies.set(delay_ms=network.round_trip_ms / 2, mbit_s=network.mbit_s)
            with AutoDistributedModel.from_pretrained(
                str(path),
                initial_peers=swarm.initial_peers,
                client_config=ClientConfig(speculation="off"),
                progress=False,
            ) as model:
                timed_generation(model, 16, 2)  # dials everybody, opens the links between servers
                measured = bench(f"{num_servers} servers, {network}", model)
            token_bytes = model.config.hidden_size * model.dtype.itemsize
            for row in measured:
                row.floor_tokens_per_s = floor(row, network, num_servers, token_bytes, local[row.what])
            rows += measured
    return rows


def floor(row: Row, network: Network, num_servers: int, token_bytes: int, local: Row) -> float:
    """Tokens per second if only distance, bandwidth and the model's own computing took time."""
    way_s, bytes_per_s = network.round_trip_ms / 2e3, network.mbit_s * 1e6 / 8
    if row.what.startswith("inference"):
        transfer_s = (num_servers + 1) * (token_bytes + MESSAGE_BYTES) / bytes_per_s
        return 1 / ((num_servers + 1) * way_s + 1 / local.tokens_per_s + transfer_s)
    num_tokens = int(row.what.split()[1]) * BATCH_SEQUENCE
    transfer_s = num_tokens * token_bytes / bytes_per_s
    return num_tokens / ((num_servers + 1) * way_s + num_tokens / local.tokens_per_s + transfer_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="512x12")
    parser.add_argument("--servers", type=int, nargs="*", default=[3, 12])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--sequences", type=int, nargs="*", default=[128, 2048])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=8, help="timed per inference")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    bench = Bench(args.sequences, args.batches, args.tokens, args.repeats)
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        path = save_random_model(args.shape, Path(directory))
        rows = offloaded(path, Path(directory) / "offload", bench)
        local = {row.what: row for row in rows if row.where == "local"}
        for num_servers in args.servers:
            rows += over(path, num_servers, args.networks, bench, local)
    cells = []
    for row in rows:
        share = "" if row.floor_tokens_per_s is None else row.tokens_per_s / row.floor_tokens_per_s
        cells.append([row.what, row.where, row.tokens_per_s, row.floor_tokens_per_s or "", share])
    print(table(["", "", "tokens/s", "floor tokens/s", "share of the floor"], sorted(cells, key=lambda cell: cell[0])))
    print(f"written to {save_results('wan', {'arguments': vars(args), 'rows': [asdict(row) for row in rows]})}")
    names = {f"{row.what}: {row.where}": row for row in rows}
    local_rates = {row.what: row.tokens_per_s for row in rows if row.where == "local"}
    plots.bars(
        "wan",
        "tokens/s as a share of the local model's; red: what distance, bandwidth and computing allow",
        {name: row.tokens_per_s / local_rates[row.what] for name, row in names.items()},
        {
            name: row.floor_tokens_per_s / local_rates[row.what]
            for name, row in names.items()
            if row.floor_tokens_per_s is not None
        },
    )


if __name__ == "__main__":
    main()
