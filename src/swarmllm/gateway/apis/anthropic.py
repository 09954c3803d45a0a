"""Anthropic's API, `/v1/messages`: the request as a chat, and the answer in Anthropic's shape."""

import json
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swarmllm.gateway.apis.chat_request import MAX_TOOLS, ChatRequest, ToolName
from swarmllm.gateway.apis.request_bodies import ANYTHING, Body, Harmless, StopString
from swarmllm.gateway.apis.responder import Answer, Choice, Dialect, sse, translated
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.engine.vision import free_memory
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import CALLER
from swarmllm.gateway.routes import JSON, post
from swarmllm.gateway.text import Event, TextPiece

ERROR_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
"""Anthropic's names of errors, where they differ from OpenAI's."""
NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
"""Names of OpenAI's fields in this API."""
CACHING: Harmless = {"cache_control": ANYTHING}


class PictureSource(Body):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str

    def as_url(self) -> str:
        """The picture as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class Block(Body):
    """A block of a message; its type decides which fields it has."""

    harmless: ClassVar[Harmless] = {**CACHING, "citations": ([],), "caller": ({"type": "direct"},), "toolset_name": ()}
    type: str
    text: str = ""
    thinking: str = ""
    signature: str = Field("", description="Empty here.")
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: "str | list[Block]" = ""
    is_error: bool | None = None
    source: PictureSource | None = None

    @model_validator(mode="after")
    def _can_be_read(self) -> "Block":
        if (self.type == "image") != (self.source is not None):
            raise ValueError("a block has a source if it is of type image, and only then")
        if self.type not in ("text", "thinking", "tool_use", "tool_result", "image"):
            raise ValueError(f"blocks of type {self.type[:32]!r} can't be read here: leave them out")
        if not isinstance(self.content, str) and any(one.type not in ("text", "image") for one in self.content):
            raise ValueError("the content of a tool_result has blocks of the types text and image")
        return self


Content = str | list[Block]


class AnthropicMessage(Body):
    harmless: ClassVar[Harmless] = CACHING
    role: Literal["user", "assistant", "system"]
    content: Content

    def as_chat(self) -> Iterator[dict[str, Any]]:
        """The messages for a chat: there, a result of a tool is a message of its own."""
        blocks = (
            [Block.model_validate({"type": "text", "text": self.content})]
            if isinstance(self.content, str)
            else self.content
        )
        for block in blocks:
            if block.type == "tool_result":
                found = _content(block.content)
                if block.is_error:
                    found = (
                        f"Error: {found}" if isinstance(found, str) else [{"type": "text", "text": "Error: "}, *found]
                    )
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": found}
        said: dict[str, Any] = {"role": self.role, "content": _content(blocks)}
        if calls := [block for block in blocks if block.type == "tool_use"]:
            said["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input)}} for call in calls
            ]
        if thoughts := "".join(block.thinking for block in blocks if block.type == "thinking"):
            said["reasoning_content"] = thoughts
        if len(said) > 2 or any(block.type in ("text", "image") for block in blocks):
            yield said


class AnthropicTool(Body):
    harmless: ClassVar[Harmless] = {
        **CACHING,
        "strict": (False,),
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "input_examples": ([],),
        "eager_input_streaming": ANYTHING,
    }
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    harmless: ClassVar[Harmless] = {"display": ("summarized",), "budget_tokens": ANYTHING}
    type: Literal["enabled", "adaptive", "disabled"]


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountRequest(Body):
    """`POST /v1/messages/count_tokens`."""

    harmless: ClassVar[Harmless] = {**CACHING, "speed": ("standard",), "mcp_servers": ([],)}
    model: str | None = Field(None, description="A name from /v1/models; left out: the first one.")
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096)]
    system: Content | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _system_is_text(self) -> "CountRequest":
        if isinstance(self.system, list) and any(block.type != "text" for block in self.system):
            raise ValueError("system has blocks of type text only: put pictures into a message of the user")
        return self

    def as_chat(self, model: LanguageModel) -> ChatRequest:
        """The request as a chat.

        Raises:
            ApiError: this model can't do that.
        """
        messages = [one for message in self.messages for one in message.as_chat()]
        if self.system:
            messages.insert(0, {"role": "system", "content": text_of(self.system)})
        asked: dict[str, Any] = {"model": self.model, "messages": messages, **self._options()}
        if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            asked |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            names = {"input_schema": "parameters", "name": "name", "description": "description"}
            asked["tools"] = [
                {"type": "function", "function": {names[k]: getattr(tool, k) for k in names}} for tool in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            asked["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            asked["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return ChatRequest.model_validate(asked | self._thoughts(model) | self._output())

    def _options(self) -> dict[str, Any]:
        return {}

    def _thoughts(self, model: LanguageModel) -> dict[str, Any]:
        """Without the field, thoughts are turned off if the model can do that."""
        kind = "none asked for" if self.thinking is None else self.thinking.type
        silent = model.efforts.get("none")
        if kind == "disabled" and silent is None and model.thinks:
            raise ApiError(400, f"{model.name} can't be told not to think: leave thinking out", param="thinking")
        return {} if kind in ("adaptive", "enabled") or silent is None else {"chat_template_kwargs": silent}

    def _output(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.output_config is not None and self.output_config.effort is not None:
            found["reasoning_effort"] = self.output_config.effort
        if self.output_config is not None and (form := self.output_config.format) is not None:
            found["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        return found


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    harmless: ClassVar[Harmless] = {
        **CountRequest.harmless,
        "metadata": ANYTHING,
        "service_tier": ("auto", "standard_only"),
        **dict.fromkeys(("container", "context_management", "diagnostics", "inference_geo"), ()),
        **dict.fromkeys(("user_profile_id", "workspace_id"), ANYTHING),
    }
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None

    def _options(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        return {"stop": self.stop_sequences, **{name: getattr(self, name) for name in names}}


def _content(blocks: Content) -> str | list[dict[str, Any]]:
    """The content for a chat: parts if there are pictures, else text."""
    if isinstance(blocks, str) or all(block.source is None for block in blocks):
        return text_of(blocks)
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.source is not None:
            parts.append({"type": "image_url", "image_url": {"url": block.source.as_url()}})
        elif block.type == "text":
            parts.append({"type": "text", "text": block.text})
    return parts


def text_of(content: Content) -> str:
    """The text of all blocks."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


