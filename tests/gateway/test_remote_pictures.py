"""Pictures by address: fetched from where the gateway was told, and from nowhere else, whatever a name stands for."""

import asyncio
import contextlib
import ipaddress
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from vision_model import as_png, as_url, picture, save_vision_model
from web_gateway import OPTIONS, RunningGateway, running_gateway

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError
from swarmllm.gateway.apis import remote_pictures
from swarmllm.gateway.apis.chat_request import ChatMessage
from swarmllm.gateway.apis.remote_pictures import MAX_REDIRECTS, RemotePictures, is_public
from swarmllm.gateway.engine.vision import MAX_PICTURES
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.settings import GatewayConfig

PNG = as_png(picture("red"))


class Pictures(BaseHTTPRequestHandler):
    """A web server with pictures, and with what some servers do instead."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked: list[str] = self.server.asked  # type: ignore[attr-defined]
        asked.append(self.path)
        kind, _, more = self.path.strip("/").partition("/")
        answer = {
            "red.png": lambda: self.answer(200, PNG, **{"Content-Type": "image/png; x=y"}),
            "to": lambda: self.answer(302, b"", Location=f"/{more}"),
            "away": lambda: self.answer(307, b"", Location=f"http://127.0.0.1:9/{more}"),
            "nowhere": lambda: self.answer(302, b""),
            "badly": lambda: self.answer(302, b"", Location="http://[::1"),
            "round": lambda: self.answer(301, b"", Location="/round"),
            "page": lambda: self.answer(200, b"<p>", **{"Content-Type": "text/html"}),
            "packed": lambda: self.answer(200, PNG, **{"Content-Type": "image/png", "Content-Encoding": "gzip"}),
            "chunked": lambda: self.chunked(PNG),
            "crumbs": lambda: self.chunked(bytes(4096), 1),
            "large": lambda: self.answer(200, bytes(4096), **{"Content-Type": "image/png"}),
            "endless": self.endless,
            "silent": self.server.released.wait,  # type: ignore[attr-defined]
            "broken": lambda: self.wfile.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 99\r\n\r\nx"
            ),
            "nonsense": lambda: self.wfile.write(b"\x00\x01 hello"),
        }.get(kind, lambda: self.answer(404, b""))
        answer()
        self.close_connection = True

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def chunked(self, data: bytes, size: int = 50) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pieces = [data[place : place + size] for place in range(0, len(data), size)]
        chunks = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        with contextlib.suppress(OSError):  # the client has gone
            self.wfile.write(b"".join(chunks) + b"0\r\n\r\n")

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 12))
        except OSError:  # the client has gone
            pass

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def web_server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        server.asked, server.released = [], threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.released.set()  # type: ignore[attr-defined]
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def web() -> Iterator[Any]:
    with web_server() as server:
        yield server


def where(web: Any) -> str:
    return f"127.0.0.1:{web.server_port}"


def said(*urls: str) -> list[ChatMessage]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [ChatMessage.model_validate({"role": "user", "content": [*parts, {"type": "text", "text": "?"}]})]


def fetched(hosts: list[str], *urls: str) -> list[str]:
    async def fetch() -> list[str]:
        messages = said(*urls)
        async with fetching(hosts).fetched(messages, "me"):
            found = messages[0].picture_urls()
        assert messages[0].picture_urls() == [*urls]
        return found

    return asyncio.run(fetch())


def fetching(hosts: list[str]) -> RemotePictures:
    return RemotePictures(hosts, num_bytes=1 << 40, max_waiting=8)


@pytest.mark.parametrize("path", ["red.png", "to/red.png", "to/to/to/red.png", "chunked", "red.png?a=b c&ü=%20"])
def test_the_picture_replaces_its_address(web: Any, path: str) -> None:
    assert fetched([where(web)], f"HTTP://{where(web)}/{path}".replace("?", "/?"), as_url(picture("blue"))) == [
        as_url(picture("red")),
        as_url(picture("blue")),
    ]


REFUSED = {
    "round": f"redirected more than {MAX_REDIRECTS} times",
    "nowhere": "answers 302 instead of the picture",
    "badly": "redirects to a place that is no address",
    "away/red.png": "fetches no pictures from 127.0.0.1:9: see --picture_hosts",
    "to//127.0.0.1:9/": "fetches no pictures from 127.0.0.1:9",
    "page": "answers with something that is no picture: 'text/html'",
    "packed": "in an encoding that was not asked for",
    "nothing": "answers 404 instead of the picture",
    "broken": "answers no HTTP, or breaks off",
    "crumbs": "in chunks that are too small",
    "nonsense": "answers no HTTP, or breaks off",
}


@pytest.mark.parametrize("path", REFUSED)
def test_answers_that_are_no_picture(web: Any, path: str) -> None:
    with pytest.raises(ApiError, match=REFUSED[path]) as refused:
        fetched([where(web)], f"http://{where(web)}/{path}")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "messages", "invalid_image")


def test_bounds(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits count all pictures of a request together."""
    monkeypatch.setattr(remote_pictures, "MAX_BYTES", 6000)
    at = f"http://{where(web)}"
    assert fetched([where(web)], f"{at}/large")
    for paths in (("endless",), ("large", "large")):
        with pytest.raises(ApiError, match="larger than 6000 bytes"):
            fetched([where(web)], *(f"{at}/{path}" for path in paths))
    with pytest.raises(ApiError, match="are too many"):
        fetched([where(web)], *[f"{at}/red.png"] * (MAX_PICTURES + 1))
    monkeypatch.setattr(remote_pictures, "TIMEOUT_S", 0.2)
    with pytest.raises(ApiError, match=r"did not come within 0\.2 s"):
        fetched([where(web)], f"{at}/silent")
    web.released.set()


