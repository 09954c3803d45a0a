"""Limits of a gateway: keys, rates, hosts, origins; and its command."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import unquote

import httpx2 as httpx
import psutil
import pytest
from starlette.responses import PlainTextResponse
from web_gateway import NAME, RunningGateway, running_gateway
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Ping, RejectConnection, Request, TextMessage

from swarmllm import LocalSwarm, embedded_model_path
from swarmllm.commands.up import UpConfig
from swarmllm.errors import ConfigurationError
from swarmllm.gateway.app import TABLE
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import Guard, Rates
from swarmllm.gateway.settings import GatewayConfig


def ask(method: str, path: str, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    """One request to an application behind a guard with these settings."""
    config = GatewayConfig(**{"model": "m", **settings})
    rates = Rates(config.requests_per_minute)
    guard = Guard(PlainTextResponse("inside"), TABLE, config, rates, lambda path, status: None)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("# people\nsecret-1\n\nsecret-2\n")
    return str(path)


def test_keys_are_needed_where_tokens_are_made(keys: str) -> None:
    for path in ("/v1/models", "/v1/chat/completions"):
        assert ask("GET", path, api_keys_file=keys).status_code == 401
        assert ask("GET", path, {"Authorization": "Bearer secret-3"}, api_keys_file=keys).status_code == 401
        assert ask("GET", path, {"Authorization": "Bearer secret-2"}, api_keys_file=keys).status_code == 200
    for path in ("/", "/swarm", "/docs", "/static/chat.js", "/health", "/metrics", "/api/swarm", "/api/version"):
        assert ask("GET", path, api_keys_file=keys).status_code == 200, path
    assert ask("GET", "/nothing/here", api_keys_file=keys).status_code == 401
    error = ask("GET", "/v1/models", api_keys_file=keys).json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(ConfigurationError, match="holds no keys"):
        GatewayConfig(model="m", api_keys_file=str(tmp_path / "keys")).api_keys()


def test_other_pages_may_not_use_it_unless_allowed() -> None:
    foreign = {"Origin": "https://elsewhere.example"}
    assert ask("POST", "/v1/completions", foreign).status_code == 403
    assert ask("POST", "/v1/completions", {"Origin": "http://localhost:8080"}).status_code == 200
    allowed = ask("POST", "/v1/completions", foreign, cors_origins=("https://elsewhere.example",))
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://elsewhere.example"
    assert "access-control-allow-origin" not in ask("GET", "/health").headers


def test_preflight_needs_no_key(keys: str) -> None:
    settings: Any = {"api_keys_file": keys, "cors_origins": ("*",)}
    assert ask("OPTIONS", "/v1/models", {"Origin": "https://elsewhere.example"}, **settings).status_code == 204


def test_on_loopback_only_names_of_this_machine_are_answered() -> None:
    refused = ask("GET", "/", {"Host": "rebound.example:8080"})
    assert refused.status_code == 403
    assert refused.json()["error"]["message"].endswith("'rebound.example'; name it by --allowed_hosts")
    of_up = ask("GET", "/", {"Host": "rebound.example"}, model=()).json()["error"]["message"]
    assert of_up.endswith("name it by allowed_hosts in the file of --config")
    assert ask("GET", "/", {"Host": "xn--bcher-kva"}, allowed_hosts=("bücher",)).status_code == 200
    assert ask("GET", "/", {"Host": "chat.example"}, allowed_hosts=("chat.example",)).status_code == 200


def test_rebinding_reaches_no_gateway_off_loopback_either() -> None:
    """A name that a hostile page made point here is refused on every address; what can't be such a name is not."""
    for host in ("0.0.0.0", "::", "192.168.1.5"):
        for name in ("rebound.example", "rebound.example:8080", "", "127.0.0.1.rebound.example"):
            assert ask("GET", "/api/swarm", {"Host": name}, host=host).status_code == 403, name
        own = [socket.gethostname(), f"{socket.gethostname()}.local", "localhost", "192.168.1.5:8080", "[fe80::1]:8080"]
        for name in own:
            assert ask("GET", "/", {"Host": name}, host=host).status_code == 200, name
        for allowed in ("Chat.example", "*"):
            assert ask("GET", "/", {"Host": "chat.example"}, host=host, allowed_hosts=(allowed,)).status_code == 200
    assert ask("GET", "/", {"Host": "192.168.1.5"}).status_code == 403  # on loopback only its own numbers


