"""Ollama's API, `/api/…`. Translates its requests into chats and completions, and writes answers in its shapes.

`app` lists its handlers, and `embeddings` answers Ollama's embeddings.
"""

import json
import secrets
import time
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swarmllm.api import __version__
from swarmllm.gateway.apis.chat_request import MAX_TOOLS, ChatRequest, Tool, ToolName
from swarmllm.gateway.apis.request_bodies import ANYTHING, Body, CompletionRequest, Harmless, StopString
from swarmllm.gateway.apis.responder import Answer, CallInAnswer, Dialect, Responder, to_json, translated
from swarmllm.gateway.engine.embedding_model import EmbeddingModel
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.offered_model import OfferedModel
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.routes import JSON, LINES, get, post
from swarmllm.gateway.text import Event, TextPiece

TAG = ":latest"
"""Added by Ollama's clients to a name without a tag."""
MOST_FILLED = 8
"""A request for an answer without a limit gets this many times `default_max_tokens`. Servers lease KV cache for all
these tokens, so a limit is needed."""


class Options(Body):
    harmless: ClassVar[Harmless] = {
        **dict.fromkeys(("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "use_mmap", "use_mlock"), ANYTHING),
        **dict.fromkeys(("num_thread", "num_keep", "logits_all"), ANYTHING),
        **dict.fromkeys(("vocab_only", "embedding_only"), (False,)),
        "num_ctx": ANYTHING,  # the whole context of the model is always available
        "penalize_newline": (True,),
    }
    repeat_last_n: int | None = Field(None, description="-1: all; other values go without repeat_penalty.")
    num_predict: Annotated[int, Field(ge=-2)] | None = Field(None, description="-1 or -2: as long as there is room.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: int | None = None
    stop: StopString | list[StopString] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @model_validator(mode="after")
    def _penalizes_all(self) -> "Options":
        if self.repeat_last_n not in (None, -1) and self.repeat_penalty not in (None, 1):
            raise ValueError("repeat_last_n can only be -1 here with a repeat_penalty: leave one of them out")
        return self

    def hints(self) -> list[str]:
        return [] if self.repeat_last_n in (None, -1) else ["repeat_last_n"]


OTHER_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "mirostat_mode": "mirostat"}
OF_OPTIONS = {**OTHER_NAMES, **{name: name for name in Options.model_fields}}
NAMES = {openai: f"options.{own}" for openai, own in OF_OPTIONS.items()} | {
    "response_format": "format",
    "guided_json": "format",
    "reasoning_effort": "think",
}
"""Names of OpenAI's fields in this API."""


class OllamaRequest(Body):
    """The fields of chats and prompts."""

    harmless: ClassVar[Harmless] = {
        "keep_alive": ANYTHING,
        **dict.fromkeys(("truncate", "shift"), (False,)),
        **dict.fromkeys(("logprobs",), (False,)),
        "top_logprobs": (0,),
    }
    model: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="A name from /api/tags; left out: the first one."
    )
    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    @property
    def fills(self) -> bool:
        """True if the client asks for an answer without a limit. The gateway limits it all the same (`MOST_FILLED`)."""
        return self.options is not None and (self.options.num_predict or 0) < 0

    def _shared(self, model: LanguageModel) -> dict[str, Any]:
        given = self.options or Options.model_validate({})
        names = ["temperature", "top_p", "top_k", "min_p", "typical_p", "tfs_z", "seed", "stop"]
        names += ["presence_penalty", "frequency_penalty"]
        found = {"model": model.name, **{name: getattr(given, name) for name in names}}
        found["repetition_penalty"] = given.repeat_penalty
        if given.mirostat:  # clients send these settings even if mirostat is off
            found |= {
                "mirostat_mode": given.mirostat,
                "mirostat_tau": given.mirostat_tau,
                "mirostat_eta": given.mirostat_eta,
            }
        if given.num_predict == 0:
            message = "options.num_predict: give at least 1, or -1 for as many as there is room for"
            raise ApiError(400, message, param="options.num_predict", code="invalid_value")
        if given.num_predict is not None and given.num_predict > 0:
            found["max_tokens"] = given.num_predict
        return found

    def _of_chats(self, model: LanguageModel) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if isinstance(self.format, dict):
            found["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format == "json":
            found["response_format"] = {"type": "json_object"}
        if isinstance(self.think, str):
            found["reasoning_effort"] = self.think
        elif self.think is False and "none" in model.efforts:
            found["chat_template_kwargs"] = model.efforts["none"]
        elif self.think is False and model.thinks:
            raise ApiError(400, f"{model.name} can't be told not to think: leave think out", param="think")
        elif self.think and not model.thinks:
            raise ApiError(400, f"{model.name} does not think: leave think out", param="think")
        return found


class OllamaFunction(Body):
    harmless: ClassVar[Harmless] = {"index": ANYTHING}
    name: ToolName
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Body):
    harmless: ClassVar[Harmless] = {"type": ("function",)}
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: list[str] | None = Field(None, description="In base64, for models with vision.")
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def _content(text: str | None, pictures: list[str] | None) -> Any:
    """The content for a chat: parts if there are pictures, else text.

    The URLs name no picture format, because it is recognized from the bytes.
    """
    if not pictures:
        return text
    urls = [f"data:image/any;base64,{one}" for one in pictures]
    seen = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*seen, {"type": "text", "text": text or ""}]


