"""Whatever is sent, the event loop goes on: no body, message or stream holds it up for longer than `most_s()`.

A stall is measured as what the whole process computes while the loop has no turn. So it doesn't matter how busy the
machine is, and a thread that keeps Python's lock counts as the loop's own work does.
"""

import base64
import gc
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from web_gateway import NAME, RunningGateway
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Message, Request, TextMessage

MOST_S = 0.1
MOST_READINGS = 2.5
"""Most readings of the largest body in place of it, on slow machines: the least that a body can cost."""
TRIES = 4
"""A stall that shows each time is the body's; others are a collection of garbage, or another test's end."""
SIZE = (1 << 20) - 300


class Ticks:
    """The longest time that the process has computed between two turns of the loop."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._loop = gateway.loop
        self._goes_on = True
        self._last: float | None = None
        self.longest_s = 0.0
        self._loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        now = time.process_time()
        if self._last is not None:
            self.longest_s = max(self.longest_s, now - self._last)
        self._last = now
        if self._goes_on:
            self._loop.call_later(0.0005, self._tick)

    def end(self) -> float:
        self._goes_on = False
        return self.longest_s


@pytest.fixture(scope="module")
def calm() -> Iterator[None]:
    """Garbage is looked for among what is new, as in the command."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def most_s() -> float:
    """The longest stall that is allowed, in seconds that this process computes."""
    body, began = filled("[]"), time.thread_time()
    json.loads(body)
    return max(MOST_S, MOST_READINGS * (time.thread_time() - began))


def require_no_stall(gateway: RunningGateway, send: Callable[[], None]) -> None:
    found = []
    for _ in range(TRIES):
        ticks = Ticks(gateway)
        send()
        found.append(ticks.end())
        if found[-1] <= most_s():
            return
    pytest.fail(f"the loop was held up each time, for {found} s")


def filled(item: str, size: int = SIZE) -> str:
    """As many as there is room for, in a list."""
    return f"[{','.join([item] * (size // (len(item) + 1)))}]"


