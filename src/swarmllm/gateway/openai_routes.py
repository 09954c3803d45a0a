"""/v1/…: what OpenAI's clients ask, answered whole or as server-sent events. Part of `app`."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swarmllm.gateway.chat_request import ChatRequest
from swarmllm.gateway.language_model import LanguageModel
from swarmllm.gateway.openai_answers import OpenAIAnswer
from swarmllm.gateway.request_bodies import CompletionRequest
from swarmllm.gateway.serving import Serving


class OpenAIRoutes:
    """The handlers; made once per gateway."""

    def __init__(self, serving: Serving, started_at: int) -> None:
        self._serving = serving
        self._started_at = started_at

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`"""
        return JSONResponse({"object": "list", "data": list(map(self._described, self._serving.models))})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`"""
        return JSONResponse(self._described(self._serving.models.named(request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`"""
        return await self._answer(request, CompletionRequest)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`"""
        return await self._answer(request, ChatRequest)

    async def _answer(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        body, num_bytes = await self._serving.read(request, kind)
        wants_trace = request.headers.get("x-swarm-trace", "").lower() in ("1", "true")
        shape = partial(OpenAIAnswer, trace=wants_trace)
        return await self._serving.answer(request, body, num_bytes, shape, stream=bool(body.stream))

    def _described(self, model: LanguageModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "swarm",
            "max_model_len": model.max_length,
            "chat": bool(model.tokenizer.chat_template),
        }
