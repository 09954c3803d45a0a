"""/v1/…: what OpenAI's clients ask, answered whole or as server-sent events. Part of `app`."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from swarmllm.gateway.answers import Answer
from swarmllm.gateway.engine import Answering, Engine
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.generation import GenerationOptions
from swarmllm.gateway.language_model import LanguageModel
from swarmllm.gateway.model_choice import ModelChoice
from swarmllm.gateway.request_bodies import ChatRequest, CompletionRequest
from swarmllm.gateway.settings import GatewayConfig
from swarmllm.gateway.unknown_fields import Body as AnyBody
from swarmllm.gateway.unknown_fields import refuse_unknown

KEEPALIVE_S = 15.0
"""Seconds of silence after which a stream gets a comment. Assumed: proxies give up after 30 or 60."""

BODY_TIMEOUT_S = 60.0
"""For a whole request to arrive. Assumed: 1 MiB over the slowest line that people use."""
LARGE_BYTES = 1 << 13
"""A body from which on checking and tokenizing it takes milliseconds, in which others want to be served."""

DONE = b"data: [DONE]\n\n"

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps would make one each time

Body = ChatRequest | CompletionRequest


class OpenAIRoutes:
    """The handlers; made once per gateway."""

    def __init__(self, models: ModelChoice, engine: Engine, config: GatewayConfig, started_at: int) -> None:
        self._models = models
        self._engine = engine
        self._config = config
        self._started_at = started_at

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`"""
        return JSONResponse({"object": "list", "data": list(map(self._described, self._models))})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`"""
        return JSONResponse(self._described(self._models.named(request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`"""
        return await self._answer(request, CompletionRequest)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`"""
        return await self._answer(request, ChatRequest)

    async def _answer(self, request: Request, kind: type[Body]) -> Response:
        data = await read_body(request, self._config.max_body_bytes)
        body = self.parse(kind, data) if len(data) < LARGE_BYTES else await asyncio.to_thread(self.parse, kind, data)
        model, prompts, options = await self.prepare(body, len(data))
        wants_trace = request.headers.get("x-swarm-trace", "").lower() in ("1", "true")
        answer = Answer(body, model, prompts, options, trace=wants_trace)
        answering = self._engine.start(model, prompts, options)
        if body.stream:
            return EventStream(answering, answer)
        async with cancelled_when_gone(request.receive, answering):
            async for event in answering:
                answer.add(event)
        if answer.error is not None:
            raise answer.error
        return JSONResponse(answer.whole())

    def parse(self, kind: type[Body], body: bytes | str) -> Body:
        """The request in a body.

        Raises:
            ApiError: it is not one, or has a field that isn't honoured.
        """
        return read_request(kind, body, lenient=self._config.lenient)

    async def prepare(self, body: Body, num_bytes: int) -> tuple[LanguageModel, list[list[int]], GenerationOptions]:
        """The model that is meant, the prompts' tokens and how to answer them.

        Raises:
            ApiError, SwarmError: that can't be done.
        """
        model = self._models.named(body.model)
        n, most = body.n or 1, self._config.max_choices
        if n > most:
            raise ApiError(400, f"n can be at most {most} here, not {n}", param="n", code="invalid_value")
        if num_bytes < LARGE_BYTES and not body.is_constrained:
            return self._prepare(model, body)  # faster than changing threads
        return await asyncio.to_thread(self._prepare, model, body)

    def _prepare(self, model: LanguageModel, body: Body) -> tuple[LanguageModel, list[list[int]], GenerationOptions]:
        prompts = [body.prompt(model)] if isinstance(body, ChatRequest) else body.prompts(model)
        options = body.options(model, max(map(len, prompts)), self._config.default_max_tokens)
        if options.constraint is not None:
            model.grammars().matcher(options.constraint)  # refused now, not in the middle of an answer
        return model, prompts, options

    def _described(self, model: LanguageModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "swarm",
            "max_model_len": model.max_length,
            "chat": bool(model.tokenizer.chat_template),
        }


class EventStream(Response):
    """Server-sent events; when whoever reads them has gone, the generation ends, also while no token comes."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, answer: Answer) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._answering = answering
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]
        async with cancelled_when_gone(receive, self._answering):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in stream(self._answering, self._answer):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream(answering: Answering, answer: Answer) -> AsyncIterator[bytes]:
    """The lines of the stream; what happens at the same time goes out together."""
    while not answering.has_ended:
        events = await answering.some(KEEPALIVE_S)
        if lines := b"".join(sse(chunk) for event in events for chunk in answer.chunks(event)):
            yield lines
        elif not events:
            yield b": still there\n\n"
        if answer.error is not None:
            answering.cancel()
            yield sse(answer.error.body()) + DONE
            return
    yield b"".join(map(sse, answer.last_chunks())) + DONE


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {_to_json(data)}\n\n".encode()


@asynccontextmanager
async def cancelled_when_gone(receive: Receive, answering: Answering) -> AsyncIterator[None]:
    """While inside, a client that hangs up ends the generations; so does leaving."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answering.cancel()

    watching = asyncio.create_task(watch(), name="watch for a client that hangs up")
    try:
        yield
    finally:
        watching.cancel()
        answering.cancel()


Kind = TypeVar("Kind", bound=AnyBody)


def read_request(kind: type[Kind], body: bytes | str, *, lenient: bool) -> Kind:
    """The request in a body.

    Raises:
        ApiError: it is not one, or has a field that isn't honoured.
    """
    try:
        found = kind.model_validate_json(body)
    except ValidationError as error:
        raise ApiError.invalid(error) from None
    refuse_unknown(found, lenient=lenient)
    return found


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, of which no more is read than is allowed.

    Raises:
        ApiError: it is larger, or doesn't come.
    """
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="timeout") from None
    return b"".join(chunks)
