"""At which lengths of a call its positions are computed otherwise.

Some rotary embeddings look at the largest position of a call and choose the frequencies of all its positions by it.
No table of names: modules without weights that are given positions are called again, always with the same first
positions and with others up to a length that varies. If what they give for the first ones depends on that length, the
lengths where it changes are found by halving. Called by `probes`; a client may call it as well, with its own stack.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from swarmllm.models.span.kept_state import KeptState

ROWS = 5
"""Rows of the positions, of which the last one is far away; unlikely to be the size of other axes."""
MOST_BORDERS = 16
TIMES_LONGER = 4
"""Looked at are lengths up to this many times what the model was made for: stretched frequencies begin before."""


@dataclass(frozen=True, eq=False)
class Lengths:
    """What makes a difference to some modules; see `BlockTraits`."""

    borders: tuple[int, ...] = ()
    own_beyond: int | None = None


def find_lengths(stack: nn.Module, positions: Tensor, run: Callable[[], object], longest: int) -> Lengths:
    """The lengths at which what modules of the stack make of `positions` changes, up to `longest`.

    `run` is a forward with those positions, `[ROWS, seq]`. The modules keep what they keep of a call that long.
    """
    borders: set[int] = set()
    own: list[int] = []
    calls = _calls(stack, positions, run)
    for call in calls:
        found = call.find(longest)
        borders.update(found.borders)
        own += [] if found.own_beyond is None else [found.own_beyond]
    for call in calls:
        call.near(longest)
    beyond = min(own, default=None)
    return Lengths(tuple(sorted(one for one in borders if beyond is None or one < beyond)), beyond)


class _Call:
    """A module, and how the stack has called it."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, positions: Tensor) -> None:
        self._module, self._args, self._kwargs, self._positions = module, args, kwargs, positions
        self._before = KeptState.everything(module)

    def find(self, longest: int) -> Lengths:
        start = self._positions.shape[1]
        borders: list[int] = []
        while start < longest and not self._same(start, longest):
            low, high = start, longest
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._same(start, middle) else (low, middle)
            if (high < longest and not self._same(high, high + 1)) or len(borders) == MOST_BORDERS:
                return Lengths(tuple(borders), low)
            borders.append(low)
            start = high
        return Lengths(tuple(borders))

    def _same(self, one: int, other: int) -> bool:
        return all(torch.equal(*pair) for pair in zip(self._alone(one), self._alone(other), strict=True))

    def _alone(self, length: int) -> list[Tensor]:
        self._before.changed(self._module).put_back()
        return self.near(length)

    def near(self, length: int) -> list[Tensor]:
        """What the module gives for the first rows, in a call of that length."""
        far = self._positions.clone()
        far[-1] += length - far.shape[1]

        def moved(value: Any) -> Any:
            if _is_positions(value, self._positions):
                return far.expand_as(value)
            # In short floats a small difference of frequencies would vanish.
            return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = tree_map(moved, (self._args, self._kwargs))
        return list(_first_rows(self._module(*args, **kwargs)))


def _calls(stack: nn.Module, positions: Tensor, run: Callable[[], object]) -> list[_Call]:
    """Modules without weights that are given the positions in such a forward."""
    found: list[_Call] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if any(_is_positions(value, positions) for value in tree_leaves((args, kwargs))):
            found.append(_Call(module, args, kwargs, positions))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in stack.modules()
        if next(module.parameters(), None) is None and not type(module).__module__.startswith("swarmllm.")
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _is_positions(value: Any, positions: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.shape[-2:] != positions.shape:
        return False
    return bool((value == positions).all())


def _first_rows(outputs: Any) -> Iterator[Tensor]:
    """All rows but the last of each tensor that has rows."""
    for tensor in tree_leaves(outputs):
        if isinstance(tensor, Tensor) and ROWS in tensor.shape:
            yield tensor.narrow(list(tensor.shape).index(ROWS), 0, ROWS - 1)
