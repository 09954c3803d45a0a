"""Routes of Anthropic's and Ollama's APIs, and OpenAI's /v1/responses: translated to chats and back. In `app`."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swarmllm.api import __version__
from swarmllm.gateway.apis.anthropic import AnthropicAnswer, CountRequest, MessagesRequest
from swarmllm.gateway.apis.ollama import TAG, OllamaAnswer, OllamaChat, OllamaGenerate, described, loaded, now, shown
from swarmllm.gateway.apis.request_bodies import Body
from swarmllm.gateway.apis.responder import Responder, aside
from swarmllm.gateway.apis.responses import ResponsesAnswer, ResponsesRequest, StoredResponses
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.vision import free_memory
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import CALLER

MOST_FILLED = 8
"""An answer that may go on as long as there is room has so many times the usual tokens: servers lease their caches."""
Given = TypeVar("Given")
Asking = TypeVar("Asking")


class ShowRequest(Body):
    """`POST /api/show`."""

    model: str | None = None
    name: str | None = Field(None, description="The model, as older clients call it.")
    verbose: bool | None = None

    @model_validator(mode="after")
    def _names_a_model(self) -> "ShowRequest":
        if (self.model or self.name) is None:
            raise ValueError("give the name of a model")
        return self


class TranslatedRoutes:
    """The handlers; made once per gateway."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._started_at = now()
        self._stored = StoredResponses(responder.config.max_stored_bytes)

    # ------------------------------------------------------------------ Anthropic's

    async def messages(self, request: Request) -> Response:
        """`POST /v1/messages`"""
        body, num_bytes = await self._responder.read(request, MessagesRequest)
        chat = await _translated(num_bytes, body.as_chat, self._responder.models.named(body.model))
        return await self._responder.answer(request, chat, num_bytes, AnthropicAnswer, stream=bool(body.stream))

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`"""
        body, num_bytes = await self._responder.read(request, CountRequest)
        chat = await _translated(num_bytes, body.as_chat, self._responder.models.named(body.model))
        _, (prompt,), _ = await self._responder.prepare(chat, num_bytes, request.scope[CALLER])
        free_memory([prompt])
        return JSONResponse({"input_tokens": len(prompt)})

    # ------------------------------------------------------------------ OpenAI's other one

    async def responses(self, request: Request) -> Response:
        """`POST /v1/responses`"""
        body, num_bytes = await self._responder.read(request, ResponsesRequest)
        owner = request.scope[CALLER]
        if body.store and not self._stored.keeps_any:
            raise ApiError(400, "this gateway keeps no responses: leave store out", param="store")
        before: list[dict[str, Any]] = []
        num_before = 0
        if body.previous_response_id is not None:
            earlier = self._stored.get(body.previous_response_id, owner)
            before, num_before = [*earlier.items, *earlier.response["output"]], earlier.num_bytes
        num_all = num_bytes + num_before
        chat = await _translated(num_all, body.as_chat, before)
        items = [*before, *await aside(num_bytes, lambda: [one.model_dump(exclude_none=True) for one in body.items()])]

        def keep(name: str, response: dict[str, Any]) -> None:
            if body.store is not False:
                self._stored.keep(name, owner, response, items)

        shape = partial(ResponsesAnswer, request=body, keep=keep)
        return await self._responder.answer(request, chat, num_bytes, shape, stream=bool(body.stream))

    async def response(self, request: Request) -> Response:
        """`GET` or `DELETE /v1/responses/{name}`"""
        name, owner = request.path_params["name"], request.scope[CALLER]
        if request.method == "DELETE":
            self._stored.forget(name, owner)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return JSONResponse(self._stored.get(name, owner).response)

    async def input_items(self, request: Request) -> Response:
        """`GET /v1/responses/{name}/input_items`"""
        found = self._stored.get(request.path_params["name"], request.scope[CALLER])
        return JSONResponse({"object": "list", "data": found.items, "has_more": False})

    # ------------------------------------------------------------------ Ollama's

    async def chat(self, request: Request) -> Response:
        """`POST /api/chat`"""
        return await self._answer(request, *await self._responder.read(request, OllamaChat), is_chat=True)

    async def generate(self, request: Request) -> Response:
        """`POST /api/generate`"""
        return await self._answer(request, *await self._responder.read(request, OllamaGenerate), is_chat=False)

    async def _answer(
        self, request: Request, body: OllamaChat | OllamaGenerate, num_bytes: int, *, is_chat: bool
    ) -> Response:
        model = self._named(body.model)
        if not (body.messages if isinstance(body, OllamaChat) else body.prompt):
            empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
            found = {"model": model.name, "created_at": now(), **empty}
            return JSONResponse({**found, "done": True, "done_reason": "load"})  # it is always loaded
        asked = await _translated(num_bytes, body.asked, model)
        return await self._responder.answer(
            request,
            asked,
            num_bytes,
            partial(OllamaAnswer, is_chat=is_chat),
            stream=body.stream is not False,
            default_max_tokens=MOST_FILLED * self._responder.config.default_max_tokens if body.fills else None,
        )

    async def tags(self, _: Request) -> Response:
        """`GET /api/tags`"""
        return JSONResponse({"models": [described(model, self._started_at) for model in self._responder.models]})

    async def running(self, _: Request) -> Response:
        """`GET /api/ps`"""
        return JSONResponse({"models": [loaded(model, self._started_at) for model in self._responder.models]})

    async def show(self, request: Request) -> Response:
        """`POST /api/show`"""
        body, _ = await self._responder.read(request, ShowRequest)
        model = self._responder.models.any(self._without_tag(body.model or body.name or ""))
        return JSONResponse(shown(model, self._started_at))

    async def version(self, _: Request) -> Response:
        """`GET /api/version`"""
        return JSONResponse({"version": __version__})

    def _named(self, name: str) -> LanguageModel:
        return self._responder.models.named(self._without_tag(name))

    def _without_tag(self, name: str) -> str:
        return name if name in self._responder.models else name.removesuffix(TAG)


async def _translated(num_bytes: int, translate: Callable[[Given], Asking], given: Given) -> Asking:
    """What `translate` makes of it and so many bytes.

    Raises:
        ApiError: a chat can't be like that.
    """
    try:
        return await aside(num_bytes, lambda: translate(given))
    except ValidationError as error:
        raise ApiError.invalid(error) from None
