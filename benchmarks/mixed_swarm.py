"""Fourteen servers of mixed speed, four of them hidden, over a slow network, beside three fast ones.

    python benchmarks/mixed_swarm.py [--delay_ms 20] [--mbit_s 100] [--repeats 3]

The shape of the "real world" row in table 3 of Borzunov et al. 2022 (Petals): 14 smaller machines on two continents, 4
of them behind firewalls. Servers take a stated time per token and block (`paced_server`), choose 4 of 12 blocks
themselves, and are reached through proxies that delay and limit (`delay_proxy`); the hidden ones through relays, which
are those of the others. Then four servers are killed in the midst of a text, and the same is measured once more.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import transformers
from common import median, save_random_model, save_results, table, timed_generation
from delay_proxy import SlowNetwork, SlowSwarm
from transformers import AutoModelForCausalLM

from swarmllm import AutoDistributedModel, ClientConfig

SHAPE = "512x12"
NUM_BLOCKS, OF_EACH = 12, 4
FAST_MS, MEDIUM_MS, SLOW_MS = 0.1, 0.2, 0.4
"""Milliseconds per token and block."""
MIXED = [(FAST_MS, False)] * 2 + [(MEDIUM_MS, False)] * 5 + [(SLOW_MS, False)] * 3 + [(MEDIUM_MS, True)] * 4
"""For each server: its pace, and whether it is hidden."""
KILLED = (1, 4, 8, 12)
SEQUENCE = 128
TOKENS = 16


def options_of(pace_ms: float, hidden: bool) -> dict[str, Any]:
    program = [sys.executable, str(Path(__file__).with_name("paced_server.py")), str(pace_ms)]
    away = {"reachability": "private", "announce_maddrs": None} if hidden else {}
    return {"program": program, "quant_type": "none", "num_threads": 1, "update_period": 5, **away}


def forward_rate(model: Any, batch: int) -> float:
    """Tokens per second of one forward of all blocks, without a cache."""
    ids = torch.randint(3, 4000, (batch, SEQUENCE), generator=torch.Generator().manual_seed(batch))
    began_at = time.perf_counter()
    with torch.no_grad():
        model.get_decoder()(input_ids=ids, use_cache=False)
    return batch * SEQUENCE / (time.perf_counter() - began_at)


def measured(name: str, path: Path, swarm: SlowSwarm, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    config = ClientConfig(initial_peers=tuple(swarm.initial_peers), speculation="off")
    with AutoDistributedModel.from_pretrained(str(path), client_config=config, progress=False) as model:
        timed_generation(model, 16, 2)  # dials everybody, opens the links between servers
        row: dict[str, Any] = {"swarm": name}
        for prefix in (128, 2048):
            rates = [timed_generation(model, prefix, TOKENS + 1).tokens_per_s for _ in range(args.repeats)]
            row[f"inference after {prefix}"] = median(rates)
        for batch in (1, 64):
            row[f"forward of {batch}"] = median(forward_rate(model, batch) for _ in range(args.repeats))
        row["hops"] = len(model.swarm.route())
    print(row, flush=True)
    return row


def killed_in_mid_text(path: Path, swarm: SlowSwarm) -> bool:
    """True if the text is the local model's although servers are killed during it."""
    ids = torch.randint(3, 4000, (1, SEQUENCE), generator=torch.Generator().manual_seed(7))
    options = {"max_new_tokens": 4 * TOKENS, "do_sample": False}
    expected = AutoModelForCausalLM.from_pretrained(path, dtype="auto").generate(ids, **options)
    config = ClientConfig(initial_peers=tuple(swarm.initial_peers), speculation="off")
    with AutoDistributedModel.from_pretrained(str(path), client_config=config, progress=False) as model:
        timed_generation(model, 16, 2)
        timer = Timer(1.0, lambda: [swarm.servers[number].kill() for number in KILLED])
        timer.start()
        found = model.generate(ids, **options)
        timer.join()
    return bool(torch.equal(found, expected))


@contextmanager
def swarm_of(network: SlowNetwork, path: Path, servers: Sequence[tuple[float, bool]]) -> Iterator[SlowSwarm]:
    """All these servers, online. Each chooses the weakest blocks when it joins."""
    with network.swarm(path, spans=[(0, OF_EACH)], **options_of(*servers[0])) as swarm:
        for pace_ms, hidden in servers[1:]:
            swarm.add_server(num_blocks=OF_EACH, **options_of(pace_ms, hidden))
        yield swarm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--delay_ms", type=float, default=20.0, help="one way")
    parser.add_argument("--mbit_s", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        path = save_random_model(SHAPE, Path(directory))
        with SlowNetwork(delay_ms=args.delay_ms, mbit_s=args.mbit_s) as network:
            with swarm_of(network, path, [(FAST_MS, False)] * 3) as swarm:
                rows.append(measured("3 fast servers", path, swarm, args))
            with swarm_of(network, path, MIXED) as swarm:
                rows.append(measured("14 mixed, 4 hidden", path, swarm, args))
                same = killed_in_mid_text(path, swarm)
                rows.append(measured("10 left of them", path, swarm, args))
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"the text in which four were killed is the local model's: {same}")
    print(f"written to {save_results('mixed_swarm', {'arguments': vars(args), 'rows': rows, 'same_tokens': same})}")


if __name__ == "__main__":
    main()
