"""Hooks on whole blocks: what enters or leaves a block passes through this machine, so they do what they do locally.

Where a block has a hook, the model's blocks are run in pieces (`playback`), and what comes out of one piece goes
through the hooks into the next. A hook may read hidden states, change them in place or return others; whatever else a
block is given or returns, servers have computed themselves. Made by `hollow_blocks`; hooks inside blocks, and those of
backwards, are refused by `hollow_modules`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never

from torch import Tensor, nn
from transformers.utils import output_capturing

from swarmllm.errors import ConfigurationError
from swarmllm.models.shell.hollow_modules import ClosedTable, ModulePlace

TABLES = ("_forward_pre_hooks", "_forward_hooks")
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Where torch notes in which way a hook wants to be called."""


class _Hook:
    """A user's hook; what is called in place of the block gives it the block."""

    def __init__(self, hook: Callable[..., Any], block: nn.Module, where: ModulePlace) -> None:
        self.hook, self._block, self._where = hook, block, where

    def __call__(self, _stand_in: nn.Module, *given: Any) -> Any:
        args, *others = given
        kwargs = others[0] if others and isinstance(others[0], dict) else {}
        beside = [one for one in [*args, *kwargs.values()][1:] if isinstance(one, Tensor)]
        versions = [_version(one) for one in beside]
        returned = self.hook(self._block, *given)
        if [_version(one) for one in beside] != versions:
            self.refuse()
        return returned

    def compare(self, was: Sequence[Any], now: Sequence[Any]) -> None:
        """Refuse what differs in more than the first of them, which are hidden states."""
        fits = len(was) == len(now) and all(a is b for a, b in zip(was[1:], now[1:], strict=True))
        if not fits or not was or not isinstance(now[0], Tensor) or now[0].shape != was[0].shape:
            self.refuse()

    def refuse(self) -> Never:
        """Refuse a hook that has changed what servers compute for themselves."""
        raise ConfigurationError(
            f"a hook on {self._where} has changed more than hidden states, and servers compute masks, positions and "
            "all else themselves: have it return, or change in place, hidden states of the same shape alone"
        )


class _PreHook(_Hook):
    def __call__(self, _stand_in: nn.Module, *given: Any) -> Any:
        returned = super().__call__(_stand_in, *given)
        if returned is None:
            return None
        if len(given) == 1:
            was, now = given[0], returned if isinstance(returned, tuple) else (returned,)
        else:
            (args, kwargs), (new_args, new_kwargs) = given, returned
            was, now = (*args, *kwargs.values()), (*new_args, *new_kwargs.values())
            if list(kwargs) != list(new_kwargs):
                self.refuse()
        self.compare(was, now)
        return returned


class _ForwardHook(_Hook):
    def __call__(self, _stand_in: nn.Module, *given: Any) -> Any:
        returned = super().__call__(_stand_in, *given)
        if returned is None:
            return None
        was, now = ((one if isinstance(one, tuple) else (one,)) for one in (given[-1], returned))
        if isinstance(given[-1], tuple) is not isinstance(returned, tuple):
            self.refuse()
        self.compare(was, now)
        return returned


def _version(tensor: Tensor) -> int:
    """What counts changes in place."""
    return 0 if tensor.is_inference() else tensor._version


class _Table(ClosedTable):
    """The hooks of a block in front of it, or behind it."""

    block: nn.Module
    where: ModulePlace
    kind: type[_Hook]
    cut: int | None
    """The block before which the model has to be cut for them; None: it is cut there anyway."""
    forbidden: frozenset[int]

    def __setitem__(self, key: Any, hook: Any) -> None:
        if getattr(hook, "__module__", None) != output_capturing.__name__:  # transformers' own: they only look
            if self.cut in self.forbidden:
                raise ConfigurationError(
                    f"no hook can run {'behind' if self.kind is _ForwardHook else 'before'} {self.where}, because this "
                    "model can't be cut there: hook another block"
                )
            hook = self.kind(hook, self.block, self.where)
        super(ClosedTable, self).__setitem__(key, hook)

    @property
    def used(self) -> bool:
        return any(isinstance(hook, _Hook) for hook in self.values())


def open_to_hooks(block: nn.Module, where: ModulePlace, block_idx: int, end: int, forbidden: Iterable[int]) -> None:
    """Have a hollow block take forward hooks and forward pre-hooks.

    Args:
        block_idx: its number in the whole model; `end`: the one behind the last block of its stack.
        forbidden: blocks before which the model can't be cut.
    """
    for name, kind, cut in zip(TABLES, (_PreHook, _ForwardHook), (block_idx, block_idx + 1), strict=True):
        table = _Table()
        table.block, table.where, table.kind, table.forbidden = block, where, kind, frozenset(forbidden)
        table.cut = None if cut == end else cut
        block.__dict__[name] = table


def share_hooks(stand_in: nn.Module, block: nn.Module) -> None:
    """Have what is called in place of a hollow block run its hooks."""
    if isinstance(block._forward_hooks, _Table):
        for name in (*TABLES, *_FLAGS):
            stand_in.__dict__[name] = block.__dict__[name]


def hooked_bounds(blocks: Mapping[int, nn.Module]) -> set[int]:
    """Where hidden states pass through hooks: `i` is before block `i`, `i + 1` behind it."""
    found = set()
    for block_idx, block in blocks.items():
        for name, bound in zip(TABLES, (block_idx, block_idx + 1), strict=True):
            table = block.__dict__[name]
            if isinstance(table, _Table) and table.used:
                found.add(bound)
    return found
