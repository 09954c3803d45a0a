"""Frustratingly simple decoding (Yang et al. 2023), and its randomized form (Inferflow's report, section 6)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from swarmllm.decoding.text_so_far import uniform


class FrustratinglySimple(LogitsProcessor):
    """The one of the k likeliest tokens with the largest (1 - alpha) P(token) - alpha A(token), P being the model.

    A is made of the text so far: the share that the token has among those that have followed the last n - 1 tokens,
    with weight beta; with beta of the rest, that among those after the last n - 2; and so on, the whole rest going to
    its share of all tokens. Where a context hasn't been seen, its weight goes to the shorter ones.

    In the first `random_steps` tokens behind `start`, with `random_probability` a row is left as it is: to be sampled.
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
        """`[rows, vocabulary]` scores, all but one token's at -inf."""
        probabilities = scores.float().softmax(-1)
        best = probabilities.topk(min(self._k, scores.shape[-1]), dim=-1)
        foretold = torch.stack([self._foretold(row, ids, scores.shape[-1]) for row, ids in enumerate(input_ids)])
        foretold = foretold.to(scores.device).gather(-1, best.indices)
        # Where others have left fewer than k tokens, the rest of the k has no chance either.
        values = ((1 - self._alpha) * best.values - self._alpha * foretold).masked_fill(
            ~scores.gather(-1, best.indices).isfinite(), -torch.inf
        )
        chosen = best.indices.gather(-1, values.argmax(-1, keepdim=True))
        simple = torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)
        if self._random is None:
            return simple
        return torch.where(self._random.now(input_ids.shape[1], len(scores), scores.device)[:, None], scores, simple)

    def _foretold(self, row: int, ids: Tensor, size: int) -> Tensor:
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
    """The first steps of a text, in which a coin says what is done."""

    def __init__(self, start: int, steps: int, probability: float, generator: torch.Generator | None) -> None:
        self._end = start + steps
        self._probability = probability
        self._generator = generator

    def now(self, length: int, num_rows: int, device: torch.device) -> Tensor:
        """`[rows]`: whether to sample behind a text of `length` tokens."""
        if length >= self._end:
            return torch.zeros(num_rows, dtype=torch.bool, device=device)
        return uniform(num_rows, self._generator, device) < self._probability
