"""Reads calls of tools out of an answer as it comes; `call_forms` says what they look like. Used by `readers`."""

import secrets
from collections.abc import Sequence

from swarmllm.gateway.output_parsing.call_forms import PYTHON_TAG, CallForm, Schemas, ToolCall
from swarmllm.gateway.tokens.events import CallPiece
from swarmllm.gateway.tokens.text import overlap


class CallsSoFar:
    """The calls of one answer, and what of them is new each time."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._ids: list[str] = []

    def update(self, calls: Sequence[ToolCall]) -> list[CallPiece]:
        """These are all calls now; returns what has been added to them."""
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
    """Parts the text of one answer, as it comes, into what is said and what is called.

    What has been recognized as a call stays one: its arguments are given on as the model writes them.
    """

    def __init__(self, form: CallForm, schemas: Schemas, *, most: int | None = None) -> None:
        """`most` calls are given on."""
        self._form, self._schemas, self._most = form, schemas, most
        self._held = ""
        self._begun = self._has_said = False
        self._so_far = CallsSoFar()

    @property
    def calls(self) -> list[ToolCall]:
        """As far as they have come."""
        return self._so_far.calls

    def take(self, text: str, *, last: bool) -> tuple[str, list[CallPiece]]:
        """What is no call for certain, and what has been added to calls; `last`: no more comes."""
        self._held += text
        said = "" if self._begun else self._before_call(last)
        pieces = self._so_far.update(self._read()) if self._begun else []
        if last and self._begun and not self.calls:  # it looked like one
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
            pass  # no call, or none yet
        return found

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
