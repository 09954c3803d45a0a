"""What gpt-oss writes: messages, each in a channel, of which some are thoughts and some are calls of tools.

    <|channel|>analysis<|message|>THOUGHTS<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

The prompt ends with <|start|>assistant. As its own chat template and OpenAI's description of the format have it.
Used by `language_model` where the template writes channels.
"""

import json
import re
from typing import Any, Literal

from swarmllm.gateway.output_parsing.call_forms import Schemas, ToolCall, literal, special_tokens, template_of
from swarmllm.gateway.output_parsing.tool_calls import CallsSoFar
from swarmllm.gateway.tokens.events import CallPiece
from swarmllm.gateway.tokens.grammar import LAYOUT
from swarmllm.gateway.tokens.text import overlap

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)
"""What no message goes on behind."""
FINAL = f"{CHANNEL}final{MESSAGE}"
"""Where the answer itself begins."""
EFFORTS = ("low", "medium", "high")
"""How much it can be told to think."""
_TOOL = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def speaks_harmony(tokenizer: Any) -> bool:
    """Whether the chat template writes channels."""
    return CHANNEL in template_of(tokenizer)


class HarmonyForm:
    """How calls are written; as `call_forms.CallForm` for others."""

    def grammar(self, tokenizer: Any, schemas: Schemas) -> str:
        """In Lark: a call of one of these tools, and nothing else."""
        begin, constrain, message = (literal(tokenizer, text) for text in (CHANNEL, CONSTRAIN, MESSAGE))
        rules, calls = [], []
        for place, (name, schema) in enumerate(schemas.items()):
            to = json.dumps(f"commentary to=functions.{name} ")
            calls.append(f'{begin} {to} {constrain} "json" {message} call{place}')
            rules.append(f"call{place}: %json {json.dumps({**schema, 'x-guidance': LAYOUT})}")
        return "\n".join((f"start: {' | '.join(calls)}", *rules))

    def markers(self, tokenizer: Any) -> frozenset[int]:
        """Special tokens that are part of the text."""
        return special_tokens(tokenizer, frozenset((*ENDS, MESSAGE, CONSTRAIN)))


class HarmonyReader:
    """Parts the text of one answer, as it comes, into thoughts, what is said, and what is called."""

    def __init__(self, *, most: int | None = None, has_begun: bool = False) -> None:
        """`most` calls are given on; `has_begun`: the prompt ends within the answer itself."""
        self._most = most
        self._held = ""
        self._kind: Literal["thoughts", "said", "call"] | None = "said" if has_begun else None
        """What the message under way is; None: its head is not over."""
        self._has_begun, self._has_said = has_begun, False
        self._calls: list[ToolCall] = []
        self._so_far = CallsSoFar()

    def take(self, text: str, *, last: bool) -> tuple[str, str, list[CallPiece]]:
        """(thoughts, what is said, what has been added to calls); `last`: no more comes."""
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
        if last and not self._has_begun:  # it doesn't keep to its own form
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
            self._kind = "thoughts"  # and what it tells to tools that nobody has given it
        else:
            self._kind = "said"
            parts["said"] += "\n\n" if self._has_said else ""
        return True

    def _body(self, last: bool) -> tuple[str, bool]:
        """What is certain of the message under way, and whether it has ended."""
        places = [place for end in ENDS if (place := self._held.find(end)) >= 0]
        if places:
            body, self._held = self._held[: min(places)], self._held[min(places) :]
            if not self._held.startswith(CHANNEL):
                self._held = self._held.partition("|>")[2]
            return body, True
        kept = 0 if last else max(overlap(self._held, end) for end in ENDS)
        body, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return body, False

    def _go_on_with_call(self, body: str, *, has_ended: bool) -> None:
        call = self._calls[-1]
        arguments = call.arguments + (body if call.arguments else body.lstrip())
        self._calls[-1] = ToolCall(call.name, arguments or ("{}" if has_ended else ""))
