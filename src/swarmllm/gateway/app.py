"""The web application: all routes of a gateway, their OpenAPI document, the pages' files, and answers to errors.

`gateway/__main__` serves `Waiting` until the swarm is complete, then `Gateway`. A new route is added to
`Gateway._routes` and to `document`, which `/docs` shows.
"""

import asyncio
import gzip
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from swarmllm.api import MissingBlocksError, SwarmError, __version__, one_line
from swarmllm.gateway.apis.anthropic import CountRequest, MessagesRequest
from swarmllm.gateway.apis.audio import AudioRoutes, TranscriptionRequest, TranslationRequest
from swarmllm.gateway.apis.chat_request import ChatRequest
from swarmllm.gateway.apis.embeddings import (
    EmbeddingRoutes,
    EmbeddingsRequest,
    OllamaEmbed,
    OllamaEmbeddings,
    RerankRequest,
    RerankRoutes,
)
from swarmllm.gateway.apis.ollama import OllamaChat, OllamaGenerate
from swarmllm.gateway.apis.openai import DetokenizeRequest, OpenAIRoutes, TokenizeRequest, TokenRoutes
from swarmllm.gateway.apis.request_bodies import CompletionRequest
from swarmllm.gateway.apis.responder import Responder
from swarmllm.gateway.apis.responses import ResponsesRequest
from swarmllm.gateway.apis.translated_routes import ShowRequest, TranslatedRoutes
from swarmllm.gateway.apis.websocket import WebSocketRoute as GenerateRoute
from swarmllm.gateway.engine.engine import Engine
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.engine.offered_model import OfferedModel
from swarmllm.gateway.errors import RETRY_AFTER_S, ApiError
from swarmllm.gateway.guard import Guard, Rates
from swarmllm.gateway.metrics import GatewayMetrics
from swarmllm.gateway.monitor import SwarmWatch
from swarmllm.gateway.settings import GatewayConfig

