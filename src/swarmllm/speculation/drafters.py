"""Guesses of what comes next: by n-grams of the text so far, prompt included, or by a small model in this process.

A head of the model's own guesses in `mtp_drafter`.

A drafter follows the text (`extend`), begins a guess where the text ends (`begin`), and goes on with it as far as it is
asked (`more`), taking its own guesses for right. Guesses are certain, not drawn: that makes them easy to check against
any distribution (see `speculation/sampling_loop`). Each has a kind, by which `speculation/planner` measures acceptance.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

MAX_OCCURRENCES = 16
"""Most recent places of a token or pair that are compared with the end of the text."""
MAX_MATCH = 32
"""Tokens back to which places are compared; a longer match says no more."""
GOOD_MATCH = 2
"""Tokens from which on a match is trusted more than the place where the last copy would go on."""
RESUMED_KIND, MODEL_KIND = -1, -2
"""Kinds of the first guess that resumes a copy after something else than it said, and of a model's guesses. Other kinds
are the bits of the length of a match."""
RESUMED_PRIOR = 0.5
"""Assumed."""
MAX_DEVIATIONS = 3
"""Assumed: a copy that was wrong this many times in a row is not resumed."""
MODEL_PRIOR = 0.6
"""Assumed acceptance of a small model's guesses."""


class Drafter(Protocol):
    """One text's guesses."""

    @property
    def name(self) -> str:
        """Who guesses: what it costs is known by it."""
        ...

    def following(self, model: Any) -> AbstractContextManager[None]:
        """Within, the drafter may look at the model's forwards, all of which are of this text."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        ...

    def begin(self) -> bool:
        """Begin a guess where the text ends; False if there is none."""
        ...

    def more(self, count: int) -> list[int]:
        """At most `count` further tokens, after those that were guessed before. Fewer: that is all."""
        ...

    def kinds(self, count: int) -> list[tuple[int, float]]:
        """(kind, acceptance that is assumed before any of the kind was seen) for each of the next `count` guesses."""
        ...


class _TextAlone:
    """A drafter that looks at nothing but the tokens."""

    def following(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()


class SilentDrafter(_TextAlone):
    """Never guesses: for texts that only tell how far away the swarm is."""

    name = "silent"

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def begin(self) -> bool:
        return False

    def more(self, count: int) -> list[int]:
        return []

    def kinds(self, count: int) -> list[tuple[int, float]]:
        return []


class NGramDrafter(_TextAlone):
    """Copies what followed the place that looks most like the end of the text (prompt lookup).

    The longest match counts, of several the latest. A copy may run into its own guesses, which repeats them. Where the
    text replaces something and nothing else matches, the last copy is resumed behind it, as if as much was replaced.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[int, list[int]] = defaultdict(list)
        """The indices at which each token stands."""
        self._pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
        """The same for a token and the one before it."""
        self._guesses: list[int] = []
        """Guesses not yet confirmed, or confirmed since `begin`; they follow the text as it was then."""
        self._began_at = 0
        self._source = 0
        """Index from which the next guess is copied, as if the guesses were part of the text."""
        self._match = 0
        """Length of the match before the first guess; 0: the last copy is resumed."""
        self._copying = False
        self._deviations = 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            index = len(self._tokens)
            if index:
                self._pairs[self._tokens[-1], token].append(index)
            self._places[token].append(index)
            self._tokens.append(token)

    def begin(self) -> bool:
        if not self._tokens:
            return False
        end = len(self._tokens) - 1
        since = end + 1 - self._began_at
        resumed = self._source - len(self._guesses) + since
        if since:
            guess = self._guesses[:1] or self._tokens[self._source : self._source + 1]  # if it was not asked
            right = self._tokens[self._began_at : self._began_at + 1] == guess
            self._deviations = 0 if right else self._deviations + 1
        self._guesses, self._began_at, self._match = [], end + 1, 0
        places = self._pairs[self._tokens[end - 1], self._tokens[end]] if end else []
        if len(places) < 2:
            places = self._places[self._tokens[end]]
        for place in reversed(places[-MAX_OCCURRENCES - 1 : -1]):
            match = self._match_length(place, end)
            if match > self._match:
                self._match, self._source = match, place + 1
        if self._match < GOOD_MATCH and self._copying and self._deviations < MAX_DEVIATIONS and resumed <= end:
            self._match, self._source = 0, resumed
        else:
            self._copying = self._match > 0
            self._deviations = 0
        return self._copying

    def _match_length(self, place: int, end: int) -> int:
        tokens, length = self._tokens, 1
        most = min(MAX_MATCH, place + 1)
        while length < most and tokens[place - length] == tokens[end - length]:
            length += 1
        return length

    def more(self, count: int) -> list[int]:
        guesses = self._guesses
        first = len(guesses)
        for _ in range(count):
            source, began_at = self._source, self._began_at
            guesses.append(self._tokens[source] if source < began_at else guesses[source - began_at])
            self._source += 1
        return guesses[first:]

    def kinds(self, count: int) -> list[tuple[int, float]]:
        start = self._match + len(self._guesses)
        kinds = [_kind_of_match(match) for match in range(start, start + count)]
        if not start and kinds:
            kinds[0] = RESUMED_KIND, RESUMED_PRIOR
        return kinds


def _kind_of_match(match: int) -> tuple[int, float]:
    """The bits of the length; assumed: a match of m tokens goes on with probability m / (m + 1)."""
    match = min(match, MAX_MATCH)
    return match.bit_length(), match / (match + 1)


class ModelDrafter(_TextAlone):
    """The likeliest tokens of a small model with the same vocabulary."""

    name = "model"

    def __init__(self, model: PreTrainedModel, vocabulary_size: int) -> None:
        self._model = model
        self._vocabulary_size = vocabulary_size
        self._cache = DynamicCache(config=model.config)
        self._cache.activate_past_recording()
        self._tokens: list[int] = []
        self._guesses: list[int] = []
        self._began_at = 0
        self._seen: list[int] = []
        """Tokens that the cache has been fed."""

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def begin(self) -> bool:
        self._guesses, self._began_at = [], len(self._tokens)
        same = 0
        for seen, token in zip(self._seen, self._tokens, strict=False):
            if seen != token:
                break
            same += 1
        same = min(same, len(self._tokens) - 1)
        if same < len(self._seen):
            self._cache.crop(same - len(self._seen))
            del self._seen[same:]
        return bool(self._tokens)

    @torch.no_grad()
    def more(self, count: int) -> list[int]:
        first = len(self._guesses)
        for _ in range(count):
            new = (self._tokens[: self._began_at] + self._guesses)[len(self._seen) :]
            ids = torch.tensor([new], device=self._model.device)
            logits: Tensor = self._model(ids, past_key_values=self._cache, use_cache=True).logits
            self._seen += new
            token = int(logits[0, -1].argmax())
            if token >= self._vocabulary_size:  # padding of its own embedding
                break
            self._guesses.append(token)
        return self._guesses[first:]

    def kinds(self, count: int) -> list[tuple[int, float]]:
        return [(MODEL_KIND, MODEL_PRIOR)] * count
