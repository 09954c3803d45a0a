"""What may be asked: the bodies of OpenAI's requests, checked field by field. Unknown fields are ignored, as there.

`GenerationOptions` come out; the same models make the OpenAPI document.
"""

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from swarmllm.client.text_generation import COLDEST
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.generation import GenerationOptions
from swarmllm.gateway.grammar import ANY_OBJECT
from swarmllm.gateway.language_model import LanguageModel
from swarmllm.gateway.sampling import SamplingOptions

MAX_SCHEMA_CHARS = 1 << 16
MAX_PROMPTS = 32
MAX_TOKEN_DIGITS = 10

StopString = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None


class Sampling(_Body):
    """What both kinds of requests share."""

    model: str | None = Field(None, description="The name that /v1/models gives; left out: the first of them.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1: all.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    swarm_events: bool | None = Field(None, description="Also tell of the route and of servers that fail.")

    def options(self, model: LanguageModel, longest_prompt: int, default_max_tokens: int) -> GenerationOptions:
        """How to answer, for prompts of up to so many tokens.

        Raises:
            ApiError: the model can't do that.
        """
        room = model.max_length - longest_prompt
        wanted = self._max_tokens()
        max_tokens = min(default_max_tokens, room) if wanted is None else wanted
        if max_tokens > room or room < 1:
            raise ApiError(
                400,
                f"the model's maximum is {model.max_length} tokens, but the prompt has {longest_prompt}"
                + (f" and {wanted} are to be written" if wanted is not None else ""),
                code="context_length_exceeded",
                param="messages" if isinstance(self, ChatRequest) else "prompt",
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerationOptions(
            sampling=self._sampling(model),
            max_tokens=max_tokens,
            n=self.n or 1,
            stop=stop,
            schema=self._schema(),
            score_prompt=self._score_prompt(),
        )

    def _sampling(self, model: LanguageModel) -> SamplingOptions:
        preferred = model.preferred_sampling()
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        chosen = {**preferred, **{name: value for name, value in given.items() if value is not None}}
        chosen["top_k"] = max(0, chosen.get("top_k", 0))
        if chosen.get("temperature", 1.0) < COLDEST:
            chosen["temperature"] = 0.0
        return SamplingOptions(
            seed=(secrets.randbits(62) if self.seed is None else self.seed) % (1 << 63),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(model.num_scores),
            top_logprobs=self._top_logprobs(),
            **chosen,
        )

    def _logit_bias(self, num_scores: int) -> dict[int, float]:
        found = {}
        for token, bias in (self.logit_bias or {}).items():
            is_number = token.isascii() and token.isdecimal() and len(token) <= MAX_TOKEN_DIGITS
            if not is_number or int(token) >= num_scores:
                raise ApiError(
                    400,
                    f"logit_bias: {token[:MAX_TOKEN_DIGITS]!r} is not a token id; the model has {num_scores}",
                    param="logit_bias",
                    code="invalid_value",
                )
            found[int(token)] = bias
        return found

    def _max_tokens(self) -> int | None:
        raise NotImplementedError

    def _top_logprobs(self) -> int | None:
        raise NotImplementedError

    def _schema(self) -> dict[str, Any] | None:
        return None

    def _score_prompt(self) -> bool:
        return False


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("text before a suffix can't be written by this model")
        return value

    @field_validator("best_of")
    @classmethod
    def _no_best_of(cls, value: int | None) -> int | None:
        if value is not None and value > 1:
            raise ValueError("best_of is not supported; use n")
        return value

    def prompts(self, model: LanguageModel) -> list[list[int]]:
        """Token ids.

        Raises:
            ApiError: there is nothing to go on from, or not a token of the model.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        found = [model.encode(p) if isinstance(p, str) else list(p) for p in prompt]
        for ids in found:
            if not ids:
                raise ApiError(400, "the prompt is empty: give at least one token", param="prompt", code="empty_prompt")
            if max(ids) >= model.num_scores:
                raise ApiError(
                    400, f"the model has only {model.num_scores} tokens", param="prompt", code="invalid_value"
                )
        return found

    def _max_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    def _top_logprobs(self) -> int | None:
        return self.logprobs

    def _score_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates want it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class JsonSchema(_Body):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None

    @field_validator("tools", "functions")
    @classmethod
    def _no_tools(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("tools are not supported; describe them in the messages, or use response_format")
        return value

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
        return model.encode_chat([message.for_template() for message in self.messages])

    def _max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def _schema(self) -> dict[str, Any] | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        given = self.response_format.json_schema
        return ANY_OBJECT if given is None else given.schema_
