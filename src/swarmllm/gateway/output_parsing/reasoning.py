"""What a thinking model writes before its answer: between <think> and </think>, or from the beginning up to the latter
where its chat template has already opened it.

Used by `readers`, which keeps it apart as `reasoning_content`.
"""

from typing import Any

from swarmllm.gateway.output_parsing.call_forms import template_of
from swarmllm.gateway.tokens.text import overlap

BEGIN, END = "<think>", "</think>"


def thinks(tokenizer: Any) -> bool:
    """Whether the chat template knows thoughts."""
    return END in template_of(tokenizer)


class ReasoningReader:
    """Parts the text of one answer, as it comes, into thoughts and what is said."""

    def __init__(self, *, begun: bool) -> None:
        """`begun`: the prompt ends within thoughts."""
        self._inside: bool | None = True if begun else None
        """None: not known yet."""
        self._held = ""
        self._written = False
        """Whether anything of what is under way has been given on."""

    def take(self, text: str, *, last: bool) -> tuple[str, str]:
        """(thoughts, what is said) that are certain; `last`: no more comes."""
        self._held += text
        if self._inside is None:
            self._decide(last)
        thoughts = self._thoughts(last) if self._inside else ""
        return thoughts, self._said() if self._inside is False else ""

    def _decide(self, last: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(BEGIN):
            self._inside, self._held = True, begun.removeprefix(BEGIN)
        elif last or not BEGIN.startswith(begun):
            self._inside, self._written = False, True  # an answer without thoughts keeps its blanks

    def _thoughts(self, last: bool) -> str:
        found, end, rest = self._held.partition(END)
        if end:
            self._inside, self._held = False, rest
            thoughts = self._begun(found).rstrip()
            self._written = False
            return thoughts
        kept = 0 if last else overlap(found, END)
        kept += len(found[: len(found) - kept]) - len(found[: len(found) - kept].rstrip())
        self._held = found[len(found) - kept :]
        return self._begun(found[: len(found) - kept])

    def _said(self) -> str:
        said, self._held = self._begun(self._held), ""
        return said

    def _begun(self, text: str) -> str:
        """Without the blanks at the beginning."""
        text = text if self._written else text.lstrip()
        self._written |= bool(text)
        return text
