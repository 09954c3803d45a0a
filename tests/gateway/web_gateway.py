"""A gateway for tests: in this process, on a port of its own, in front of a real local swarm."""

import asyncio
import copy
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2 as httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.gateway.__main__ import address, web_server
from swarmllm.gateway.app import Gateway
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.machines import MachinesPages
from swarmllm.gateway.settings import GatewayConfig

Result = TypeVar("Result")
TIMEOUT_S = 120.0
"""Limit of requests and of waits for a condition: only a hang takes so long."""
DTYPE = "float32"
"""In bfloat16, stories have words that are equally likely, and a rounding says which the likeliest is."""
OPTIONS = {"num_threads": 1, "quant_type": "none", "metrics_port": 0, "dtype": DTYPE}
NAME = "embedded"
WITH_TOOLS = """{%- if tools %}Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}
{% endif %}{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments["city"] }}</tool_call>{% endfor %}
{% endfor %}assistant:"""
"""A chat template that knows tools."""


class RunningGateway:
    """`url`, the `gateway` itself to look into, and clients."""

    def __init__(self, gateway: Gateway, url: str, listener: int, loop: asyncio.AbstractEventLoop) -> None:
        self.gateway = gateway
        self.loop = loop
        """In which it serves."""
        self.listener = listener
        """The file descriptor of the socket that it listens on."""
        self.url = url.rstrip("/")
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def post(self, path: str, **body: Any) -> Any:
        """The JSON that answers a request; it must not be refused."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The JSON of all events or lines of a stream; each event has its type as its name, if it has a name."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = list(response.iter_lines())
        found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))]
        named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        assert not named or named == [one["type"] for one in found]
        return found

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function in the gateway's event loop, and return its result."""

        async def call() -> Result:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(TIMEOUT_S)

    def swarm(self) -> dict[str, Any]:
        """`/api/swarm`"""
        found: dict[str, Any] = self.http.get("/api/swarm").json()
        return found

    def figure(self, name: str) -> float:
        """A figure of /metrics without labels."""
        value = self.gateway.metrics.registry.get_sample_value(name)
        assert value is not None, name
        return value

    def wait_until_seen(self, num_servers: int) -> None:
        """Until the gateway has looked at the swarm and has a line to that many servers."""
        wait_until(
            lambda: sum(bool(server["reachable"]) for server in self.swarm()["servers"]) == num_servers,
            f"{num_servers} servers were reached",
        )

    def close(self) -> None:
        self.http.close()
        self.openai.close()


@contextmanager
def running_gateway(
    initial_peers: list[str],
    *,
    chat_template: str | None = None,
    machines: Callable[[GatewayConfig], MachinesPages] | None = None,
    **settings: Any,
) -> Iterator[RunningGateway]:
    """A gateway with these settings, stopped at the end. `chat_template`: in place of the model's own."""
    config = GatewayConfig(
        **{
            "model": embedded_model_path(),
            "initial_peers": initial_peers,
            "port": 0,
            "num_threads": 1,
            "dtype": DTYPE,
            **settings,
        }
    )
    models = ModelChoice.open(config)
    if chat_template is not None:
        models.first.tokenizer = copy.deepcopy(models.first.tokenizer)
        models.first.tokenizer.chat_template = chat_template
    try:
        gateway = Gateway(models, config, None if machines is None else machines(config))
        server = web_server(gateway)
        thread = threading.Thread(target=server.run, name="gateway under test")
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive(), "the gateway started")
        (listening,) = server.servers
        running = RunningGateway(gateway, address(server), listening.sockets[0].fileno(), listening.get_loop())
        try:
            yield running
        finally:
            running.close()
            server.should_exit = True
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    finally:
        models.close()


def local_swarm(*spans: tuple[int, int], **options: Any) -> LocalSwarm:
    """Servers of the embedded model."""
    return LocalSwarm(embedded_model_path(), spans=list(spans), **OPTIONS, **options)


def metrics_page(server: LocalServer) -> str:
    """The page of metrics that Prometheus reads from a server."""
    match = re.search(r"metrics are at (http://\S+)", server.log_path.read_text())
    assert match is not None
    return httpx.get(match[1]).text


def server_metrics(server: LocalServer) -> dict[str, float]:
    """Metrics of a server, without labels."""
    families = text_string_to_metric_families(metrics_page(server))
    return {sample.name: sample.value for family in families for sample in family.samples}


def wait_until(happened: Callable[[], object], what: str) -> None:
    """Wait for a condition, not for a time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen in {TIMEOUT_S} s"
        time.sleep(0.01)
