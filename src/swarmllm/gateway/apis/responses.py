"""OpenAI's `/v1/responses`: the request as a chat, and the answer as items, whole or as events.

`StoredResponses` keeps answers in memory, within a limit, for the next request (`store`).
"""

import json
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swarmllm.gateway.apis.chat_request import MAX_TOOLS, ChatRequest, Effort, ToolName
from swarmllm.gateway.apis.request_bodies import ANYTHING, Body, Harmless
from swarmllm.gateway.apis.responder import Answer, Dialect, Responder, aside, sse, translated
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.guard import CALLER
from swarmllm.gateway.routes import delete, get, post
from swarmllm.gateway.text import Event, TextPiece

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Names of OpenAI's older fields in this API."""


class ItemPart(Body):
    harmless: ClassVar[Harmless] = {"annotations": ([],), "logprobs": ([],), "detail": ANYTHING}
    type: str
    text: str = ""
    image_url: str | None = Field(None, description="data:image/…;base64,…, for models with vision.")

    @model_validator(mode="after")
    def _is_text_or_picture(self) -> "ItemPart":
        if (self.type == "input_image") != (self.image_url is not None):
            raise ValueError("a part has an image_url if it is of type input_image, and only then")
        if self.type not in ("input_text", "output_text", "text", "reasoning_text", "summary_text", "input_image"):
            raise ValueError(f"parts of type {self.type[:32]!r} can't be read here: leave them out")
        return self


class Item(Body):
    """An item of the conversation so far; its type decides which fields it has."""

    harmless: ClassVar[Harmless] = {
        **dict.fromkeys(("id", "status", "encrypted_content", "phase"), ANYTHING),
        "caller": ({"type": "direct"},),
    }
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[ItemPart] = ""

    @model_validator(mode="after")
    def _has_content(self) -> "Item":
        if self.type == "message" and self.role != "assistant" and self.content in (None, []):
            raise ValueError(f"a message of the role {self.role} needs content, which may be empty text")
        return self

    @model_validator(mode="after")
    def _shows_pictures_to_the_model(self) -> "Item":
        written = self.content if self.role == "assistant" or self.type == "reasoning" else None
        parts = [part for some in (written, self.summary) if isinstance(some, list) for part in some]
        if any(part.image_url is not None for part in parts):
            raise ValueError("messages of the assistant are text: put pictures into a message of the user")
        return self

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the item to a chat. Thoughts, text and calls of one turn are one message there."""
        if self.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _content(self.output)})
            return
        if self.type == "message" and self.role != "assistant":
            messages.append({"role": self.role, "content": _content(self.content)})
            return
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        turn = messages[-1]
        if self.type == "message":
            turn["content"] += _text(self.content)
        elif self.type == "reasoning":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + (_text(self.content) or _text(self.summary))
        else:
            function = {"name": self.name, "arguments": self.arguments}
            turn.setdefault("tool_calls", []).append({"id": self.call_id, "function": function})


class FunctionTool(Body):
    harmless: ClassVar[Harmless] = {"strict": ANYTHING, "defer_loading": (False,), "async": (False,)}
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: ToolName


class Format(Body):
    harmless: ClassVar[Harmless] = {"strict": ANYTHING, "description": ANYTHING, "name": ANYTHING}
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class Text(Body):
    harmless: ClassVar[Harmless] = {"verbosity": ANYTHING}
    format: Format | None = None


class Reasoning(Body):
    harmless: ClassVar[Harmless] = {"summary": ("auto",), "generate_summary": ("auto",)}
    effort: Effort | None = None


class ResponsesRequest(Body):
    """`POST /v1/responses`."""

    harmless: ClassVar[Harmless] = {
        **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), ANYTHING),
        **dict.fromkeys(("prompt_cache_options", "max_tool_calls"), ANYTHING),  # there are no built-in tools
        **dict.fromkeys(("conversation", "prompt", "context_management", "moderation", "image"), ()),
        "access_programs": (),
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),  # thoughts come in plain text
        "service_tier": ("auto", "default"),
        "stream_options": ({"include_obfuscation": False}, {}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        # vLLM's
        "request_id": ANYTHING,
        "priority": (0,),
        "skip_special_tokens": (True,),
        **dict.fromkeys(("enable_response_messages", "include_stop_str_in_output", "ignore_eos"), (False,)),
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens"), (0,)),
        **dict.fromkeys(("top_k", "min_p", "repetition_penalty", "seed", "stop", "logit_bias"), ()),
        **dict.fromkeys(("mm_processor_kwargs", "chat_template_kwargs", "vllm_xargs", "cache_salt"), ()),
        **dict.fromkeys(("kv_transfer_params", "previous_input_messages", "structured_outputs"), ()),
    }
    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = False
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    def items(self) -> list[Item]:
        """The new items of the conversation."""
        return [Item(content=self.input)] if isinstance(self.input, str) else self.input

    def as_chat(self, before: list[dict[str, Any]]) -> ChatRequest:
        """The request as a chat; `before` holds the earlier items of the conversation."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in (*map(Item.model_validate, before), *self.items()):
            item.add_to(messages)
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            **{name: getattr(self, name) for name in ("temperature", "top_p")},
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        if self.tools:
            shapes = [tool.model_dump(include={"name", "description", "parameters"}) for tool in self.tools]
            asked["tools"] = [{"type": "function", "function": shape} for shape in shapes]
        choice = self.tool_choice
        named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice
        form = self.text.format if self.text is not None else None
        if form is not None:
            schema = {"json_schema": {"schema": form.schema_}} if form.schema_ is not None else {}
            asked["response_format"] = {"type": form.type, **schema}
        return ChatRequest.model_validate({**asked, "tool_choice": named})


