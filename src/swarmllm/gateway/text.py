"""From tokens to text, as they come, and the events that bring the text to the answers.

Characters of several tokens wait until they are whole, `stop` strings are cut. `engine/generation` has one `TextRow`
and one `StopFinder` per answer, and `Spelling` for the bytes of single tokens. Its worker threads send `Event`s to the
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
"""A character has at most four bytes, so this many tokens that make none are no part of one."""


class TextRow:
    """The text of one answer."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], kept: Collection[int] = ()) -> None:
        """`kept` are special tokens that are text all the same."""
        self._tokenizer = tokenizer
        self._left_out = special_ids(tokenizer) - frozenset(kept)
        # A tokenizer may write a token differently at the beginning of a text: decode with some tokens before it.
        self._ids = list(filter(self._is_text, prompt_ids[-2 * MAX_HELD_TOKENS :]))
        self._begin = max(0, len(self._ids) - MAX_HELD_TOKENS)
        while self._begin and self._decode(self._ids[self._begin :]).startswith(INCOMPLETE):
            self._begin -= 1
        self._read = len(self._ids)
        self._num_given = 0
        self.offset = 0
        """Where the next token's text begins, or the character that it goes on with."""

    @property
    def before(self) -> list[int]:
        """The last tokens that are text, from the beginning of a character on."""
        return self._ids[self._begin :]

    def add(self, token: int) -> str:
        """The text that is certain after this token; may be empty."""
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
        """The rest, when no more tokens come."""
        before = self._decode(self._ids[self._begin : self._read])
        rest = self._decode(self._ids[self._begin :])[len(before) :]
        self._begin = self._read = len(self._ids)
        return self._given(rest)

    def _given(self, text: str) -> str:
        self._num_given += len(text)
        self.offset = self._num_given
        return text

    def _is_text(self, token: int) -> bool:
        """Or it is a special token, or a place in the model's tables that has none."""
        return token not in self._left_out and self._tokenizer.convert_ids_to_tokens(token) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class StopFinder:
    """Cuts a text at the first of some `stop` strings, as it comes."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that has come: then nothing more will."""

    def take(self, new: str, *, last: bool) -> str:
        """The text that is certain: what may become a stop string waits, unless this is the last of it."""
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
    """The bytes of single tokens, whatever kind of tokenizer it is.

    Behind other tokens the tokenizer itself says what a token adds to the text. A token that is only a part of a
    character has its bytes in the vocabulary, in one of two forms: a character for each byte, as GPT-2 has it, or
    `<0xF0>`, as SentencePiece has it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)

    def of(self, before: Sequence[int], tokens: Collection[int], kept: Collection[int] = ()) -> dict[int, bytes | None]:
        """The bytes of each of these tokens behind those of a text; None: a special token, which is no part of the
        text unless it is `kept`."""
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
        """The byte for each character of names in the vocabulary; empty if this tokenizer has none."""
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
"""A character of four bytes, to find out how a tokenizer writes them."""


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
    """What was added to one call of a tool."""

    place: int
    """Among the calls of its answer."""
    id: str
    name: str
    arguments: str
    """Only what is new."""
    is_new: bool


@dataclass(frozen=True)
class TextPiece:
    """One more token of one answer."""

    index: int
    """The number of the answer, as in the API's `choices`."""
    text: str
    """What it makes certain; may be empty."""
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None
    """`stop` or `length`, with the last piece of this answer."""
    reasoning: str = ""
    """What the model only thinks, which `text` is without."""
    calls: tuple[CallPiece, ...] = ()
    """What was added to calls, which `text` is without."""
    stopped_by: str | None = None
    """The stop string that came, with the last piece."""


@dataclass(frozen=True)
class PromptScores:
    """The log probabilities of a prompt's tokens, of the first not a number; for `echo` with `logprobs`."""

    index: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class SwarmEvent:
    """A diagnostic: `queue`, `route`, `shard_status`, `shard_failover` or `pipeline_aborted`."""

    name: str
    details: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """A prompt's answers are complete, or (with an error) as complete as they will be."""

    first_index: int
    """The number among the prompt's answers."""
    prompt_tokens: int
    completion_tokens: int
    trace: dict[str, Any]
    error: Exception | None = None
    cancelled: bool = False


Event = TextPiece | PromptScores | SwarmEvent | Ended
