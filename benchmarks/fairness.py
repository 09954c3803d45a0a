"""The cost of a flood for other clients of the same server: for strangers, and for clients of a contributor.

    python benchmarks/fairness.py [--shape 2048x4] [--repeats 5] [--seconds 4]

One server has all blocks and one thread. Two processes ask it as fast as it answers. A second server, which nobody
uses, belongs to the contributor. The measured client decodes one text. Phases with and without the flood take turns;
medians of `--repeats`.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import transformers
from common import SHAPES, median, save_random_model, save_results, table

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm
from swarmllm.network.p2p.identity import Identity

NUM_FLOODS = 2
"""Flooding processes, each a peer of its own."""
NUM_THREADS = 8
"""Sessions, or requests in progress, of each process."""
MAX_LENGTH = 2048
PROMPT_TOKENS = 64
"""Tokens of a prompt or a training request."""
SETTLE_S = 1.0
"""Seconds between the beginning of a flood and the measurement."""


def decode(model: Any, counts: Callable[[int], None], goes_on: Callable[[], bool]) -> None:
    """Decode one text, token by token, without the client's own computing."""
    token = torch.randn(1, 1, model.config.hidden_size)
    while goes_on():
        with model.inference_session(max_length=MAX_LENGTH) as session, torch.no_grad():
            for _ in range(MAX_LENGTH - 1):
                session.step(token)
                counts(1)
                if not goes_on():
                    break


def prompts(model: Any, counts: Callable[[int], None], goes_on: Callable[[], bool]) -> None:
    """Send prompts that are new each time."""
    while goes_on():
        with model.inference_session(max_length=PROMPT_TOKENS) as session, torch.no_grad():
            session.step(torch.randn(1, PROMPT_TOKENS, model.config.hidden_size))
            counts(PROMPT_TOKENS)


def batches(model: Any, counts: Callable[[int], None], goes_on: Callable[[], bool]) -> None:
    """Send forwards and backwards, as training does."""
    while goes_on():
        embeds = torch.randn(1, PROMPT_TOKENS, model.config.hidden_size, requires_grad=True)
        model.base_model(inputs_embeds=embeds).last_hidden_state.sum().backward()
        counts(PROMPT_TOKENS)


KINDS = {"16 texts": decode, "prompts, 16 at a time": prompts, "training, 16 at a time": batches}


def flood(path: str, initial_peers: Sequence[str], kind: str, idle: Event, on: Event, num_tokens: Any) -> None:
    """A process that asks while `on` is set, and sets `idle` when all its requests were answered."""
    torch.set_num_threads(1)

    def count(more: int) -> None:
        with num_tokens.get_lock():
            num_tokens.value += more

    with connected(path, initial_peers) as model:
        while True:
            idle.set()
            on.wait()
            threads = [Thread(target=KINDS[kind], args=(model, count, on.is_set)) for _ in range(NUM_THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


@contextmanager
def connected(path: str, initial_peers: Sequence[str], **options: Any) -> Iterator[Any]:
    config = ClientConfig(initial_peers=tuple(initial_peers), speculation="off", max_parallel_routes=1, **options)
    with AutoDistributedModel.from_pretrained(path, client_config=config, dtype=torch.float32) as model:
        yield model


def rate(model: Any, seconds: float) -> float:
    """Tokens per second of one text."""
    num_tokens, until = 0, time.perf_counter() + seconds

    def count(more: int) -> None:
        nonlocal num_tokens
        num_tokens += more

    began_at = time.perf_counter()
    decode(model, count, lambda: time.perf_counter() < until)
    return num_tokens / (time.perf_counter() - began_at)


def measured(
    models: dict[str, Any], on: Event, idle: Sequence[Event], num_tokens: Any, args: argparse.Namespace
) -> tuple[dict[str, list[float]], list[float]]:
    """Each client's speed beside a flood, as a share of its speed alone, and the flood's own tokens per second."""
    shares: dict[str, list[float]] = {name: [] for name in models}
    flooded: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.repeats):
        for name, model in models.items():
            for event in idle:
                event.wait()
                event.clear()
            alone = rate(model, args.seconds)
            on.set()
            time.sleep(SETTLE_S)
            before, began_at = num_tokens.value, time.perf_counter()
            shares[name].append(rate(model, args.seconds) / alone)
            flooded[name].append((num_tokens.value - before) / (time.perf_counter() - began_at))
            on.clear()
    return shares, [median(flooded[name]) for name in models]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="2048x4")
    parser.add_argument("--quant_type", default="int8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    processes = multiprocessing.get_context("spawn")
    rows, results = [], []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path, key = save_random_model(args.shape, directory), directory / "server.key"
        Identity.load_or_create(key)
        everything = (0, SHAPES[args.shape]["blocks"])
        swarm = stack.enter_context(
            LocalSwarm(path, [everything], quant_type=args.quant_type, num_threads=1, update_period=2)
        )
        contested = {"allowed_servers": (swarm.servers[0].peer_id,)}
        swarm.add_server((0, 1), identity_path=key)
        time.sleep(5)  # until the first server has met it
        models = {
            "a stranger": stack.enter_context(connected(str(path), swarm.initial_peers, **contested)),
            "a contributor": stack.enter_context(
                connected(str(path), swarm.initial_peers, contributor_identity=str(key), **contested)
            ),
        }
        peers = tuple(swarm.servers[0].maddrs)
        for kind in KINDS:
            on, num_tokens = processes.Event(), processes.Value("q", 0)
            idle = [processes.Event() for _ in range(NUM_FLOODS)]
            floods = [
                processes.Process(target=flood, args=(str(path), peers, kind, event, on, num_tokens), daemon=True)
                for event in idle
            ]
            for process in floods:
                process.start()
            shares, flooded = measured(models, on, idle, num_tokens, args)
            for process in floods:
                process.terminate()
                process.join()
            for (name, values), num in zip(shares.items(), flooded, strict=True):
                spread = f"{min(values):.2f}-{max(values):.2f}"
                rows.append((kind, name, f"{median(values):.2f}", spread, f"{num:.0f}"))
                results.append({"flood": kind, "who": name, "shares": values, "flood_tokens_per_s": num})
            print(
                table(("flood", "who decodes", "of its rate alone", "spread", "tokens/s of the flood"), rows),
                flush=True,
            )
    print(save_results("fairness", {"args": vars(args), "results": results}))


if __name__ == "__main__":
    main()
