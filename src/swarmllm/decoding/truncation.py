"""Processors that leave some tokens without a chance, for each row `[vocabulary]` of its own. Made by `processors`."""

import torch
from torch import Tensor
from transformers import LogitsProcessor

from swarmllm.decoding.text_so_far import uniform


class TailFree(LogitsProcessor):
    """Tail-free sampling (Bricken 2019): the tail begins where the curve of sorted probabilities has become flat.

    The second differences of the probabilities, likeliest first, are taken as shares of their sum. Token i (the
    likeliest is 0) stays while those before it, 0 to i - 1, add up to z at most; the last one goes with the one before.
    """

    def __init__(self, z: float) -> None:
        self._z = z

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[rows, vocabulary]` scores, those of the tail at -inf."""
        if scores.shape[-1] < 3:
            return scores
        probabilities, order = scores.double().softmax(-1).sort(-1, descending=True)
        curvature = probabilities.diff(dim=-1).diff(dim=-1).abs()
        total = curvature.sum(-1, keepdim=True)
        beyond = curvature.cumsum(-1) > self._z * total
        tail = torch.cat([torch.zeros_like(beyond[:, :1]), beyond, beyond[:, -1:]], dim=-1)
        return scores.masked_fill(torch.zeros_like(tail).scatter(-1, order, tail), -torch.inf)


class TopNSigma(LogitsProcessor):
    """Top-n-sigma (Tang et al. 2024): scores that are more than n standard deviations below the best go.

    Of scores that others have left, so temperature makes no difference.
    """

    def __init__(self, n: float) -> None:
        self._n = n

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[rows, vocabulary]` scores, the lower ones at -inf."""
        left = scores.isfinite()
        count = left.sum(-1, keepdim=True)
        known = scores.double().masked_fill(~left, 0.0)
        mean = known.sum(-1, keepdim=True) / count
        variance = (known - mean).square().masked_fill(~left, 0.0).sum(-1, keepdim=True) / count
        best = scores.max(-1, keepdim=True).values.double()
        return scores.masked_fill(left & (scores.double() < best - self._n * variance.sqrt()), -torch.inf)


class ExcludeTopChoices(LogitsProcessor):
    """XTC: with some probability, of the tokens at least as likely as a threshold all but the least likely one go."""

    def __init__(self, probability: float, threshold: float, generator: torch.Generator | None = None) -> None:
        self._probability = probability
        self._threshold = threshold
        self._generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[rows, vocabulary]` scores, in some rows the best ones at -inf."""
        probabilities, order = scores.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        likely = (probabilities >= self._threshold) & (probabilities > 0)
        rank = torch.arange(scores.shape[-1], device=scores.device)
        excluded = rank < likely.sum(-1, keepdim=True) - 1
        excluded &= uniform(len(scores), self._generator, scores.device)[:, None] < self._probability
        return scores.masked_fill(torch.zeros_like(excluded).scatter(-1, order, excluded), -torch.inf)
