"""Batches and gradients: next to the local model, through slow networks, and with an interactive client beside them.

    python benchmarks/training.py [--repeats 5] [--parts local pipeline depth push overlap together]
                                  [--delays 0 5 20 50] [--servers 1 2 4] [--push-servers 4]

local: a forward of 16x128 tokens and a step of prompt tuning, by two servers of one thread each and by the local model
with one thread, in turn; what counts is the ratio. Each once with the head of a language model, which the client
computes when all is there, and once without (as Petals' benchmarks measure: hidden states, and two classes). The client
has one thread as well, and then one per core.
pipeline: tokens per second of forward and of forward and backward, over servers behind a delay (one way), the batch in
1 micro-batch, which is relayed from server to server as a whole, and in more. The servers' blocks take a stated time
(`paced_server.py`), 20 ms for 256 tokens on each of 4 servers, so that four servers are four even on two cores.
depth: how many times as fast as one such server 2 and 4 are, which hold the same blocks together, by rows of the batch;
in turn (the shape of EnergonAI's figure 11).
push: seconds of a forward and of a forward and backward over such servers, passed on from server to server and relayed
by the client, in turn.
overlap: the same over a server of the first half and three of the second, each a third as fast: by all, and by the best
route alone, in turn.
together: time between tokens of an interactive client, alone and beside two clients that train.
Writes results/training.json.
"""

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from common import median, save_random_model, save_results, table, timed_generation
from delay_proxy import SlowNetwork
from peft import PromptTuningConfig, TaskType, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from swarmllm import (
    AutoDistributedModel,
    AutoDistributedModelForSequenceClassification,
    ClientConfig,
    LocalSwarm,
)
from swarmllm.client.batches import batch_runner

ROWS, LENGTH = 16, 128
TOKENS = ROWS * LENGTH
MS_PER_TOKEN_AND_BLOCK = 20 / 256 / 2
NUM_BLOCKS = 8
DEFAULT = 0
"""Micro-batches: as the client makes them by itself."""