class OllamaChat(OllamaRequest):
    """`POST /api/chat`."""

    messages: list[OllamaMessage] = Field(default_factory=list, max_length=4096)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None

    def asked(self, model: LanguageModel) -> ChatRequest:
        """The request as a chat."""
        messages, last_id = [], "call"
        for one in self.messages:
            said: dict[str, Any] = {
                "role": one.role,
                "content": _content(one.content or "", one.images),
                "reasoning_content": one.thinking,
            }
            if one.role == "tool":
                said |= {"tool_call_id": one.tool_call_id or last_id, "name": one.tool_name}
            calls = []
            for call in one.tool_calls or ():
                last_id = call.id or f"call_{secrets.token_hex(12)}"
                function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
                calls.append({"id": last_id, "function": function})
            messages.append({**said, "tool_calls": calls or None})
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()] or None
        more = self._shared(model) | self._of_chats(model)
        return ChatRequest.model_validate({"messages": messages, "tools": tools, **more})


class OllamaGenerate(OllamaRequest):
    """`POST /api/generate`."""

    harmless: ClassVar[Harmless] = {
        **OllamaRequest.harmless,
        "context": ([],),
        "template": ("",),
    }
    prompt: str = ""
    suffix: str | None = Field(None, description="For models that write the text between two others.")
    system: str | None = None
    raw: bool | None = False
    images: list[str] | None = Field(None, description="In base64, for models with vision.")

    @model_validator(mode="after")
    def _raw_is_raw(self) -> "OllamaGenerate":
        if self.raw and self.images:
            raise ValueError("images go without raw")
        if (self.raw or self.suffix) and (self.system or self.think is not None):
            raise ValueError("system and think go without raw and suffix")
        if self.suffix and self.images:
            raise ValueError("images go without suffix")
        return self

    def asked(self, model: LanguageModel) -> ChatRequest | CompletionRequest:
        """The request as a chat; as a completion if the prompt is raw or the model has no chat template."""
        shared = self._shared(model)
        if not self.raw and not self.suffix and model.tokenizer.chat_template:
            messages = [{"role": "system", "content": self.system}] if self.system else []
            messages.append({"role": "user", "content": _content(self.prompt, self.images)})
            return ChatRequest.model_validate({"messages": messages, **shared, **self._of_chats(model)})
        if self.system or self.think is not None or self.images:
            raise ApiError(400, f"{model.name} has no chat template: leave system, think and images out")
        given = {"": None, "json": {"type": "object"}}
        schema = given.get(self.format) if isinstance(self.format, str) else self.format
        longest = {} if "max_tokens" in shared else {"max_tokens": None}
        more = {"guided_json": schema, "suffix": self.suffix}
        return CompletionRequest.model_validate({"prompt": self.prompt, **shared, **longest, **more})


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


