"""A gateway that is started before its swarm is complete: it says what is missing, and goes on by itself."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from web_gateway import NAME, RunningGateway, local_swarm, running_gateway, wait_until

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.config import ClientModelConfig
from swarmllm.errors import MissingBlocksError
from swarmllm.gateway import app
from swarmllm.gateway.apis import responder
from swarmllm.gateway.app import Waiting
from swarmllm.gateway.engine import model_choice
from swarmllm.gateway.engine.generation import Generation
from swarmllm.gateway.settings import GatewayConfig

pytestmark = pytest.mark.rotates(6, whole_file=True)


def ask(application: Any, path: str) -> httpx.Response:
    """The answer of an application in this process."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
            return await client.get(path)

    return asyncio.run(send())


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def test_it_serves_before_it_can_answer_and_becomes_ready_by_itself(tmp_path: Path) -> None:
    (tmp_path / "gateway.toml").write_text("route_timeout_s = 1\n")
    port = free_port()
    command = [sys.executable, "-m", "swarmllm.gateway", "--model", embedded_model_path(), "--port", str(port)]
    with local_swarm((0, 4)) as swarm:
        command += ["--initial_peers", *swarm.initial_peers, "--stop_on_stdin_eof"]
        command += ["--config", str(tmp_path / "gateway.toml")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

        def get(path: str) -> Any:
            try:
                return http.get(path)
            except httpx.TransportError:
                assert process.poll() is None
                return None

        try:
            wait_until(lambda: get("/health") and "nobody serves" in get("/health").text, "it says what is missing")
            health = http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "waiting")
            assert (health.json()["model"], health.json()["missing_blocks"]) == (NAME, [4, 5, 6, 7])
            for path, asked in (("/v1/completions", {"prompt": "a"}), ("/v1/messages", {}), ("/api/chat", {})):
                answer = http.post(path, json=asked)
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) > 0
                assert "nobody serves blocks 4" in json.dumps(answer.json(), ensure_ascii=False)
            assert http.get("/").status_code == http.get("/swarm").status_code == 200
            assert "nobody serves" in http.get("/api/swarm").json()["waiting"]
            swarm.add_server((4, 8))
            wait_until(lambda: get("/health").status_code == 200, "it became ready")
            assert process.stdout is not None
            assert re.match(r"swarmllm: gateway of \S+ at http://", process.stdout.readline())
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        finally:
            http.close()
            assert process.stdin is not None
            process.stdin.close()
            code = process.wait(60)
            assert process.stdout is not None
            process.stdout.close()
    assert code == 0


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"model": embedded_model_path()}, NAME),
        ({"model": f"{embedded_model_path()}/"}, NAME),
        ({"model": f"{embedded_model_path()}:poet"}, f"{NAME}:poet"),
        ({"model": "owner/model:owner/poet"}, "owner/model:owner/poet"),
        ({"model": embedded_model_path(), "served_name": "mine"}, "mine"),
    ],
)
def test_a_path_is_shown_to_nobody(settings: dict[str, Any], name: str) -> None:
    """/health needs no key."""
    waiting = Waiting(GatewayConfig(**settings))
    for path in ("/health", "/api/swarm"):
        found = ask(waiting, path).json()
        assert found["model"] == name
        assert embedded_model_path() not in json.dumps(found)


def test_it_says_which_of_several_models_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(GatewayConfig(model=("a", "b")))
    told = []

    def opened(config: ClientModelConfig, *_: Any) -> Any:
        told.append((config.model, ask(waiting, "/health").json()))
        if len(told) == 2:
            raise MissingBlocksError("nobody serves blocks 4:6", (4, 5))
        return SimpleNamespace(name=config.model, close=lambda: None)

    monkeypatch.setattr(model_choice, "_open", opened)
    monkeypatch.setattr(app, "RETRY_S", 0.001)
    assert [one.name for one in asyncio.run(waiting.models())] == ["a", "b"]
    assert [model for model, _ in told] == ["a", "b", "a", "b"]
    assert [health["model"] for _, health in told] == ["a", "a", "b", "b"]
    assert [health["missing_blocks"] for _, health in told] == [None, None, [4, 5], [4, 5]]


def test_a_gap_is_told_soon() -> None:
    """Within `route_timeout_s`, 5 s by default; here less."""
    assert GatewayConfig(model=("m",)).route_timeout_s == 5
    with local_swarm((0, 4), (4, 8)) as swarm, running_gateway(swarm.initial_peers, route_timeout_s=0.5) as gateway:
        gateway.wait_until_seen(2)
        swarm.servers[1].kill()
        wait_until(lambda: gateway.swarm()["missing_blocks"], "the gap was seen")
        said = [{"role": "user", "content": "a"}]
        asked: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "a"},
            "/v1/chat/completions": {"messages": said},
            "/v1/responses": {"input": "a"},
            "/v1/messages": {"messages": said, "max_tokens": 4},
            "/api/chat": {"messages": said},
        }
        for path, body in asked.items():  # a stream that hasn't begun is no success, so that clients try again
            for stream in (False, True):
                response = gateway.http.post(path, json={**body, "stream": stream})
                assert response.status_code == 503, path
                assert response.headers["retry-after"]
                error = response.json()["error"]
                assert "4:8" in (error if path == "/api/chat" else error["message"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_a_silent_stream_begins_all_the_same(
    path: str, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is known after `KEEPALIVE_S` at the latest, also in an API that has no sign of life."""
    may_go_on, run = threading.Event(), Generation.run

    def late(generation: Generation) -> None:
        assert may_go_on.wait(60)
        run(generation)

    monkeypatch.setattr(responder, "KEEPALIVE_S", 0.2)
    monkeypatch.setattr(Generation, "run", late)
    said = [{"role": "user", "content": "a"}]
    body = {"input": "a"} if path == "/v1/responses" else {"messages": said}
    body |= {"max_tokens": 2} if path == "/v1/messages" else {}
    with gateway.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        may_go_on.set()
        assert len(answer.read()) > 20


@pytest.mark.parametrize("seconds", [0, -1])
def test_it_can_not_wait_for_less_than_nothing(seconds: int) -> None:
    from swarmllm.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="route_timeout_s"):
        GatewayConfig(model=("m",), route_timeout_s=seconds)


def test_places_in_the_queue(swarm: LocalSwarm) -> None:
    """One answers at a time: the others are told when they move up."""
    settings: dict[str, Any] = {"max_concurrent": 1, "max_waiting": 3}
    asked = {"prompt": "Once", "stream": True, "swarm_events": True, "ignore_eos": True}
    with running_gateway(swarm.initial_peers, **settings) as gateway, ExitStack() as stack:
        streams = []
        for number in range(3):
            body = {**asked, "max_tokens": 1500 if number == 0 else 2}
            streams.append(stack.enter_context(gateway.http.stream("POST", "/v1/completions", json=body)))
            assert streams[number].headers.get("x-queue-place") == (str(number) if number else None)
        streams[0].close()
        lines = [line for line in streams[2].iter_lines() if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")).get("swarm") for line in lines]
        assert [one["place"] for one in events if one and one["event"] == "queue"] == [2, 1, 0]
