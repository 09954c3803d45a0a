"""Memory of a gateway and its servers over thousands of requests of all kinds.

One gateway process and two servers answer several clients at once: streams, whole answers, two choices, JSON, requests
that are cancelled in the middle, and refused ones. Prints the resident memory of each process during the run, and at
the end the growth over the second half, in MB per 1000 requests, with its uncertainty. By then, warm-up (the allocator,
caches of compiled schemas) is over.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
from common import save_results, table

from swarmllm import LocalSwarm, embedded_model_path

CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 4}
TEXT = {"prompt": "Once upon a time", "max_tokens": 4}
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"enum": [2, 4]}},
    "required": ["legs"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}


def whole(http: httpx.Client, number: int) -> None:
    http.post("/v1/completions", json={**TEXT, "prompt": f"Once upon a time there were {number}"}).raise_for_status()


def streamed(http: httpx.Client, number: int) -> None:
    with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True, "swarm_events": True}) as response:
        for _ in response.iter_lines():
            pass


def two_choices(http: httpx.Client, number: int) -> None:
    headers = {"X-Swarm-Trace": "1"}
    http.post("/v1/completions", json={**TEXT, "n": 2, "logprobs": 2, "echo": True}, headers=headers).raise_for_status()


def as_json(http: httpx.Client, number: int) -> None:
    http.post("/v1/chat/completions", json={**CHAT, "response_format": FORMAT}).raise_for_status()


def hung_up(http: httpx.Client, number: int) -> None:
    with http.stream("POST", "/v1/completions", json={**TEXT, "max_tokens": 500, "stream": True}) as response:
        next(response.iter_lines())


def refused(http: httpx.Client, number: int) -> None:
    status = http.post("/v1/completions", json={**TEXT, "temperature": -number}).status_code
    if status != 400:
        raise RuntimeError(f"expected a refusal, not {status}")


KINDS: Sequence[Callable[[httpx.Client, int], None]] = (whole, streamed, two_choices, as_json, hung_up, refused)


def megabytes(pids: Sequence[int]) -> list[float]:
    """Resident memory of each process."""
    return [psutil.Process(pid).memory_info().rss / 1e6 for pid in pids]


def growth(requests: Sequence[int], held: Sequence[float]) -> tuple[float, float]:
    """MB per 1000 requests over the second half: the slope, and its standard error."""
    x, y = np.array(requests[len(requests) // 2 :]) / 1000, np.array(held[len(held) // 2 :])
    (slope, offset), rest = np.polyfit(x, y, 1), len(x) - 2
    error = np.sqrt(np.sum((y - slope * x - offset) ** 2) / rest / np.sum((x - x.mean()) ** 2))
    return float(slope), float(error)


def soak(url: str, pids: Sequence[int], arguments: Any) -> dict[str, Any]:
    names = ["gateway", *(f"server {number}" for number in range(1, len(pids)))]
    counts, seen = [0], [megabytes(pids)]
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=120) as http, ThreadPoolExecutor(arguments.at_once) as threads:
        for start in range(0, arguments.requests, arguments.every):
            numbers = range(start + 1, start + arguments.every + 1)
            done = [threads.submit(KINDS[number % len(KINDS)], http, number) for number in numbers]
            for one in done:
                one.result()
            counts.append(start + arguments.every)
            seen.append(megabytes(pids))
            print(f"{counts[-1]:6} requests, {time.monotonic() - began:5.0f} s:", end=" ")
            print("  ".join(f"{name} {held:.1f} MB" for name, held in zip(names, seen[-1], strict=True)), flush=True)
    columns = list(zip(*seen, strict=True))
    slopes = [growth(counts, column) for column in columns]
    rows = [
        (name, column[0], max(column), column[-1], f"{slope:+.2f} ± {error:.2f}")
        for name, column, (slope, error) in zip(names, columns, slopes, strict=True)
    ]
    print()
    print(table(["process", "MB at first", "most", "at last", "MB per 1000 requests, second half"], rows))
    return {"requests": counts, **dict(zip(names, columns, strict=True))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=250, help="requests between two looks")
    parser.add_argument("--at_once", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.requests < 8 * arguments.every:
        parser.error("give at least 8 looks: fewer say nothing about growth")
    path = embedded_model_path()
    with LocalSwarm(path, num_servers=2, num_threads=1) as swarm:
        flags = ["--model", path, "--port", "0", "--num_threads", "1", "--initial_peers", *swarm.initial_peers]
        gateway = subprocess.Popen(
            [sys.executable, "-m", "swarmllm", "gateway", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            match = re.search(r"http://\S+", gateway.stdout.readline() if gateway.stdout else "")
            if match is None:
                raise RuntimeError("the gateway did not start")
            results = soak(match[0], [gateway.pid, *(server.pid for server in swarm.servers)], arguments)
        finally:
            gateway.terminate()
            gateway.wait()
    print(f"\nall figures are in {save_results('soak', results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
