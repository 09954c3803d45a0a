"""Part the text of one answer, as it comes, into thoughts, what is said, and calls of tools.

`chat_request` chooses one for an answer; `generation` feeds it.
"""

from typing import Protocol

from swarmllm.gateway.output_parsing.reasoning import ReasoningReader
from swarmllm.gateway.output_parsing.tool_calls import CallReader
from swarmllm.gateway.tokens.events import CallPiece


class Reader(Protocol):
    """`harmony.HarmonyReader`, or the one below."""

    def take(self, text: str, *, last: bool) -> tuple[str, str, list[CallPiece]]:
        """(thoughts, what is said, what was added to calls) that are certain; `last`: no more comes."""


class PlainReader:
    """First thoughts, then text, then calls, as most models write them."""

    def __init__(self, reasoning: ReasoningReader | None, calls: CallReader | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    def take(self, text: str, *, last: bool) -> tuple[str, str, list[CallPiece]]:
        """See `Reader`."""
        thoughts, said = ("", text) if self._reasoning is None else self._reasoning.take(text, last=last)
        said, calls = (said, []) if self._calls is None else self._calls.take(said, last=last)
        return thoughts, said, calls
