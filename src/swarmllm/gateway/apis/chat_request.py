"""OpenAI's request for a chat, with vLLM's additions. All other APIs translate their chats into it.

It checks messages and tools, and makes them ready for chat templates.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from swarmllm.gateway.apis.request_bodies import ANYTHING, MAX_SCHEMA_CHARS, Body, Harmless, Sampling
from swarmllm.gateway.engine.generation import GenerationOptions
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.output_parsing import HARMONY_FINAL, CallForm, CallReader, HarmonyReader, PlainReader, Reader
from swarmllm.gateway.sampling import ANY_OBJECT, Constraint

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]

MAX_TOOLS = 128
"""OpenAI's limit."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ImageUrl(Body):
    harmless: ClassVar[Harmless] = {"detail": ANYTHING}  # the model's own processor chooses the size
    url: str = Field(description="data:image/…;base64,…")


class ContentPart(Body):
    harmless: ClassVar[Harmless] = {"cache_control": ANYTHING, "annotations": ([],)}
    type: str
    text: str = ""
    image_url: ImageUrl | None = Field(None, description="For models with vision.")

    @model_validator(mode="after")
    def _is_text_or_picture(self) -> "ContentPart":
        if self.type not in ("text", "image_url"):
            raise ValueError(f"parts of type {self.type[:32]!r} can't be read here: leave them out")
        if (self.type == "image_url") != (self.image_url is not None):
            raise ValueError("a part has an image_url if it is of type image_url, and only then")
        return self


class CalledFunction(Body):
    name: ToolName
    arguments: str = "{}"


class EarlierCall(Body):
    """A call in an earlier answer."""

    harmless: ClassVar[Harmless] = {"index": ANYTHING}  # streams number calls; some programs send the number back
    id: Annotated[str, Field(max_length=128)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call for a chat template, with its arguments as an object."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")},
        }

    @model_validator(mode="after")
    def _is_json(self) -> "EarlierCall":
        try:
            known = isinstance(json.loads(self.function.arguments or "{}"), dict)
        except (ValueError, RecursionError):
            known = False
        if not known:
            raise ValueError("the arguments of a call are a JSON object")
        return self


class Function(Body):
    harmless: ClassVar[Harmless] = {"strict": ANYTHING}
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool that the model may call."""

    harmless: ClassVar[Harmless] = {"cache_control": ANYTHING}
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool for a chat template."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.schema_of_parameters()}}

    def schema_of_parameters(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class NamedFunction(Body):
    name: ToolName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatMessage(Body):
    harmless: ClassVar[Harmless] = {
        **dict.fromkeys(("refusal", "audio", "function_call"), ()),
        "annotations": ([],),
        "cache_control": ANYTHING,
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=128)] | None = Field(None, description="For the result of a tool.")
    name: str | None = Field(None, description="For templates that know it.")
    reasoning_content: str | None = Field(
        None, description="Thoughts of an earlier answer, for templates that know them."
    )

    @model_validator(mode="after")
    def _of_its_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the assistant can have tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message has the role tool if it has a tool_call_id, and only then")
        if self.role not in ("assistant", "tool") and self.content in (None, []):
            raise ValueError(f"a message of the role {self.role} needs content, which may be empty text")
        return self

    def picture_urls(self) -> list[str]:
        """Addresses of the message's pictures, in order."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if part.image_url is not None]

    def for_template(self) -> dict[str, Any]:
        """The message for a chat template; pictures are parts of type "image"."""
        content = self.content or ""
        text: Any = content if isinstance(content, str) else "".join(part.text for part in content)
        if not isinstance(content, str) and self.picture_urls():
            text = [{"type": "image"} if part.image_url else {"type": "text", "text": part.text} for part in content]
        found = {"role": "system" if self.role == "developer" else self.role, "content": text}
        more = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
        }
        return found | {name: value for name, value in more.items() if value is not None}


def picture_urls(messages: Sequence[ChatMessage]) -> list[str]:
    """Addresses of all pictures, in order."""
    return [url for message in messages for url in message.picture_urls()]


