"""What the gateway adds: the same prompts through the Python client and through HTTP, in turns, on one local swarm.

The first token is measured with one request at a time, throughput with several streams at once. Both ways use the same
model object and servers, and make text of every token; the HTTP client is a process of its own. Prints medians over the
rounds; and for the first token also the CPU time of this process, which other load on the machine changes less.
"""

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2 as httpx
import torch
from transformers import TextStreamer

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.gateway.__main__ import address, web_server
from swarmllm.gateway.app import Gateway
from swarmllm.gateway.language_model import LanguageModel
from swarmllm.gateway.settings import GatewayConfig

PROMPT = "Once upon a time there was a fox"
NEVER_ENDS = 2
"""The embedded model's end of text; both ways are kept from taking it."""


class Silent(TextStreamer):
    """Makes text, and shows it to nobody."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        pass


def by_client(language: LanguageModel, ids: torch.Tensor, num_tokens: int) -> None:
    language.swarm.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        suppress_tokens=[NEVER_ENDS],
        streamer=Silent(language.tokenizer, skip_prompt=True),
    )


def by_gateway(http: httpx.Client, num_tokens: int) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "logit_bias": {str(NEVER_ENDS): -100},
        "stream": True,
    }
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = sum(line.startswith("data: {") for line in response.iter_lines())
    if lines != num_tokens:
        raise RuntimeError(f"{lines} chunks for {num_tokens} tokens")


class HttpClient:
    """Another process that asks when it is told to."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--ask", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, num_streams: int, num_tokens: int) -> float:
        """So many streams at once; the seconds that it took."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        self._process.stdin.write(f"{num_streams} {num_tokens}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def answer_questions(url: str) -> None:
    """What that process does."""
    limits = httpx.Limits(max_keepalive_connections=64, keepalive_expiry=600)
    with httpx.Client(base_url=url, timeout=600, limits=limits) as http, ThreadPoolExecutor(64) as threads:
        for line in sys.stdin:
            num_streams, num_tokens = map(int, line.split())
            print(seconds(partial(by_gateway, http, num_tokens), num_streams, threads), flush=True)


def seconds(call: Callable[[], None], at_once: int, threads: ThreadPoolExecutor) -> float:
    began = time.perf_counter()
    for done in [threads.submit(call) for _ in range(at_once)]:
        done.result()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        answer_questions(arguments.ask)
        return 0
    with LocalSwarm(embedded_model_path(), num_servers=2, num_threads=1, quant_type="none") as swarm:
        config = GatewayConfig(
            model=embedded_model_path(), initial_peers=tuple(swarm.initial_peers), port=0, num_threads=1
        )
        language = LanguageModel.open(config)
        server = web_server(Gateway(language, config))
        serving = threading.Thread(target=server.run)
        serving.start()
        while not server.started:
            time.sleep(0.01)
        http = HttpClient(address(server))
        try:
            with ThreadPoolExecutor(64) as threads:
                measure(language, http, threads, arguments)
        finally:
            http.close()
            server.should_exit = True
            serving.join()
            language.close()
    return 0


def measure(language: LanguageModel, http: HttpClient, threads: ThreadPoolExecutor, arguments: Any) -> None:
    ids = torch.tensor([language.encode(PROMPT)])
    first: dict[str, list[float]] = {"client": [], "gateway": []}
    many: dict[str, list[float]] = {"client": [], "gateway": []}
    cpu: dict[str, list[float]] = {"client": [], "gateway": []}
    ways: dict[str, Callable[[], float]] = {
        "client": lambda: seconds(partial(by_client, language, ids, 1), 1, threads),
        "gateway": lambda: http.ask(1, 1),
    }
    for _ in range(2 + 8 * arguments.rounds):
        for way, ask in ways.items():
            began = time.process_time()
            first[way].append(ask())
            cpu[way].append(time.process_time() - began)
    for _ in range(1 + arguments.rounds):
        many["client"].append(seconds(lambda: by_client(language, ids, arguments.tokens), arguments.streams, threads))
        many["gateway"].append(http.ask(arguments.streams, arguments.tokens))
    client_ms, gateway_ms = (1000 * statistics.median(first[way][2:]) for way in ("client", "gateway"))
    print(
        f"first token      client {client_ms:7.1f} ms   gateway {gateway_ms:7.1f} ms   {gateway_ms - client_ms:+.1f} ms"
    )
    client_ms, gateway_ms = (1000 * statistics.median(cpu[way][2:]) for way in ("client", "gateway"))
    print(
        f"of it CPU here   client {client_ms:7.1f} ms   gateway {gateway_ms:7.1f} ms   {gateway_ms - client_ms:+.1f} ms"
    )
    rates = [arguments.streams * arguments.tokens / statistics.median(many[way][1:]) for way in ("client", "gateway")]
    print(
        f"{arguments.streams} streams       client {rates[0]:7.1f} tokens/s gateway {rates[1]:7.1f} tokens/s "
        f"{100 * (rates[1] / rates[0] - 1):+.1f} %"
    )


if __name__ == "__main__":
    sys.exit(main())
