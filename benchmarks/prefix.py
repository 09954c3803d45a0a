"""Time to first token of clients that ask with the same 512-token prompt, one after the other: 1st against 2nd…8th.

Once on servers that share prompts, once on servers that don't (`--prefix_cache_tokens 0`), in one run: the two swarms
take turns, prompt by prompt. A client is a session of its own here; whose process it comes from is nothing to a server.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import plots
import torch
from common import Stopwatch, median, save_random_model, save_results, table

from swarmllm import AutoDistributedModel, LocalSwarm

PROMPT_TOKENS = 512
NUM_CLIENTS = 8


def first_token_s(model: Any, ids: torch.Tensor) -> float:
    watch = Stopwatch()
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, streamer=watch)
    return watch.first_token_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="512x8")
    parser.add_argument("--prompts", type=int, default=3, help="different prompts, of which medians are taken")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        checkpoint = save_random_model(arguments.shape, Path(directory))
        options = {"num_servers": 2, "num_threads": 1, "quant_type": "none"}
        clients: dict[str, Any] = {}
        for name, flags in (("shared", {}), ("not shared", {"prefix_cache_tokens": 0})):
            swarm = stack.enter_context(LocalSwarm(checkpoint, **options, **flags))
            clients[name] = stack.enter_context(
                AutoDistributedModel.from_pretrained(str(checkpoint), initial_peers=swarm.initial_peers)
            )
        random = torch.Generator().manual_seed(1)
        times: dict[str, list[list[float]]] = {name: [] for name in clients}
        for number in range(arguments.prompts + 1):
            ids = torch.randint(3, 4000, (1, PROMPT_TOKENS), generator=random)
            taken: dict[str, list[float]] = {name: [] for name in clients}
            for _ in range(NUM_CLIENTS):
                for name, model in clients.items():
                    taken[name].append(first_token_s(model, ids))
            if number:  # the first prompt warms up connections and kernels
                for name, values in taken.items():
                    times[name].append(values)
    rows, results = [], {}
    for name, of_prompts in times.items():
        first = median(values[0] for values in of_prompts)
        later = median(value for values in of_prompts for value in values[1:])
        rows.append((name, first * 1e3, later * 1e3, later / first))
        results[name] = of_prompts
    print(f"\nTime to first token, {PROMPT_TOKENS}-token prompt, {arguments.shape}, 2 servers\n")
    print(table(("pages", "1st client, ms", f"2nd…{NUM_CLIENTS}th, ms", "ratio"), rows))
    print(f"\n{save_results(f'prefix-{arguments.shape}', results)}")
    plots.lines(
        f"prefix-{arguments.shape}",
        f"ms to the first token after the same {PROMPT_TOKENS} tokens",
        "client",
        {
            name: (
                range(1, NUM_CLIENTS + 1),
                [1e3 * median(values) for values in zip(*of_prompts, strict=True)],
            )
            for name, of_prompts in times.items()
        },
    )


if __name__ == "__main__":
    main()
