"""Pictures that a chat names by their address on the web, if `--picture_hosts` allows it. Used by `responder`.

Whoever may ask a gateway could make it ask others in its own network. So the address that a name stands for is looked
at, and the connection goes to that very address; each redirection is looked at anew. Bytes and time are bounded.
"""

import asyncio
import base64
import http.client
import io
import ipaddress
import re
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from swarmllm.gateway.engine.pictures import MAX_PICTURES, bad_picture
from swarmllm.gateway.requests.chat_messages import ChatMessage, ImageUrl
from swarmllm.gateway.settings import host_and_port
from swarmllm.version import __version__

ANY_HOST = "*"
MAX_BYTES = 20 << 20
"""Of all pictures of a request, as they come. Assumed: some photographs."""
TIMEOUT_S = 20.0
"""For all pictures of a request. Assumed."""
MAX_REDIRECTS = 3
MAX_FETCHES = 32
"""Requests whose pictures are fetched at a time: 640 MB at worst. With fewer, some slow hosts would hold up all."""
_HEAD_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}
_REMOTE = re.compile(r"https?://", re.IGNORECASE)
_UNICAST = ipaddress.ip_network("2000::/3")
"""All that IANA has given out of IPv6 for the internet (RFC 4291). What else there is reaches one's own network, or
holds an IPv4 address that some machines unpack."""
_HOLD_IPV4 = tuple(map(ipaddress.ip_network, ("::ffff:0:0/96", "64:ff9b::/96")))
"""IPv6 addresses that stand for the IPv4 address in their last bits: on this machine, and behind a NAT64."""
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
            *("192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
            *(
                "224.0.0.0/3",
                "168.63.129.16/32",
            ),  # multicast and reserved; what Azure's machines ask for their settings
            *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
        ),
    )
)
"""IANA's registries of special-purpose addresses, whether these are routed or not: no pictures are there."""
_SAFE = "%/:=&?~+!$,;'@()*[]"