class JsonSchema(Body):
    harmless: ClassVar[Harmless] = {"strict": ANYTHING, "description": ANYTHING}
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    harmless: ClassVar[Harmless] = {
        **Sampling.harmless,
        **dict.fromkeys(("echo", "add_special_tokens"), (False,)),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, like enable_thinking."
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")
    reasoning_effort: Effort | None = Field(None, description="How much to think, for templates that know it.")
    continue_final_message: bool | None = Field(False, description="Continue the last message.")
    add_generation_prompt: bool | None = Field(None, description="false needs continue_final_message.")
    functions: list[Any] | None = None

    @field_validator("functions")
    @classmethod
    def _no_functions(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("functions have been replaced by tools: use these")
        return value

    @model_validator(mode="after")
    def _can_choose(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools or ()]
        if len({*names}) < len(names):
            raise ValueError("two tools have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is none of the tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, but there are no tools")
        return self

    @model_validator(mode="after")
    def _has_one_limit(self) -> "ChatRequest":
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise ValueError(f"max_tokens is {old}, but max_completion_tokens is {new}: give one of them")
        return self

    @model_validator(mode="after")
    def _has_log_probabilities(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: give it as true")
        return self

    @model_validator(mode="after")
    def _can_continue(self) -> "ChatRequest":
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or not last.content or last.tool_calls):
            raise ValueError("continue_final_message needs a text of the assistant as the last message")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise ValueError("add_generation_prompt can only be false with continue_final_message")
        return self

    @property
    def _forced(self) -> bool:
        """The answer must be a call, and nothing else."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def _usable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    def _schemas(self) -> dict[str, dict[str, Any]]:
        """Schemas of the parameters of the usable tools, by name."""
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return {
            tool.function.name: tool.schema_of_parameters()
            for tool in self._usable_tools
            if chosen in (None, tool.function.name)
        }

    def reader(self, model: LanguageModel, prompt_ids: list[int], options: GenerationOptions) -> Reader | None:
        """A reader for one answer; None: all of it is text.

        A constraint holds from the first token on, so a constrained answer has no thoughts.
        """
        most = 1 if self.parallel_tool_calls is False else None
        is_free = options.constraint is None
        if model.speaks_harmony:
            has_begun = bool(self.continue_final_message)
            return HarmonyReader(most=most, has_begun=has_begun) if is_free or self._forced else None
        thoughts = model.reasoning_reader(prompt_ids) if is_free else None
        form = model.call_form if self._usable_tools else None
        calls = CallReader(form, self._schemas(), most=most) if isinstance(form, CallForm) else None
        return None if thoughts is None and calls is None else PlainReader(thoughts, calls)

    def _kept_tokens(self, model: LanguageModel) -> frozenset[int]:
        of_calls = model.call_form.markers(model.tokenizer) if self._usable_tools else frozenset()
        return of_calls | model.thought_markers

    @field_validator("response_format")
    @classmethod
    def _schema_is_given(cls, value: ResponseFormat | None) -> ResponseFormat | None:
        if value is not None and value.type == "json_schema":
            if value.json_schema is None:
                raise ValueError('give {"type": "json_schema", "json_schema": {"schema": {…}}}')
            if len(json.dumps(value.json_schema.schema_)) > MAX_SCHEMA_CHARS:
                raise ValueError(f"the JSON schema is longer than {MAX_SCHEMA_CHARS} characters")
        return value

    def prompt(self, model: LanguageModel) -> list[int]:
        """Token ids of the conversation.

        Raises:
            ConfigurationError: the model has no chat template, or it refuses these messages.
        """
        messages = [message.for_template() for message in self.messages]
        tools = [tool.for_template() for tool in self._usable_tools]
        if tools:
            _ = model.call_form  # a model without tools is refused now, not when the answer is read
        options = (self.chat_template_kwargs or {}) | self._effort(model)
        urls = picture_urls(self.messages)
        found = model.encode_chat(messages, options, tools, pictures=urls, go_on=bool(self.continue_final_message))
        if model.speaks_harmony and not self.continue_final_message and self._is_constrained_text(model):
            found += model.encode(HARMONY_FINAL, special_tokens=False)  # a constrained answer can't begin with it
        return found

    def _effort(self, model: LanguageModel) -> dict[str, Any]:
        effort, known = self.reasoning_effort, model.efforts
        if effort is None:
            return {}
        if "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise ApiError(
                400, "reasoning_effort is also in chat_template_kwargs: give one of them", param="reasoning_effort"
            )
        if effort in known:
            return known[effort]
        hint = f"can be {', '.join(known)}" if known else "is nothing that its chat template knows: leave it out"
        raise ApiError(400, f"reasoning_effort of {model.name} {hint}", param="reasoning_effort", code="invalid_value")

    def _is_constrained_text(self, model: LanguageModel) -> bool:
        return not self._forced and self._constraint(model) is not None

    def _max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def _constraints(self, model: LanguageModel) -> list[Constraint]:
        found = super()._constraints(model)
        if self._forced:
            text = model.call_form.grammar(model.tokenizer, self._schemas())
            if len(text) > MAX_SCHEMA_CHARS:
                reason = f"the schemas of the tools are longer than {MAX_SCHEMA_CHARS} characters"
                raise ApiError(400, f"tool_choice: {reason}, so no call can be forced", param="tool_choice")
            found.append(Constraint("tool_choice", "lark", text))
        if self.response_format is not None and self.response_format.type != "text":
            given = self.response_format.json_schema
            found.append(Constraint.json("response_format", ANY_OBJECT if given is None else given.schema_))
        return found
