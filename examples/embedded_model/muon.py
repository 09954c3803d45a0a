"""An optimizer for matrices: each step is the momentum with all its singular values made alike. Used by train.py.

The idea is Muon's (Jordan et al. 2024): momentum is dominated by few directions, and the others matter as much for
what is learned. A matrix G = U S V^T becomes nearly U V^T by Newton and Schulz's iteration, X <- aX + (bA + cA^2) X
with A = X X^T, whose odd polynomial drives singular values towards 1 and needs nothing but products, for which bfloat16
is exact enough.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_ROUNDS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # published there: steep at 0, and within 0.7 to 1.2 at the end


def orthogonalized(matrices: Tensor) -> Tensor:
    """For each matrix `[count, rows, columns]`, rows <= columns, the nearest one with singular values of about 1."""
    found = (matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(_ROUNDS):
        square = found @ found.mT
        found = _A * found + (_B * square + _C * square @ square) @ found
    return found.float()


class Muon(torch.optim.Optimizer):
    """Orthogonalize all matrices with the same shape, also transposed, at once."""

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for weight in group["params"]:
                shape = min(weight.shape), max(weight.shape)
                alike.setdefault(shape, []).append((weight, self._direction(weight, group["momentum"])))
            for (rows, _), pairs in alike.items():
                steps = orthogonalized(torch.stack([it if len(it) == rows else it.T for _, it in pairs]))
                for (weight, _), step in zip(pairs, steps, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    tall = max(1.0, weight.shape[0] / weight.shape[1])
                    weight.add_(step if len(weight) == rows else step.T, alpha=-group["lr"] * tall**0.5)

    def _direction(self, weight: Tensor, momentum: float) -> Tensor:
        """The gradient with Nesterov's momentum."""
        state = self.state[weight]
        average = state.setdefault("average", torch.zeros_like(weight))
        average.lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(average, momentum)