def numbered(size: int = SIZE) -> str:
    return "{" + ",".join(f'"{number:x}":1' for number in range(size // 12)) + "}"


ITEMS = {
    "strings": '"a"',
    "numbers": "1",
    "lists": "[]",
    "objects": "{}",
    "lists of lists": "[[1]]",
    "two kinds": '1,"a"',
    "parts": '{"type":"text","text":""}',
    "bad parts": '{"type":1}',
    "messages": '{"role":"user","content":""}',
    "bad messages": '{"role":"user","content":[1,2]}',
}
FIELDS = {
    "/v1/completions": ("prompt", "stop", "logit_bias", "stream_options"),
    "/v1/chat/completions": ("messages", "tools"),
    "/v1/embeddings": ("input",),
    "/v1/messages": ("messages", "system"),
    "/v1/responses": ("input", "metadata"),
    "/api/chat": ("messages", "format"),
    "/api/generate": ("images",),
    "/api/embed": ("input",),
    "/tokenize": ("messages",),
    "/detokenize": ("tokens",),
}


def body_of(path: str, field: str, name: str) -> bytes:
    more = {"/v1/messages": ',"max_tokens":1'}.get(path, "")
    value = numbered() if name == "keys" else filled(ITEMS[name])
    return f'{{"model":"{NAME}"{more},"{field}":{value}}}'.encode()


@pytest.mark.rotates(3)
@pytest.mark.parametrize("path", FIELDS)
def test_bodies(gateway: RunningGateway, calm: None, path: str) -> None:
    """One kind of list or object, as long as a body may be, in each field that takes some."""
    for field in FIELDS[path]:
        for name in (*ITEMS, "keys"):
            body = body_of(path, field, name)

            def send(body: bytes = body) -> None:
                assert gateway.http.post(path, content=body).status_code < 500

            require_no_stall(gateway, send)


def chat_of(content: str) -> str:
    return f'"messages":[{{"role":"user","content":{content}}}]'


OTHERS: dict[str, tuple[str, str]] = {
    "a long text": ("/v1/completions", f'"prompt":"{"hello " * (SIZE // 6)}"'),
    "a long chat": ("/v1/chat/completions", chat_of(f'"{"hello " * (SIZE // 6)}"')),
    "a chat of many parts": ("/v1/chat/completions", chat_of(filled(ITEMS["parts"], 700_000))),
    "many messages": ("/v1/chat/completions", f'"messages":{filled(ITEMS["messages"], 110_000)}'),
    "many messages of Ollama": ("/api/chat", f'"messages":{filled(ITEMS["messages"], 110_000)}'),
    "many messages of Anthropic": (
        "/v1/messages",
        f'"max_tokens":1,"messages":{filled(chat_of(filled(ITEMS["parts"], 100))[12:-1], 600_000)}',
    ),
    "many items": ("/v1/responses", f'"input":{filled(ITEMS["messages"], 110_000)}'),
    "many fields": ("/v1/completions", numbered()[1:-1]),
    "a long name": ("/v1/completions", f'"{"a" * SIZE}":1'),
    "brackets": ("/v1/completions", f'"prompt":{"[" * (SIZE // 2)}{"]" * (SIZE // 2)}'),
    "brackets in a text": ("/v1/completions", f'"prompt":"{"[" * SIZE}"'),
    "quotes in a text": ("/v1/completions", f'"prompt":"{"[" * 40_000}{chr(92) + chr(34)}{"{" * (SIZE // 2)}"'),
    "a long number": ("/v1/completions", f'"prompt":{"1" * SIZE}'),
    "arguments": (
        "/v1/chat/completions",
        '"messages":[{"role":"assistant","content":"","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}}'
        ']},{"role":"user","content":' + json.dumps("[" * (SIZE // 2)) + "}]",
    ),
    "texts of tokens": ("/tokenize", f'"return_token_strs":true,"prompt":"{"a b " * (SIZE // 16)}"'),
}


@pytest.mark.rotates(3)
@pytest.mark.parametrize("name", OTHERS)
def test_other_bodies(gateway: RunningGateway, calm: None, name: str) -> None:
    path, fields = OTHERS[name]
    body = f'{{"model":"{NAME}",{fields}}}'.encode()

    def send() -> None:
        assert gateway.http.post(path, content=body).status_code < 500

    require_no_stall(gateway, send)


class Socket:
    """A WebSocket that can send what clients don't."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._socket = connected(gateway)
        self._protocol = WSConnection(ConnectionType.CLIENT)
        host = urlsplit(gateway.url).netloc
        self._socket.sendall(self._protocol.send(Request(host=host, target="/ws/generate")))
        assert isinstance(self.receive(), AcceptConnection)

    def receive(self) -> Any:
        """An event."""
        while True:
            for event in self._protocol.events():
                if isinstance(event, AcceptConnection) or (isinstance(event, TextMessage) and event.message_finished):
                    return event
            self._protocol.receive_data(self._socket.recv(1 << 16) or None)

    def send(self, text: str, pieces: int = 1) -> None:
        """A message, in so many frames; each but the last has one character."""
        first = b"".join(self._protocol.send(Message(data=one, message_finished=False)) for one in text[: pieces - 1])
        self._socket.sendall(first + self._protocol.send(Message(data=text[pieces - 1 :])))

    def close(self) -> None:
        self._socket.sendall(self._protocol.send(CloseConnection(code=1000)))
        self._socket.close()


def connected(gateway: RunningGateway) -> socket.socket:
    where = urlsplit(gateway.url)
    return socket.create_connection((where.hostname, where.port), 120)


@contextmanager
def web_socket(gateway: RunningGateway) -> Iterator[Socket]:
    found = Socket(gateway)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("name", [*ITEMS, "keys"])
def test_messages_of_a_websocket(gateway: RunningGateway, calm: None, name: str) -> None:
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        text = body_of(path, field, name).decode()
        with web_socket(gateway) as sent:

            def send(sent: Socket = sent, text: str = text) -> None:
                sent.send(text)
                assert "error" in json.loads(sent.receive().data)

            require_no_stall(gateway, send)


def test_frames_of_one_byte(gateway: RunningGateway, calm: None) -> None:
    with web_socket(gateway) as sent:

        def send() -> None:
            sent.send("[" * 20_000, 20_000)
            assert "error" in json.loads(sent.receive().data)

        require_no_stall(gateway, send)


def test_chunks_of_one_byte(gateway: RunningGateway, calm: None) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(gateway.url).netloc}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )

    def send() -> None:
        with connected(gateway) as raw:
            raw.sendall(head.encode() + b"1\r\n[\r\n" * 30_000 + b"0\r\n\r\n")
            assert raw.recv(1 << 12).startswith(b"HTTP/1.1 400")

    require_no_stall(gateway, send)


def test_spaces_in_a_picture(gateway: RunningGateway, calm: None) -> None:
    url = f"data:image/png;base64,{base64.b64encode(bytes(30)).decode()}{' a' * (SIZE // 2)}"
    body = f"{{{chat_of(json.dumps([{'type': 'image_url', 'image_url': {'url': url}}]))}}}".encode()

    def send() -> None:
        assert gateway.http.post("/v1/chat/completions", content=body).status_code == 400

    require_no_stall(gateway, send)
