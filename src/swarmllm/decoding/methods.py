"""Ways to choose the next token that transformers lacks, as logits processors, each after its paper.

TailFree, TopNSigma, ExcludeTopChoices   excludes some tokens
Mirostat                                 excludes tokens, so that the surprise per token stays near a target
Dry                                      makes tokens less likely that would repeat the text
FrustratinglySimple                      prefers likely tokens that the text so far doesn't predict

Each call is given scores `[rows, vocabulary]`; an excluded token has -inf.

The functions at the end make the processors that options ask for, for `generate()` and for requests of the gateway.
transformers has two places for processors. *Before* temperature, top-k and the like: DRY, and FSD, which decides by the
model's own probabilities. *Behind* them, if tokens are sampled: top-n-sigma, tail-free, XTC, mirostat, in this order.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor

from swarmllm.decoding.options import DecodingOptions


def uniform(count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """`[count]` random numbers in [0, 1), on `device`; `generator` None: torch's own."""
    if generator is None:
        return torch.rand(count, device=device)
    return torch.rand(count, generator=generator, device=generator.device).to(device)


# ---------------------------------------------------------------------- truncation


class TailFree(LogitsProcessor):
    """Tail-free sampling (Bricken 2019): the tail begins where the curve of sorted probabilities becomes flat.

    The second differences of the probabilities, likeliest first, are taken as shares of their sum. Token i (the
    likeliest is 0) stays while the shares 0 to i - 1 add up to z at most. The last token goes with the one before.
    """

    def __init__(self, z: float) -> None:
        self._z = z

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores, with the tail at -inf."""
        if scores.shape[-1] < 3:
            return scores
        probabilities, order = scores.double().softmax(-1).sort(-1, descending=True)
        curvature = probabilities.diff(dim=-1).diff(dim=-1).abs()
        total = curvature.sum(-1, keepdim=True)
        beyond = curvature.cumsum(-1) > self._z * total
        tail = torch.cat([torch.zeros_like(beyond[:, :1]), beyond, beyond[:, -1:]], dim=-1)
        return scores.masked_fill(torch.zeros_like(tail).scatter(-1, order, tail), -torch.inf)


class TopNSigma(LogitsProcessor):
    """Top-n-sigma (Tang et al. 2024): drops scores more than n standard deviations below the best.

    The deviation is that of the scores which other processors have left. Temperature makes no difference.
    """

    def __init__(self, n: float) -> None:
        self._n = n

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores, with the lower ones at -inf."""
        left = scores.isfinite()
        count = left.sum(-1, keepdim=True)
        known = scores.double().masked_fill(~left, 0.0)
        mean = known.sum(-1, keepdim=True) / count
        variance = (known - mean).square().masked_fill(~left, 0.0).sum(-1, keepdim=True) / count
        best = scores.max(-1, keepdim=True).values.double()
        return scores.masked_fill(left & (scores.double() < best - self._n * variance.sqrt()), -torch.inf)


