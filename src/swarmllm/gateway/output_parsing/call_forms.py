"""Calls of tools in what a model writes: each family has a form of its own, which its chat template tells apart.

    family                   form
    Qwen3-Coder              <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    GLM                      <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    Hermes, Qwen             <tool_call>{"name": NAME, "arguments": {…}}</tool_call>
    Mistral                  [TOOL_CALLS][{"name": NAME, "arguments": {…}}] or [TOOL_CALLS]NAME[ARGS]{…}
    DeepSeek                 <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
    Llama 3                  {"name": NAME, "parameters": {…}}, perhaps behind <|python_tag|>


As the models' own chat templates write them. `request_bodies` forces calls by a grammar of the form; `tool_calls` reads
them while they are written. gpt-oss writes calls as messages of their own: `harmony`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swarmllm.errors import ConfigurationError
from swarmllm.gateway.tokens.grammar import LAYOUT
from swarmllm.gateway.tokens.text import overlap

Schemas = Mapping[str, dict[str, Any]]
"""The JSON schema of the parameters, by the tool's name."""


@dataclass(frozen=True)
class ToolCall:
    """One call that a model writes."""

    name: str
    arguments: str
    """JSON, or as much of it as there is."""


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls."""

    sign: str
    """In chat templates of this family, and in none of those below."""
    begin: str
    """Where the first call begins; what stands before it is text."""
    read: Callable[[str, Schemas], Iterator[ToolCall]]
    """The calls in a text from `begin` on, of which the last one may be under way: then its arguments are a prefix of
    what they will be.

    Raises ValueError, KeyError, TypeError, AttributeError or RecursionError where no further call is, or not yet."""
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
        before, behind = (" ".join(literal(tokenizer, text) for text in texts) for texts in self.around)
        return f"start: {before} call {behind}\ncall: %json {json.dumps({'anyOf': calls, 'x-guidance': LAYOUT})}"

    def markers(self, tokenizer: Any) -> frozenset[int]:
        """Special tokens that are part of calls, and so of the text."""
        return special_tokens(tokenizer, _MARKERS)


def form_of(name: str, tokenizer: Any) -> CallForm:
    """How the model of this name and tokenizer writes calls.

    Raises:
        ConfigurationError: its chat template knows no tools, or of a form that isn't known here.
    """
    text = template_of(tokenizer)
    if "tools" not in text:
        raise ConfigurationError(f"the chat template of {name} knows no tools: leave them out, or use response_format")
    for form in FORMS:
        if form.sign in text:
            return form
    raise ConfigurationError(f"{name} writes calls of tools in a form that isn't known here: leave the tools out")


def template_of(tokenizer: Any) -> str:
    """The text of the chat template, of all of them if there are several; empty without one."""
    template = tokenizer.chat_template
    return " ".join(template.values()) if isinstance(template, dict) else str(template or "")


def special_tokens(tokenizer: Any, texts: frozenset[str]) -> frozenset[int]:
    """Those of these that are special tokens, which are otherwise left out of the text."""
    added = tokenizer.get_added_vocab()
    return frozenset(added[token] for token in texts & added.keys() if added[token] in tokenizer.all_special_ids)


def literal(tokenizer: Any, text: str) -> str:
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
_DECODER = json.JSONDecoder()
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The head of a call as JSON, up to its arguments."""


def arguments_at(text: str, start: int, end: str) -> tuple[str, int]:
    """As much of the JSON object at `start` as has come, and the place behind it; `end` stands behind whole ones."""
    try:
        return text[start : (stop := _DECODER.raw_decode(text, start)[1])], stop
    except (ValueError, RecursionError):  # under way, or no JSON: then up to the end
        stop = text.find(end, start)
        stop = len(text) - overlap(text, end) if stop < 0 else stop
        return text[start:stop], stop


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no call")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _objects(text: str, start: int, between: str, end: str) -> Iterator[ToolCall]:
    """Calls that are JSON objects with a name and arguments, from `start` on, with such characters in between."""
    while start < len(text):
        if head := _HEAD.match(text, start):
            yield ToolCall(json.loads(head[1]), arguments_at(text, head.end(), end)[0])
        start += len(text[start:]) - len(text[start:].lstrip())
        found, stop = _DECODER.raw_decode(text, start)
        if not head:
            yield _call(found["name"], found["parameters"] if "parameters" in found else found["arguments"])
        start = stop + len(text[stop:]) - len(text[stop:].lstrip(between))


