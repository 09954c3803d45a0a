"""Pictures that a chat names by their address on the web, if `--picture_hosts` allows it. `responder` fetches them.

A client could make the gateway ask hosts in its own network. Therefore the gateway looks up the address of a name,
checks it, and connects to that very address; it checks each redirection again. Bytes and time are limited.
"""

import asyncio
import base64
import http.client
import io
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from swarmllm.api import __version__
from swarmllm.gateway.apis.chat_request import ChatMessage, ImageUrl
from swarmllm.gateway.engine.vision import MAX_PICTURES, Room, bad_picture
from swarmllm.gateway.settings import host_and_port

ANY_HOST = "*"
MAX_BYTES = 20 << 20
"""Bytes of all pictures of a request, as they come. Assumed: some photographs."""
TIMEOUT_S = 20.0
"""Seconds for all pictures of a request. Assumed."""
MAX_REDIRECTS = 3
MAX_FETCHES = 32
"""Requests whose pictures are being fetched, or wait to be unpacked. With fewer, some slow hosts would hold up all."""
SHARE_OF_ONE = 4
"""One caller has at most a quarter of them, so that its slow hosts don't hold up others."""
BYTES_OF_FETCH = 3 * MAX_BYTES
"""Memory of one fetch: the bytes, and the same as a data URL."""
FREE_CHUNKS, LEAST_CHUNK_BYTES = 64, 512
"""After `FREE_CHUNKS` chunks, an answer must have this many bytes per chunk on average, because each costs some
microseconds. Assumed: web servers send some kilobytes at a time."""
_PIECE_BYTES = 1 << 16
_MAX_SIZE_DIGITS = 8
_PORTS = {"http": 80, "https": 443}
_REMOTE = re.compile(r"https?://", re.IGNORECASE)
_UNICAST = ipaddress.ip_network("2000::/3")
"""IANA's IPv6 addresses for the internet (RFC 4291). All others are in one's own network, or hold an IPv4 address that
some machines unpack."""
_HOLD_IPV4 = tuple(map(ipaddress.ip_network, ("::ffff:0:0/96", "64:ff9b::/96")))
"""IPv6 addresses that mean the IPv4 address in their last bits: on this machine, and behind a NAT64."""
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
            ),  # multicast and reserved; the settings service of Azure's machines
            *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
        ),
    )
)
"""IANA's registries of special-purpose addresses, routed or not: pictures are never there."""
_SAFE = "%/:=&?~+!$,;'@()*[]"


