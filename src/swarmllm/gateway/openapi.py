"""The OpenAPI document of the gateway: its paths, listed here, and bodies as `request_bodies` checks them."""

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from swarmllm.gateway.chat_request import ChatRequest
from swarmllm.gateway.request_bodies import CompletionRequest
from swarmllm.gateway.token_routes import DetokenizeRequest, TokenizeRequest
from swarmllm.version import __version__

_ERRORS = {
    400: "The request can't be answered as it is.",
    401: "An API key is needed.",
    403: "Not from this host or origin.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "Too many requests; see Retry-After.",
    503: "The swarm can't answer now.",
}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas = models_json_schema(
        [(kind, "validation") for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)],
        ref_template="#/components/schemas/{model}",
    )[1]["$defs"]
    schemas["Error"] = {
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
    return {
        "openapi": "3.1.0",
        "info": {"title": "swarmllm gateway", "version": __version__},
        "paths": {
            "/v1/chat/completions": {"post": _post("Answer a conversation.", "ChatRequest")},
            "/v1/completions": {"post": _post("Go on with a text.", "CompletionRequest")},
            "/tokenize": {"post": _post("The tokens of a text or a conversation.", "TokenizeRequest")},
            "/detokenize": {"post": _post("The text of tokens.", "DetokenizeRequest")},
            "/v1/models": {"get": _get("The models that are served.", 401)},
            "/v1/models/{name}": {
                "get": {
                    **_get("The model of this name.", 401, 404),
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            "/health": {"get": _get("Whether an answer could be begun now.", 503, error="application/json")},
            "/metrics": {"get": _get("For Prometheus.", content="text/plain")},
            "/api/swarm": {"get": _get("Who serves which blocks.")},
        },
        "components": {"schemas": schemas},
    }


def _post(summary: str, body: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": "The answer, or with `stream` its chunks.",
                "content": {"application/json": {}, "text/event-stream": {}},
            },
            **{str(status): _error(status) for status in _ERRORS},
        },
    }


def _get(summary: str, *errors: int, content: str = "application/json", error: str | None = None) -> dict[str, Any]:
    others = {str(status): _error(status) for status in (*errors, 403)}
    if error is not None:
        others = {status: {"description": one["description"], "content": {error: {}}} for status, one in others.items()}
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": {content: {}}}, **others}}


def _error(status: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": _ERRORS[status], "content": content}
