"""Text of tokens as they come, and the events that bring it to the answers.

A character of several tokens waits until it is whole; `stop` strings cut the text. `engine/generation` has a `TextRow`
and a `StopFinder` for each answer, and `Spelling` for the bytes of single tokens. Its threads send `Event`s to the
answers (`apis/responder`).
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from swarmllm.gateway.sampling import TokenLogprob

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8
"""Tokens that may wait for the rest of a character. It has at most four bytes, so more tokens can't belong to one."""


class TextRow:
    """The text of one answer."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], kept: Collection[int] = ()) -> None:
        """`kept`: special tokens that belong to the text."""
        self._tokenizer = tokenizer
        self._left_out = special_ids(tokenizer) - frozenset(kept)
        # A tokenizer may write a token differently at the start of a text: decode it after some other tokens.
        self._ids = list(filter(self._is_text, prompt_ids[-2 * MAX_HELD_TOKENS :]))
        self._begin = max(0, len(self._ids) - MAX_HELD_TOKENS)
        while self._begin and self._decode(self._ids[self._begin :]).startswith(INCOMPLETE):
            self._begin -= 1
        self._read = len(self._ids)
        self._num_given = 0
        self.offset = 0
        """Place in the text of the next token, or of the unfinished character that it continues."""

    @property
    def before(self) -> list[int]:
        """The last tokens that are text, from the start of a character on."""
        return self._ids[self._begin :]

    def add(self, token: int) -> str:
        """Add a token; returns the text that is certain now. It may be empty."""
        if not self._is_text(token):
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        if after.endswith(INCOMPLETE) and len(self._ids) - self._read < MAX_HELD_TOKENS:
            self.offset = self._num_given + len(after[len(before) :].rstrip(INCOMPLETE))
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return self._given(after[len(before) :])

    def end(self) -> str:
        """The rest of the text, when no more tokens come."""
        before = self._decode(self._ids[self._begin : self._read])
        rest = self._decode(self._ids[self._begin :])[len(before) :]
        self._begin = self._read = len(self._ids)
        return self._given(rest)

    def _given(self, text: str) -> str:
        self._num_given += len(text)
        self.offset = self._num_given
        return text

    def _is_text(self, token: int) -> bool:
        """The token belongs to the text: it is not special, and the tokenizer knows it."""
        return token not in self._left_out and self._tokenizer.convert_ids_to_tokens(token) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class StopFinder:
    """Cuts a text at the first `stop` string, as the text comes."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that was found; the text has ended then."""

    def take(self, new: str, *, last: bool) -> str:
        """Add text; returns what is certain now. A possible start of a stop string waits, unless this text is the
        `last`."""
        if self.stopped_by is not None:
            return ""
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            place, self.stopped_by = min(found)
            self._held = ""
            return text[:place]
        keep = 0 if last else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class Spelling:
    """The bytes of single tokens, for any kind of tokenizer.

    The tokenizer itself says what a token adds after other tokens. For a token that is only a part of a character, the
    vocabulary has its bytes in one of two forms: a character per byte, as in GPT-2, or `<0xF0>`, as in SentencePiece.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)

    def of(self, before: Sequence[int], tokens: Collection[int], kept: Collection[int] = ()) -> dict[int, bytes | None]:
        """The bytes that each of `tokens` adds after the tokens `before`. None: a special token, which is no part of
        the text unless it is `kept`."""
        left_out, context = self._special - frozenset(kept), self._decode(before)
        return {token: None if token in left_out else self._bytes(before, context, token) for token in tokens}

    def _bytes(self, before: Sequence[int], context: str, token: int) -> bytes:
        after = self._decode([*before, token])
        added = after[len(context) :]
        if INCOMPLETE not in added and not context.endswith(INCOMPLETE):
            return added.encode()
        name = str(self._tokenizer.convert_ids_to_tokens(token) or "")
        if (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", name)) and self._has_byte_tokens:
            return bytes.fromhex(byte[1])
        if name and self._by_character.keys() >= set(name):
            return bytes(self._by_character[one] for one in name)
        return added.encode()

    @cached_property
    def _by_character(self) -> dict[str, int]:
        """The byte of each character in names of tokens; empty if this tokenizer has no such form."""
        found = {character: byte for byte, character in bytes_to_unicode().items()}
        name = "".join(bytes_to_unicode()[byte] for byte in FOX.encode())
        return found if self._tokenizer.convert_tokens_to_string([name]) == FOX else {}

    @cached_property
    def _has_byte_tokens(self) -> bool:
        names = [f"<0x{byte:02X}>" for byte in FOX.encode()]
        return bool(self._tokenizer.convert_tokens_to_string(names) == FOX)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


FOX = "\N{FOX FACE}"
"""A character of four bytes, to find out how a tokenizer writes bytes."""


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that `decode()` can leave out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token for token, one in added.items() if one.special}


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(frozen=True)
class CallPiece:
    """An addition to one call of a tool."""

    place: int
    """Number of the call in its answer."""
    id: str
    name: str
    arguments: str
    """The new part only."""
    is_new: bool


@dataclass(frozen=True)
class TextPiece:
    """The next token of one answer."""

    index: int
    """Number of the answer, as in the API's `choices`."""
    text: str
    """Text that is certain now; may be empty."""
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None
    """`stop` or `length`, with the last piece of the answer."""
    reasoning: str = ""
    """Thoughts, which are not in `text`."""
    calls: tuple[CallPiece, ...] = ()
    """Additions to calls, which are not in `text`."""
    stopped_by: str | None = None
    """The stop string that ended the answer, with its last piece."""


@dataclass(frozen=True)
class PromptScores:
    """Log probabilities of a prompt's tokens (NaN for the first), for `echo` with `logprobs`."""

    index: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class SwarmEvent:
    """A diagnostic: `queue`, `route`, `shard_status`, `shard_failover` or `pipeline_aborted`."""

    name: str
    details: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """The answers to a prompt are complete; after an error, as complete as they will be."""

    first_index: int
    """Number of the prompt's first answer."""
    prompt_tokens: int
    completion_tokens: int
    trace: dict[str, Any]
    error: Exception | None = None
    cancelled: bool = False


Event = TextPiece | PromptScores | SwarmEvent | Ended
