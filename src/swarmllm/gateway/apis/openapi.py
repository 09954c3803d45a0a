"""The OpenAPI document of the gateway: its paths, listed here, and bodies as `request_bodies` checks them."""

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from swarmllm.gateway.apis.anthropic_messages import CountRequest, MessagesRequest
from swarmllm.gateway.apis.embedding_routes import EmbeddingsRequest, OllamaEmbed, OllamaEmbeddings
from swarmllm.gateway.apis.ollama import OllamaChat, OllamaGenerate
from swarmllm.gateway.apis.rerank_routes import RerankRequest
from swarmllm.gateway.apis.responses import ResponsesRequest
from swarmllm.gateway.apis.token_routes import DetokenizeRequest, TokenizeRequest
from swarmllm.gateway.apis.translated_routes import ShowRequest
from swarmllm.gateway.requests.audio_request import TranscriptionRequest, TranslationRequest
from swarmllm.gateway.requests.chat_request import ChatRequest
from swarmllm.gateway.requests.request_bodies import CompletionRequest
from swarmllm.version import __version__

_BODIES = (
    *(ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountRequest, OllamaChat, OllamaGenerate),
    *(ShowRequest, TokenizeRequest, DetokenizeRequest, EmbeddingsRequest, OllamaEmbed, OllamaEmbeddings),
    *(TranscriptionRequest, TranslationRequest, RerankRequest),
)
_ERRORS = {
    400: "The request can't be answered as it is.",
    401: "An API key is needed.",
    403: "Not from this host or origin.",
    404: "There is no such model.",
    413: "The body is too large.",
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


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas = models_json_schema(
        [(kind, "validation") for kind in _BODIES],
        ref_template="#/components/schemas/{model}",
    )[1]["$defs"]
    schemas["Error"] = _ERROR_SCHEMA
    return {
        "openapi": "3.1.0",
        "info": {"title": "swarmllm gateway", "version": __version__},
        "paths": {
            "/v1/chat/completions": {"post": _post("Answer a conversation.", "ChatRequest")},
            "/v1/completions": {"post": _post("Go on with a text.", "CompletionRequest")},
            "/v1/responses": {
                "post": _post("Answer a conversation, in the form of OpenAI's items.", "ResponsesRequest")
            },
            "/v1/responses/{name}": {"get": _named("A response that is kept."), "delete": _named("Forget it.")},
            "/v1/responses/{name}/input_items": {"get": _named("What was said before it.")},
            "/v1/messages": {"post": _post("Answer a conversation, as Anthropic's API does.", "MessagesRequest")},
            "/v1/messages/count_tokens": {"post": _post("How long such a conversation is.", "CountRequest")},
            "/v1/embeddings": {"post": _post("Embeddings of texts.", "EmbeddingsRequest")},
            "/v1/rerank": {"post": _post("Texts in the order in which they fit a query.", "RerankRequest")},
            "/rerank": {"post": _post("The same.", "RerankRequest")},
            "/v1/audio/transcriptions": {"post": _post("What is said in a sound.", "TranscriptionRequest", form=True)},
            "/v1/audio/translations": {"post": _post("The same, in English.", "TranslationRequest", form=True)},
            "/api/embed": {"post": _post("Embeddings of texts, as Ollama gives them.", "OllamaEmbed")},
            "/api/embeddings": {"post": _post("An embedding, as Ollama gave it before.", "OllamaEmbeddings")},
            "/api/chat": {"post": _post("Answer a conversation, as Ollama does.", "OllamaChat", lines=True)},
            "/api/generate": {"post": _post("Answer a prompt, as Ollama does.", "OllamaGenerate", lines=True)},
            "/api/show": {"post": _post("What is known of a model, as Ollama has it.", "ShowRequest", lines=True)},
            "/api/tags": {"get": _get("The models, as Ollama lists them.", 401)},
            "/api/ps": {"get": _get("The models that are loaded, as Ollama lists them: all.", 401)},
            "/api/version": {"get": _get("The version of the gateway.")},
            "/tokenize": {"post": _post("The tokens of a text or a conversation.", "TokenizeRequest")},
            "/detokenize": {"post": _post("The text of tokens.", "DetokenizeRequest")},
            "/v1/models": {"get": _get("The models that are served.", 401)},
            "/v1/models/{name}": {"get": _named("The model of this name.")},
            "/health": {"get": _get("Whether an answer could be begun now.", 503, error="application/json")},
            "/metrics": {"get": _get("For Prometheus.", content="text/plain")},
            "/api/swarm": {"get": _get("Who serves which blocks.")},
        },
        "components": {"schemas": schemas},
    }


def _named(summary: str) -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {**_get(summary, 401, 404), "parameters": [name]}


def _post(summary: str, body: str, *, lines: bool = False, form: bool = False) -> dict[str, Any]:
    kind = "multipart/form-data" if form else "application/json"
    content = {kind: {"schema": {"$ref": f"#/components/schemas/{body}"}}}
    streamed = "application/x-ndjson" if lines else "text/event-stream"
    others: dict[str, Any] = {"text/plain": {}} if form else {}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": "The answer, or with `stream` its chunks.",
                "content": {"application/json": {}, streamed: {}, **others},
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
