"""The bodies of OpenAI's requests, checked field by field: each field is honoured exactly, or refused by name.

All of them are a `Body`. It lists which other fields of OpenAI's and vLLM's change nothing in the answer, and with
which values; `refuse_unknown` refuses all others. The fields of decoding methods are made from `DecodingOptions`.
Bodies give `GenerationOptions`, and make the OpenAPI document. Chats are in `chat_request`.
"""

import difflib
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from swarmllm.api import COLDEST, MAX_BREAKER_CHARS, MAX_BREAKERS, DecodingOptions, docstrings
from swarmllm.gateway.engine.generation import GenerationOptions
from swarmllm.gateway.engine.language_model import LanguageModel
from swarmllm.gateway.errors import ApiError
from swarmllm.gateway.sampling import ANY_OBJECT, SAMPLING_NAMES, Constraint, SamplingOptions

MOST_NAMES = 32
"""Characters of an unknown name that errors repeat, and number of fields that the header names."""

NEAR = 0.75
"""From this likeness on, as difflib measures it, an unknown name may mean a known one. With the usual 0.6,
"response_format" would mean "reasoning_effort"."""

_String = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_CHARS)]

MAX_SCHEMA_CHARS = 1 << 16
MAX_PROMPTS = 32
CONSTRAINING = {"response_format", "structured_outputs", "tool_choice"} | {
    f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")
}
MAX_TOKEN_DIGITS = 10
DECODING_NAMES = tuple(one.name for one in fields(DecodingOptions))

StopString = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
Constraining = Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_CHARS)]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)]


class Anything:
    """Contains every value."""

    def __contains__(self, value: object) -> bool:
        return True


ANYTHING = Anything()
"""A hint: any value is accepted, and the header `X-Unused-Fields` names it."""


Harmless = dict[str, tuple[Any, ...] | Anything]
"""Fields by name, with the values that change nothing in the answer; None is always one. Other values are refused."""


def _fail_fast(schema: Any) -> None:
    """Stop at the first error in each list. Otherwise a list of 240,000 wrong items makes as many errors, for each
    possible type."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = [*schema.values()]
    if isinstance(schema, list | tuple):
        for one in schema:
            _fail_fast(one)


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "give a number, not true or false")
    return value


def _no_word(value: Any) -> Any:
    if isinstance(value, str):
        raise PydanticCustomError("bool_type", "give true or false, without quotation marks")
    return value


_REFUSALS = {"int": _no_boolean, "float": _no_boolean, "bool": _no_word}


def _refuse_other_kinds(schema: Any) -> None:
    """Refuse booleans where numbers are wanted, and words where booleans are: pydantic takes `true` for 1 and "no" for
    `false`. Numbers in strings stay: they can mean only one thing. Strict schemas, those of long lists, refuse by
    themselves, and faster."""
    if isinstance(schema, dict):
        if schema.get("type") == "function-before" and schema["function"].get("function") in _REFUSALS.values():
            return  # an object within this one has been here already
        refuse = None if schema.get("strict") else _REFUSALS.get(str(schema.get("type")))
        if refuse is not None:
            inner = dict(schema)
            schema.clear()
            schema.update(no_info_before_validator_function(refuse, inner))
            return
        schema = [*schema.values()]
    if isinstance(schema, list | tuple):
        for one in schema:
            _refuse_other_kinds(one)


class Body(BaseModel):
    """An object in a request's JSON."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    harmless: ClassVar[Harmless] = {}
    is_form: ClassVar[bool] = False
    """The request is a form, which has strings only."""

    def hints(self) -> list[str]:
        """Names of declared fields that changed nothing, besides harmless ones with any value."""
        return []

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """pydantic's own schema, but each list stops at its first error, and no kind of value is taken for another."""
        schema = handler(source)
        _fail_fast(schema)
        if not cls.is_form:
            _refuse_other_kinds(schema)
        return schema

    @classmethod
    def known_names(cls) -> list[str]:
        """The names of all fields that the object may have."""
        return [*(field.alias or name for name, field in cls.model_fields.items()), *cls.harmless]