class AnthropicAnswer(Answer):
    """A message of blocks: thoughts, text, calls."""

    sign_of_life = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._open: dict[str, Any] | None = None
        self._num_blocks = 0

    def begin(self) -> bytes:
        num_tokens = sum(map(len, self._prompts))
        return _event("message_start", message=self._message([], input_tokens=num_tokens, output_tokens=0))

    def pieces(self, event: Event) -> bytes:
        event = self.add(event)
        if not isinstance(event, TextPiece):
            return b""
        found = b""
        if event.reasoning:
            found += self._within({"type": "thinking", "thinking": "", "signature": ""})
            found += self._delta(type="thinking_delta", thinking=event.reasoning)
        if event.text:
            found += self._within({"type": "text", "text": ""}) + self._delta(type="text_delta", text=event.text)
        for call in event.calls:
            if call.is_new:
                found += self._close() + self._within(_tool_use(call.id, call.name, {}))
            found += self._delta(type="input_json_delta", partial_json=call.arguments)
        return found

    def end(self) -> bytes:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": self._completion_tokens}
        delta = {"stop_reason": _reason(self._choices[0]), "stop_sequence": self._choices[0].stopped_by}
        return self._close() + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return sse(error_body(error), "error")

    def whole(self) -> dict[str, Any]:
        choice = self._choices[0]
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.text or not choice.calls:
            content.append({"type": "text", "text": choice.text})
        content += [_tool_use(call.id, call.name, _object(call.arguments)) for call in choice.calls]
        found = self._message(content, input_tokens=self._prompt_tokens, output_tokens=self._completion_tokens)
        return {**found, "stop_reason": _reason(choice), "stop_sequence": choice.stopped_by}

    def _message(self, content: list[dict[str, Any]], **usage: int) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model.name, "content": content}
        return {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _within(self, block: dict[str, Any]) -> bytes:
        if self._open is not None and self._open["type"] == block["type"]:
            return b""
        closed = self._close()
        self._open = block
        return closed + _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error, in Anthropic's shape."""
    return {"type": "error", "error": {"type": ERROR_TYPES.get(error.status, error.type), "message": str(error)}}


class Anthropic(Dialect):
    """Handlers of Anthropic's API."""

    error_paths = ("/v1/messages",)
    field_names = NAMES
    error_body = staticmethod(error_body)

    @post("/v1/messages", "Answer a conversation, as Anthropic's API does.", MessagesRequest)
    async def messages(self, request: Request) -> Response:
        body, num_bytes = await self._responder.read(request, MessagesRequest)
        models = self._responder.models
        async with models.using(models.named, body.model) as model:
            chat = await translated(num_bytes, body.as_chat, model)
            return await self._responder.answer(request, chat, num_bytes, AnthropicAnswer, stream=bool(body.stream))

    @post("/v1/messages/count_tokens", "Count the tokens of a conversation.", CountRequest, answer_types=(JSON,))
    async def count_tokens(self, request: Request) -> Response:
        body, num_bytes = await self._responder.read(request, CountRequest)
        models = self._responder.models
        async with models.using(models.named, body.model) as model:
            chat = await translated(num_bytes, body.as_chat, model)
            _, (prompt,), _ = await self._responder.prepare(chat, num_bytes, request.scope[CALLER])
        free_memory([prompt])
        return JSONResponse({"input_tokens": len(prompt)})


def _tool_use(call_id: str, name: str, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def _object(arguments: str) -> dict[str, Any]:
    """The arguments as an object; empty if they are cut off or no object, since nothing else fits here."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _reason(choice: Choice) -> str:
    if choice.stopped_by is not None and not choice.calls:
        return "stop_sequence"
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(choice.finish_reason or "length", "end_turn")


def _event(kind: str, **data: Any) -> bytes:
    return sse({"type": kind, **data}, kind)
