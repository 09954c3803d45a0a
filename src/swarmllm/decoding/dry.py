"""DRY ("don't repeat yourself"): a token that would go on with what the text has said before is made less likely."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

MAX_PENALTY = 1e30
"""Beyond which float32 would hold no difference."""


class Dry(LogitsProcessor):
    """If the last m tokens stood earlier in the text, the token that followed them there loses
    `multiplier * base ** (m - allowed_length)`, where m (the longest such) is at least `allowed_length`.

    Repetitions don't go across tokens of `breakers`, and these lose nothing. Looked for in the `last_n` tokens; -1: in
    all. `padding`: tokens before each row's text.
    """

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Collection[int],
        padding: Sequence[int] = (),
    ) -> None:
        self._multiplier = multiplier
        self._base = base
        self._allowed_length = allowed_length
        self._last_n = last_n
        self._breakers = breakers
        self._padding = padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[rows, vocabulary]` scores, some of them lowered."""
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            begin = self._padding[row] if self._padding else 0
            if self._last_n >= 0:
                begin = max(begin, len(ids) - self._last_n)
            lengths = repeated_lengths(ids[begin:], self._breakers)
            penalties = {
                token: min(MAX_PENALTY, self._penalty(length - self._allowed_length))
                for token, length in lengths.items()
                if length >= self._allowed_length
            }
            if penalties:
                tokens = torch.tensor(list(penalties), device=scores.device)
                scores[row, tokens] -= torch.tensor(list(penalties.values()), dtype=scores.dtype, device=scores.device)
        return scores

    def _penalty(self, exponent: int) -> float:
        try:
            return float(self._multiplier * self._base**exponent)
        except OverflowError:
            return MAX_PENALTY


def repeated_lengths(text: Sequence[int], breakers: Collection[int]) -> dict[int, int]:
    """By token that has followed it before, how many of the text's last tokens stood there too, at most.

    The Z-algorithm on the text from its end: each token is looked at a few times, however often the text repeats.
    """
    backwards = list(reversed(text))
    limit = next((place for place, token in enumerate(backwards) if token in breakers), len(backwards))
    matches = [0] * len(backwards)
    found: dict[int, int] = {}
    left = right = 0
    for place in range(1, len(backwards)):
        length = min(matches[place - left], right - place) if place < right else 0
        while place + length < len(backwards) and backwards[length] == backwards[place + length]:
            length += 1
        matches[place] = length
        if place + length > right:
            left, right = place, place + length
        follower = backwards[place - 1]
        if (repeated := min(length, limit)) and follower not in breakers:
            found[follower] = max(found.get(follower, 0), repeated)
    return found
