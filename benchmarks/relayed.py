"""The cost of relays: pairs of servers on one machine of which none, one or both can't be dialled.

    python benchmarks/relayed.py [--shape 2048x4] [--repeats 5] [--quant_type int8]

Each pair of servers has its own relay (`swarmllm dht`). The pairs take turns; medians. Hidden servers dial public ones,
so only connections to a hidden server are relayed: the client's, and the one between two hidden servers. Loopback has
no latency, so this measures the work of relaying; a real relay adds its distance.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from common import SHAPES, median, save_random_model, save_results, table, timed_generation

from swarmllm import AutoDistributedModel, ClientConfig
from swarmllm.demo.local_swarm import LocalServer

WAYS = {
    "both can be dialled": ("public", "public"),
    "the last is hidden": ("public", "private"),
    "the first is hidden": ("private", "public"),
    "both are hidden": ("private", "private"),
}
RELAY = (sys.executable, "-m", "swarmllm", "dht")
LOOPBACK = ("--host_maddrs", "/ip4/127.0.0.1/tcp/0")
DECODED = 32


@contextmanager
def connected(path: Path, blocks: int, reachability: Sequence[str], options: Sequence[str]) -> Iterator[Any]:
    """A client of two servers, each with half of the blocks."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:

        def begin(name: str, *arguments: str, **more: Any) -> LocalServer:
            server = LocalServer([*arguments, *LOOPBACK], Path(logs) / name, **more)
            stack.callback(server.stop)
            server.wait_until_ready()
            return server

        joins = ("--initial_peers", *begin("relay", program=RELAY).maddrs)
        for number, how in enumerate(reachability):
            span = f"{number * blocks // 2}:{(number + 1) * blocks // 2}"
            where = ("--model", str(path), "--block_indices", span, "--reachability", how)
            begin(f"server-{number}", *where, *joins, *options)
        config = ClientConfig(initial_peers=joins[1:], speculation="off")
        yield stack.enter_context(AutoDistributedModel.from_pretrained(str(path), client_config=config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="2048x4")
    parser.add_argument("--quant_type", default="int8")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    options = ("--num_threads", "1", "--quant_type", args.quant_type, "--prefix_cache_tokens", "0")
    found: dict[str, dict[str, list[float]]] = {way: {"decode": [], "first": []} for way in WAYS}
    with ExitStack() as stack:
        path = save_random_model(args.shape, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        blocks = SHAPES[args.shape]["blocks"]
        models = {way: stack.enter_context(connected(path, blocks, who, options)) for way, who in WAYS.items()}
        for repeat in range(args.repeats + 1):
            for way, model in models.items():
                decoded = timed_generation(model, 8, DECODED).tokens_per_s
                first_s = timed_generation(model, 512, 1).first_token_s
                if repeat:  # the first warms up
                    found[way]["decode"].append(decoded)
                    found[way]["first"].append(first_s)
    medians = {way: {name: median(values) for name, values in one.items()} for way, one in found.items()}
    direct = next(iter(medians.values()))
    rows = [
        [way, one["decode"], one["decode"] / direct["decode"], one["first"], one["first"] / direct["first"]]
        for way, one in medians.items()
    ]
    print(table(["two servers", "tokens/s", "to direct", "first token of 512, s", "to direct"], rows))
    print(f"written to {save_results('relayed', medians)}")


if __name__ == "__main__":
    main()
