"""Part the text of one answer, as it comes, into thoughts, text, and calls of tools.

`chat_request` chooses a `Reader` for an answer, and `generation` feeds it. Each family of models writes calls in a
form of its own, which its chat template tells apart:

    family                   form
    Qwen3-Coder              <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    GLM                      <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    Hermes, Qwen             <tool_call>{"name": NAME, "arguments": {…}}</tool_call>
    Mistral                  [TOOL_CALLS][{"name": NAME, "arguments": {…}}] or [TOOL_CALLS]NAME[ARGS]{…}
    DeepSeek                 <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
    Llama 3                  {"name": NAME, "parameters": {…}}, perhaps behind <|python_tag|>

`CallReader` reads them while they are written, and a `CallForm` makes a grammar that forces them.

Thinking models write their thoughts between <think> and </think>, or from the beginning up to the latter where the
chat template has already opened it (`ReasoningReader`).

gpt-oss writes messages, each in a channel (`HarmonyReader`), as its chat template and OpenAI's description of the
format have it. The prompt ends with <|start|>assistant:

    <|channel|>analysis<|message|>THOUGHTS<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from swarmllm.api import ConfigurationError
from swarmllm.gateway.sampling import LAYOUT
from swarmllm.gateway.text import CallPiece, overlap

Schemas = Mapping[str, dict[str, Any]]
"""JSON schema of the parameters of each tool, by name."""

BEGIN_THOUGHTS, END_THOUGHTS = "<think>", "</think>"

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)
"""Markers that end a message."""
HARMONY_FINAL = f"{CHANNEL}final{MESSAGE}"
"""Start of the answer itself."""
EFFORTS = ("low", "medium", "high")
"""Levels of thinking."""
_TOOL = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True)
class ToolCall:
    """One call that a model writes."""

    name: str
    arguments: str
    """JSON, or its beginning as far as it has come."""


@dataclass(frozen=True)
class CallForm:
    """The form in which a family of models writes calls."""

    sign: str
    """A text in chat templates of this family, and in none of the families below."""
    begin: str
    """Start of the first call; anything before it is text."""
    read: Callable[[str, Schemas], Iterator[ToolCall]]
    """Reads the calls in a text from `begin` on. The last one may be under way; then its arguments are the beginning of
    the final ones.

    Raises ValueError, KeyError, TypeError, AttributeError or RecursionError where no further call is, or not yet.
    """
    around: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Texts before and after the JSON object of a single call; None: calls are no JSON objects."""
    arguments: str = "arguments"
    """Name of the arguments in that object."""

    def grammar(self, tokenizer: Any, schemas: Schemas) -> str:
        """A grammar in Lark: a call of one of these tools, and nothing else.

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
        """Special tokens that belong to calls, and therefore to the text."""
        return special_tokens(tokenizer, _MARKERS)


def form_of(name: str, tokenizer: Any) -> CallForm:
    """The form in which a model writes calls, found by its chat template.

    Raises:
        ConfigurationError: the template knows no tools, or a form that isn't known here.
    """
    text = template_of(tokenizer)
    if "tools" not in text:
        raise ConfigurationError(f"the chat template of {name} knows no tools: leave them out, or use response_format")
    for form in FORMS:
        if form.sign in text:
            return form
    raise ConfigurationError(f"{name} writes calls of tools in a form that isn't known here: leave the tools out")


def template_of(tokenizer: Any) -> str:
    """Text of the chat template, or of all templates if there are several; empty without one."""
    template = tokenizer.chat_template
    return " ".join(template.values()) if isinstance(template, dict) else str(template or "")


def special_tokens(tokenizer: Any, texts: frozenset[str]) -> frozenset[int]:
    """Ids of the texts that are special tokens, which decoding leaves out by default."""
    added = tokenizer.get_added_vocab()
    return frozenset(added[token] for token in texts & added.keys() if added[token] in tokenizer.all_special_ids)


def literal(tokenizer: Any, text: str) -> str:
    """A text in Lark. A special token is written by its id."""
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
"""Start of a call as JSON, up to its arguments."""


def arguments_at(text: str, start: int, end: str) -> tuple[str, int]:
    """The JSON object at `start`, as far as it has come, and the place after it. `end` stands after whole objects."""
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
    """Calls that are JSON objects with a name and arguments, from `start` on; `between` are the characters between
    them."""
    while start < len(text):
        if head := _HEAD.match(text, start):
            yield ToolCall(json.loads(head[1]), arguments_at(text, head.end(), end)[0])
        start += len(text[start:]) - len(text[start:].lstrip())
        found, stop = _DECODER.raw_decode(text, start)
        if not head:
            yield _call(found["name"], found["parameters"] if "parameters" in found else found["arguments"])
        start = stop + len(text[stop:]) - len(text[stop:].lstrip(between))


def _parts(text: str, begin: str) -> Iterator[int]:
    """Places after each occurrence of a text."""
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
    """A call whose values come one by one, without quotes. The tool's schema says which of them are texts."""
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
        if head.strip() == "function":  # up to V3, the name is on the next line, and the JSON is fenced
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
"""The first form whose sign is in a template counts."""


