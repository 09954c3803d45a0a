"""Who may ask: host names and origins (so that no web page uses a gateway behind its user's back), keys, rates.

An ASGI layer around the whole application (`app`), so that nothing gets past it. Also counts requests for the metrics.
"""

import hmac
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.settings import LOOPBACK, GatewayConfig

OLLAMA = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/ps", "/api/show")
PROTECTED = ("/v1/", "/ws/", "/rerank", "/tokenize", "/detokenize", *OLLAMA)
RATED = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/api/chat", "/api/generate", "/v1/embeddings", "/api/embed", "/api/embeddings"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/rerank", "/rerank"),
)
"""On a WebSocket each message counts instead (`websocket`)."""
UNUSED = "swarmllm.unused_fields"
"""Where the scope has the fields of a request that were taken although they make no difference."""
CALLER = "swarmllm.caller"
"""Where the scope says whose rate a request counts for."""
ANY_HOST = "*"
MAX_CALLERS = 10_000
"""Keys or addresses whose rates are remembered; the one that was silent longest is forgotten first."""
POLICY_VIOLATION = 1008
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Rates:
    """A bucket of tokens per caller: it holds a minute's worth and fills evenly."""

    def __init__(self, per_minute: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._now = now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        """One more request of `caller`.

        Raises:
            ApiError: it has made too many.
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
    """`on_response(path, status)` is told of every HTTP answer."""

    def __init__(
        self, app: ASGIApp, config: GatewayConfig, rates: Rates, on_response: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._config = config
        self._keys = config.api_keys()
        self._rates = rates
        self._on_response = on_response
        own_name = socket.gethostname().lower()
        self._hosts = {*LOOPBACK, *(name.lower() for name in config.allowed_hosts)}
        if not config.on_loopback:
            self._hosts |= {own_name, f"{own_name}.local"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        origin = connection.headers.get("origin")
        cors = self._cors_headers(origin)

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = {**SECURITY_HEADERS, **cors}
                if unused := scope.get(UNUSED):
                    more["x-unused-fields"] = ", ".join(unused)
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in more.items())]
                self._on_response(scope["path"], message["status"])
            await send(message)

        try:
            self._check_host(connection)
            self._check_origin(connection, origin, bool(cors))
            if cors and scope.get("method") == "OPTIONS":
                await Response(status_code=204)(scope, receive, send_and_count)
                return
            self._check_key(connection)
        except ApiError as error:
            if scope["type"] == "websocket":
                await receive()  # "websocket.connect"; to close before accepting is an answer 403
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": str(error)})
            else:
                await error.response(scope["path"])(scope, receive, send_and_count)
            return
        await self._app(scope, receive, send_and_count)

    def _check_host(self, connection: HTTPConnection) -> None:
        """A page whose name was made to point to this machine (DNS rebinding) would ask under that name.

        Who asks a number can't have been led here by a name; on loopback there are only numbers of its own.
        """
        host = _parsed(f"//{connection.headers.get('host', '')}").hostname or ""
        is_number = not self._config.on_loopback and _is_ip_address(host)
        if not (is_number or host in self._hosts or ANY_HOST in self._hosts):
            raise ApiError(
                403, f"this gateway is not called {host!r}; name it with --allowed_hosts", code="unknown_host"
            )

    def _check_origin(self, connection: HTTPConnection, origin: str | None, allowed: bool) -> None:
        if origin is None or allowed or connection.url.path == "/health":
            return
        if _parsed(origin).netloc != connection.headers.get("host"):
            raise ApiError(
                403, f"pages of {origin} may not use this gateway; allow it with --cors_origins", code="cross_origin"
            )

    def _check_key(self, connection: HTTPConnection) -> None:
        path = connection.url.path
        caller = connection.client.host if connection.client else ""
        if self._keys and path.startswith(PROTECTED):
            # Browsers can't set headers of a WebSocket: there the key may come as a subprotocol "key.…".
            kind, _, key = connection.headers.get("authorization", "").partition(" ")
            if connection.scope["type"] == "websocket" and not key:
                offered = connection.scope.get("subprotocols", [])
                kind, key = "bearer", next((name[4:] for name in offered if name.startswith("key.")), "")
            if not key and "x-api-key" in connection.headers:  # as Anthropic's clients give it
                kind, key = "bearer", connection.headers["x-api-key"]
            key = key.strip()
            if kind.lower() != "bearer" or not self._knows(key):
                raise ApiError(
                    401, "give an API key of this gateway: Authorization: Bearer KEY", code="invalid_api_key"
                )
            caller = key
        connection.scope[CALLER] = caller
        if path in RATED:
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


def _parsed(url: str) -> SplitResult:
    """Raises: ApiError: it is none."""
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