@pytest.mark.parametrize(
    ("hosts", "url", "words"),
    [
        (["*"], "http://{here}/red.png", "fetches no pictures from"),  # another port
        (["*"], "http://127.0.0.1/red.png", "127.0.0.1 has no public address"),
        (["*"], "http://localhost/red.png", "localhost has no public address"),
        (["*"], "http://2130706433/red.png", "has no public address"),  # 127.0.0.1 as a number
        (["*"], "http://0x7f.1/red.png", "has no public address"),
        (["*"], "http://[::1]/red.png", "has no public address"),
        (["*"], "http://[::ffff:127.0.0.1]/red.png", "has no public address"),
        (["*"], "http://169.254.169.254/latest", "has no public address"),
        (["*"], "http://[::127.0.0.1]/red.png", "has no public address"),
        (["*"], "http://[64:ff9b:1::7f00:1]/red.png", "has no public address"),
        (["*"], "http://[::ffff:0:127.0.0.1]/red.png", "has no public address"),
        (["example.org"], "http://{here}/red.png", "fetches no pictures from 127.0.0.1:"),
        (["127.0.0.1"], "http://{here}/red.png", "fetches no pictures from 127.0.0.1:"),
        (["{here}"], "http://me@{here}/red.png", "without a user's name"),
        (["*"], "http:///red.png", "fetched from http:// and https:// addresses"),
        (["*"], "http://x:99999/red.png", "is no address"),
        (["*"], "http://" + "a" * 300 + "/", "is no address"),
        (["{here}"], "https://{here}/red.png", "can't be asked for a picture"),  # it knows no TLS
    ],
)
def test_forbidden_addresses(web: Any, hosts: list[str], url: str, words: str) -> None:
    web.asked.clear()
    with pytest.raises(ApiError, match=words):
        fetched([host.format(here=where(web)) for host in hosts], url.format(here=where(web)))
    assert not web.asked


