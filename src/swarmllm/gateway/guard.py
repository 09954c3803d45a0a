"""Limits for strangers: host names and origins, API keys, rates, and idle connections.

`Guard` is an ASGI layer around the whole application (`app`), so nothing gets past it. It keeps web pages from using a
gateway without their user's knowledge, and counts requests for the metrics. `http_protocol` makes the protocols of the
web server (`__main__`), because uvicorn alone waits for ever for each byte of a request's head. The rest of a request
has its own limits (`responder.read_body`).
"""

import asyncio
import hmac
import ipaddress
import itertools
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.routes import RouteTable
from swarmllm.gateway.settings import LOOPBACK, GatewayConfig, allowed_host

UNUSED = "swarmllm.unused_fields"
"""Key of the scope: fields of a request that were accepted although they change nothing."""
CALLER = "swarmllm.caller"
"""Key of the scope: the caller whose rate a request counts for, an API key or an address."""
ANY_HOST = "*"
MAX_CALLERS = 10_000
"""Most callers whose rates are remembered; the one that was silent longest is dropped first."""
POLICY_VIOLATION = 1008
_ABSOLUTE = re.compile(rb"(?:https?|wss?)://([^/]*)(/.*)?", re.IGNORECASE)
"""A request's target that is a whole URL, without its query."""
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

_turns = itertools.count(1)
HEAD_TIMEOUT_S = 15.0
"""Seconds for the whole head of a request, from the start of the connection or its last answer. Assumed: browsers
connect in advance and send a head in one packet; uvicorn itself closes idle connections 5 s after an answer."""


SLICE_BYTES = 1 << 10
"""Bytes read from a connection at a time; uvloop reads 32 such slices before others have their turn. Chunks or frames
of one byte cost some microseconds each: with uvloop's own 256 KiB they would hold up the event loop for 0.3 s."""


class Rates:
    """A token bucket for each caller: it holds a minute's worth and fills evenly."""

    def __init__(self, per_minute: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._now = now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        """Count one more request of `caller`.

        Raises:
            ApiError: there were too many.
        """
        if self._per_minute is None:
            return
        now = self._now()
        left, since = self._buckets.pop(caller, (float(self._per_minute), now))
        per_s = self._per_minute / 60
        left = min(self._per_minute, left + (now - since) * per_s)
        allowed = left >= 1
        self._buckets[caller] = (left - allowed, now)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait_s = int((1 - left) / per_s) + 1
            raise ApiError(
                429,
                f"more than {self._per_minute} requests per minute; try again in {wait_s} s",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )


class Guard:
    """The ASGI layer. `on_response(path, status)` is called for each HTTP answer."""

    def __init__(
        self,
        app: ASGIApp,
        table: RouteTable,
        config: GatewayConfig,
        rates: Rates,
        on_response: Callable[[str, int], None],
    ) -> None:
        self._app, self._table = app, table
        self._config = config
        self._keys = config.api_keys()
        self._rates = rates
        self._on_response = on_response
        own_name = socket.gethostname().lower()
        self._hosts = {*LOOPBACK, *map(allowed_host, config.allowed_hosts)}
        if not config.on_loopback:
            self._hosts |= {own_name, f"{own_name}.local"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        as_sent, scope = HTTPConnection(scope), _in_origin_form(scope)
        connection = HTTPConnection(scope)
        origin = connection.headers.get("origin")
        cors = self._cors_headers(origin)
        keeps_body = connection.headers.get("expect", "").lower() == "100-continue"

        async def receive_body() -> Message:
            nonlocal keeps_body
            keeps_body = False  # the web server asks for it now
            return await receive()

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = {**SECURITY_HEADERS, **cors}
                if keeps_body:  # it will never come, so the next request would be taken for it
                    more["connection"] = "close"
                if unused := scope.get(UNUSED):
                    more["x-unused-fields"] = ", ".join(unused)
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in more.items())]
                self._on_response(scope["path"], message["status"])
            await send(message)

        try:
            self._check_host(as_sent)
            self._check_host(connection)
            self._check_origin(connection, origin, bool(cors))
            if cors and scope.get("method") == "OPTIONS":
                await Response(status_code=204)(scope, receive, send_and_count)
                return
            self._check_key(connection)
            _check_encoding(connection)
        except ApiError as error:
            if scope["type"] == "websocket":
                await receive()  # "websocket.connect"; closing before accepting answers 403
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": str(error)})
            else:
                await self._table.answer(error, scope["path"])(scope, receive, send_and_count)
            return
        await self._app(scope, receive_body, send_and_count)

    def _check_host(self, connection: HTTPConnection) -> None:
        """Refuse unknown host names. A hostile page could make its own name point here (DNS rebinding), and ask under
        it.

        An address in numbers can't have been such a name; on loopback, only its own numbers are allowed.
        """
        host = _parsed(f"//{connection.headers.get('host', '')}").hostname or ""
        is_number = not self._config.on_loopback and _is_ip_address(host)
        if not (is_number or host in self._hosts or ANY_HOST in self._hosts):
            # `swarmllm up`, whose gateway begins without a model, has no such flag.
            setting = "--allowed_hosts" if self._config.model else "allowed_hosts in the file of --config"
            raise ApiError(403, f"this gateway is not called {host!r}; name it by {setting}", code="unknown_host")

    def _check_origin(self, connection: HTTPConnection, origin: str | None, allowed: bool) -> None:
        if origin is None or allowed or connection.scope["path"] == "/health":
            return
        if _parsed(origin).netloc != connection.headers.get("host"):
            raise ApiError(
                403,
                f"pages of {origin} may not use this gateway; allow it with cors_origins in the file of --config",
                code="cross_origin",
            )

    def _check_key(self, connection: HTTPConnection) -> None:
        path = connection.scope["path"]
        caller = connection.client.host if connection.client else ""
        if self._keys and self._table.needs_key(path):
            # Browsers can't set headers of a WebSocket, so there the key may come as a subprotocol "key.…".
            kind, _, key = connection.headers.get("authorization", "").partition(" ")
            if connection.scope["type"] == "websocket" and not key:
                offered = connection.scope.get("subprotocols", [])
                kind, key = "bearer", next((name[4:] for name in offered if name.startswith("key.")), "")
            if not key and "x-api-key" in connection.headers:  # the header of Anthropic's clients
                kind, key = "bearer", connection.headers["x-api-key"]
            key = key.strip()
            if kind.lower() != "bearer" or not self._knows(key):
                raise ApiError(
                    401, "give an API key of this gateway: Authorization: Bearer KEY", code="invalid_api_key"
                )
            caller = key
        connection.scope[CALLER] = caller
        if self._table.is_rated(path):
            self._rates.take(caller)

    def _knows(self, key: str) -> bool:
        given = key.encode()
        return any(hmac.compare_digest(given, known.encode()) for known in self._keys)

    def _cors_headers(self, origin: str | None) -> dict[str, str]:
        allowed = self._config.cors_origins
        if origin is None or not (origin in allowed or "*" in allowed):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-allow-headers": "authorization, content-type, x-api-key, anthropic-version, x-swarm-trace",
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-expose-headers": "x-queue-place, x-unused-fields",
            "access-control-max-age": "600",
            "vary": "Origin",
        }