def refuse_unknown(body: Body, *, lenient: bool) -> None:
    """Refuse fields. Raises: ApiError: a field can't be honoured. `lenient`: only if its name is known."""
    for part, path, name, value in _extras(body):
        harmless = part.harmless.get(name)
        if value is None or (harmless is not None and value in harmless):
            continue
        where = f"{path}{name}" if harmless is not None else f"{path}{name[:MOST_NAMES]}"
        if harmless is not None:
            allowed = (
                " or ".join(json.dumps(one) for one in harmless) if isinstance(harmless, tuple) and harmless else ""
            )
            reason = f"can only be {allowed} here" if allowed else "is not supported here"
            raise ApiError(400, f"{where} {reason}: leave it out", param=where, code="unsupported_parameter")
        if not lenient:
            near = difflib.get_close_matches(name[:MOST_NAMES], part.known_names(), n=1, cutoff=NEAR)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise ApiError(400, f"unknown field {where!r}: {hint}", param=where, code="unknown_parameter")


def unused_fields(body: Body) -> list[str]:
    """Paths of fields that were accepted although they change nothing; the client is told of them."""
    found = set()
    for part, path in _parts(body, ""):
        extras = [name for name, value in (part.model_extra or {}).items() if value is not None]
        names = [*part.hints(), *(name for name in extras if part.harmless.get(name, ANYTHING) is ANYTHING)]
        found |= {re.sub(r"\[\d+\]", "[]", path) + name[:MOST_NAMES] for name in names}
    return sorted(path for path in found if re.fullmatch(r"[\w.\[\]-]+", path, re.ASCII))[:MOST_NAMES]


def _extras(body: Body) -> Iterator[tuple[Body, str, str, Any]]:
    """(object, its path, field name, value) of all fields that no class declares."""
    for part, path in _parts(body, ""):
        for name, value in (part.model_extra or {}).items():
            yield part, path, name, value


def _parts(part: Any, path: str) -> Iterator[tuple[Body, str]]:
    """(object, its path) of all objects in a request, the request itself first."""
    if isinstance(part, list):
        for place, one in enumerate(
            part if part and isinstance(part[0], Body | list) else ()
        ):  # lists of numbers have none
            yield from _parts(one, f"{path[:-1]}[{place}].")
    if isinstance(part, Body):
        yield part, path
        for name in part.model_fields_set & type(part).model_fields.keys():
            yield from _parts(getattr(part, name), f"{path}{name}.")


def _definition(one: Any) -> tuple[Any, Any]:
    """Type and Field of one option."""
    default, text = one.metadata["default"], docstrings(DecodingOptions)[one.name]
    bounds = {name: one.metadata[name] for name in ("ge", "gt", "le") if name in one.metadata}
    if isinstance(default, tuple):
        kind: Any = Annotated[list[_String], Field(max_length=MAX_BREAKERS)]
    else:
        kind = Annotated[type(default), Field(**bounds)]
    return kind | None, Field(None, description=f"{text} Default: {default!r}.")


if TYPE_CHECKING:

    class DecodingFields(Body):
        """The fields of decoding methods."""
else:
    DecodingFields = create_model(
        "DecodingFields", __base__=Body, **{one.name: _definition(one) for one in fields(DecodingOptions)}
    )


class StreamOptions(Body):
    harmless: ClassVar[Harmless] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
    include_usage: bool | None = None


class StructuredOutputs(Body):
    """vLLM's constraints: one of these."""

    harmless: ClassVar[Harmless] = {"disable_fallback": ANYTHING, "structural_tag": (), "whitespace_pattern": ()}
    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Constraining | None = None
    choice: Choices | None = None
    grammar: Constraining | None = Field(None, description="In Lark, as llguidance has it.")