@dataclass(frozen=True)
class _Target:
    """Where a picture is."""

    scheme: str
    host: str
    port: int
    path: str
    is_named: bool
    """Whether its host is one of those that the gateway was told: it may be in a private network."""

    @property
    def authority(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS[self.scheme] else f"{name}:{self.port}"


class RemotePictures:
    """Made once per gateway. `hosts` are names, with a port unless it is the usual one; `*`: any public address."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = frozenset(map(host_and_port, hosts))
        self._free = asyncio.Semaphore(MAX_FETCHES)

    async def fetch(self, messages: Sequence[ChatMessage]) -> None:
        """Put what is found at the addresses of pictures into their place, as data URLs. Others stay as they are.

        Raises:
            ApiError: one can't be had.
        """
        places = [place for message in messages for place in _places(message) if _REMOTE.match(place.url)]
        if not places or not self._hosts:
            return
        if len(places) > MAX_PICTURES:
            raise bad_picture(f"{len(places)} pictures are too many: {MAX_PICTURES} at most")
        try:
            async with self._free, asyncio.timeout(TIMEOUT_S):  # those who wait are not told that their host is slow
                left = MAX_BYTES
                for place in places:
                    kind, data = await self._found(place.url, left)
                    left -= len(data)
                    place.url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        except TimeoutError:
            raise bad_picture(f"the pictures did not come within {TIMEOUT_S:g} s") from None

    async def _found(self, url: str, max_bytes: int) -> tuple[str, bytes]:
        """The media type and the bytes of what is at an address."""
        for _ in range(MAX_REDIRECTS + 1):
            target = self._target(url)
            answer, data = _read(await _asked(target, max_bytes), target, max_bytes)
            if answer.status in (301, 302, 303, 307, 308) and (location := answer.getheader("location")):
                try:
                    url = urljoin(url, location)
                except ValueError:
                    raise bad_picture(f"{target.authority} redirects to what is no address") from None
                continue
            if answer.status != 200:
                raise bad_picture(f"{target.authority} answers {answer.status} instead of the picture")
            kind = answer.getheader("content-type", "").partition(";")[0].strip().lower()
            if not re.fullmatch(r"image/[a-z0-9.+-]{1,32}", kind):
                raise bad_picture(f"{target.authority} answers what is no picture: {kind[:64]!r}")
            if answer.getheader("content-encoding", "identity").lower() != "identity":
                raise bad_picture(f"{target.authority} answers in an encoding that was not asked for")
            return kind, data
        raise bad_picture(f"a picture is redirected more than {MAX_REDIRECTS} times")

    def _target(self, url: str) -> _Target:
        """Raises: ApiError: nobody may ask there."""
        try:
            parts = urlsplit(url)
            scheme, port = parts.scheme, parts.port
            host = (parts.hostname or "").rstrip(".").encode("idna").decode()
        except ValueError:
            raise bad_picture(f"{url[:128]!r} is no address") from None
        if scheme not in _PORTS or not host or parts.username is not None:
            raise bad_picture("pictures are fetched from http:// and https:// addresses without a user's name")
        port = port or _PORTS[scheme]
        path = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")
        is_named = (host, port) in self._hosts or ((host, None) in self._hosts and port == _PORTS[scheme])
        target = _Target(scheme, host, port, path, is_named)
        if is_named:
            return target
        if (ANY_HOST, None) not in self._hosts or port not in _PORTS.values():
            raise bad_picture(f"this gateway fetches no pictures from {target.authority[:128]}: see --picture_hosts")
        return target


def _places(message: ChatMessage) -> list[ImageUrl]:
    parts = message.content if isinstance(message.content, list) else []
    return [part.image_url for part in parts if part.image_url is not None]


async def _asked(target: _Target, max_bytes: int) -> bytes:
    """All that is answered, as it comes from the network.

    Raises:
        ApiError: nothing, or too much.
    """
    tls = {"ssl": ssl.create_default_context(), "server_hostname": target.host} if target.scheme == "https" else {}
    try:
        reader, writer = await _connected(await _addresses(target), target, tls)
        try:
            head = (
                f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\nUser-Agent: swarmllm/{__version__}\r\n"
                "Accept: image/*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode("ascii"))
            found = bytearray()
            while chunk := await reader.read(1 << 16):
                found += chunk
                if len(found) > max_bytes + _HEAD_BYTES:
                    raise bad_picture(f"the pictures are larger than {MAX_BYTES} bytes")
            return bytes(found)
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or type(error).__name__
        raise bad_picture(f"{target.authority[:128]} can't be asked for a picture: {reason}") from None


async def _connected(
    addresses: Sequence[str], target: _Target, tls: dict[str, object]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To the first address that answers. Raises: OSError: none does."""
    for place, address in enumerate(addresses):
        try:
            return await asyncio.open_connection(address, target.port, **tls)  # type: ignore[arg-type]
        except OSError:
            if place == len(addresses) - 1:
                raise
    raise OSError(None, "it has no address")


async def _addresses(target: _Target) -> list[str]:
    """What its name stands for now.

    Raises:
        ApiError: one of them is in a private network. OSError: nothing.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(where[0]) for *_, where in found))
    if not target.is_named and not all(map(is_public, addresses)):
        raise bad_picture(f"{target.authority[:128]} has no public address, and is not named by --picture_hosts")
    return addresses


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet, also if it stands for another one."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if any(known in network for network in _HOLD_IPV4):
        known = ipaddress.IPv4Address(int(known) & 0xFFFFFFFF)
    if known.version == 6 and known not in _UNICAST:
        return False
    return not any(known in network for network in _SPECIAL)


class _Stored:
    """Looks like a socket from which all of this can be read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)


def _read(raw: bytes, target: _Target, max_bytes: int) -> tuple[http.client.HTTPResponse, bytes]:
    """The head and the body of an answer.

    Raises:
        ApiError: it is none.
    """
    answer = http.client.HTTPResponse(_Stored(raw))  # type: ignore[arg-type]
    try:
        answer.begin()
        data = answer.read()
    except (http.client.HTTPException, ValueError, OSError):
        raise bad_picture(f"{target.authority[:128]} answers no HTTP, or breaks off") from None
    if len(data) > max_bytes:
        raise bad_picture(f"the pictures are larger than {MAX_BYTES} bytes")
    return answer, data
