"""OpenAI's API: models, completions and chats, and the shapes of their answers; vLLM's /tokenize and /detokenize.

`websocket` and `audio` write their answers with the same functions. Facts about the swarm are in one field, `swarm`,
and only on request.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swarmllm.gateway.apis.chat_request import MAX_TOOLS, ChatMessage, ChatRequest, Tool, picture_urls
from swarmllm.gateway.apis.request_bodies import Body, CompletionRequest, Harmless, TokenId
from swarmllm.gateway.apis.responder import DONE, Answer, CallInAnswer, Dialect, LargeAnswer, Responder, sse
from swarmllm.gateway.engine.audio_model import AudioModel
from swarmllm.gateway.engine.embedding_model import EmbeddingModel
from swarmllm.gateway.engine.generation import GenerationOptions
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.offered_model import OfferedModel
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import CALLER
from swarmllm.gateway.routes import JSON, get, post
from swarmllm.gateway.sampling import TokenLogprob
from swarmllm.gateway.text import CallPiece, Event, PromptScores, SwarmEvent, TextPiece

BY_ID = "token_id:"
"""vLLM's prefix for a token that is named by its id."""


class OpenAIAnswer(Answer):
    """OpenAI's shape. `chunks(event)` are those of `pieces` before encoding, for other transports."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        model: LanguageModel,
        prompts: list[list[int]],
        options: GenerationOptions,
        *,
        trace: bool = False,
    ) -> None:
        super().__init__(request, model, prompts, options)
        self._request = request
        self._chat = isinstance(request, ChatRequest)
        self._trace = trace
        self._n = request.n or 1
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    # ------------------------------------------------------------------ whole

    def whole(self) -> dict[str, Any]:
        """The JSON of the answer, after all events were added."""
        choices = []
        for index, choice in enumerate(self._choices):
            text = self._echo(index) + choice.text
            item = {"index": index, "finish_reason": choice.finish_reason or "length", "logprobs": None}
            if self._wants_logprobs:
                item["logprobs"] = self._logprobs(choice.logprobs, len(text))
            if self._chat:
                message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
                if choice.reasoning:
                    message["reasoning_content"] = choice.reasoning
                if choice.calls:
                    message |= {"content": text or None, "tool_calls": list(map(_called, choice.calls))}
                item["message"] = message
            else:
                item["text"] = text
            choices.append(item)
        answer = {**self._head("chat.completion" if self._chat else "text_completion"), "choices": choices}
        answer["usage"] = self._usage()
        swarm = self._swarm()
        return {**answer, "swarm": swarm} if swarm else answer

    # ------------------------------------------------------------------ chunks

    def pieces(self, event: Event) -> bytes:
        return b"".join(map(sse, self.chunks(event)))

    def end(self) -> bytes:
        return b"".join(map(sse, self.last_chunks())) + DONE

    def failure(self, error: ApiError) -> bytes:
        return sse(error.body()) + DONE

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """The chunks for an event; `error` may be set afterwards."""
        event = self.add(event)
        if isinstance(event, SwarmEvent):
            if self._request.swarm_events:
                yield self._chunk([], swarm=self._swarm_events[-1])
        elif isinstance(event, PromptScores):
            yield from self._begin(event.index, event.logprobs)
        elif isinstance(event, TextPiece):
            yield from self._begin(event.index, None)
            if event.text or event.reasoning or event.calls or event.finish_reason or event.logprob is not None:
                yield self._chunk([self._piece(event)])
        elif event.error is None and not self._chat and self._request.max_tokens == 0:
            for index in range(event.first_index, event.first_index + self._n):
                yield from self._begin(index, None)
                end = self._piece(TextPiece(index, "", None, "length"))
                if self._wants_logprobs and not self._choices[index].logprobs:
                    end["logprobs"] = self._logprobs([])
                yield self._chunk([end])

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """The chunks after all choices."""
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield {**self._chunk([]), "usage": self._usage()}
        if self._trace:
            yield self._chunk([], swarm={"event": "trace", "traces": self._traces})

    def _begin(self, index: int, scores: Sequence[TokenLogprob] | None) -> Iterator[dict[str, Any]]:
        """The first chunk of a choice: its role, or the echoed prompt."""
        choice = self._choices[index]
        if choice.begun:
            return
        choice.begun = True
        item: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if self._chat:
            yield self._chunk([{**item, "delta": {"role": "assistant", "content": ""}}])
        elif echoed := self._echo(index):
            if scores is not None:
                item["logprobs"] = self._logprobs(scores)
            yield self._chunk([{**item, "text": echoed}])

    def _piece(self, event: TextPiece) -> dict[str, Any]:
        logprobs = None if event.logprob is None else self._logprobs([event.logprob])
        item = {"index": event.index, "logprobs": logprobs, "finish_reason": event.finish_reason}
        if self._chat:
            calls = list(map(_delta, event.calls))
            delta = {"reasoning_content": event.reasoning, "content": event.text, "tool_calls": calls}
            return {**item, "delta": {name: what for name, what in delta.items() if what}}
        return {**item, "text": event.text}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head(kind), "choices": choices, **more}

    # ------------------------------------------------------------------ parts

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.fingerprint[:16],
        }

    def _usage(self) -> dict[str, int]:
        prompt, completion = self._prompt_tokens, self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _swarm(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._request.swarm_events:
            found["events"] = self._swarm_events
        if self._trace:
            found["traces"] = self._traces
        return found

    def _echo(self, index: int) -> str:
        request = self._request
        if isinstance(request, ChatRequest) or not request.echo:
            return ""
        return self._model.decode(self._prompts[index // self._n])

    @property
    def _wants_logprobs(self) -> bool:
        asked = self._request.logprobs
        return bool(asked) if self._chat else asked is not None

    def _logprobs(self, given: Sequence[TokenLogprob | None], num_chars: int | None = None) -> dict[str, Any]:
        """`num_chars`: length of the text, if a stop text has cut it."""
        found = [logprob for logprob in given if logprob is not None]
        if self._chat:
            return {"content": [self._with_likeliest(one) for one in found], "refusal": None}
        scored = [None if math.isnan(one.logprob) else one for one in found]
        return {
            "tokens": [self._name(one, one.token_id) for one in found],
            "token_logprobs": [one and _finite(one.logprob) for one in scored],
            "top_logprobs": [one and self._likeliest(one) for one in scored],
            "text_offset": [one.offset if num_chars is None else min(one.offset, num_chars) for one in found],
        }

    def _likeliest(self, one: TokenLogprob) -> dict[str, float]:
        """Logprobs by the names of tokens. If two tokens have the same name, the less likely one is named by its id."""
        found: dict[str, float] = {}
        for token, logprob in one.top:
            name = self._name(one, token)
            found[name if name not in found else f"{BY_ID}{token}"] = _finite(logprob)
        return found

    def _with_likeliest(self, one: TokenLogprob) -> dict[str, Any]:
        """One token in the shape of chats."""
        likeliest = [self._named(one, token, logprob) for token, logprob in one.top]
        return {**self._named(one, one.token_id, one.logprob), "top_logprobs": likeliest}

    def _named(self, among: TokenLogprob, token: int, logprob: float) -> dict[str, Any]:
        spelled = among.spelled[token]
        name, in_bytes = self._name(among, token), None if spelled is None else list(spelled)
        return {"token": name, "logprob": _finite(logprob), "bytes": in_bytes}

    def _name(self, among: TokenLogprob, token: int) -> str:
        """Name of a token: its text; for a special token, its name; for a part of a character, its bytes, as OpenAI
        writes them."""
        if self._request.return_tokens_as_token_ids:
            return f"{BY_ID}{token}"
        spelled = among.spelled[token]
        if spelled is None:
            return self._model.token_text(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return ("" if self._chat else "bytes:") + spelled.decode(errors="backslashreplace")


def _called(call: CallInAnswer) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(piece: CallPiece) -> dict[str, Any]:
    """One chunk of a call. The call's name comes with its first chunk only."""
    if piece.is_new:
        return {"index": piece.place, **_called(CallInAnswer(piece.id, piece.name, piece.arguments))}
    return {"index": piece.place, "function": {"arguments": piece.arguments}}