def asked_by_url(target: bytes, host: bytes = b"localhost:8080", **settings: Any) -> tuple[int, str, str]:
    """The status, the path and the host behind the guard, for a request whose target is a whole URL."""
    config = GatewayConfig(**{"model": "m", **settings})
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], dict(scope["headers"])[b"host"].decode()))
        await PlainTextResponse("inside")(scope, receive, send)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.insert(0, message["status"])

    guard = Guard(app, TABLE, config, Rates(None), lambda path, status: None)
    raw_path = target.partition(b"?")[0]
    scope = {"type": "http", "method": "GET", "scheme": "http", "query_string": b"", "client": ("127.0.0.1", 1)}
    scope |= {"path": unquote(raw_path.decode()), "raw_path": raw_path, "headers": [(b"host", host)]}
    asyncio.run(guard(scope, Mock(), send))
    status, *inside = seen
    return (status, *(inside[0] if inside else ("", "")))


def test_a_target_may_be_a_whole_url(keys: str) -> None:
    """Of an allowed host (RFC 9112, 3.2.2). The guard is as strict as for paths."""
    assert asked_by_url(b"http://127.0.0.1:31980/health") == (200, "/health", "127.0.0.1:31980")
    assert asked_by_url(b"HTTP://localhost?a=/b") == (200, "/", "localhost")
    assert asked_by_url(b"http://localhost/static/a%2Fb%3F?c") == (200, "/static/a/b?", "localhost")
    for target in (b"http://rebound.example/health", b"http:///health", b"http://localhost%2F@rebound.example/"):
        assert asked_by_url(target)[0] == 403, target
    assert asked_by_url(b"http://[::1/health")[0] == 400
    assert asked_by_url(b"http://localhost/health", host=b"rebound.example")[0] == 403
    assert asked_by_url(b"http://localhost/v1/models", api_keys_file=keys)[0] == 401
    assert asked_by_url(b"http://localhost/health/../v1/models", api_keys_file=keys)[0] == 401
    assert asked_by_url(b"http://localhost/health", api_keys_file=keys)[0] == 200


def test_compressed_bodies_are_refused() -> None:
    refused = ask("POST", "/v1/completions", {"Content-Encoding": "gzip"})
    assert refused.status_code == 415
    error = refused.json()["error"]
    assert "Content-Encoding: gzip" in error["message"]
    assert error["message"].endswith("send it uncompressed")
    assert ask("POST", "/v1/completions", {"Content-Encoding": "Identity"}).status_code == 200


def raw_answers(gateway: RunningGateway, *head: str) -> list[int]:
    """The statuses of all answers to a request without its body, until the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as connection:
        connection.settimeout(60)
        connection.sendall("\r\n".join((*head, "", "")).encode())
        found = b""
        while data := connection.recv(1 << 16):
            found += data
    return [int(status) for status in re.findall(r"^HTTP/1\.1 (\d+)", found.decode(), re.MULTILINE)]


def test_a_large_body_is_refused_before_it_is_sent(gateway: RunningGateway) -> None:
    """And the connection is closed: the client's next request would be taken for the body."""
    begin = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Length: 99999999", "Expect: 100-continue")
    assert raw_answers(gateway, *begin) == [413]
    assert raw_answers(gateway, *begin, "Content-Encoding: gzip") == [415]


def test_a_whole_url_reaches_its_path(gateway: RunningGateway) -> None:
    head = (f"GET {gateway.url}/health HTTP/1.1", "Host: localhost", "Connection: close")
    assert raw_answers(gateway, *head) == [200]


@pytest.mark.parametrize("headers", [{"Host": "[::1"}, {"Host": "a]"}, {"Origin": "http://["}])
def test_headers_that_name_no_host_are_refused(headers: dict[str, str]) -> None:
    answer = ask("GET", "/", headers)
    assert (answer.status_code, answer.json()["error"]["code"]) in {(400, "invalid_host"), (403, "unknown_host")}


def test_rates_fill_up_again() -> None:
    now = 0.0
    rates = Rates(60, now=lambda: now)
    for _ in range(60):
        rates.take("somebody")
    with pytest.raises(ApiError, match="more than 60 requests") as raised:
        rates.take("somebody")
    assert (raised.value.status, raised.value.retry_after_s) == (429, 2)
    rates.take("somebody else")
    now = 1.0
    rates.take("somebody")
    with pytest.raises(ApiError):
        rates.take("somebody")


