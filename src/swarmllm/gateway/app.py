"""The web application: all routes of a gateway, and how their errors are answered. Served by `gateway/__main__`."""

import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from swarmllm.errors import SwarmError
from swarmllm.gateway.apis.audio_routes import AudioRoutes
from swarmllm.gateway.apis.embedding_routes import EmbeddingRoutes
from swarmllm.gateway.apis.openai_routes import OpenAIRoutes
from swarmllm.gateway.apis.openapi import document
from swarmllm.gateway.apis.rerank_routes import RerankRoutes
from swarmllm.gateway.apis.responder import Responder
from swarmllm.gateway.apis.token_routes import TokenRoutes
from swarmllm.gateway.apis.translated_routes import TranslatedRoutes
from swarmllm.gateway.apis.websocket import WebSocketRoute as GenerateRoute
from swarmllm.gateway.engine.engine import Engine
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.engine.offered_model import OfferedModel
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import Guard, Rates
from swarmllm.gateway.metrics import GatewayMetrics
from swarmllm.gateway.page_files import PageFiles
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.gateway.swarm.swarm_watch import SwarmWatch

STATUSES = ("ok", "degraded", "dead")
"""Ways to name a model, from the best on."""


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
