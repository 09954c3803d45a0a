"""Which token is taken, so that a seed gives the same text whatever else the process computes at the same time.

transformers samples from torch's one global random generator. Here `generate()` is greedy, and its last logits
processor is a `Sampler` with random generators of its own: it chooses, and leaves all other tokens without a chance.
Made by `gateway/generation` for each request.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from swarmllm.gateway.grammar import JsonMatcher


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; fields as in the API."""

    seed: int
    temperature: float = 1.0
    """0 = the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    """How many of the likeliest tokens to name; None = no log probabilities at all."""


@dataclass(frozen=True)
class TokenLogprob:
    """What the model thought of one token, before anything about sampling changed it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens there."""


class Sampler:
    """As one of transformers' logits processors, the last one: `[rows, vocabulary]` scores in, one chance each out."""

    def __init__(self, options: SamplingOptions, num_rows: int, matchers: Sequence[JsonMatcher] = ()) -> None:
        self._options = options
        self._matchers = matchers
        self._generators = [torch.Generator().manual_seed(_row_seed(options.seed, row)) for row in range(num_rows)]
        self._counts: list[Counter[int]] = [Counter() for _ in range(num_rows)]
        self._warpers = _warpers(options)
        self.logprobs: list[TokenLogprob | None] = [None] * num_rows
        """Of the tokens chosen last."""
        self.finished = [False] * num_rows
        """Set by the caller: these rows don't matter any more."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float()
        chosen = torch.zeros(len(scores), dtype=torch.long)
        for row, row_scores in enumerate(scores):
            if not self.finished[row]:
                chosen[row] = self._choose(row, row_scores, input_ids[row : row + 1])
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None].to(scores.device), 0.0)

    def _choose(self, row: int, scores: Tensor, ids: Tensor) -> int:
        adjusted = self._penalized(row, scores)
        if self._matchers:
            allowed = self._matchers[row].allowed()[: len(scores)].to(scores.device)
            adjusted = adjusted.masked_fill(~allowed, -torch.inf)
        if self._options.temperature == 0:
            token = int(adjusted.argmax())
        else:
            warped = adjusted[None]
            for warp in self._warpers:
                warped = warp(ids, warped)
            token = int(torch.multinomial(warped[0].softmax(-1).cpu(), 1, generator=self._generators[row]))
        self._counts[row][token] += 1
        if self._matchers:
            self._matchers[row].take(token)
        if self._options.top_logprobs is not None:
            self.logprobs[row] = token_logprob(scores, token, self._options.top_logprobs)
        return token

    def _penalized(self, row: int, scores: Tensor) -> Tensor:
        options, counts = self._options, self._counts[row]
        if not options.logit_bias and not (counts and (options.presence_penalty or options.frequency_penalty)):
            return scores
        scores = scores.clone()
        for token, bias in options.logit_bias.items():
            scores[token] += bias
        for token, count in counts.items():
            scores[token] -= options.presence_penalty + count * options.frequency_penalty
        return scores


def token_logprob(scores: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Of `token`, given the scores `[vocabulary]`."""
    logprobs = scores.float().log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


def _row_seed(seed: int, row: int) -> int:
    """Far from those of other rows and of the next seeds: users count seeds up."""
    return (seed + row * 0x5851F42D4C957F2D) % (1 << 63)


def _warpers(options: SamplingOptions) -> list[Callable[[Tensor, Tensor], Any]]:
    """In transformers' order."""
    warpers: list[Callable[[Tensor, Tensor], Any]] = []
    if options.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k > 0:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p > 0:
        warpers.append(MinPLogitsWarper(options.min_p))
    return warpers