def _in_origin_form(scope: Scope) -> Scope:
    """The scope with the path and host of a target that is a whole URL (RFC 9112, 3.2.2). Others stay as they are."""
    target = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if target is None:
        return scope
    host, raw_path = target[1], target[2] or b"/"
    headers = [(b"host", host), *(one for one in scope["headers"] if one[0] != b"host")]
    return {**scope, "path": unquote(raw_path.decode("ascii")), "raw_path": raw_path, "headers": headers}


def _check_encoding(connection: HTTPConnection) -> None:
    encoding = connection.headers.get("content-encoding", "identity")
    if encoding.lower() not in ("identity", ""):
        raise ApiError(
            415,
            f"the body has Content-Encoding: {encoding[:32]}, and this gateway unpacks nothing: send it uncompressed",
            code="unsupported_encoding",
        )


def _parsed(url: str) -> SplitResult:
    """Raises: ApiError: it is no URL."""
    try:
        return urlsplit(url)
    except ValueError:
        raise ApiError(400, f"{url[:128]!r} names no host", code="invalid_host") from None


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def http_protocol(max_connections: int) -> Callable[..., asyncio.BufferedProtocol]:
    """Make the protocols of a server with a limited number of connections at a time, WebSockets included."""

    class Patient(_Patient):
        most = max_connections

    return lambda **options: _InSlices(Patient(**options))


class _InSlices(asyncio.BufferedProtocol):
    """Hands received bytes to a protocol of uvicorn, one slice at a time."""

    def __init__(self, inner: Any) -> None:
        self._buffer = memoryview(bytearray(SLICE_BYTES))
        self._inner = inner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def get_buffer(self, _hint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        self._inner.data_received(bytes(self._buffer[:num_bytes]))


class _Patient(H11Protocol):
    most: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._patience: asyncio.TimerHandle | None = None
        self._idle_since = 0
        """A count, not a time: many connections come within one tick of the loop's clock."""

    @property
    def is_idle(self) -> bool:
        """No request is under way."""
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle or self not in self.connections:  # it has become a WebSocket
            self._stop_waiting()

    def handle_websocket_upgrade(self, event: Any) -> None:
        super().handle_websocket_upgrade(event)
        self.transport.set_protocol(_InSlices(self.transport.get_protocol()))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_idle:  # otherwise the next request is there already
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._idle_since = next(_turns)
        self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest; this new one last."""
        idle = (one for one in self.connections if isinstance(one, _Patient) and one._patience is not None)
        oldest = min(idle, key=lambda one: one._idle_since)
        oldest._stop_waiting()  # a connection that is closing can't make room twice
        oldest.transport.close()