def _finite(logprob: float) -> float:
    """JSON has no -inf, and a processor of a checkpoint may give it."""
    return max(logprob, -9999.0)


class TokenizeRequest(Body):
    """`POST /tokenize`."""

    harmless: ClassVar[Harmless] = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(None, description="For a prompt; a chat's template decides itself.")
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _has_one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens is for a prompt: the chat template adds those of messages")
        if self.prompt is not None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs need messages")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class OpenAI(Dialect):
    """Handlers of OpenAI's API, and of vLLM's tokenizer."""

    def __init__(self, responder: Responder) -> None:
        super().__init__(responder)
        self._models = responder.models
        self._started_at = int(time.time())

    @post("/v1/chat/completions", "Answer a conversation.", ChatRequest)
    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest)

    @post("/v1/completions", "Continue a text.", CompletionRequest)
    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest)

    async def _answer(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        body, num_bytes = await self._responder.read(request, kind)
        wants_trace = request.headers.get("x-swarm-trace", "").lower() in ("1", "true")
        shape = partial(OpenAIAnswer, trace=wants_trace)
        return await self._responder.answer(request, body, num_bytes, shape, stream=bool(body.stream))

    @get("/v1/models", "List the models.")
    async def models(self, _: Request) -> Response:
        """A model that isn't open yet has its name only. Clients offer all of `data` to people, so models that the
        machines still load are apart."""
        data = [
            self._listed(offer.name) if offer.model is None else self._described(offer.model)
            for offer in self._models.offers
        ]
        loading = {"loading": sorted(self._models.coming)} if self._models.coming else {}
        return JSONResponse({"object": "list", "data": data, **loading})

    @get("/v1/models/{name:path}", "Describe a model.", errors=(401, 403, 404))
    async def model(self, request: Request) -> Response:
        """It opens the model, if it isn't open yet."""
        async with self._models.using(self._models.any, request.path_params["name"]) as model:
            return JSONResponse(self._described(model))

    def _listed(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started_at, "owned_by": "swarm"}

    def _described(self, model: OfferedModel) -> dict[str, Any]:
        return {
            **self._listed(model.name),
            "max_model_len": model.max_length,
            "chat": isinstance(model, LanguageModel) and bool(model.tokenizer.chat_template),
            "vision": isinstance(model, LanguageModel) and model.picture_processor is not None,
            **({"embeddings": True, "dimensions": model.size} if isinstance(model, EmbeddingModel) else {}),
            **({"audio": True, "translates": model.translates} if isinstance(model, AudioModel) else {}),
        }

    @post("/tokenize", "Split a text or a conversation into tokens.", TokenizeRequest, answer_types=(JSON,))
    async def tokenize(self, request: Request) -> Response:
        body, _ = await self._responder.read(request, TokenizeRequest)
        if body.messages is None:
            async with self._models.using(self._models.any, body.model) as model:
                return await asyncio.to_thread(_tokenized, model, body, lambda: _prompt_ids(model, body))
        async with (
            self._models.using(self._models.named, body.model) as writer,
            self._responder.unpacking(writer, body.messages, request.scope[CALLER]) as memory,
        ):
            loop, threads = asyncio.get_running_loop(), writer.templates.threads
            found = await loop.run_in_executor(threads, _tokenized, writer, body, lambda: _chat_ids(writer, body))
        if memory is not None:
            memory.free()
        return found

    @post("/detokenize", "Join tokens to a text.", DetokenizeRequest, answer_types=(JSON,))
    async def detokenize(self, request: Request) -> Response:
        body, _ = await self._responder.read(request, DetokenizeRequest)
        async with self._models.using(self._models.any, body.model) as model:
            return await asyncio.to_thread(_detokenized, model, body)


def _tokenized(model: OfferedModel, body: TokenizeRequest, encode: Callable[[], list[int]]) -> Response:
    ids = encode()
    found = {"count": len(ids), "max_model_len": model.max_length, "tokens": ids}
    texts = {"token_strs": [model.token_text(one) for one in ids]} if body.return_token_strs else {}
    return LargeAnswer(found | texts)


def _prompt_ids(model: OfferedModel, body: TokenizeRequest) -> list[int]:
    return model.encode(body.prompt or "", special_tokens=body.add_special_tokens is not False)


def _chat_ids(model: LanguageModel, body: TokenizeRequest) -> list[int]:
    messages = body.messages or []
    tools = [tool.for_template() for tool in body.tools or ()]
    options = body.chat_template_kwargs or {}
    templated = [message.for_template() for message in messages]
    return model.encode_chat(templated, options, tools, pictures=picture_urls(messages))


def _detokenized(model: OfferedModel, body: DetokenizeRequest) -> Response:
    if max(body.tokens, default=0) >= model.num_scores:
        raise ApiError(400, f"the model has only {model.num_scores} tokens", param="tokens", code="invalid_value")
    return LargeAnswer({"prompt": model.decode(body.tokens, special_tokens=True)})