def _content(content: str | list[ItemPart] | None) -> str | list[dict[str, Any]]:
    """The content for a chat: parts if there are pictures, else text."""
    if not isinstance(content, list) or all(part.image_url is None for part in content):
        return _text(content)
    return [
        {"type": "text", "text": part.text}
        if part.image_url is None
        else {"type": "image_url", "image_url": {"url": part.image_url}}
        for part in content
    ]


def _text(content: str | list[ItemPart] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


class ResponsesAnswer(Answer):
    """Items: thoughts, a message, calls. `keep` gets the whole response when it is complete."""

    def __init__(self, *given: Any, request: ResponsesRequest, keep: Any) -> None:
        super().__init__(*given)
        self.id = f"resp_{secrets.token_hex(16)}"
        self._request, self._keep = request, keep
        self._created_at = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._num_events = 0

    def begin(self) -> bytes:
        return self._tell("response.created", response=self._response("in_progress")) + self._tell(
            "response.in_progress", response=self._response("in_progress")
        )

    def pieces(self, event: Event) -> bytes:
        event = self.add(event)
        if not isinstance(event, TextPiece):
            return b""
        found = b""
        if event.reasoning:
            found += self._within("reasoning") + self._grow("reasoning_text", event.reasoning)
        if event.text:
            found += self._within("message") + self._grow("output_text", event.text)
        for call in event.calls:
            if call.is_new:
                more = {"call_id": call.id, "name": call.name, "arguments": ""}
                found += self._close() + self._within("function_call", **more)
            self._items[-1]["arguments"] += call.arguments
            found += self._at("response.function_call_arguments.delta", delta=call.arguments)
        return found

    def end(self) -> bytes:
        closed = self._close()
        response = self._complete()
        return closed + self._tell(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        why = error.body()["error"]
        return self._tell("error", code=why["code"], message=why["message"], param=why["param"]) + self._tell(
            "response.failed",
            response={**self._response("failed"), "error": {"code": "server_error", "message": why["message"]}},
        )

    def whole(self) -> dict[str, Any]:
        choice = self._choices[0]
        for kind, text in (("reasoning", choice.reasoning), ("message", choice.text)):
            if text or (kind == "message" and not choice.calls):
                self._within(kind)
                self._grow("reasoning_text" if kind == "reasoning" else "output_text", text)
        for call in choice.calls:
            self._close()
            self._within("function_call", call_id=call.id, name=call.name, arguments=call.arguments)
        self._close()
        return self._complete()

    # ------------------------------------------------------------------ parts

    def _complete(self) -> dict[str, Any]:
        cut = self._choices[0].finish_reason in ("length", None)
        response = self._response("incomplete" if cut else "completed")
        self._keep(self.id, response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._request.model_dump(
            mode="json",
            by_alias=True,
            include={"instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "text"}
            | {"reasoning", "metadata"},
        )
        prompt, completion = self._prompt_tokens, self._completion_tokens
        usage = {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        choice = self._request.tool_choice
        return {
            **asked,
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "model": self._model.name,
            "output": list(self._items) if status != "in_progress" else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "metadata": self._request.metadata or {},
            "parallel_tool_calls": self._request.parallel_tool_calls is not False,
            "store": self._request.store is not False,
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [tool.model_dump(mode="json") for tool in self._request.tools or ()],
            "usage": {**usage, **details} if status != "in_progress" else None,
        }

    def _within(self, kind: str, **more: str) -> bytes:
        """Begin an item of this kind, unless one is under way."""
        if self._items and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress":
            return b""
        closed = self._close()
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        if kind == "reasoning":
            item |= {"summary": [], "content": []}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        self._items.append(item | more)
        return closed + self._at("response.output_item.added", of_item=False, item=dict(self._items[-1]))

    def _grow(self, kind: str, text: str) -> bytes:
        content, found = self._items[-1]["content"], b""
        if not content:
            content.append(_part(kind, ""))
            found = self._at("response.content_part.added", content_index=0, part=dict(content[0]))
        content[0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return found + self._at(f"response.{kind}.delta", content_index=0, delta=text, **more)

    def _close(self) -> bytes:
        """End the item under way, if there is one."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item = self._items[-1]
        item["status"] = "completed"
        found = b""
        if item["type"] == "function_call":
            found = self._at("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        for part in item.get("content", ()):
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            found += self._at(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            found += self._at("response.content_part.done", content_index=0, part=part)
        return found + self._at("response.output_item.done", of_item=False, item=item)

    def _at(self, kind: str, *, of_item: bool = True, **data: Any) -> bytes:
        where = {"item_id": self._items[-1]["id"]} if of_item else {}
        return self._tell(kind, output_index=len(self._items) - 1, **where, **data)

    def _tell(self, kind: str, **data: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **data}
        self._num_events += 1
        return sse(body, kind)


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}


@dataclass(frozen=True)
class Stored:
    """A response, and the conversation before it."""

    owner: str
    """The client that may read it: an API key, or an address if there are no keys."""
    response: dict[str, Any]
    items: list[dict[str, Any]]
    """Items of the conversation, without the response's own."""
    num_bytes: int


class StoredResponses:
    """Responses by name. The one that was used longest ago is dropped first. Any thread may call it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def keeps_any(self) -> bool:
        return self._max_bytes > 0

    def keep(self, name: str, owner: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response, unless it alone is larger than the limit."""
        num_bytes = len(json.dumps([response, items]))
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            self._stored[name] = Stored(owner, response, items, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._stored.popitem(last=False)[1].num_bytes

    def get(self, name: str, owner: str) -> Stored:
        """Raises: ApiError: there is none of this name (any more), or it belongs to another client."""
        with self._lock:
            found = self._stored.get(name)
            if found is not None and found.owner == owner:
                self._stored.move_to_end(name)
        if found is None or found.owner != owner:
            raise ApiError(
                404,
                f"there is no response {name[:64]!r} here (any more): send the conversation itself",
                param="previous_response_id",
                code="response_not_found",
            )
        return found

    def forget(self, name: str, owner: str) -> None:
        """Raises: ApiError: as `get`."""
        self.get(name, owner)
        with self._lock:
            found = self._stored.pop(name, None)
            self._num_bytes -= 0 if found is None else found.num_bytes


class Responses(Dialect):
    """Handlers of OpenAI's responses."""

    error_paths = ("/v1/responses",)
    field_names = NAMES

    def __init__(self, responder: Responder) -> None:
        super().__init__(responder)
        self._stored = StoredResponses(responder.config.max_stored_bytes)

    @post("/v1/responses", "Answer a conversation, in the form of OpenAI's items.", ResponsesRequest)
    async def responses(self, request: Request) -> Response:
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
        chat = await translated(num_all, body.as_chat, before)
        items = [*before, *await aside(num_bytes, lambda: [one.model_dump(exclude_none=True) for one in body.items()])]

        def keep(name: str, response: dict[str, Any]) -> None:
            if body.store is not False:
                self._stored.keep(name, owner, response, items)

        shape = partial(ResponsesAnswer, request=body, keep=keep)
        return await self._responder.answer(request, chat, num_bytes, shape, stream=bool(body.stream))

    @get("/v1/responses/{name}", "Read a response that is kept.", errors=(401, 403, 404))
    async def response(self, request: Request) -> Response:
        return JSONResponse(self._stored.get(request.path_params["name"], request.scope[CALLER]).response)

    @delete("/v1/responses/{name}", "Delete a response that is kept.")
    async def forget(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._stored.forget(name, request.scope[CALLER])
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @get(
        "/v1/responses/{name}/input_items",
        "List the conversation before a response that is kept.",
        errors=(401, 403, 404),
    )
    async def input_items(self, request: Request) -> Response:
        found = self._stored.get(request.path_params["name"], request.scope[CALLER])
        return JSONResponse({"object": "list", "data": found.items, "has_more": False})
