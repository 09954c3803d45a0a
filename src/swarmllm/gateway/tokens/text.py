"""From tokens to text, as they come: characters of several tokens wait until they are whole, `stop` strings are cut.

Used by `gateway/engine/generation`, one `TextRow` per answer.
"""

from collections.abc import Collection, Sequence
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8
"""A character has at most four bytes, so this many tokens that make none are no part of one."""


class TextRow:
    """The text of one answer."""

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        kept: Collection[int] = (),
    ) -> None:
        """`kept` are special tokens that are text all the same."""
        self._tokenizer = tokenizer
        self._left_out = frozenset(tokenizer.all_special_ids) - frozenset(kept) if kept else frozenset()
        self._stop = tuple(stop)
        # A tokenizer may write a token differently at the beginning of a text: decode with some tokens before it.
        self._ids = list(prompt_ids)[-MAX_HELD_TOKENS:]
        self._begin = 0
        self._read = len(self._ids)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that has come: then nothing more will."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self.stopped_by is not None

    def add(self, token: int) -> str:
        """The text that is certain after this token; may be empty."""
        self._ids.append(token)
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        if after.endswith(INCOMPLETE) and len(self._ids) - self._read < MAX_HELD_TOKENS:
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :])

    def end(self) -> str:
        """What was still held back when no more tokens come."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._begin : self._read])
        rest = self._decode(self._ids[self._begin :])[len(before) :]
        self._begin = self._read = len(self._ids)
        certain = self._release(rest)
        held, self._held = self._held, ""
        return certain + held

    def _decode(self, ids: Sequence[int]) -> str:
        shown = [token for token in ids if token not in self._left_out] if self._left_out else ids
        return str(
            self._tokenizer.decode(shown, skip_special_tokens=not self._left_out, clean_up_tokenization_spaces=False)
        )

    def _release(self, new: str) -> str:
        """Cut at the first stop string; hold back what may become one."""
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            place, self.stopped_by = min(found)
            self._held = ""
            return text[:place]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