class ExcludeTopChoices(LogitsProcessor):
    """XTC: with some probability, drops the likeliest tokens.

    Of all tokens at least as likely as the threshold, only the least likely one stays.
    """

    def __init__(self, probability: float, threshold: float, generator: torch.Generator | None = None) -> None:
        self._probability = probability
        self._threshold = threshold
        self._generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores, in some rows with the best ones at -inf."""
        probabilities, order = scores.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        likely = (probabilities >= self._threshold) & (probabilities > 0)
        rank = torch.arange(scores.shape[-1], device=scores.device)
        excluded = rank < likely.sum(-1, keepdim=True) - 1
        excluded &= uniform(len(scores), self._generator, scores.device)[:, None] < self._probability
        return scores.masked_fill(torch.zeros_like(excluded).scatter(-1, order, excluded), -torch.inf)


# ---------------------------------------------------------------------- mirostat

ZIPF_TOKENS = 100
"""Likeliest tokens by which the exponent of Zipf's law is estimated; as in the paper's experiments."""
KEPT_POSITIONS = 256
"""Positions that Mirostat remembers. Assumed: nobody guesses farther ahead."""


@dataclass(frozen=True)
class _Position:
    """The limit at one position, and the tokens that it allowed."""

    mu: Tensor
    """`[rows]` bits."""
    tokens: Tensor
    """`[rows, kept]`, likeliest first."""
    surprises: Tensor
    """`[rows, kept]` bits; inf = not allowed."""


class Mirostat(LogitsProcessor):
    """Mirostat (Basu et al. 2021): the surprise of the text so far decides how many tokens are sampled from.

    A token of probability p surprises by -log2 p bits. `mu`, the surprise that is allowed, begins at 2 tau. Each token
    lowers it by eta times the error: the token's surprise among the allowed tokens, minus tau.

    mode 1: as many of the likeliest tokens as would have the surprise mu if the probabilities followed Zipf's law
            (algorithm 1); its exponent is estimated from the likeliest ones
    mode 2: tokens with a surprise of at most mu, and the likeliest

    The state is kept by position. Guesses that are dropped later (by assisted generation, or of a draft model with the
    same processor) make it come to a position twice; what they left there is written anew before it is read.
    """

    def __init__(self, mode: int, tau: float, eta: float, start: int) -> None:
        """`start`: tokens of the prompt."""
        self._mode = mode
        self._tau = tau
        self._eta = eta
        self._start = start
        self._positions: dict[int, _Position] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores, with tokens that are too surprising at -inf."""
        length = input_ids.shape[1]
        mu = self._allowed(input_ids, len(scores)).to(scores.device)
        logprobs, order = scores.float().log_softmax(-1).sort(-1, descending=True)
        kept = self._kept_by_rank(logprobs, mu) if self._mode == 1 else -logprobs / math.log(2) <= mu[:, None]
        kept[:, 0] = True
        kept &= logprobs.isfinite()
        most = int(kept.sum(-1).max())
        among = logprobs.masked_fill(~kept, -torch.inf)[:, :most].log_softmax(-1)
        self._positions[length] = _Position(mu, order[:, :most], -among / math.log(2))
        self._positions.pop(length - KEPT_POSITIONS, None)
        return scores.masked_fill(torch.zeros_like(kept).scatter(-1, order, ~kept), -torch.inf)

    def _allowed(self, input_ids: Tensor, num_rows: int) -> Tensor:
        """mu at this position: `[rows]`."""
        before = self._positions.get(input_ids.shape[1] - 1)
        if input_ids.shape[1] <= self._start or before is None or len(before.mu) != num_rows:
            return torch.full((num_rows,), 2 * self._tau)
        taken = before.tokens == input_ids[:, -1:].to(before.tokens.device)
        surprise = before.surprises.masked_fill(~taken, 0.0).sum(-1)
        # A token that wasn't drawn from here, such as the padding of a row that has ended, teaches nothing.
        known = taken.any(-1) & surprise.isfinite()
        return torch.where(known, before.mu - self._eta * (surprise - self._tau), before.mu)

    def _kept_by_rank(self, logprobs: Tensor, mu: Tensor) -> Tensor:
        """Which tokens stay in mode 1: `[rows, vocabulary]`, by rank."""
        size = logprobs.shape[-1]
        rank = torch.arange(1, size + 1, device=logprobs.device)
        most = min(ZIPF_TOKENS, size)
        steps = ((rank[:most] + 1) / rank[:most]).log()[:-1].float()
        falls = logprobs[:, : most - 1] - logprobs[:, 1:most]
        falls = falls.where(falls.isfinite(), 0.0)
        exponent = (steps * falls).sum(-1) / steps.square().sum() if most > 1 else torch.ones_like(mu)
        exponent = exponent.clamp_min(1e-3).double()
        excess = exponent - 1
        # excess / (1 - size^-excess), which is 1 / ln(size) where the excess is 0
        near = excess.abs() < 1e-9
        ratio = torch.where(near, 1 / math.log(max(size, 2)), excess / -torch.expm1(-excess * math.log(max(size, 2))))
        count = ((ratio * 2 ** mu.double()) ** (1 / exponent)).round()
        return rank <= count.clamp(1, size)[:, None]


# ---------------------------------------------------------------------- dry

MAX_PENALTY = 1e30
"""Beyond it, float32 would hold no difference."""


class Dry(LogitsProcessor):
    """DRY ("don't repeat yourself"): makes tokens less likely that would continue a repetition.

    If the last m tokens stand earlier in the text, the token that followed them there loses
    `multiplier * base ** (m - allowed_length)`, where m is the longest such match, and at least `allowed_length`.

    A repetition ends at a token of `breakers`, and these lose nothing. It is looked for in the `last_n` tokens; -1: in
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
        """The scores, some of them lowered."""
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
    """The length of the longest repetition that each token would continue.

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


# ---------------------------------------------------------------------- frustratingly simple decoding


