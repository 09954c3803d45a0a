"""The gateway's overhead: the same prompts through the Python client and through HTTP, in turns, on one local swarm.

The first token is measured with one request at a time, throughput with several streams at once. Both ways begin with
the prompt as text, use the same model object and servers, and turn every token into text. The HTTP client is a lean
process of its own (`http_load`), because it shares the cores. Prints medians over the rounds, with the quartiles of the
difference between neighbours, and this process's CPU time, which other load changes less.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from common import save_results
from transformers import TextStreamer

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.gateway.__main__ import address, web_server
from swarmllm.gateway.app import Gateway
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.settings import GatewayConfig

PROMPT = "Once upon a time there was a fox"
NEVER_ENDS = 2
"""The embedded model's end of text; both ways are kept from taking it."""
SETTLE_S = 0.05
"""Seconds between two measurements, so that sessions of one that still end don't count for the other."""


class Reader(TextStreamer):
    """Turns tokens into text, shows it to nobody, and notes the time of the first token."""

    first_s: float | None = None
    num_calls = 0

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.num_calls += 1
        if self.num_calls == 2:  # the first call brings the prompt
            self.first_s = time.perf_counter()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        pass


class ByClient:
    """Requests through the Python client, each on a thread."""

    def __init__(self, language: LanguageModel, threads: ThreadPoolExecutor) -> None:
        self._language = language
        self._threads = threads

    def ask(self, num_streams: int, num_tokens: int) -> tuple[float, float]:
        """So many streams at once: seconds until the first one's first token, and until all have ended."""
        began = time.perf_counter()
        asked = [self._threads.submit(self._one, num_tokens) for _ in range(num_streams)]
        first = min(one.result() for one in asked)
        return first - began, time.perf_counter() - began

    def _one(self, num_tokens: int) -> float:
        ids = torch.tensor([self._language.encode(PROMPT)])
        reader = Reader(self._language.tokenizer, skip_prompt=True)
        self._language.swarm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            suppress_tokens=[NEVER_ENDS],
            streamer=reader,
        )
        if reader.first_s is None:
            raise RuntimeError("no token came")
        return reader.first_s


class ByGateway:
    """The same through HTTP."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, num_streams: int, num_tokens: int) -> tuple[float, float]:
        """As `ByClient.ask`."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        body["logit_bias"] = {str(NEVER_ENDS): -100}
        self._process.stdin.write(f"{num_streams} {num_tokens} {json.dumps(body)}\n")
        self._process.stdin.flush()
        took = json.loads(self._process.stdout.readline())
        return min(took["first_s"]), took["all_s"]


@contextmanager
def both(models: ModelChoice, config: GatewayConfig) -> Iterator[dict[str, Any]]:
    """The two ways, by name."""
    server = web_server(Gateway(models, config))
    serving = threading.Thread(target=server.run)
    serving.start()
    while not server.started:
        time.sleep(0.01)
    url = urlsplit(address(server))
    command = [sys.executable, "-I", str(Path(__file__).with_name("http_load.py")), str(url.hostname), str(url.port)]
    process = subprocess.Popen([*command, "/v1/completions"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with ThreadPoolExecutor(64) as threads:
            yield {"client": ByClient(models.first, threads), "gateway": ByGateway(process)}
    finally:
        process.communicate()
        server.should_exit = True
        serving.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    with LocalSwarm(embedded_model_path(), num_servers=2, num_threads=1, quant_type="none") as swarm:
        config = GatewayConfig(
            model=(embedded_model_path(),), initial_peers=tuple(swarm.initial_peers), port=0, num_threads=1
        )
        models = ModelChoice.open(config)
        try:
            with both(models, config) as ways:
                results = measure(ways, arguments)
        finally:
            models.close()
    print(f"\nall figures are in {save_results('gateway', results)}")
    return 0


def measure(ways: dict[str, Any], arguments: Any) -> dict[str, Any]:
    num_tokens = arguments.streams * arguments.tokens
    one = in_turns(ways, lambda way: way.ask(1, 1), 3, 8 * arguments.rounds)
    many = in_turns(ways, lambda way: way.ask(arguments.streams, arguments.tokens), 1, arguments.rounds)

    first_ms = {name: [1000 * first for (first, _), _ in found] for name, found in one.items()}
    first_cpu_ms = {name: [1000 * cpu for _, cpu in found] for name, found in one.items()}
    rates = {name: [num_tokens / took for (_, took), _ in found] for name, found in many.items()}
    token_cpu_ms = {name: [1000 * cpu / num_tokens for _, cpu in found] for name, found in many.items()}
    show("first token, ms", first_ms)
    show("  its CPU here, ms", first_cpu_ms)
    show(f"{arguments.streams} streams, tokens/s", rates, in_percent=True)
    show("  CPU here, ms/token", token_cpu_ms)
    return {"first_ms": first_ms, "first_cpu_ms": first_cpu_ms, "tokens_per_s": rates, "token_cpu_ms": token_cpu_ms}


Took = tuple[tuple[float, float], float]
"""The result of `ask`, and the seconds of CPU time of this process."""


def in_turns(
    ways: dict[str, Any], ask: Callable[[Any], tuple[float, float]], num_warm: int, rounds: int
) -> dict[str, list[Took]]:
    """The figures of each way in each round. The ways take turns in beginning."""
    found: dict[str, list[Took]] = {name: [] for name in ways}
    for number in range(num_warm + rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            began = time.process_time()
            took = ask(ways[name])
            time.sleep(SETTLE_S)
            if number >= num_warm:
                found[name].append((took, time.process_time() - began))
    return found


def show(what: str, values: dict[str, list[float]], *, in_percent: bool = False) -> None:
    """Medians, and the quartiles of the differences."""
    pairs = list(zip(values["client"], values["gateway"], strict=True))
    differences = [100 * (gateway / client - 1) if in_percent else gateway - client for client, gateway in pairs]
    low, middle, high = statistics.quantiles(differences, n=4)
    client, gateway = (statistics.median(values[name]) for name in ("client", "gateway"))
    unit = " %" if in_percent else ""
    print(
        f"{what:24} client {client:7.2f}   gateway {gateway:7.2f}   {middle:+.2f}{unit} ({low:+.2f} to {high:+.2f})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
