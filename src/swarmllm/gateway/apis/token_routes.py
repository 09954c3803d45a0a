"""/tokenize and /detokenize, as vLLM has them: what the tokenizer and the chat template make of a text."""

import asyncio
from typing import Any, ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from swarmllm.gateway.apis.responder import LargeAnswer, Responder
from swarmllm.gateway.engine.model_choice import ModelChoice
from swarmllm.gateway.engine.offered_model import OfferedModel
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import CALLER
from swarmllm.gateway.requests.chat_messages import ChatMessage, Tool, picture_urls
from swarmllm.gateway.requests.chat_request import MAX_TOOLS
from swarmllm.gateway.requests.request_bodies import TokenId
from swarmllm.gateway.requests.unknown_fields import Body, Harmless


class TokenizeRequest(Body):
    """`POST /tokenize`."""

    harmless: ClassVar[Harmless] = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(None, description="Of a prompt; a chat's template says it itself.")
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _has_one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens goes with a prompt: the chat template says which ones messages get")
        if self.prompt is not None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs go with messages")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class TokenRoutes:
    """The handlers; made once per gateway."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`"""
        body, _ = await self._responder.read(request, TokenizeRequest)
        if body.messages is None:
            return await asyncio.to_thread(self._tokenize, body)
        model = self._models.named(body.model)
        async with self._responder.unpacking(model, body.messages, request.scope[CALLER]) as memory:
            loop, threads = asyncio.get_running_loop(), model.templates.threads
            found = await loop.run_in_executor(threads, self._tokenize, body)
        if memory is not None:
            memory.free()
        return found

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`"""
        body, _ = await self._responder.read(request, DetokenizeRequest)
        return await asyncio.to_thread(self._detokenize, body)

    @property
    def _models(self) -> ModelChoice:
        return self._responder.models

    def _tokenize(self, body: TokenizeRequest) -> Response:
        if body.messages is not None:
            writer = self._models.named(body.model)
            messages = [message.for_template() for message in body.messages]
            tools = [tool.for_template() for tool in body.tools or ()]
            model: OfferedModel = writer
            options = body.chat_template_kwargs or {}
            if urls := picture_urls(body.messages):
                ids: list[int] = writer.encode_chat_with_pictures(messages, urls, options, tools)
            else:
                ids = writer.encode_chat(messages, options, tools)
        else:
            model = self._models.any(body.model)
            ids = model.encode(body.prompt or "", special_tokens=body.add_special_tokens is not False)
        found = {"count": len(ids), "max_model_len": model.max_length, "tokens": ids}
        texts = {"token_strs": [model.token_text(one) for one in ids]} if body.return_token_strs else {}
        return LargeAnswer(found | texts)

    def _detokenize(self, body: DetokenizeRequest) -> Response:
        model = self._models.any(body.model)
        if max(body.tokens, default=0) >= model.num_scores:
            raise ApiError(400, f"the model has only {model.num_scores} tokens", param="tokens", code="invalid_value")
        return LargeAnswer({"prompt": model.decode(body.tokens, special_tokens=True)})
