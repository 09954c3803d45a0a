"""Many clients at once on two local servers: what batching their steps brings, beside the same servers without it.

    python benchmarks/concurrency.py [--clients 1 2 4 8 16 32] [--seconds 4] [--repeats 3] [--shape 2048x4]
        [--quant_type int8] [--activations int8]

A client is an inference session with a thread of its own that sends one precomputed hidden state after the other; so
what is measured is the blocks, the servers and the way between them, not the embeddings, the head and `generate()` of
the clients, who would have machines of their own. The sessions live in `--processes` processes on the same cores as the
servers. Contexts are spread over 40 to 400 tokens at the start. Two swarms run side by side, one with
`max_batch_sessions = 1`; measurements alternate between them, and the medians count.

mixed: the times between two tokens of a few clients, with and without one more that sends prompts of 2000 tokens all
the time. far: a client alone and among 8, through 12 servers behind proxies that make a round trip take 100 ms, as in
Borzunov et al. 2022. Prints tables, writes results/concurrency.json and concurrency.svg.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import chain, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import plots
import torch
import transformers
from common import median, save_random_model, save_results, table
from delay_proxy import SlowNetwork

from swarmllm import AutoDistributedModel, LocalSwarm
from swarmllm.models.quantization import QUANT_TYPES

CONTEXTS = (40, 400)
PROMPT_TOKENS = 2000
MIXED_CLIENTS = 4
MAX_LENGTH = 4096
ROOM_TOKENS = MAX_LENGTH - CONTEXTS[1]
"""Positions of a session for the tokens of one measurement."""
WARM_UP_S = 0.5
FAR_SERVERS = 12
FAR_SHAPE = "512x12"
FAR_DELAY_MS = 50.0
"""One-way delay."""
FAR_CLIENTS = 8
PARTS = ("scaling", "mixed", "far")
SERVERS: dict[str, dict[str, int]] = {"batched": {}, "one by one": {"max_batch_sessions": 1}}
"""Kinds of servers, and their settings."""


class Clients:
    """A process with sessions, one thread each; commands go through a pipe.

    It starts meanwhile: start all processes, and then wait for all (`wait_until_ready`; `measure` does so)."""

    def __init__(
        self, path: Path, initial_peers: Sequence[str], dtype: str = "auto", room_tokens: int = ROOM_TOKENS
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        arguments = (theirs, str(path), list(initial_peers), dtype, room_tokens)
        self.process = spawn.Process(target=serve_commands, args=arguments)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Raises: EOFError: the process has ended."""
        if not self._is_ready:
            self.pipe.recv()
            self._is_ready = True

    def close(self) -> None:
        with suppress(OSError):  # it has ended
            self.pipe.send(None)
        self.process.join()