class CallsSoFar:
    """The calls of one answer, and the additions each time."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._ids: list[str] = []

    def update(self, calls: Sequence[ToolCall]) -> list[CallPiece]:
        """Take all calls up to now; returns the additions."""
        pieces = []
        for place, call in enumerate(calls):
            if is_new := place == len(self.calls):
                self.calls.append(ToolCall(call.name, ""))
                self._ids.append(f"call_{secrets.token_hex(12)}")
            known = self.calls[place]
            if is_new or (call.arguments.startswith(known.arguments) and call.arguments != known.arguments):
                added = call.arguments[len(known.arguments) :]
                pieces.append(CallPiece(place, self._ids[place], call.name, added, is_new))
                self.calls[place] = ToolCall(known.name, known.arguments + added)
        return pieces


class CallReader:
    """Splits one answer into text and calls, as it comes.

    A text that was recognized as a call stays one: its arguments are passed on as the model writes them.
    """

    def __init__(self, form: CallForm, schemas: Schemas, *, most: int | None = None) -> None:
        """`most`: calls that are passed on at most."""
        self._form, self._schemas, self._most = form, schemas, most
        self._held = ""
        self._begun = self._has_said = False
        self._so_far = CallsSoFar()

    @property
    def calls(self) -> list[ToolCall]:
        """The calls, as far as they have come."""
        return self._so_far.calls

    def take(self, text: str, *, last: bool) -> tuple[str, list[CallPiece]]:
        """Add text; returns the text that is certainly no call, and the additions to calls. `last`: no more text
        comes."""
        self._held += text
        said = "" if self._begun else self._before_call(last)
        pieces = self._so_far.update(self._read()) if self._begun else []
        if last and self._begun and not self.calls:  # it only looked like a call
            said += self._held
        return said, pieces

    def _read(self) -> list[ToolCall]:
        found: list[ToolCall] = []
        try:
            for call in self._form.read(self._held, self._schemas):
                if len(found) == self._most:
                    break
                found.append(call)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # no call (yet)
        return found

    def _before_call(self, last: bool) -> str:
        begin, held = self._form.begin, self._held
        place = held.find(begin)
        if begin == "{" and self._has_said:  # an object is a call only if nothing stands before it
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
    """Length of a possible start of `marker` at the end of `text`, with the blanks before it."""
    length = overlap(text, marker)
    return length + _spaces(text[: len(text) - length])


def _spaces(text: str) -> int:
    return len(text) - len(text.rstrip())


def thinks(tokenizer: Any) -> bool:
    """The chat template knows thoughts."""
    return END_THOUGHTS in template_of(tokenizer)


class ReasoningReader:
    """Splits one answer into thoughts and text, as it comes."""

    def __init__(self, *, begun: bool) -> None:
        """`begun`: the prompt ends within thoughts."""
        self._inside: bool | None = True if begun else None
        """None: not known yet."""
        self._held = ""
        self._written = False
        """A part of the current thoughts or text has been passed on."""

    def take(self, text: str, *, last: bool) -> tuple[str, str]:
        """Add text; returns the (thoughts, text) that are certain now. `last`: no more text comes."""
        self._held += text
        if self._inside is None:
            self._decide(last)
        thoughts = self._thoughts(last) if self._inside else ""
        return thoughts, self._said() if self._inside is False else ""

    def _decide(self, last: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(BEGIN_THOUGHTS):
            self._inside, self._held = True, begun.removeprefix(BEGIN_THOUGHTS)
        elif last or not BEGIN_THOUGHTS.startswith(begun):
            self._inside, self._written = False, True  # an answer without thoughts keeps its blanks

    def _thoughts(self, last: bool) -> str:
        found, end, rest = self._held.partition(END_THOUGHTS)
        if end:
            self._inside, self._held = False, rest
            thoughts = self._begun(found).rstrip()
            self._written = False
            return thoughts
        kept = 0 if last else overlap(found, END_THOUGHTS)
        kept += len(found[: len(found) - kept]) - len(found[: len(found) - kept].rstrip())
        self._held = found[len(found) - kept :]
        return self._begun(found[: len(found) - kept])

    def _said(self) -> str:
        said, self._held = self._begun(self._held), ""
        return said

    def _begun(self, text: str) -> str:
        """Drop blanks at the start."""
        text = text if self._written else text.lstrip()
        self._written |= bool(text)
        return text


class Reader(Protocol):
    """Splits one answer into thoughts, text and calls."""

    def take(self, text: str, *, last: bool) -> tuple[str, str, list[CallPiece]]:
        """Add text; returns the (thoughts, text, additions to calls) that are certain now. `last`: no more text
        comes."""


class PlainReader:
    """Reads the form of most models: thoughts, then text, then calls."""

    def __init__(self, reasoning: ReasoningReader | None, calls: CallReader | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    def take(self, text: str, *, last: bool) -> tuple[str, str, list[CallPiece]]:
        """See `Reader`."""
        thoughts, said = ("", text) if self._reasoning is None else self._reasoning.take(text, last=last)
        said, calls = (said, []) if self._calls is None else self._calls.take(said, last=last)
        return thoughts, said, calls


def speaks_harmony(tokenizer: Any) -> bool:
    """The chat template writes channels."""
    return CHANNEL in template_of(tokenizer)


class HarmonyForm:
    """How gpt-oss writes calls, with the methods of `CallForm`."""

    def grammar(self, tokenizer: Any, schemas: Schemas) -> str:
        """A grammar in Lark: a call of one of these tools, and nothing else."""
        begin, constrain, message = (literal(tokenizer, text) for text in (CHANNEL, CONSTRAIN, MESSAGE))
        rules, calls = [], []
        for place, (name, schema) in enumerate(schemas.items()):
            to = json.dumps(f"commentary to=functions.{name} ")
            calls.append(f'{begin} {to} {constrain} "json" {message} call{place}')
            rules.append(f"call{place}: %json {json.dumps({**schema, 'x-guidance': LAYOUT})}")
        return "\n".join((f"start: {' | '.join(calls)}", *rules))

    def markers(self, tokenizer: Any) -> frozenset[int]:
        """Special tokens that belong to the text."""
        return special_tokens(tokenizer, frozenset((*MESSAGE_ENDS, MESSAGE, CONSTRAIN)))


class HarmonyReader:
    """Reads the messages and channels of gpt-oss."""

    def __init__(self, *, most: int | None = None, has_begun: bool = False) -> None:
        """`most`: calls that are passed on at most. `has_begun`: the prompt ends within the answer itself."""
        self._most = most
        self._held = ""
        self._kind: Literal["thoughts", "said", "call"] | None = "said" if has_begun else None
        """Kind of the message under way; None: its head isn't over."""
        self._has_begun, self._has_said = has_begun, False
        self._calls: list[ToolCall] = []
        self._so_far = CallsSoFar()

    def take(self, text: str, *, last: bool) -> tuple[str, str, list[CallPiece]]:
        """See `Reader`."""
        self._held += text
        parts = {"thoughts": "", "said": "", "call": ""}
        while self._kind is not None or self._begin_message(parts):
            kind = self._kind or "said"
            body, has_ended = self._body(last)
            if kind == "call":
                self._go_on_with_call(body, has_ended=has_ended)
            parts[kind] += body
            self._has_said |= kind == "said" and bool(body)
            if not has_ended:
                break
            self._kind = None
        if last and not self._has_begun:  # the model doesn't keep to its own form
            parts["said"], self._held = self._held, ""
        return parts["thoughts"], parts["said"], self._so_far.update(self._calls[: self._most])

    def _begin_message(self, parts: dict[str, str]) -> bool:
        head, found, rest = self._held.partition(MESSAGE)
        if not found:
            return False
        self._held, self._has_begun = rest, True
        channel = _CHANNEL.search(head)
        if tool := _TOOL.search(head):
            self._kind = "call"
            self._calls.append(ToolCall(tool[1], ""))
        elif "to=" in head or (channel is not None and channel[1] == "analysis"):
            self._kind = "thoughts"  # includes texts for built-in tools, which it doesn't have here
        else:
            self._kind = "said"
            parts["said"] += "\n\n" if self._has_said else ""
        return True

    def _body(self, last: bool) -> tuple[str, bool]:
        """Certain text of the message under way; True if the message has ended."""
        places = [place for end in MESSAGE_ENDS if (place := self._held.find(end)) >= 0]
        if places:
            body, self._held = self._held[: min(places)], self._held[min(places) :]
            if not self._held.startswith(CHANNEL):
                self._held = self._held.partition("|>")[2]
            return body, True
        kept = 0 if last else max(overlap(self._held, end) for end in MESSAGE_ENDS)
        body, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return body, False

    def _go_on_with_call(self, body: str, *, has_ended: bool) -> None:
        call = self._calls[-1]
        arguments = call.arguments + (body if call.arguments else body.lstrip())
        self._calls[-1] = ToolCall(call.name, arguments or ("{}" if has_ended else ""))