class Socket:
    """A WebSocket, seen from the client."""

    def __init__(self, url: str, **headers: str) -> None:
        import socket

        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._protocol = WSConnection(ConnectionType.CLIENT)
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._send(Request(host=f"{host}:{port}", target="/ws/generate", extra_headers=extra))
        self._events = self._read()
        self._text = ""
        self.accepted = isinstance(next(self._events), AcceptConnection)

    def ask(self, message: Any) -> None:
        self.tell(json.dumps(message))

    def tell(self, text: str) -> None:
        self._send(TextMessage(data=text))

    def answer(self) -> dict[str, Any]:
        """The next message."""
        text = ""
        for event in self._events:
            assert isinstance(event, TextMessage), event
            text += event.data
            if event.message_finished:
                found: dict[str, Any] = json.loads(text)
                return found
        raise AssertionError("the socket was closed")

    def close(self) -> None:
        self._socket.close()

    def _send(self, event: Any) -> None:
        self._socket.sendall(self._protocol.send(event))

    def _read(self) -> Any:
        while True:
            data = self._socket.recv(65536)
            self._protocol.receive_data(data or None)
            for event in self._protocol.events():
                if isinstance(event, Ping):
                    self._send(event.response())
                    continue
                yield event
                if isinstance(event, CloseConnection | RejectConnection):
                    return


def test_websocket_answers_several_requests_and_cancels(gateway: RunningGateway) -> None:
    socket = Socket(gateway.url)
    try:
        endless = {"prompt": "Once", "max_tokens": 1500, "logit_bias": {"2": -100}}
        socket.ask({"id": "long", **endless})
        socket.ask({"id": 7, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0})
        seen: dict[Any, list[dict[str, Any]]] = {"long": [], 7: []}
        while not any("done" in one for one in seen[7]):
            one = socket.answer()
            seen[one["request"]].append(one)
        socket.ask({"cancel": "long"})
        while not any("done" in one for one in seen["long"]):
            one = socket.answer()
            seen[one["request"]].append(one)
        assert seen[7][0]["object"] == "chat.completion.chunk"
        assert 0 < len(seen["long"]) < 1500
        socket.ask({"id": "bad", "prompt": ""})
        assert socket.answer()["request"] == "bad"
        socket.ask([])
        while "error" not in (one := socket.answer()) or one.get("request") == "bad":
            pass  # the rest of what was asked before
        assert "JSON object" in one["error"]["message"]
    finally:
        socket.close()


def test_websocket_messages_that_are_none_end_nothing(gateway: RunningGateway) -> None:
    socket = Socket(gateway.url)
    try:
        for text, code in (
            ("{", "invalid_json"),
            ("[" * 100_000, "invalid_json"),
            ('{"id": ' + "9" * 5000 + "}", "invalid_json"),
            (json.dumps({"id": "i" * 129, "prompt": "Once"}), "invalid_value"),
            (json.dumps({"id": [[]], "prompt": "Once"}), "invalid_value"),
            (json.dumps({"cancel": {"a": 1}}), "invalid_value"),
        ):
            socket.tell(text)
            assert socket.answer()["error"]["code"] == code, text[:50]
        socket.ask({"id": "i" * 128, "prompt": "Once", "max_tokens": 1})
        assert socket.answer()["request"] == "i" * 128
    finally:
        socket.close()


def test_the_rate_holds_for_each_message_of_a_websocket(swarm: LocalSwarm) -> None:
    with running_gateway(swarm.initial_peers, requests_per_minute=2) as gateway:
        socket = Socket(gateway.url)
        try:
            for _ in range(2):
                socket.ask({"prompt": 1})
                assert socket.answer()["error"]["code"] != "rate_limit_exceeded"
            socket.ask({"prompt": 1})
            assert socket.answer()["error"]["code"] == "rate_limit_exceeded"
            assert gateway.http.post("/v1/completions", json={"prompt": 1}).status_code == 429
        finally:
            socket.close()