class OllamaAnswer(Answer):
    """Lines of JSON. `is_chat` decides in which field the text is."""

    media_type = "application/x-ndjson"
    sign_of_life = b""  # clients read every line as a piece of the answer

    def __init__(self, *given: Any, is_chat: bool) -> None:
        super().__init__(*given)
        self._for_chat = is_chat
        self._began_at = time.monotonic()
        self._first_at: float | None = None

    def add(self, event: Event) -> Event:
        """Add an event; returns the event for the stream."""
        if isinstance(event, TextPiece):
            self._first_at = self._first_at or time.monotonic()
        return super().add(event)

    def pieces(self, event: Event) -> bytes:
        event = self.add(event)
        if not isinstance(event, TextPiece) or not (event.text or event.reasoning):
            return b""
        return _line(self._said(event.text, event.reasoning))

    def end(self) -> bytes:
        calls = self._choices[0].calls
        before = _line(self._said("", "", calls)) if calls else b""
        return before + _line({**self._said("", ""), **self._numbers()})

    def failure(self, error: ApiError) -> bytes:
        return _line(error_body(error))

    def whole(self) -> dict[str, Any]:
        choice = self._choices[0]
        return {**self._said(choice.text, choice.reasoning, choice.calls), **self._numbers()}

    def _said(self, text: str, thoughts: str, calls: list[CallInAnswer] | None = None) -> dict[str, Any]:
        found = {"model": self._model.name, "created_at": now(), "done": False}
        thinking = {"thinking": thoughts} if thoughts else {}
        if not self._for_chat:
            return {**found, "response": text, **thinking}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thinking}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": _object(call)}} for call in calls
            ]
        return {**found, "message": message}

    def _numbers(self) -> dict[str, Any]:
        end = time.monotonic()
        first = self._first_at or end
        return {
            "done": True,
            "done_reason": "length" if self._choices[0].finish_reason in ("length", None) else "stop",
            "total_duration": round((end - self._began_at) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self._prompt_tokens,
            "prompt_eval_duration": round((first - self._began_at) * 1e9),
            "eval_count": self._completion_tokens,
            "eval_duration": round((end - first) * 1e9),
        }


def now() -> str:
    """The time now, in Ollama's form."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def described(model: OfferedModel, started_at: str) -> dict[str, Any]:
    """A model for `/api/tags`. Its size is 0: no file here holds a part of it."""
    return listed(model.name, started_at, model.fingerprint, str(model.swarm.config.model_type))


def listed(name: str, started_at: str, fingerprint: str = "", family: str = "") -> dict[str, Any]:
    """A model as far as it is known."""
    families = [family] if family else []
    details = {"format": "swarm", "family": family, "families": families, "parameter_size": "", "parent_model": ""}
    return {
        "name": name,
        "model": name,
        "modified_at": started_at,
        "size": 0,
        "digest": fingerprint,
        "details": {**details, "quantization_level": ""},
    }


def loaded(model: OfferedModel, started_at: str) -> dict[str, Any]:
    """A model for `/api/ps`. Each model is always loaded, by servers."""
    return {
        **{name: value for name, value in described(model, started_at).items() if name != "modified_at"},
        "expires_at": "9999-12-31T23:59:59Z",
        "size_vram": 0,
        "context_length": model.max_length,
    }


def shown(model: OfferedModel, started_at: str) -> dict[str, Any]:
    """The answer of `/api/show`."""
    family = str(model.swarm.config.model_type)
    writes = isinstance(model, LanguageModel)
    text = str(model.tokenizer.chat_template or "") if writes else ""
    thinks = isinstance(model, LanguageModel) and model.thinks
    fills_in = isinstance(model, LanguageModel) and model.middle_form is not None
    if fills_in:
        text += "{# .Suffix #}"  # older clients look for this text
    capabilities = {
        "completion": writes,
        "embedding": isinstance(model, EmbeddingModel),
        "vision": isinstance(model, LanguageModel) and model.picture_processor is not None,
        "tools": "tools" in text,
        "insert": fills_in,
        "thinking": thinks,
    }
    info = {"general.architecture": family, f"{family}.context_length": model.max_length}
    return {
        "details": described(model, started_at)["details"],
        "template": text,
        "parameters": "",
        "model_info": {**info, f"{family}.block_count": model.swarm.swarm.num_blocks},
        "capabilities": [name for name, has in capabilities.items() if has],
        "modified_at": started_at,
    }


def _object(call: CallInAnswer) -> Any:
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}


def _line(data: dict[str, Any]) -> bytes:
    return to_json(data).encode() + b"\n"


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error, in Ollama's shape."""
    return {"error": str(error)}


class Ollama(Dialect):
    """Handlers of Ollama's API."""

    error_paths = ("/api/",)
    field_names = NAMES
    error_body = staticmethod(error_body)

    def __init__(self, responder: Responder) -> None:
        super().__init__(responder)
        self._started_at = now()

    @post("/api/chat", "Answer a conversation, as Ollama does.", OllamaChat, answer_types=(JSON, LINES))
    async def chat(self, request: Request) -> Response:
        return await self._answer(request, *await self._responder.read(request, OllamaChat), is_chat=True)

    @post("/api/generate", "Answer a prompt, as Ollama does.", OllamaGenerate, answer_types=(JSON, LINES))
    async def generate(self, request: Request) -> Response:
        return await self._answer(request, *await self._responder.read(request, OllamaGenerate), is_chat=False)

    async def _answer(
        self, request: Request, body: OllamaChat | OllamaGenerate, num_bytes: int, *, is_chat: bool
    ) -> Response:
        models = self._responder.models
        async with models.using(models.named, self._without_tag(body.model)) as model:
            if not (body.messages if isinstance(body, OllamaChat) else body.prompt):
                empty: dict[str, Any] = (
                    {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
                )
                found = {"model": model.name, "created_at": now(), **empty}
                return JSONResponse({**found, "done": True, "done_reason": "load"})  # it is open now
            asked = await translated(num_bytes, body.asked, model)
            return await self._responder.answer(
                request,
                asked,
                num_bytes,
                partial(OllamaAnswer, is_chat=is_chat),
                stream=body.stream is not False,
                default_max_tokens=MOST_FILLED * self._responder.config.default_max_tokens if body.fills else None,
            )

    @get("/api/tags", "List the models, as Ollama does.")
    async def tags(self, _: Request) -> Response:
        """A model that isn't open yet has its name only."""
        offers = self._responder.models.offers
        found = [
            listed(offer.name, self._started_at) if offer.model is None else described(offer.model, self._started_at)
            for offer in offers
        ]
        return JSONResponse({"models": found})

    @get("/api/ps", "List the models that are loaded, as Ollama does: all that are open.")
    async def running(self, _: Request) -> Response:
        return JSONResponse({"models": [loaded(model, self._started_at) for model in self._responder.models]})

    @post("/api/show", "Describe a model, as Ollama does.", ShowRequest, answer_types=(JSON,), is_rated=False)
    async def show(self, request: Request) -> Response:
        body, _ = await self._responder.read(request, ShowRequest)
        models = self._responder.models
        async with models.using(models.any, self._without_tag(body.model or body.name or "")) as model:
            return JSONResponse(shown(model, self._started_at))

    @get("/api/version", "Tell the version of the gateway.", errors=(403,), needs_key=False)
    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    def _without_tag(self, name: str | None) -> str | None:
        return name if name is None or name in self._responder.models else name.removesuffix(TAG)