class Sampling(DecodingFields):
    """The fields of chats and completions."""

    harmless: ClassVar[Harmless] = {
        # OpenAI's
        **dict.fromkeys(("user", "metadata", "safety_identifier", "prediction"), ANYTHING),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), ANYTHING),
        **dict.fromkeys(("audio", "web_search_options", "moderation"), ()),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "verbosity": ANYTHING,
        "best_of": (1,),
        "function_call": ("none", "auto"),
        # vLLM's
        **dict.fromkeys(("request_id", "guided_decoding_backend"), ANYTHING),
        **dict.fromkeys(("cache_salt", "chat_template", "documents", "kv_transfer_params", "logits_processors"), ()),
        **dict.fromkeys(("mm_processor_kwargs", "prompt_logprobs", "structural_tag", "truncate_prompt_tokens"), ()),
        **dict.fromkeys(("allowed_token_ids", "guided_whitespace_pattern", "vllm_xargs"), ()),
        **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "return_token_ids"), (False,)),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "bad_words": ([],),
        "length_penalty": (1,),
        "priority": (0,),
        # the WebSocket's
        "id": ANYTHING,
    }

    model: str | None = Field(None, description="A name from /v1/models; left out: the first one.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1: all.")
    top_h: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Sample from tokens that keep this share of the entropy. Nguyen et al. 2025."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None, description="Penalty of tokens in the prompt or the answer; 1: none."
    )
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="No end of text comes before this many tokens."
    )
    ignore_eos: bool | None = Field(None, description="Continue after the end of text.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Constraining | None = None
    guided_choice: Choices | None = None
    guided_grammar: Constraining | None = Field(None, description="In Lark, as llguidance has it.")
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Name tokens as token_id:N in log probabilities.")
    swarm_events: bool | None = Field(None, description="Also report the route and failed servers.")

    @field_validator("stream_options")
    @classmethod
    def _is_of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream", True):
            raise ValueError("only streams have them: give stream as true, or leave them out")
        return value

    def options(self, model: LanguageModel, longest_prompt: int, default_max_tokens: int) -> GenerationOptions:
        """The options of the generation, for prompts of up to this many tokens.

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
                param="messages" if "messages" in type(self).model_fields else "prompt",
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        constraint = self._constraint(model)
        self._require_possible(model, constraint, max_tokens)
        return GenerationOptions(
            sampling=self._sampling(model),
            max_tokens=max_tokens,
            n=self.n or 1,
            stop=stop,
            constraint=constraint,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=(*(self.stop_token_ids or ()), *self._more_ends(model)),
            ignore_eos=bool(self.ignore_eos),
            kept_tokens=self._kept_tokens(model),
            score_prompt=self._score_prompt(),
        )

    def _require_possible(self, model: LanguageModel, constraint: Constraint | None, max_tokens: int) -> None:
        for name in ("ignore_eos", "min_tokens", "stop_token_ids"):
            if constraint is not None and getattr(self, name):
                raise ApiError(
                    400,
                    f"{name} can't be used with {constraint.field}, which decides where the text ends",
                    param=name,
                    code="invalid_value",
                )
        if (self.min_tokens or 0) > max_tokens:
            raise ApiError(
                400,
                f"min_tokens is {self.min_tokens}, but only {max_tokens} are to be written",
                param="min_tokens",
                code="invalid_value",
            )
        if self.stop_token_ids and max(self.stop_token_ids) >= model.num_scores:
            raise ApiError(
                400, f"the model has only {model.num_scores} tokens", param="stop_token_ids", code="invalid_value"
            )

    @property
    def is_constrained(self) -> bool:
        """A grammar has to be compiled before the answer begins."""
        return bool(self.model_fields_set & CONSTRAINING)

    def _sampling(self, model: LanguageModel) -> SamplingOptions:
        preferred = model.preferred_sampling()
        given = {name: getattr(self, name) for name in (*SAMPLING_NAMES, *DECODING_NAMES)}
        chosen = {**preferred, **{name: value for name, value in given.items() if value is not None}}
        decoding = DecodingOptions(**{name: chosen.pop(name) for name in DECODING_NAMES if name in chosen})
        chosen["top_k"] = max(0, chosen.get("top_k", 0))
        if chosen.get("temperature", 1.0) < COLDEST:
            chosen["temperature"] = 0.0
        draws = chosen.get("temperature", 1.0) > 0
        decoding.require_fitting(do_sample=draws, num_beams=1, mend="give a temperature above 0")
        return SamplingOptions(
            seed=(secrets.randbits(62) if self.seed is None else self.seed) % (1 << 63),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(model.num_scores),
            top_logprobs=self._top_logprobs(),
            decoding=decoding,
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

    def _kept_tokens(self, model: LanguageModel) -> frozenset[int]:
        return frozenset()

    def _more_ends(self, model: LanguageModel) -> frozenset[int]:
        """Tokens that end an answer, besides the model's own and the request's."""
        return frozenset()

    def _max_tokens(self) -> int | None:
        raise NotImplementedError

    def _top_logprobs(self) -> int | None:
        raise NotImplementedError

    def _constraint(self, model: LanguageModel) -> Constraint | None:
        """The constraint on the answer, if there is one.

        Raises:
            ApiError: two fields constrain it.
            ConfigurationError: the model can't be constrained.
        """
        found = self._constraints(model)
        if len(found) > 1:
            first, second = (one.field for one in found[:2])
            raise ApiError(400, f"{first} and {second} both constrain the answer: give one of them", param=second)
        return found[0] if found else None

    def _constraints(self, model: LanguageModel) -> list[Constraint]:
        found = _constraints("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if (given := self.structured_outputs) is not None:
            schema = given.json_ if given.json_ is not None or not given.json_object else ANY_OBJECT
            found += _constraints("structured_outputs.", schema, given.regex, given.choice, given.grammar)
        return found

    def _score_prompt(self) -> bool:
        return False


def _constraints(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choices: list[str] | None,
    grammar: str | None,
) -> list[Constraint]:
    found = []
    if schema is not None:
        found.append(json_constraint(f"{prefix}json", schema))
    if regex is not None:
        found.append(Constraint(f"{prefix}regex", "regex", regex))
    if choices is not None:
        found.append(Constraint.choice(f"{prefix}choice", choices))
    if grammar is not None:
        found.append(Constraint(f"{prefix}grammar", "lark", grammar))
    return found


def json_constraint(field: str, schema: dict[str, Any] | str) -> Constraint:
    constraint = Constraint.json(field, schema)
    if len(constraint.text) > MAX_SCHEMA_CHARS:
        raise ApiError(
            400, f"{field}: the JSON schema is longer than {MAX_SCHEMA_CHARS} characters", param=field.partition(".")[0]
        )
    return constraint


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    harmless: ClassVar[Harmless] = {**Sampling.harmless, "add_special_tokens": (True,), "reasoning_effort": ()}

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
    suffix: str | None = Field(None, description="For models that write the text between two others.")

    @model_validator(mode="after")
    def _echoes_no_suffix(self) -> "CompletionRequest":
        if self.suffix and self.echo:
            raise ValueError("echo and suffix exclude each other")
        return self

    @field_validator("best_of")
    @classmethod
    def _no_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value > (info.data.get("n") or 1):
            raise ValueError("best_of is not supported; use n")
        return value

    def prompts(self, model: LanguageModel) -> list[list[int]]:
        """Token ids of each prompt.

        Raises:
            ApiError: a prompt is empty, or has a token that the model lacks.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        if self.suffix:
            found = [self._around(model, p) for p in prompt]
        else:
            found = [model.encode(p) if isinstance(p, str) else list(p) for p in prompt]
        for ids in found:
            if not ids:
                raise ApiError(400, "the prompt is empty: give at least one token", param="prompt", code="empty_prompt")
            if max(ids) >= model.num_scores:
                raise ApiError(
                    400, f"the model has only {model.num_scores} tokens", param="prompt", code="invalid_value"
                )
        return found

    def _around(self, model: LanguageModel, prefix: str | list[int]) -> list[int]:
        if model.middle_form is None:
            message = f"{model.name} has no tokens for the text between two others: leave suffix out"
            raise ApiError(400, message, param="suffix", code="unsupported_parameter")
        before = model.encode(prefix, special_tokens=False) if isinstance(prefix, str) else list(prefix)
        after = model.encode(self.suffix or "", special_tokens=False)
        return model.middle_form.prompt(model.encode(""), before, after)

    def _more_ends(self, model: LanguageModel) -> frozenset[int]:
        return model.middle_form.ends if self.suffix and model.middle_form is not None else frozenset()

    def _max_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    def _top_logprobs(self) -> int | None:
        return self.logprobs

    def _score_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None