def test_idle_connections_are_closed(swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, a head that never ends, a body that never ends, and more connections or sockets than there is room."""
    monkeypatch.setattr("swarmllm.gateway.guard.HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr("swarmllm.gateway.apis.responder.BODY_TIMEOUT_S", 0.5)
    with running_gateway(swarm.initial_peers, max_connections=4) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")

        def connect(text: str) -> socket.socket:
            one = socket.create_connection((host, int(port)), timeout=60)
            one.sendall(text.encode())
            return one

        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n"
        for text in ("", head):
            with connect(text) as one:
                assert one.recv(1) == b""
        with connect(f"{head}\r\n{{") as one:
            assert one.recv(12) == b"HTTP/1.1 408"

        monkeypatch.setattr("swarmllm.gateway.guard.HEAD_TIMEOUT_S", 60.0)
        idle = [connect("") for _ in range(6)]
        assert [one.recv(1) for one in idle[:2]] == [b"", b""]  # those that were idle longest made room
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 200
        for one in idle:
            one.close()
        sockets = [Socket(gateway.url) for _ in range(3)]  # half of the connections may be sockets
        with pytest.raises(AssertionError):
            sockets[0].answer()
        for other in sockets[1:]:
            other.ask([])
            assert "JSON object" in other.answer()["error"]["message"]
        for other in sockets:
            other.close()


def test_websocket_of_another_page_is_refused(gateway: RunningGateway) -> None:
    socket = Socket(gateway.url, Origin="https://elsewhere.example")
    assert not socket.accepted
    socket.close()


def test_the_openapi_document_describes_all_routes(gateway: RunningGateway) -> None:
    document = gateway.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    refs = re.findall(r"#/components/schemas/(\w+)", json.dumps(document))
    assert set(refs) <= document["components"]["schemas"].keys()
    for path, methods in document["paths"].items():
        for method in methods:
            status = gateway.http.request(method, path.replace("{name}", NAME), json={}).status_code
            is_unknown = path.startswith("/v1/responses/") and status == 404
            assert status in (200, 400) or is_unknown, path


@pytest.mark.rotates(3)
def test_the_command(swarm: LocalSwarm) -> None:
    arguments = ["--model", embedded_model_path(), "--initial_peers", *swarm.initial_peers, "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "swarmllm", "gateway", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        match = re.fullmatch(rf"swarmllm: gateway of {NAME} at (http://127\.0\.0\.1:\d+/)\n", process.stdout.readline())
        assert match is not None
        assert httpx.get(f"{match[1]}v1/models").json()["data"][0]["id"] == NAME
        body = {"prompt": "Once", "max_tokens": 1500, "stream": True, "logit_bias": {"2": -100}}
        with httpx.stream("POST", f"{match[1]}v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]  # the stream is ended, not cut, and says why
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_dead_daemon_ends_the_gateway_with_a_reason(swarm: LocalSwarm) -> None:
    arguments = ["--model", embedded_model_path(), "--initial_peers", *swarm.initial_peers, "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "swarmllm", "gateway", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (daemon,) = (one for one in psutil.Process(process.pid).children() if "p2pd" in one.name())
        daemon.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "start it again" in errors.splitlines()[-1]
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "99999"], "port must be"),
        (["--max_length", "0"], "max_length must be at least 1"),
        (["--api_keys_file", os.devnull], "holds no keys"),
        (["--allowed_hosts", "http://x"], "'http://x' is no host for allowed_hosts: give it like chat.example.org"),
        (["--allowed_hosts", "*.example.org"], "is no host for allowed_hosts"),
        (["--allowed_hosts", ""], "is no host for allowed_hosts"),
        (["--allowed_hosts", "a.example,b.example"], "is no host for allowed_hosts"),
        (["--allowed_hosts", "x:80"], "allowed_hosts are names without ports: give x, not 'x:80'"),
        (["--picture_hosts", "*.example.org"], "is no host for picture_hosts"),
        (["--served_name", ""], "a served_name is empty: give each model a name, or leave it out"),
    ],
)
def test_unusable_flags_end_with_one_sentence(flags: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    from swarmllm.gateway.__main__ import main

    assert main(["--model", "m", *flags]) == 2
    captured = capfd.readouterr().err
    assert words in captured
    assert captured.count("\n") == 1


@pytest.mark.parametrize(
    "origin",
    [
        *("example.org", "https://example.org/", "https://a b", "", "https://a.org/chat"),
        *("https://Example.org", "https://example.org:443", "https://münchen.example", "https://*.example.org"),
    ],
)
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is no origin for cors_origins: .* like https://example\.org"):
        GatewayConfig(model="m", cors_origins=(origin,))
    with pytest.raises(ConfigurationError, match="is no origin for cors_origins"):
        UpConfig(cors_origins=(origin,))
    GatewayConfig(model="m", cors_origins=("*", "null", "file://", "http://[::1]:81", "chrome-extension://abc"))


def test_a_port_in_use_is_one_sentence_before_anything_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    from swarmllm.gateway.__main__ import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", "m", "--port", str(port)]) == 2
    captured = capfd.readouterr().err
    assert f"can't listen on 127.0.0.1 port {port}: Address already in use; choose another --port" in captured
    assert captured.count("\n") == 1
