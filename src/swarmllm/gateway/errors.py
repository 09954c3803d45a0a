"""Errors in OpenAI's shape, and the HTTP status of each error of the swarm. Other APIs have shapes of their own.

{"error": {"message": "…", "type": "invalid_request_error", "param": "max_tokens", "code": "context_length_exceeded"}}
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from swarmllm.api import (
    CacheFullError,
    ConfigurationError,
    PeerError,
    RoutingError,
    ServerOverloadedError,
    SessionClosedError,
    SessionLengthExceededError,
    SessionTooLargeError,
    SwarmError,
    one_line,
)

RETRY_AFTER_S = 5
"""Seconds until a client may try again. Assumed: a queue moves on, or a server comes, by then."""

MAX_ERRORS = 1000
"""Most errors of a body that are searched for the first one. A body with more is garbage."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
_TYPE_NAMES = ("str", "int", "float", "bool")


class ApiError(Exception):
    """An error that a request is answered with."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """The answer for a failure of the swarm, or of the gateway itself."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, SwarmError):
            status = _status(error)
            retry_after_s = RETRY_AFTER_S if status in (429, 503) else None
            return cls(status, one_line(error), code=error.code, retry_after_s=retry_after_s)
        return cls(500, "the gateway failed; its log says more", code="internal_error")

    @classmethod
    def invalid(cls, error: ValidationError) -> "ApiError":
        """The first error in a request's body.

        If a field may have several types, an error within the type that fits is more useful than "no other type fits".
        """
        if error.error_count() > MAX_ERRORS:
            return cls(400, f"{error.error_count()} fields are wrong: see /docs", code="invalid_value")
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        of_types = max(errors, key=lambda e: len(e["loc"]))
        first = next((e for e in errors if not e["type"].endswith(("_type", "_parsing"))), of_types)
        param = str(first["loc"][0]) if first["loc"] else None
        where = ".".join(str(part) for part in first["loc"] if not _names_a_type(part))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] in ("model_type", "dict_type"):
            message = "Input should be an object"
        return cls(400, f"{where}: {message}" if where else message, param=param, code="invalid_value")

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """The same with other names of fields, under which the client knows them."""
        if self.code == "unknown_parameter":  # it names what the client has sent
            return self
        message = str(self)
        first = re.split(r"\W", message, maxsplit=1)[0]
        message = names.get(first, first) + message[len(first) :]
        param = None if self.param is None else names.get(self.param, self.param)
        return ApiError(self.status, message, code=self.code, param=param, retry_after_s=self.retry_after_s)

    @property
    def type(self) -> str:
        """OpenAI's name for errors of this status."""
        return _TYPES.get(self.status, "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON of the error, in OpenAI's shape."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def response(self, body: dict[str, Any]) -> JSONResponse:
        """The answer with this JSON."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(body, self.status, headers)


def _names_a_type(part: int | str) -> bool:
    """This part of an error's place names only a type that pydantic has tried."""
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-") or part in _TYPE_NAMES)


def _status(error: SwarmError) -> int:
    if isinstance(error, ConfigurationError | SessionLengthExceededError | SessionTooLargeError):
        return 400
    if isinstance(error, CacheFullError | ServerOverloadedError):
        return 429
    if isinstance(error, RoutingError | PeerError | SessionClosedError):
        return 503
    return 500