def test_the_checked_address_is_the_one_that_is_asked(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that stands for something else the next time (DNS rebinding) gains nothing."""
    looked: list[str] = []

    async def look_up(self: Any, host: str, port: int, **_: Any) -> Any:
        looked.append(host)
        return [(2, 1, 6, "", ("127.0.0.1" if len(looked) == 1 else "10.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    assert fetched([f"pictures.test:{web.server_port}"], f"http://pictures.test:{web.server_port}/red.png")
    assert looked[:1] == ["pictures.test"]
    looked.clear()
    with pytest.raises(ApiError, match=r"pictures\.test has no public address"):
        fetched(["*"], "http://pictures.test/red.png")


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        (["example.org:80"], "http://example.org/a"),
        (["example.org:443"], "https://example.org/a"),
        (["Example.org"], "https://EXAMPLE.org/a"),
        (["b\u00fccher.example"], "https://b\u00fccher.example/a"),
        (["example.org."], "http://example.org/a"),
        (["::1"], "http://[::1]/a"),
        (["[::1]:81"], "http://[::1]:81/a"),
    ],
)
def test_hosts_that_are_named(hosts: list[str], url: str) -> None:
    assert fetching(hosts)._target(url).is_named


def test_a_port_is_meant() -> None:
    for hosts, url in ((["example.org:80"], "https://example.org/a"), (["example.org"], "http://example.org:81/a")):
        with pytest.raises(ApiError, match="fetches no pictures from"):
            fetching(hosts)._target(url)


@pytest.mark.parametrize("host", ["http://example.org", "example.org/", "", "example.org:http", "me@example.org"])
def test_wrong_hosts_are_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no host for picture_hosts: give it like example\.org"):
        GatewayConfig(model=("x",), picture_hosts=(host,))


def test_waiting_requests_do_not_time_out(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pictures, "TIMEOUT_S", 4.0)
    monkeypatch.setattr(remote_pictures, "MAX_FETCHES", 1)

    async def fetch() -> list[str]:
        pictures = fetching([where(web)])
        slow = asyncio.ensure_future(fetched_by(pictures, "others", f"http://{where(web)}/silent"))
        await asyncio.sleep(0)
        found = await fetched_by(pictures, "me", f"http://{where(web)}/red.png")
        with pytest.raises(ApiError, match="did not come within"):
            await slow
        return found

    web.released.clear()
    assert asyncio.run(fetch()) == [as_url(picture("red"))]
    web.released.set()


async def fetched_by(pictures: RemotePictures, caller: str, *urls: str) -> list[str]:
    messages = said(*urls)
    async with pictures.fetched(messages, caller):
        return messages[0].picture_urls()


def test_slow_hosts_of_one_caller_do_not_hold_up_others(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pictures, "MAX_FETCHES", 8)

    async def fetch() -> list[str]:
        pictures = RemotePictures([where(web)], num_bytes=1 << 40, max_waiting=30)
        slow = [asyncio.ensure_future(fetched_by(pictures, "slow", f"http://{where(web)}/silent")) for _ in range(30)]
        await asyncio.sleep(0)
        found = await fetched_by(pictures, "me", f"http://{where(web)}/red.png")
        assert not any(one.done() for one in slow)
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert pictures.room.left == 8
        return found

    web.released.clear()
    assert asyncio.run(fetch()) == [as_url(picture("red"))]
    web.released.set()


SPECIAL_IPV4 = """
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.0.0/29 192.0.0.8/32
192.0.0.9/32 192.0.0.10/32 192.0.0.170/32 192.0.0.171/32 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24
192.88.99.2/32 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4
255.255.255.255/32 224.0.0.0/4"""
"""IANA's registry of special-purpose IPv4 addresses, and multicast, which has one of its own."""
SPECIAL_IPV6 = """
::1/128 ::/128 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001::/32 2001:1::1/128 2001:1::2/128 2001:1::3/128
2001:2::/48 2001:3::/32 2001:4:112::/48 2001:10::/28 2001:20::/28 2001:30::/28 2001:db8::/32 2002::/16
2620:4f:8000::/48 3fff::/20 5f00::/16 fc00::/7 fe80::/10 ff00::/8 fec0::/10 ::/96 ::ffff:0:0:0/96 4000::/3 8000::/1"""
"""The same of IPv6, without the two blocks of `HELD`; with what is deprecated or was never given out."""
HELD = ("::ffff:{}", "64:ff9b::{}")
"""Addresses that are as public as the IPv4 address in them."""
HIDDEN = (
    "::{}",
    "::ffff:0:{}",
    "64:ff9b:1::{}",
    "64:ff9b:1:ffff::{}",
    "fec0::{}",
    "fd00::{}",
    "fe80::5efe:{}",
    "5f00::{}",
)
"""Addresses that are never public, whatever they hold."""


def ends(block: str) -> list[Any]:
    network = ipaddress.ip_network(block)
    return [network[0], network[network.num_addresses // 2], network[-1]]


@pytest.mark.parametrize("block", (SPECIAL_IPV4 + SPECIAL_IPV6).split())
def test_special_addresses_are_not_public(block: str) -> None:
    for address in ends(block):
        assert not is_public(str(address)), address
        for form in HELD if address.version == 4 else ():
            assert not is_public(form.format(address)), form.format(address)


@pytest.mark.parametrize("block", ["1.0.0.0/8", "93.184.216.34/32", "172.32.0.0/11", "192.0.1.0/24", "223.0.0.0/8"])
def test_public_ipv4_addresses(block: str) -> None:
    for address in ends(block):
        assert is_public(str(address))
        for form in HELD:
            assert is_public(form.format(address)), form.format(address)
        for form in HIDDEN:
            assert not is_public(form.format(address)), form.format(address)
        assert not is_public(str(ipaddress.IPv6Address(int(ipaddress.ip_address("2002::")) + (int(address) << 80))))


@pytest.mark.parametrize("block", ["2001:200::/23", "2003::/18", "2400::/12", "2600::/12", "2606:2800:220:1::1/128"])
def test_public_ipv6_addresses(block: str) -> None:
    assert all(is_public(str(address)) for address in ends(block))


@pytest.mark.parametrize(
    "address", ["192.0.0.192", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fe80::1%eth0"]
)
def test_metadata_addresses_of_clouds_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.fixture(scope="module")
def vision(web: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway that may fetch from that server."""
    directory: Path = tmp_path_factory.mktemp("vision")
    save_vision_model(directory)
    with (
        LocalSwarm(str(directory), spans=[(0, 4)], **OPTIONS) as swarm,
        running_gateway(swarm.initial_peers, model=(str(directory),), picture_hosts=(where(web),)) as gateway,
    ):
        yield gateway


def test_over_http(vision: RunningGateway, web: Any, gateway: RunningGateway) -> None:
    """The answer is that of the picture itself; a model that sees nothing has nothing fetched."""

    def asked(one: RunningGateway, url: str) -> Any:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
        return one.http.post("/v1/chat/completions", json=body)

    address = f"http://{where(web)}/to/red.png"
    found = [asked(vision, url).json()["choices"][0]["message"] for url in (address, as_url(picture("red")))]
    assert found[0] == found[1]
    tokens = vision.http.post(
        "/tokenize",
        json={"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}]},
    )
    assert tokens.json()["count"] > 16
    refused = asked(vision, f"http://{where(web)}/page")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_image")
    web.asked.clear()
    assert "reads text only" in asked(gateway, address).json()["error"]["message"]
    assert not web.asked
