"""Routes as a table: the handler of each path, who may use it, how its errors look, and the OpenAPI document of all.

A handler carries its route as a decorator (`@get`, `@post`, `@delete`, `@websocket`), so one place says all of a route.
`app` lists the classes with handlers and builds a `RouteTable` from them; `guard` asks the table which paths need a
key. This module knows no API by name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute, compile_path

from swarmllm.api import __version__
from swarmllm.gateway.errors import ApiError

JSON, EVENTS, LINES, FORM = "application/json", "text/event-stream", "application/x-ndjson", "multipart/form-data"
WEBSOCKET = "WEBSOCKET"
"""Stands where others have a method of HTTP."""
_MARK = "_endpoints"

_ERRORS = {
    400: "The request is wrong.",
    401: "An API key is needed.",
    403: "This host or origin is not allowed.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests; see Retry-After.",
    503: "The swarm can't answer now.",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One route."""

    method: str
    path: str
    summary: str | None
    """For the OpenAPI document; None: the route is not in it."""
    body: type[BaseModel] | None = None
    body_type: str = JSON
    answer_types: tuple[str, ...] = (JSON,)
    errors: tuple[int, ...] = tuple(_ERRORS)
    """HTTP statuses that the document names."""
    error_type: str | None = None
    """Media type of errors; None: JSON with the shape of OpenAI's errors."""
    needs_key: bool = True
    """If the gateway has API keys."""
    is_rated: bool = False
    """A request counts for the rate of its caller."""


def get(
    path: str,
    summary: str | None = None,
    *,
    errors: tuple[int, ...] = (401, 403),
    answer_type: str = JSON,
    error_type: str | None = None,
    needs_key: bool = True,
) -> Callable[[Handler], Handler]:
    """Mark the handler of `GET path`."""
    return _marked(
        Endpoint(
            method="GET",
            path=path,
            summary=summary,
            errors=errors,
            answer_types=(answer_type,),
            error_type=error_type,
            needs_key=needs_key,
        )
    )


def post(
    path: str,
    summary: str,
    body: type[BaseModel],
    *,
    body_type: str = JSON,
    answer_types: tuple[str, ...] = (JSON, EVENTS),
    is_rated: bool = True,
    needs_key: bool = True,
) -> Callable[[Handler], Handler]:
    """Mark the handler of `POST path`, whose body is of this class."""
    return _marked(
        Endpoint(
            method="POST",
            path=path,
            summary=summary,
            body=body,
            body_type=body_type,
            answer_types=answer_types,
            is_rated=is_rated,
            needs_key=needs_key,
        )
    )


def delete(path: str, summary: str) -> Callable[[Handler], Handler]:
    """Mark the handler of `DELETE path`."""
    return _marked(Endpoint(method="DELETE", path=path, summary=summary, errors=(401, 403, 404)))


def websocket(path: str) -> Callable[[Handler], Handler]:
    """Mark the handler of WebSockets at `path`. It counts each message itself."""
    return _marked(Endpoint(method=WEBSOCKET, path=path, summary=None))


def _marked(endpoint: Endpoint) -> Callable[[Handler], Handler]:
    def mark(handler: Handler) -> Handler:
        setattr(handler, _MARK, (endpoint, *getattr(handler, _MARK, ())))
        return handler

    return mark


class Routes:
    """Handlers with routes. Those of one API are a subclass, which may also say how its errors look."""

    error_paths: ClassVar[tuple[str, ...]] = ()
    """Begins of the paths whose errors `error_body` writes; the longest that fits counts."""

    field_names: ClassVar[Mapping[str, str]] = {}
    """Names that fields of OpenAI's chats have on these paths."""

    @staticmethod
    def error_body(error: ApiError) -> dict[str, Any]:
        """The JSON of an error."""
        return error.body()

    @classmethod
    def endpoints(cls) -> Iterator[tuple[str, Endpoint]]:
        """The name of each handler and its route, in the order of the class."""
        for name, value in vars(cls).items():
            for endpoint in getattr(value, _MARK, ()):
                yield name, endpoint

    def bound(self) -> Iterator[BaseRoute]:
        """The routes for Starlette, with this object's handlers."""
        for name, endpoint in self.endpoints():
            if endpoint.method == WEBSOCKET:
                yield WebSocketRoute(endpoint.path, getattr(self, name))
            else:
                yield Route(endpoint.path, getattr(self, name), methods=[endpoint.method])


class RouteTable:
    """All routes of some classes."""

    def __init__(self, kinds: Sequence[type[Routes]]) -> None:
        self._endpoints = [endpoint for kind in kinds for _, endpoint in kind.endpoints()]
        self._of_errors = {begin: kind for kind in kinds for begin in kind.error_paths}
        self._rated = frozenset(one.path for one in self._endpoints if one.is_rated)
        self._free = [compile_path(one.path)[0] for one in self._endpoints if not one.needs_key]
        self.paths = frozenset(one.path for one in self._endpoints if "{" not in one.path)
        """All paths without variables."""

    def needs_key(self, path: str) -> bool:
        """True if a path needs an API key: each one that isn't marked otherwise, known or not."""
        return not any(pattern.match(path) for pattern in self._free)

    def is_rated(self, path: str) -> bool:
        """True if a request to this path counts for the rate of its caller."""
        return path in self._rated

    def answer(self, error: ApiError, path: str) -> Response:
        """The answer to a request of that path, with the error in the shape of its API."""
        fitting = [begin for begin in self._of_errors if path.startswith(begin)]
        kind = self._of_errors[max(fitting, key=len)] if fitting else Routes
        error = error.renamed(kind.field_names)
        return error.response(kind.error_body(error))

    @cached_property
    def document(self) -> dict[str, Any]:
        """The OpenAPI document, version 3.1."""
        told = [one for one in self._endpoints if one.summary is not None]
        bodies = list(dict.fromkeys(one.body for one in told if one.body is not None))
        schemas = models_json_schema(
            [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
        )[1]["$defs"]
        schemas["Error"] = _ERROR_SCHEMA
        paths: dict[str, dict[str, Any]] = {}
        for one in told:
            paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
        return {
            "openapi": "3.1.0",
            "info": {"title": "swarmllm gateway", "version": __version__},
            "paths": {path.replace(":path}", "}"): operations for path, operations in paths.items()},
            "components": {"schemas": schemas},
        }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    if endpoint.error_type is not None:
        error = {endpoint.error_type: {}}
    answers = {str(status): {"description": _ERRORS[status], "content": error} for status in endpoint.errors}
    streams = not {EVENTS, LINES}.isdisjoint(endpoint.answer_types)
    found: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {
                "description": "The answer, or with `stream` its chunks." if streams else "The answer.",
                "content": {kind: {} for kind in endpoint.answer_types},
            },
            **answers,
        },
    }
    if "{name" in endpoint.path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if endpoint.body is not None:
        schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        found["requestBody"] = {"required": True, "content": {endpoint.body_type: {"schema": schema}}}
    return found