def serve_commands(pipe: Connection, path: str, initial_peers: list[str], dtype: str, room_tokens: int) -> None:
    """Runs in a client process: open sessions, report that they are ready, step them until told to stop."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with AutoDistributedModel.from_pretrained(path, initial_peers=initial_peers, dtype=dtype) as model:
        pipe.send("ready")
        while (command := pipe.recv()) is not None:
            contexts, with_prompts = command
            pipe.send(run_clients(pipe, model, contexts, room_tokens, with_prompts))


def run_clients(
    pipe: Connection, model: Any, contexts: list[int], room_tokens: int, with_prompts: bool
) -> list[list[float]]:
    """The times at which each client got its tokens."""
    with ExitStack() as stack, torch.inference_mode():
        token = torch.randn(1, 1, model.config.hidden_size).to(model.dtype)
        sessions = []
        for context in contexts:
            session = stack.enter_context(model.inference_session(max_length=context + room_tokens))
            session.step(token.expand(1, context, -1).contiguous())
            sessions.append(session)
        times: list[list[float]] = [[] for _ in sessions]
        stop = threading.Event()

        def decode(session: Any, mine: list[float]) -> None:
            while not stop.is_set():
                session.step(token)
                mine.append(time.time())

        def send_prompts() -> None:
            prompt = torch.randn(1, PROMPT_TOKENS, model.config.hidden_size).to(model.dtype)
            while not stop.is_set():
                with model.inference_session(max_length=MAX_LENGTH) as session:
                    session.step(prompt)

        threads = [threading.Thread(target=decode, args=pair) for pair in zip(sessions, times, strict=True)]
        if with_prompts:
            threads.append(threading.Thread(target=send_prompts))
        pipe.send("ready")
        pipe.recv()
        for thread in threads:
            thread.start()
        pipe.recv()
        stop.set()
        for thread in threads:
            thread.join()
    return times


def contexts_of(num_clients: int) -> list[int]:
    low, high = CONTEXTS
    return [low + (high - low) * idx // max(1, num_clients - 1) for idx in range(num_clients)]


def measure(jobs: Sequence[tuple[Clients, list[int], bool]], seconds: float) -> list[list[float]]:
    """Token times of each client after the warm-up. A job is (process, its contexts, whether it also sends prompts)."""
    for process, _, _ in jobs:
        process.wait_until_ready()
    for process, contexts, with_prompts in jobs:
        process.pipe.send((contexts, with_prompts))
    for process, _, _ in jobs:
        process.pipe.recv()
    for process, _, _ in jobs:
        process.pipe.send("go")
    started = time.time() + WARM_UP_S
    time.sleep(WARM_UP_S + seconds)
    ended = time.time()
    for process, _, _ in jobs:
        process.pipe.send("stop")
    clients = [client for process, _, _ in jobs for client in process.pipe.recv()]
    return [[at for at in client if started <= at <= ended] for client in clients]


def gaps_ms(clients: Sequence[Sequence[float]]) -> list[float]:
    return sorted((after - before) * 1e3 for client in clients for before, after in pairwise(client))


def scaling(swarms: dict[str, Sequence[Clients]], counts: Sequence[int], args: argparse.Namespace) -> list[Any]:
    """Tokens per second of all clients together, for each number of clients."""
    results = []
    for count in counts:
        runs: dict[str, list[list[float]]] = {name: [] for name in swarms}
        for _ in range(args.repeats):
            for name, processes in swarms.items():
                contexts = contexts_of(count)
                shares = [contexts[idx :: len(processes)] for idx in range(len(processes))]
                jobs = [(process, mine, False) for process, mine in zip(processes, shares, strict=True) if mine]
                runs[name].append([len(times) / args.seconds for times in measure(jobs, args.seconds)])
        for name, found in runs.items():
            result = {
                "servers": name,
                "clients": count,
                "tokens_per_s": median(map(sum, found)),
                "fastest_to_slowest": median(max(rates) / max(min(rates), 1 / args.seconds) for rates in found),
            }
            print(f"{count} clients, {name}: {result['tokens_per_s']:.0f} tokens/s", flush=True)
            results.append(result)
    for result in results:
        alone = next(r for r in results if r["servers"] == result["servers"])
        result["to_one_client"] = result["tokens_per_s"] / alone["tokens_per_s"] * alone["clients"]
    return results


def mixed(swarms: dict[str, Sequence[Clients]], args: argparse.Namespace) -> list[Any]:
    """Times between two tokens of some clients, without and with another client that sends long prompts."""
    results = []
    for name, processes in swarms.items():
        runs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(args.repeats):
            for with_prompts, found in runs.items():
                jobs = [(processes[0], contexts_of(MIXED_CLIENTS), False)]
                jobs += [(processes[1], [], True)] if with_prompts else []
                gaps = gaps_ms(measure(jobs, args.seconds))
                found.append((statistics.median(gaps), statistics.quantiles(gaps, n=20)[-1]))
        (p50, p95), (beside_p50, beside_p95) = (
            [median(run[idx] for run in runs[with_prompts]) for idx in (0, 1)] for with_prompts in (False, True)
        )
        results.append(
            {
                "servers": name,
                "p50_ms": p50,
                "p95_ms": p95,
                "p50_ms_beside_prompts": beside_p50,
                "p95_ms_beside_prompts": beside_p95,
                "p95_ratio": beside_p95 / p95,
            }
        )
    return results


def far(path: Path, args: argparse.Namespace) -> list[Any]:
    """Tokens per second of one client, alone and among others, when distance takes most of the time."""
    counts = (1, *(count for count in args.clients if 1 < count <= FAR_CLIENTS))
    runs: dict[int, list[float]] = {count: [] for count in counts}
    with ExitStack() as stack:
        network = stack.enter_context(SlowNetwork())
        shared = server_options(args)
        swarm = stack.enter_context(network.swarm(path, num_servers=FAR_SERVERS, **shared))
        process = Clients(path, swarm.initial_peers, args.dtype)
        stack.callback(process.close)
        measure([(process, contexts_of(1), False)], 1.0)  # dials everybody, opens the links between servers
        network.set(delay_ms=FAR_DELAY_MS)
        for _ in range(args.repeats):
            for count, found in runs.items():
                clients = measure([(process, contexts_of(count), False)], 3 * args.seconds)
                found.append(median(1e3 / median(gaps_ms([times])) for times in clients))
    alone = median(runs[1])
    return [
        {"clients": count, "tokens_per_s_of_one": median(found), "to_alone": median(found) / alone}
        for count, found in runs.items()
    ]


def near(path: Path, args: argparse.Namespace) -> dict[str, list[Any]]:
    """Measurements on two swarms side by side."""
    results = {}
    with ExitStack() as stack:
        swarms: dict[str, list[Clients]] = {}
        for name, settings in SERVERS.items():
            swarm = stack.enter_context(LocalSwarm(path, num_servers=2, **server_options(args), **settings))
            swarms[name] = [Clients(path, swarm.initial_peers, args.dtype) for _ in range(args.processes)]
            for process in swarms[name]:
                stack.callback(process.close)
        for process in chain.from_iterable(swarms.values()):
            process.wait_until_ready()  # also those that the first measurements don't use
        if "scaling" in args.only:
            results["scaling"] = scaling(swarms, args.clients, args)
        if "mixed" in args.only:
            results["mixed"] = mixed(swarms, args)
    return results


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """Results of all swarms."""
    options = {"quant_type": args.quant_type, "dtype": args.dtype, "activations": args.activations}
    return {**options, "num_threads": 1, "attn_cache_tokens": 64 * MAX_LENGTH}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="512x8")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quant_type", choices=QUANT_TYPES, default="none")
    parser.add_argument("--activations", choices=["none", "int8"], default="none")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="of clients, per swarm; at least 2")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {"arguments": vars(args)}
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        if {"scaling", "mixed"} & set(args.only):
            results |= near(save_random_model(args.shape, Path(directory)), args)
        if "far" in args.only:
            results["far"] = far(save_random_model(FAR_SHAPE, Path(directory)), args)
    saved = save_results("concurrency", results)
    for name in args.only:
        rows = [list(result.values()) for result in results[name]]
        print(table(list(results[name][0]), rows))
    if "scaling" in args.only:
        of_servers = {name: [result for result in results["scaling"] if result["servers"] == name] for name in SERVERS}
        plots.lines(
            "concurrency",
            "tokens/s of all clients, relative to one client",
            "clients",
            {
                name: ([r["clients"] for r in mine], [r["to_one_client"] for r in mine])
                for name, mine in of_servers.items()
            },
        )
    print(f"written to {saved}")


if __name__ == "__main__":
    main()
