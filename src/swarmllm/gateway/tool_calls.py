"""Calls of tools in what a model writes: each family has a form of its own, which its chat template tells apart.

    family                   form
    Qwen3-Coder              <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    GLM                      <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    Hermes, Qwen             <tool_call>{"name": NAME, "arguments": {…}}</tool_call>
    Mistral                  [TOOL_CALLS][{"name": NAME, "arguments": {…}}] or [TOOL_CALLS]NAME[ARGS]{…}
    DeepSeek                 <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
    Llama 3                  {"name": NAME, "parameters": {…}}, perhaps behind <|python_tag|>

As the models' own chat templates write them. Used by `request_bodies`, which forces calls by a grammar, and `answers`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmllm.errors import ConfigurationError
from swarmllm.gateway.grammar import LAYOUT
from swarmllm.gateway.text import overlap

Schemas = Mapping[str, dict[str, Any]]
"""The JSON schema of the parameters, by the tool's name."""


@dataclass(frozen=True)
class ToolCall:
    """One call that a model wrote."""

    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls."""

    sign: str
    """In chat templates of this family, and in none of those below."""
    begin: str
    """Where the first call begins; what stands before it is text."""
    read: Callable[[str, Schemas], Iterator[ToolCall]]
    """The calls in a text from `begin` on.

    Raises ValueError, KeyError, TypeError or AttributeError if it has another form."""
    around: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """What stands before and behind the JSON object of a single call; None: it is written in another way."""
    arguments: str = "arguments"
    """Their name in that object."""

    def grammar(self, tokenizer: Any, schemas: Schemas) -> str:
        """In Lark: a call of one of these tools, and nothing else.

        Raises:
            ConfigurationError: calls of this form can't be forced.
        """
        if self.around is None:
            raise ConfigurationError("calls can't be forced in the form that this model writes: use tool_choice auto")
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, self.arguments: schema},
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for name, schema in schemas.items()
        ]
        before, behind = (" ".join(_literal(tokenizer, text) for text in texts) for texts in self.around)
        return f"start: {before} call {behind}\ncall: %json {json.dumps({'anyOf': calls, 'x-guidance': LAYOUT})}"

    def markers(self, tokenizer: Any) -> frozenset[int]:
        """Special tokens that are part of calls, and so of the text."""
        added = tokenizer.get_added_vocab()
        return frozenset(added[token] for token in _MARKERS & added.keys() if added[token] in tokenizer.all_special_ids)


def form_of(name: str, tokenizer: Any) -> CallForm:
    """How the model of this name and tokenizer writes calls.

    Raises:
        ConfigurationError: its chat template knows no tools, or of a form that isn't known here.
    """
    template = tokenizer.chat_template
    text = " ".join(template.values()) if isinstance(template, dict) else str(template or "")
    if "tools" not in text:
        raise ConfigurationError(f"the chat template of {name} knows no tools: leave them out, or use response_format")
    for form in FORMS:
        if form.sign in text:
            return form
    raise ConfigurationError(f"{name} writes calls of tools in a form that isn't known here: leave the tools out")


class CallReader:
    """Parts the text of one answer, as it comes, into what is said and what is called."""

    def __init__(self, form: CallForm, schemas: Schemas, *, most: int | None = None) -> None:
        """`most` calls are given on."""
        self._form, self._schemas, self._most = form, schemas, most
        self._held = ""
        self._begun = self._has_said = False
        self.calls: list[ToolCall] = []
        """Known when the answer has ended."""

    def take(self, text: str, *, last: bool) -> str:
        """The text that is no call for certain; `last`: no more comes, and `calls` are known from now on."""
        self._held += text
        said = "" if self._begun else self._before_call(last)
        if last and self._begun:
            try:
                self.calls = list(self._form.read(self._held, self._schemas))[: self._most]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self.calls = []
            if not self.calls:  # it looked like one
                said += self._held
            self._held = ""
        return said

    def _before_call(self, last: bool) -> str:
        begin, held = self._form.begin, self._held
        place = held.find(begin)
        if begin == "{" and self._has_said:  # an object is a call if nothing stands before it
            place, keep = -1, 0
        elif begin == "{":
            place = 0 if held.lstrip().removeprefix(PYTHON_TAG).lstrip().startswith("{") else -1
            keep = len(held) if not last and PYTHON_TAG.startswith(held.strip()) else 0
        else:
            keep = 0 if last else _held_back(held, begin)
        self._begun = place >= 0
        end = place if self._begun else len(held) - keep
        said, self._held = held[:end], held[end:]
        self._has_said |= bool(said)
        return said.rstrip() if self._begun else said


def _held_back(text: str, marker: str) -> int:
    """Characters at the end of `text` that may belong to `marker`, with the blanks before it."""
    length = overlap(text, marker)
    return length + _spaces(text[: len(text) - length])


def _spaces(text: str) -> int:
    return len(text) - len(text.rstrip())


def _literal(tokenizer: Any, text: str) -> str:
    """In Lark; special tokens are no text there."""
    token = tokenizer.get_added_vocab().get(text)
    return f"<[{token}]>" if token is not None and token in tokenizer.all_special_ids else json.dumps(text)


# ---------------------------------------------------------------------- the forms

PYTHON_TAG = "<|python_tag|>"
_MARKERS = frozenset(
    {"<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}
    | {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", PYTHON_TAG}
    | {f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}
)


def _call(found: Any, arguments: Any) -> ToolCall:
    if not isinstance(found, str) or not isinstance(arguments, dict):
        raise ValueError("no call")
    return ToolCall(found, json.dumps(arguments, ensure_ascii=False))


def _between(text: str, begin: str, end: str) -> list[str]:
    """What stands between all pairs of these; the last one may lack its end."""
    return [part.partition(end)[0].strip() for part in text.split(begin)[1:]]


def _hermes(text: str, _: Schemas) -> Iterator[ToolCall]:
    for part in _between(text, "<tool_call>", "</tool_call>"):
        found = json.loads(part)
        yield _call(found["name"], found.get("arguments", {}))


def _coder(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    for part in _between(text, "<function=", "</function>"):
        name, _, rest = part.partition(">")
        pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", rest, re.DOTALL)
        yield _typed(name.strip(), pairs, schemas)


def _glm(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    for part in _between(text, "<tool_call>", "</tool_call>"):
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", part, re.DOTALL)
        yield _typed(part.partition("<arg_key>")[0].strip(), pairs, schemas)


def _typed(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> ToolCall:
    """Values are written without quotes, so the schema says which are texts."""
    known = schemas[name].get("properties", {})
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        kind = known.get(key.strip(), {}).get("type")
        try:
            arguments[key.strip()] = value if kind == "string" else json.loads(value)
        except ValueError:
            arguments[key.strip()] = value
    return _call(name, arguments)


def _mistral(text: str, _: Schemas) -> Iterator[ToolCall]:
    for part in text.split("[TOOL_CALLS]")[1:]:
        if part.lstrip().startswith("["):
            found, _end = json.JSONDecoder().raw_decode(part.lstrip())
            for one in found:
                yield _call(one["name"], one["arguments"])
        else:
            head, brace, rest = part.partition("{")
            name = re.split(r"\[CALL_ID\]|\[ARGS\]", head)[0].strip()
            yield _call(name, json.JSONDecoder().raw_decode(brace + rest)[0])


def _deepseek(text: str, _: Schemas) -> Iterator[ToolCall]:
    for part in _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        head, _sep, rest = part.partition("<｜tool▁sep｜>")
        if head.strip() == "function":  # up to V3: the name stands behind, and the JSON in a fence
            head, _sep, rest = rest.partition("\n")
            rest = rest.strip().removeprefix("```json").removesuffix("```")
        yield _call(head.strip(), json.loads(rest))


def _llama(text: str, _: Schemas) -> Iterator[ToolCall]:
    rest, decoder = text.strip().removeprefix(PYTHON_TAG).strip(), json.JSONDecoder()
    while rest:
        found, end = decoder.raw_decode(rest)
        yield _call(found["name"], found["parameters"] if "parameters" in found else found["arguments"])
        rest = rest[end:].lstrip("; \n")


FORMS = (
    CallForm("<arg_key>", "<tool_call>", _glm),
    CallForm("<function=", "<tool_call>", _coder),
    CallForm("<tool_call>", "<tool_call>", _hermes, (("<tool_call>", "\n"), ("\n", "</tool_call>"))),
    CallForm("[TOOL_CALLS]", "[TOOL_CALLS]", _mistral, (("[TOOL_CALLS]", "["), ("]",))),
    CallForm("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", _deepseek),
    CallForm('"parameters"', "{", _llama, ((), ()), "parameters"),
)
"""In the order in which their signs are looked for."""