class FrustratinglySimple(LogitsProcessor):
    """Frustratingly simple decoding (Yang et al. 2023), and its randomized form (Inferflow's report, section 6).

    Of the k likeliest tokens it takes the one with the largest (1 - alpha) P(token) - alpha A(token). P is the model's
    probability. A is predicted by the text so far: the token's share among tokens that have followed the last n - 1
    tokens, with weight beta; its share after the last n - 2, with beta of the rest; and so on. Its share of all tokens
    gets the whole rest. A context that hasn't been seen gives its weight to the shorter ones.

    `random`: in some of the first steps, a row is left as it is, to be sampled.
    """

    def __init__(
        self,
        alpha: float,
        k: int,
        n: int,
        beta: float,
        *,
        padding: Sequence[int] = (),
        random: "RandomSteps | None" = None,
    ) -> None:
        self._alpha = alpha
        self._k = k
        self._n = n
        self._beta = beta
        self._padding = padding
        self._random = random

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores, with all but one token at -inf."""
        probabilities = scores.float().softmax(-1)
        best = probabilities.topk(min(self._k, scores.shape[-1]), dim=-1)
        predicted = torch.stack([self._predicted(row, ids, scores.shape[-1]) for row, ids in enumerate(input_ids)])
        predicted = predicted.to(scores.device).gather(-1, best.indices)
        # Where other processors have left fewer than k tokens, the rest of the k has no chance either.
        values = ((1 - self._alpha) * best.values - self._alpha * predicted).masked_fill(
            ~scores.gather(-1, best.indices).isfinite(), -torch.inf
        )
        chosen = best.indices.gather(-1, values.argmax(-1, keepdim=True))
        simple = torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)
        if self._random is None:
            return simple
        return torch.where(self._random.now(input_ids.shape[1], len(scores), scores.device)[:, None], scores, simple)

    def _predicted(self, row: int, ids: Tensor, size: int) -> Tensor:
        """A: `[vocabulary]`."""
        text = ids[self._padding[row] if self._padding else 0 :]
        found = torch.zeros(size, device=ids.device)
        left = 1.0
        for n in range(min(self._n, len(text)), 0, -1):
            grams = text.unfold(0, n, 1)
            followers = grams[(grams[:, :-1] == text[len(text) - n + 1 :]).all(-1), -1]
            if len(followers):
                weight = left * self._beta if n > 1 else left
                found += weight / len(followers) * torch.bincount(followers, minlength=size)
                left -= weight
        return found


class RandomSteps:
    """Draws for the first steps of a text whether they are sampled."""

    def __init__(self, start: int, steps: int, probability: float, generator: torch.Generator | None) -> None:
        self._end = start + steps
        self._probability = probability
        self._generator = generator

    def now(self, length: int, num_rows: int, device: torch.device) -> Tensor:
        """Draw which rows of `length` tokens to sample: `[rows]` of bool."""
        if length >= self._end:
            return torch.zeros(num_rows, dtype=torch.bool, device=device)
        return uniform(num_rows, self._generator, device) < self._probability


# ---------------------------------------------------------------------- the processors that options ask for

_texts: "WeakKeyDictionary[Any, list[str]]" = WeakKeyDictionary()
"""The text of each token, by tokenizer: to decode a large vocabulary takes a second."""


def processors_before(
    options: DecodingOptions,
    *,
    start: int,
    breakers: Collection[int] = (),
    padding: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> list[LogitsProcessor]:
    """The processors before temperature. Prompts have `start` tokens, `padding` of them before each row."""
    value = options.resolved()
    found: list[LogitsProcessor] = []
    if options.is_on("dry_multiplier"):
        names = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n")
        multiplier, base, allowed_length, last_n = (value[name] for name in names)
        found.append(Dry(multiplier, base, allowed_length, last_n, breakers, padding))
    if options.is_on("fsd_alpha"):
        random = None
        if options.is_on("fsd_random_steps"):
            random = RandomSteps(start, value["fsd_random_steps"], value["fsd_random_probability"], generator)
        names = ("fsd_alpha", "fsd_k", "fsd_n", "fsd_beta")
        found.append(FrustratinglySimple(*(value[name] for name in names), padding=padding, random=random))
    return found


def processors_behind(
    options: DecodingOptions, *, start: int, generator: torch.Generator | None = None
) -> list[LogitsProcessor]:
    """The processors behind temperature and the like. Prompts have `start` tokens."""
    value = options.resolved()
    found: list[LogitsProcessor] = []
    if options.is_on("top_n_sigma"):
        found.append(TopNSigma(value["top_n_sigma"]))
    if options.is_on("tfs_z"):
        found.append(TailFree(value["tfs_z"]))
    if options.is_on("xtc_probability"):
        found.append(ExcludeTopChoices(value["xtc_probability"], value["xtc_threshold"], generator))
    if options.is_on("mirostat_mode"):
        found.append(Mirostat(value["mirostat_mode"], value["mirostat_tau"], value["mirostat_eta"], start))
    return found


def padding_lengths(attention_mask: Tensor | None) -> list[int]:
    """The number of padding tokens before each row's text, from a `[rows, seq]` mask. Empty: no padding."""
    if attention_mask is None or attention_mask.ndim != 2:
        return []
    lengths: list[int] = (attention_mask != 0).int().argmax(dim=1).tolist()
    return lengths


def tokens_with(strings: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """All tokens with one of these strings in their text."""
    texts = _texts.get(tokenizer)
    if texts is None:
        ids = [[token] for token in range(len(tokenizer))]
        texts = _texts[tokenizer] = tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False)
    return frozenset(token for token, text in enumerate(texts) if any(string in text for string in strings))
