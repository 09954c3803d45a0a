"""/v1/…: what OpenAI's clients ask, answered whole or as server-sent events. Part of `app`."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swarmllm.gateway.apis.openai_answers import OpenAIAnswer
from swarmllm.gateway.apis.responder import Responder
from swarmllm.gateway.engine.embedding_model import EmbeddingModel
from swarmllm.gateway.engine.hearing_model import HearingModel
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.offered_model import OfferedModel
from swarmllm.gateway.requests.chat_request import ChatRequest
from swarmllm.gateway.requests.request_bodies import CompletionRequest


class OpenAIRoutes:
    """The handlers; made once per gateway."""

    def __init__(self, responder: Responder, started_at: int) -> None:
        self._responder = responder
        self._started_at = started_at

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`"""
        return JSONResponse({"object": "list", "data": list(map(self._described, self._responder.models))})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`"""
        return JSONResponse(self._described(self._responder.models.any(request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`"""
        return await self._answer(request, CompletionRequest)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`"""
        return await self._answer(request, ChatRequest)

    async def _answer(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        body, num_bytes = await self._responder.read(request, kind)
        wants_trace = request.headers.get("x-swarm-trace", "").lower() in ("1", "true")
        shape = partial(OpenAIAnswer, trace=wants_trace)
        return await self._responder.answer(request, body, num_bytes, shape, stream=bool(body.stream))

    def _described(self, model: OfferedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "swarm",
            "max_model_len": model.max_length,
            "chat": isinstance(model, LanguageModel) and bool(model.tokenizer.chat_template),
            "sees": isinstance(model, LanguageModel) and model.eyes is not None,
            **({"embeddings": True, "dimensions": model.size} if isinstance(model, EmbeddingModel) else {}),
            **({"hears": True, "translates": model.translates} if isinstance(model, HearingModel) else {}),
        }