@dataclass(frozen=True)
class _Target:
    """The place of a picture."""

    scheme: str
    host: str
    port: int
    path: str
    is_named: bool
    """Its host is in `--picture_hosts`: it may be in a private network."""

    @property
    def authority(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS[self.scheme] else f"{name}:{self.port}"


class RemotePictures:
    """Fetches pictures for one gateway. `hosts` are names, with a port unless it is the usual one; `*`: any public
    address."""

    def __init__(self, hosts: Sequence[str], *, num_bytes: int, max_waiting: int) -> None:
        """`num_bytes`: memory for all fetches."""
        self._hosts = frozenset(map(host_and_port, hosts))
        places = max(1, min(MAX_FETCHES, num_bytes // BYTES_OF_FETCH))
        self.room = Room(places, of_one=max(1, places // SHARE_OF_ONE), most=max_waiting)

    @asynccontextmanager
    async def fetched(self, messages: Sequence[ChatMessage], caller: str) -> AsyncIterator[None]:
        """Within the block, data URLs replace the addresses of pictures. Data URLs stay as they are.

        Raises:
            ApiError: a picture can't be fetched.
        """
        places = [place for message in messages for place in _places(message) if _REMOTE.match(place.url)]
        if not places or not self._hosts:
            yield
            return
        if len(places) > MAX_PICTURES:
            raise bad_picture(f"{len(places)} pictures are too many: {MAX_PICTURES} at most")
        urls = [place.url for place in places]
        taken = await self.room.take(1, caller)
        try:
            await self._fetch(places)
            yield
        finally:
            for place, url in zip(places, urls, strict=True):
                place.url = url
            taken.free()

    async def _fetch(self, places: Sequence[ImageUrl]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):  # the clock starts after the wait for a place
                left = MAX_BYTES
                for place in places:
                    kind, data = await self._found(place.url, left)
                    left -= len(data)
                    place.url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        except TimeoutError:
            raise bad_picture(f"the pictures did not come within {TIMEOUT_S:g} s") from None

    async def _found(self, url: str, max_bytes: int) -> tuple[str, bytearray]:
        """The media type and the bytes at an address."""
        for _ in range(MAX_REDIRECTS + 1):
            target = self._target(url)
            answer, data = await _asked(target, max_bytes)
            if answer.status in (301, 302, 303, 307, 308) and (location := answer.getheader("location")):
                try:
                    url = urljoin(url, location)
                except ValueError:
                    raise bad_picture(f"{target.authority} redirects to a place that is no address") from None
                continue
            if answer.status != 200:
                raise bad_picture(f"{target.authority} answers {answer.status} instead of the picture")
            kind = answer.getheader("content-type", "").partition(";")[0].strip().lower()
            if not re.fullmatch(r"image/[a-z0-9.+-]{1,32}", kind):
                raise bad_picture(f"{target.authority} answers with something that is no picture: {kind[:64]!r}")
            if answer.getheader("content-encoding", "identity").lower() != "identity":
                raise bad_picture(f"{target.authority} answers in an encoding that was not asked for")
            return kind, data
        raise bad_picture(f"a picture is redirected more than {MAX_REDIRECTS} times")

    def _target(self, url: str) -> _Target:
        """Raises: ApiError: nobody may fetch from there."""
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


async def _asked(target: _Target, max_bytes: int) -> tuple[http.client.HTTPResponse, bytearray]:
    """Ask for a picture; returns the head and the body of the answer.

    Raises:
        ApiError: there is no answer, too much, or no HTTP.
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
            answer = http.client.HTTPResponse(_Stored(await reader.readuntil(b"\r\n\r\n")))  # type: ignore[arg-type]
            answer.begin()
            return answer, await _body(reader, answer, max_bytes)
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
    except (EOFError, ValueError, http.client.HTTPException, asyncio.LimitOverrunError):
        raise bad_picture(f"{target.authority[:128]} answers no HTTP, or breaks off") from None
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or type(error).__name__
        raise bad_picture(f"{target.authority[:128]} can't be asked for a picture: {reason}") from None


async def _body(reader: asyncio.StreamReader, answer: http.client.HTTPResponse, max_bytes: int) -> bytearray:
    """The body after that head.

    Raises:
        ApiError: it is too large, or its chunks too small.
        EOFError, ValueError: it breaks off, or is no HTTP.
    """
    found = bytearray()
    if not answer.chunked:
        length = max_bytes + 1 if answer.length is None else answer.length
        await _read(reader, length, found, max_bytes)
        if answer.length is not None and len(found) < length:
            raise EOFError
        return found
    num_chunks = 0
    while length := _chunk_bytes(await reader.readuntil(b"\r\n")):
        num_chunks += 1
        if num_chunks > FREE_CHUNKS + len(found) // LEAST_CHUNK_BYTES:
            raise bad_picture(f"a picture comes in chunks that are too small: {LEAST_CHUNK_BYTES} bytes on average")
        end = len(found) + length
        await _read(reader, length, found, max_bytes)
        if len(found) < end or await reader.readexactly(2) != b"\r\n":
            raise EOFError
    return found


async def _read(reader: asyncio.StreamReader, length: int, found: bytearray, max_bytes: int) -> None:
    """Read up to `length` more bytes. Raises: ApiError: there are too many."""
    end = len(found) + length
    while len(found) < end and (piece := await reader.read(min(end - len(found), _PIECE_BYTES))):
        found += piece
        if len(found) > max_bytes:
            raise bad_picture(f"the pictures are larger than {MAX_BYTES} bytes")


def _chunk_bytes(line: bytes) -> int:
    """The size in the first line of a chunk. Raises: ValueError: it is no such line."""
    size = line.partition(b";")[0].strip()
    if not 0 < len(size) <= _MAX_SIZE_DIGITS or not size.isalnum():
        raise ValueError
    return int(size, 16)


async def _connected(
    addresses: Sequence[str], target: _Target, tls: dict[str, object]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that answers. Raises: OSError: none does."""
    for place, address in enumerate(addresses):
        try:
            return await asyncio.open_connection(address, target.port, **tls)  # type: ignore[arg-type]
        except OSError:
            if place == len(addresses) - 1:
                raise
    raise OSError(None, "it has no address")


async def _addresses(target: _Target) -> list[str]:
    """The addresses of the target's name now.

    Raises:
        ApiError: one of them is in a private network.
        OSError: there are none.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(where[0]) for *_, where in found))
    if not target.is_named and not all(map(is_public, addresses)):
        raise bad_picture(f"{target.authority[:128]} has no public address, and is not named by --picture_hosts")
    return addresses


def is_public(address: str) -> bool:
    """An IP address is on the internet, also if it stands for another one."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if any(known in network for network in _HOLD_IPV4):
        known = ipaddress.IPv4Address(int(known) & 0xFFFFFFFF)
    if known.version == 6 and known not in _UNICAST:
        return False
    return not any(known in network for network in _SPECIAL)


class _Stored:
    """Looks like a socket with this data to http.client."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)