STATUSES = ("ok", "degraded", "dead")
"""Ways to name a model, from the best on."""

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

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two tries, each of which itself waits `route_timeout_s` for servers."""

DIRECTORY = Path(__file__).with_name("pages")
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


class Gateway:
    """Everything that one gateway has; `app` is what a web server runs."""

    def __init__(self, models: ModelChoice, config: GatewayConfig) -> None:
        self.models = models
        self.config = config
        self.metrics = GatewayMetrics()
        self.metrics.read_from(lambda: sum((model.swarm.swarm.counts for model in models), Counter()))
        self.engine = Engine(self.metrics, max_concurrent=config.max_concurrent, max_waiting=config.max_waiting)
        self.watches = {
            model.name: SwarmWatch(model.swarm.swarm, model.name, self.metrics, model.about()) for model in models
        }
        self._rates = Rates(config.requests_per_minute)
        self.app: ASGIApp = Guard(self._starlette(), config, self._rates, self._on_response)

    def _starlette(self) -> Starlette:
        routes = self._routes()
        self._paths = frozenset(route.path for route in routes if "{" not in route.path)
        return Starlette(
            routes=routes,
            exception_handlers={
                ApiError: _answer_error,
                SwarmError: _answer_error,
                HTTPException: _answer_http_error,
                ClientDisconnect: _answer_nobody,
                Exception: _answer_error,
            },
            lifespan=lambda _: self.watching(),
        )

    def _routes(self) -> list[Route | WebSocketRoute]:
        responder = Responder(self.models, self.engine, self.config)
        openai, other = OpenAIRoutes(responder, int(time.time())), TranslatedRoutes(responder)
        embedding, self.audio = EmbeddingRoutes(responder), AudioRoutes(responder)
        tokens, rerank, pages = TokenRoutes(responder), RerankRoutes(responder), PageFiles()
        generate = GenerateRoute(responder, self._rates)
        return [
            Route("/v1/models", openai.models),
            Route("/v1/models/{name:path}", openai.model),
            Route("/v1/completions", openai.completions, methods=["POST"]),
            Route("/v1/chat/completions", openai.chat_completions, methods=["POST"]),
            Route("/v1/responses", other.responses, methods=["POST"]),
            Route("/v1/responses/{name}", other.response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{name}/input_items", other.input_items),
            Route("/v1/messages", other.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", other.count_tokens, methods=["POST"]),
            Route("/api/chat", other.chat, methods=["POST"]),
            Route("/api/generate", other.generate, methods=["POST"]),
            Route("/api/tags", other.tags),
            Route("/api/ps", other.running),
            Route("/api/show", other.show, methods=["POST"]),
            Route("/api/version", other.version),
            Route("/v1/embeddings", embedding.embeddings, methods=["POST"]),
            Route("/api/embed", embedding.embed, methods=["POST"]),
            Route("/api/embeddings", embedding.one_embedding, methods=["POST"]),
            Route("/v1/rerank", rerank.rerank, methods=["POST"]),
            Route("/rerank", rerank.rerank, methods=["POST"]),
            Route("/v1/audio/transcriptions", self.audio.transcriptions, methods=["POST"]),
            Route("/v1/audio/translations", self.audio.translations, methods=["POST"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            WebSocketRoute("/ws/generate", generate.generate),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/api/swarm", self._swarm),
            Route("/openapi.json", self._openapi),
            Route("/docs", pages.docs),
            Route("/", pages.chat),
            Route("/swarm", pages.swarm),
            Route("/static/{name:path}", pages.file),
        ]

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """While inside, it knows the swarm; what is under way at the end is given up."""
        async with AsyncExitStack() as watching:
            for watch in self.watches.values():
                await watching.enter_async_context(watch)
            try:
                yield
            finally:
                await self.engine.close()

    async def _health(self, _: Request) -> Response:
        """Whether an answer could be begun now, by any model; which ones, if there are several."""
        found = [self._health_of(model) for model in self.models]
        best = min(found, key=lambda one: (STATUSES.index(one["status"]), len(one["missing_blocks"])))
        can_answer = best["status"] != "dead" and (not best["missing_blocks"] or self.models.has_local)
        more = {"models": found} if len(found) > 1 else {}
        return JSONResponse({**best, **more}, 200 if can_answer else 503)

    def _health_of(self, model: OfferedModel) -> dict[str, Any]:
        watch = self.watches[model.name]
        missing = watch.missing_blocks()
        status = "dead" if not watch.client_is_alive else "degraded" if missing else "ok"
        return {"status": status, "model": model.name, "missing_blocks": missing}

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.page(), media_type=self.metrics.content_type)

    async def _swarm(self, request: Request) -> Response:
        """The same for everybody who asks, so it is written once per change."""
        model = self.models.any(request.query_params.get("model"))
        etag, body = self.watches[model.name].as_json()
        headers = {"etag": etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse(document())

    def _on_response(self, path: str, status: int) -> None:
        """Unknown paths are counted as one: they are endless."""
        self.metrics.requests.labels(path if path in self._paths else "other", str(status)).inc()


async def _answer_error(request: Request, error: Exception) -> Response:
    return ApiError.of(error).response(request.url.path)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {
        404: f"there is nothing at {json.dumps(request.url.path)}",
        405: f"{request.method} is not what {json.dumps(request.url.path)} takes",
    }
    return ApiError(status, messages.get(status, "the request can't be answered")).response(request.url.path)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


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


class Waiting:
    """`app` is what a web server runs; from `go_on` on it is the real one."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.reason = "the gateway is still joining the swarm"
        """One sentence."""
        self._real: ASGIApp | None = None
        self._own: ASGIApp = Guard(self._starlette(), config, Rates(None), lambda _path, _status: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The lifespan is the web server's, and so not that of the real one."""
        real = self._real if scope["type"] != "lifespan" else None
        await (real or self._own)(scope, receive, send)

    @property
    def app(self) -> ASGIApp:
        return self

    def go_on(self, app: ASGIApp) -> None:
        """The swarm is complete."""
        self._real = app

    async def models(self) -> ModelChoice:
        """Join the swarm of each model, as soon as all of its blocks are served.

        Raises:
            SwarmError: a model can't be used, whoever comes.
        """
        told = False
        while True:
            try:
                return await asyncio.to_thread(ModelChoice.open, self.config)
            except MissingBlocksError as error:
                self.reason = one_line(error)
                if not told:
                    logger.warning("waiting for the swarm: %s", self.reason)
                told = True
            await asyncio.sleep(RETRY_S)

    def _starlette(self) -> Starlette:
        pages = PageFiles()
        return Starlette(
            routes=[
                Route("/", pages.chat),
                Route("/swarm", pages.swarm),
                Route("/static/{name:path}", pages.file),
                Route("/health", self._health),
                Route("/api/swarm", self._swarm),
            ],
            exception_handlers={ApiError: self._answer_error, HTTPException: self._not_yet},
        )

    @property
    def _names(self) -> list[str]:
        return list(self.config.served_name or self.config.model)

    async def _health(self, _: Request) -> Response:
        found = {"status": "waiting", "model": self._names[0], "missing_blocks": [], "reason": self.reason}
        return JSONResponse(found, 503, {"Retry-After": str(RETRY_AFTER_S)})

    async def _swarm(self, _: Request) -> Response:
        found: dict[str, Any] = {"model": self._names[0], "known": False, "waiting": self.reason, "num_blocks": 0}
        nothing = dict.fromkeys(("missing_blocks", "route", "servers", "events", "history"), ())
        return JSONResponse(
            {**found, **nothing, **dict.fromkeys(("bottleneck", "expected_ms_per_token", "tokens_per_s", "about"))}
        )

    async def _not_yet(self, request: Request, _: Exception) -> Response:
        error = ApiError(503, self.reason, code="MissingBlocksError", retry_after_s=RETRY_AFTER_S)
        return error.response(request.url.path)

    async def _answer_error(self, request: Request, error: Exception) -> Response:
        return ApiError.of(error).response(request.url.path)


class PageFiles:
    """Answers with the files in `pages/`, of the known kinds only."""

    def __init__(self) -> None:
        self._files = {
            path.relative_to(DIRECTORY).as_posix(): path.read_bytes()
            for path in DIRECTORY.rglob("*")
            if path.suffix in MEDIA_TYPES
        }
        self._compressed = {name: gzip.compress(data, mtime=0) for name, data in self._files.items()}
        self._etags = {
            name: f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"' for name, data in self._files.items()
        }

    async def chat(self, request: Request) -> Response:
        """`GET /`"""
        return self._answer(request, "chat.html")

    async def swarm(self, request: Request) -> Response:
        """`GET /swarm`"""
        return self._answer(request, "swarm.html")

    async def docs(self, request: Request) -> Response:
        """`GET /docs`"""
        return self._answer(request, "docs.html")

    async def file(self, request: Request) -> Response:
        """`GET /static/{name}`"""
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, "there is no such file")
        headers = {"etag": self._etags[name], "cache-control": "no-cache", "vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == self._etags[name]:
            return Response(status_code=304, headers=headers)
        data = self._files[name]
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers["content-encoding"] = self._compressed[name], "gzip"
        return Response(data, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)
