"""Mirostat (Basu et al. 2021): how many tokens are sampled from follows from how surprising the text has been so far.

A token of probability p surprises by -log2 p bits. `mu`, the surprise that is allowed, begins at 2 tau; behind each
token it is lowered by eta times the error: that token's surprise, among those that it was drawn from, minus tau.

mode 1: as many of the likeliest tokens as would have the surprise mu if the probabilities follow Zipf's law, whose
exponent is estimated from the likeliest ones (algorithm 1). Mode 2: those with a surprise of at most mu, and the
likeliest.

What a position allowed is kept by position. Who asks about guesses and then drops them, as transformers' assisted
generation does and a draft model on the same processor, comes to that position again, and what the guesses left behind
is written anew before it is read.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

ZIPF_TOKENS = 100
"""From which the exponent is estimated; as in the paper's experiments."""
KEPT_POSITIONS = 256
"""Assumed: nobody guesses farther ahead."""


@dataclass(frozen=True)
class _Position:
    """What was allowed somewhere."""

    mu: Tensor
    """`[rows]` bits."""
    tokens: Tensor
    """`[rows, kept]`, likeliest first."""
    surprises: Tensor
    """`[rows, kept]` bits; inf = not among those that were drawn from."""


class Mirostat(LogitsProcessor):
    """For texts that begin with `start` tokens of prompt."""

    def __init__(self, mode: int, tau: float, eta: float, start: int) -> None:
        self._mode = mode
        self._tau = tau
        self._eta = eta
        self._start = start
        self._positions: dict[int, _Position] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[rows, vocabulary]` scores, those of tokens that are too surprising at -inf."""
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
        """mu here: `[rows]`."""
        before = self._positions.get(input_ids.shape[1] - 1)
        if input_ids.shape[1] <= self._start or before is None or len(before.mu) != num_rows:
            return torch.full((num_rows,), 2 * self._tau)
        taken = before.tokens == input_ids[:, -1:].to(before.tokens.device)
        surprise = before.surprises.masked_fill(~taken, 0.0).sum(-1)
        # What wasn't drawn from here, e.g. a row that has ended and is padded, teaches nothing.
        known = taken.any(-1) & surprise.isfinite()
        return torch.where(known, before.mu - self._eta * (surprise - self._tau), before.mu)

    def _kept_by_rank(self, logprobs: Tensor, mu: Tensor) -> Tensor:
        """`[rows, vocabulary]`, by rank."""
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