def batch() -> Tensor:
    return torch.randint(3, 4000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def tuned(model: Any) -> Callable[[], None]:
    """One step of prompt tuning on that model: of the next token where it has a head for it, else of classes."""
    torch.manual_seed(0)
    ids, classify = batch(), not model.can_generate()
    config = PromptTuningConfig(task_type=TaskType.SEQ_CLS if classify else TaskType.CAUSAL_LM, num_virtual_tokens=8)
    adapted = get_peft_model(model.requires_grad_(False), config)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
    labels = torch.arange(ROWS) % 2 if classify else ids

    def step() -> None:
        adapted(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_of(model: Any) -> Callable[[], None]:
    ids = batch()

    @torch.no_grad()
    def forward() -> None:
        model(ids, use_cache=False)

    return forward


def beside_the_local_model(path: Path, repeats: int) -> dict[str, float]:
    """Seconds here and there, and how many times faster the swarm is: medians over alternating runs."""
    result = {}
    classes = {"num_labels": 2, "pad_token_id": 0}
    local = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    local_classifier = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto", **classes)
    with (
        LocalSwarm(path, num_servers=2, quant_type="none", num_threads=1) as swarm,
        AutoDistributedModel.from_pretrained(str(path), initial_peers=swarm.initial_peers) as remote,
        AutoDistributedModelForSequenceClassification.from_pretrained(
            str(path), initial_peers=swarm.initial_peers, **classes
        ) as remote_classifier,
    ):
        for name, make, mine, theirs in (
            ("forward", forward_of, local, remote),
            ("forward without head", forward_of, local.base_model, remote.base_model),
            ("prompt tuning", tuned, local, remote),
            ("prompt tuning, classes", tuned, local_classifier, remote_classifier),
        ):
            here, there = make(mine), make(theirs)
            here(), there()  # warm-up
            runs = [(seconds(here), seconds(there), seconds(with_all_threads(there))) for _ in range(repeats)]
            result[f"{name} local s"] = median(one for one, _, _ in runs)
            result[f"{name} swarm s"] = median(other for _, other, _ in runs)
            result[f"{name} ratio"] = median(one / other for one, other, _ in runs)
            result[f"{name} ratio, client with all cores"] = median(one / free for one, _, free in runs)
    return result


def with_all_threads(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        try:
            call()
        finally:
            torch.set_num_threads(before)

    return run


@contextlib.contextmanager
def cut_into(num_micro_batches: int) -> Iterator[None]:
    """Batches of TOKENS go in so many micro-batches, all under way at once."""
    per_hop, min_tokens = batch_runner.MICRO_BATCHES_PER_HOP, batch_runner.MIN_TOKENS
    if num_micro_batches != DEFAULT:
        batch_runner.MICRO_BATCHES_PER_HOP, batch_runner.MIN_TOKENS = ROWS, TOKENS // num_micro_batches
    try:
        yield
    finally:
        batch_runner.MICRO_BATCHES_PER_HOP, batch_runner.MIN_TOKENS = per_hop, min_tokens


def paced(speed: float = 1.0) -> dict[str, Any]:
    """Options for servers whose blocks take a stated time, or are so many times as fast."""
    program = [sys.executable, str(Path(__file__).with_name("paced_server.py")), str(MS_PER_TOKEN_AND_BLOCK / speed)]
    return {"quant_type": "none", "num_threads": 1, "throughput": 100.0 * speed, "program": program}


def pipeline(path: Path, servers: list[int], delays: list[float], repeats: int) -> list[dict[str, Any]]:
    """Tokens per second by servers, delay and micro-batches; the micro-batches of each case take turns."""
    results: list[dict[str, Any]] = []
    with SlowNetwork() as network:
        for num_servers in servers:
            config = ClientConfig(max_batch_tokens=TOKENS)
            with network.swarm(path, num_servers=num_servers, **paced()) as swarm:
                for delay_ms in delays:
                    network.set(delay_ms=delay_ms)
                    with AutoDistributedModel.from_pretrained(
                        str(path), initial_peers=swarm.initial_peers, client_config=config
                    ) as model:
                        results += _pipeline_case(model, num_servers, delay_ms, repeats)
    return results


def _pipeline_case(model: Any, num_servers: int, delay_ms: float, repeats: int) -> list[dict[str, Any]]:
    cases = (1, 2, 4, 8, 16, DEFAULT)
    hidden = torch.randn(ROWS, LENGTH, model.config.hidden_size)
    blocks = model.remote_blocks

    def forward() -> None:
        with torch.no_grad():
            blocks(hidden)

    def both() -> None:
        blocks(hidden.clone().requires_grad_()).sum().backward()

    both()  # warm-up: connections
    times: dict[int, list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            with cut_into(case):
                times[case].append((seconds(forward), seconds(both)))
    found = []
    for case in cases:
        of_relayed = [relayed / own for (_, relayed), (_, own) in zip(times[1], times[case], strict=True)]
        found.append(
            {
                "servers": num_servers,
                "delay_ms": delay_ms,
                "micro-batches": case or "default",
                "forward tokens/s": TOKENS / median(one for one, _ in times[case]),
                "forward+backward tokens/s": TOKENS / median(other for _, other in times[case]),
                "x relaying": median(of_relayed),
            }
        )
    return found


def depth(path: Path, servers: list[int], repeats: int) -> list[dict[str, Any]]:
    """How many times as fast as the first number of servers the others are, by rows."""
    found = []
    with contextlib.ExitStack() as stack:
        models = []
        for num_servers in servers:
            swarm = stack.enter_context(LocalSwarm(path, num_servers=num_servers, **paced()))
            client = AutoDistributedModel.from_pretrained(str(path), initial_peers=swarm.initial_peers)
            models.append(stack.enter_context(client))
        for rows in (1, 4, 16, 32):
            for num_servers, model in zip(servers[1:], models[1:], strict=True):
                times = _in_turn([model, models[0]], rows, repeats, f"{num_servers} servers", f"{servers[0]} server")
                speeds = {f"{what} x": times[f"{what} x"] for what in ("forward", "forward+backward")}
                found.append({"servers": num_servers, "batch": f"{rows} x {LENGTH}", **speeds})
    return found


def pushing(path: Path, num_servers: int, delays: list[float], repeats: int) -> list[dict[str, Any]]:
    """Seconds by batch and delay, with `ClientConfig.push` and without it, in turn."""
    results: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(SlowNetwork())
        swarm = stack.enter_context(network.swarm(path, num_servers=num_servers, **paced()))
        for delay_ms in delays:
            network.set(delay_ms=delay_ms)
            models = [
                stack.enter_context(
                    AutoDistributedModel.from_pretrained(
                        str(path), initial_peers=swarm.initial_peers, client_config=ClientConfig(push=push)
                    )
                )
                for push in (True, False)
            ]
            results += [_pushing_case(models, rows, repeats) | {"delay_ms": delay_ms} for rows in (1, ROWS)]
    return results


def _pushing_case(models: list[Any], rows: int, repeats: int) -> dict[str, Any]:
    return {"batch": f"{rows} x {LENGTH}"} | _in_turn(models, rows, repeats, "pushed", "relayed")


def _in_turn(models: list[Any], rows: int, repeats: int, name: str, other: str) -> dict[str, float]:
    """Seconds of a forward, and with its backward, by two clients; and how many times as fast the first one is."""
    hidden = torch.randn(rows, LENGTH, models[0].config.hidden_size)

    def forward(model: Any) -> None:
        with torch.no_grad():
            model.remote_blocks(hidden)

    def both(model: Any) -> None:
        model.remote_blocks(hidden.clone().requires_grad_()).sum().backward()

    result: dict[str, float] = {}
    for what, work in (("forward", forward), ("forward+backward", both)):
        for model in models:
            work(model), work(model)  # warm-up: connections
        runs = [[seconds(partial(work, model)) for model in models] for _ in range(repeats)]
        result[f"{what} {name} s"] = median(first for first, _ in runs)
        result[f"{what} {other} s"] = median(second for _, second in runs)
        result[f"{what} x"] = median(second / first for first, second in runs)
    return result


def overlapping(path: Path, repeats: int) -> dict[str, float]:
    """Forward, and forward and backward, where one server's successors are three that are a third as fast: over all of
    them as they are found, and over the best route alone, in turn."""
    with contextlib.ExitStack() as stack:
        swarm = stack.enter_context(LocalSwarm(path, spans=[(0, 4)], **paced(0.6)))
        for _ in range(3):
            swarm.add_server((4, 8), **paced(0.2))
        models = [
            stack.enter_context(
                AutoDistributedModel.from_pretrained(
                    str(path), initial_peers=swarm.initial_peers, client_config=ClientConfig(max_parallel_routes=most)
                )
            )
            for most in (4, 1)
        ]
        return _in_turn(models, 2 * ROWS, repeats, "flow", "one route")


def together(path: Path, num_tokens: int = 60) -> dict[str, float]:
    """95th percentile of ms between the tokens of one client, alone and beside two trainers."""
    with contextlib.ExitStack() as stack:
        swarm = stack.enter_context(LocalSwarm(path, num_servers=2, quant_type="none", num_threads=1))
        talker, *trainers = [
            stack.enter_context(AutoDistributedModel.from_pretrained(str(path), initial_peers=swarm.initial_peers))
            for _ in range(3)
        ]
        timed_generation(talker, 32, 4)  # warm-up
        alone = _p95_ms(talker, num_tokens)
        ended, steps = threading.Event(), [0, 0]

        def train(index: int) -> None:
            step = tuned(trainers[index])
            while not ended.is_set():
                step()
                steps[index] += 1

        threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        try:
            while not all(steps):
                time.sleep(0.1)
            before, started = sum(steps), time.perf_counter()
            beside = _p95_ms(talker, num_tokens)
            rate = (sum(steps) - before) * TOKENS / (time.perf_counter() - started)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    return {"alone p95 ms": alone, "beside p95 ms": beside, "ratio": beside / alone, "trained tokens/s": rate}


def _p95_ms(model: Any, num_tokens: int) -> float:
    times = timed_generation(model, 32, num_tokens).times
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    return gaps[int(0.95 * len(gaps))] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures batches and gradients through a swarm.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=["local", "pipeline", "depth", "push", "overlap", "together"])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--push-servers", type=int, default=4)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 5.0, 20.0, 50.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        if "local" in args.parts:
            results["local"] = beside_the_local_model(save_random_model("512x8", Path(directory)), args.repeats)
            print(table(("what", "value"), list(results["local"].items())), flush=True)
        if "pipeline" in args.parts:
            path = save_random_model("64x8", Path(directory))
            results["pipeline"] = pipeline(path, args.servers, args.delays, args.repeats)
            print(table(list(results["pipeline"][0]), [list(row.values()) for row in results["pipeline"]]), flush=True)
        if "depth" in args.parts:
            results["depth"] = depth(save_random_model("64x8", Path(directory)), args.servers, args.repeats)
            print(table(list(results["depth"][0]), [list(row.values()) for row in results["depth"]]), flush=True)
        if "push" in args.parts:
            path = save_random_model("64x12" if args.push_servers > 8 else "64x8", Path(directory))
            results["push"] = pushing(path, args.push_servers, args.delays, args.repeats)
            print(table(list(results["push"][0]), [list(row.values()) for row in results["push"]]), flush=True)
        if "overlap" in args.parts:
            results["overlap"] = overlapping(save_random_model("64x8", Path(directory)), args.repeats)
            print(table(("what", "value"), list(results["overlap"].items())), flush=True)
        if "together" in args.parts:
            results["together"] = together(save_random_model("512x8", Path(directory)))
            print(table(("what", "value"), list(results["together"].items())), flush=True)
    print(f"\nwritten: {save_results('training', results)}")


if __name__ == "__main__":
    main()