def _parts(text: str, begin: str) -> Iterator[int]:
    """The places behind all of these."""
    return (found.end() for found in re.finditer(re.escape(begin), text))


def _hermes(text: str, _: Schemas) -> Iterator[ToolCall]:
    for start in _parts(text, "<tool_call>"):
        if head := _HEAD.match(text, start):
            yield ToolCall(json.loads(head[1]), arguments_at(text, head.end(), "</tool_call>")[0])
        else:
            found = json.loads(text[start:].partition("</tool_call>")[0])
            yield _call(found["name"], found.get("arguments", {}))


def _coder(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    for start in _parts(text, "<function="):
        part, ended, _ = text[start:].partition("</function>")
        name, begun, rest = part.partition(">")
        if begun:
            pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", rest, re.DOTALL)
            yield _typed(name.strip(), pairs, schemas, has_ended=bool(ended))


def _glm(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    for start in _parts(text, "<tool_call>"):
        part, ended, _ = text[start:].partition("</tool_call>")
        name, begun, _ = part.partition("<arg_key>")
        if begun or ended:
            pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", part, re.DOTALL)
            yield _typed(name.strip(), pairs, schemas, has_ended=bool(ended))


def _typed(name: str, pairs: list[tuple[str, str]], schemas: Schemas, *, has_ended: bool) -> ToolCall:
    """Values are written without quotes, so the schema says which are texts. They come one by one."""
    known = schemas[name].get("properties", {})
    written = []
    for key, value in pairs:
        kind = known.get(key.strip(), {}).get("type")
        try:
            read = value if kind == "string" else json.loads(value)
        except ValueError:
            read = value
        written.append(f"{json.dumps(key.strip(), ensure_ascii=False)}: {json.dumps(read, ensure_ascii=False)}")
    return ToolCall(name, "{" + ", ".join(written) + ("}" if has_ended else ""))


def _mistral(text: str, _: Schemas) -> Iterator[ToolCall]:
    for start in _parts(text, "[TOOL_CALLS]"):
        rest = text[start:].partition("[TOOL_CALLS]")[0]
        if rest.lstrip().startswith("["):
            yield from _objects(rest, rest.index("[") + 1, " \n,]", "[TOOL_CALLS]")
        elif "{" in rest:
            name = re.split(r"\[CALL_ID\]|\[ARGS\]", rest.partition("{")[0])[0].strip()
            yield ToolCall(name, arguments_at(rest, rest.index("{"), "[TOOL_CALLS]")[0])


def _deepseek(text: str, _: Schemas) -> Iterator[ToolCall]:
    for start in _parts(text, "<｜tool▁call▁begin｜>"):
        head, _sep, rest = text[start:].partition("<｜tool▁sep｜>")
        if head.strip() == "function":  # up to V3: the name stands behind, and the JSON in a fence
            head, _sep, rest = rest.partition("\n")
        place = rest.index("{")
        yield ToolCall(head.strip(), arguments_at(rest, place, "<｜tool▁call▁end｜>")[0])


def _llama(text: str, _: Schemas) -> Iterator[ToolCall]:
    rest = text.strip().removeprefix(PYTHON_TAG).strip()
    return _objects(rest, 0, "; \n", "<|eom_id|>")


FORMS = (
    CallForm("<arg_key>", "<tool_call>", _glm),
    CallForm("<function=", "<tool_call>", _coder),
    CallForm("<tool_call>", "<tool_call>", _hermes, (("<tool_call>", "\n"), ("\n", "</tool_call>"))),
    CallForm("[TOOL_CALLS]", "[TOOL_CALLS]", _mistral, (("[TOOL_CALLS]", "["), ("]",))),
    CallForm("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", _deepseek),
    CallForm('"parameters"', "{", _llama, ((), ()), "parameters"),
)
"""In the order in which their signs are looked for."""
