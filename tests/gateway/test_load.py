"""Many connections, readers that don't read, and requests that nobody would write by hand."""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest
from test_access import Socket
from web_gateway import RunningGateway, running_gateway, server_metrics, wait_until

from swarmllm import LocalSwarm

PROMPT = "Once upon a time"
NUM_IDLE = 200
NUM_SLOW = 4
SLOW_TOKENS = 150
LONG = {
    "prompt": PROMPT,
    "max_tokens": SLOW_TOKENS,
    "temperature": 0,
    "logit_bias": {"2": -100},
    "logprobs": 20,  # so that the answer is larger than what lies in the kernel's buffers
    "stream": True,
}
OK = b"HTTP/1.1 200"
NUM_SILENT = 200
SCORED = {
    "prompt": [list(range(5, 145))],
    "max_tokens": 1,
    "echo": True,
    "logprobs": 20,  # an answer of one large piece, which takes one step
    "stream": True,
}


@pytest.fixture
def crowded(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A gateway that others should not notice to be crowded."""
    with running_gateway(swarm.initial_peers) as gateway:
        gateway.wait_until_seen(2)
        # Connections inherit it. By default the kernel takes megabytes for a reader that doesn't read.
        with socket.socket(fileno=os.dup(gateway.listener)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield gateway


class SlowReader:
    """Asks for a large stream through a small window, and reads nothing of it until it is told to."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        parts = urlsplit(url)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect((parts.hostname, parts.port))
        self._socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def begins(self) -> bool:
        """The answer is a stream. Nothing of the stream is read."""
        return self._socket.recv(len(OK), socket.MSG_WAITALL) == OK

    def read(self) -> bytes:
        """All of it."""
        return b"".join(iter(lambda: self._socket.recv(65536), b""))

    def close(self) -> None:
        self._socket.close()


@pytest.mark.slow
def test_idle_connections_and_slow_readers_hurt_nobody(
    crowded: RunningGateway, swarm: LocalSwarm, greedy: Any, tokenizer: Any
) -> None:
    engine, process = crowded.gateway.engine, psutil.Process()
    expected = greedy(tokenizer(PROMPT).input_ids, 12)
    crowded.http.get("/health")
    files = process.num_fds()
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        idle = [Socket(crowded.url) for _ in range(NUM_IDLE)]
        for one in idle:
            stack.callback(one.close)
        assert all(one.accepted for one in idle)
        # One listens meanwhile, and answers pings: on a slow machine those of the others are waited for in vain.
        answered = threads.submit(idle[5].answer)
        for one in idle[::10]:  # some have been used before they fell silent
            one.ask({"prompt": PROMPT, "max_tokens": 1})
            while "done" not in one.answer():
                pass
        silent = []
        for _ in range(NUM_SILENT):
            wait_until(lambda: engine.num_under_way < 32, "there was room for one more")
            silent.append(SlowReader(crowded.url, SCORED))
            stack.callback(silent[-1].close)
            assert silent[-1].begins()
        wait_until(lambda: engine.num_under_way == 0, "the silent readers' texts were scored")
        slow = [SlowReader(crowded.url, LONG) for _ in range(NUM_SLOW)]
        for reader in slow:
            stack.callback(reader.close)
        wait_until(lambda: engine.num_under_way == NUM_SLOW, "the slow readers are being answered")

        for _ in range(4):
            answer = crowded.openai.completions.create(model="embedded", prompt=PROMPT, max_tokens=12, temperature=0)
            assert answer.choices[0].text == expected
            assert crowded.http.get("/health").status_code == 200
        # Whoever reads slowly holds his own answer in the gateway's memory, but no session of the servers.
        wait_until(lambda: engine.num_under_way == 0, "the slow readers' texts were written")
        for server in swarm.servers:
            assert server_metrics(server)["swarmllm_server_sessions"] == 0

        for reader in slow:
            lines = reader.read().split(b"\n\n")
            assert sum(b'"text_completion"' in line for line in lines) == SLOW_TOKENS
            assert b"data: [DONE]" in b"".join(lines[-3:])
        for reader in silent[::20]:  # the others hang up
            assert b"data: [DONE]" in reader.read()
        idle[5].ask({"prompt": PROMPT, "max_tokens": 1})
        assert answered.result()["object"] == "text_completion"
    wait_until(lambda: process.num_fds() <= files, "all connections were closed")


@pytest.fixture
def brief(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A gateway whose answers are short, so that a thousand of them don't take long."""
    with running_gateway(swarm.initial_peers, max_length=32, default_max_tokens=2, max_choices=2) as gateway:
        gateway.wait_until_seen(2)
        yield gateway


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_that_fits_the_openapi_document_or_nearly_does_makes_it_fail(
    brief: RunningGateway, tmp_path: Path
) -> None:
    import subprocess

    found = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            *("run", f"{brief.url}/openapi.json", "--checks", "not_a_server_error"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "10", "--generation-deterministic"),
            *("--continue-on-failure", "--request-timeout", "60", "--warnings", "off", "--no-color"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stdout[-4000:]
    with urlopen(f"{brief.url}/openapi.json") as answer:
        number = sum(map(len, json.load(answer)["paths"].values()))
    assert f"{number} selected / {number} total" in found.stdout
