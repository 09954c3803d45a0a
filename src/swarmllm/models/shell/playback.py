"""Hidden states between blocks: the model's own loop over its blocks is played back with results of servers.

A model's forward decides which hidden states it returns, before or after its final norm. Older models collect them in
their loop over the blocks, newer ones by hooks on the blocks' classes. So a call that wants them gets as many blocks as
a local model has. The first one runs all blocks on servers, and each returns what its block has returned there
(`boundary/inner_states`). Between them runs the model's own code.

    hidden states   the output of each block, or what the model's code makes of it
    attentions      if hooks collect them locally: put there; otherwise returned after the hidden states

Hooks of users on whole blocks work as they do locally, because hidden states before and behind such a block pass
through this machine. There the blocks run in pieces: the first block of a piece runs it, the last one returns its
result, which goes through the hooks into the next piece. A hook may read hidden states, change them in place or return
others. Servers compute all other inputs and outputs of blocks themselves. `hollow_modules` refuses hooks inside blocks
and backward hooks.

`hollow_blocks` makes the stand-ins, and shows them to the model during such calls.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Never

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing
from transformers.utils.output_capturing import _active_collector

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, LocalProtocolError
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.models.shell.blocks_proxy import BlocksProxy, current_call
from swarmllm.models.shell.hollow_modules import ClosedTable, HollowModule, ModulePlace

TABLES = ("_forward_pre_hooks", "_forward_hooks")
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Attributes in which torch notes how to call a hook."""


class _Playback(nn.Module):
    """A stand-in for a block; also of the block's class, for hooks that look for that."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proxy: BlocksProxy = self.__dict__["proxy"]
        block_idx: int = self.__dict__["block_idx"]
        call = current_call()
        inner = None if call.inputs is None else call.inputs.inner
        if not call.is_played:
            raise LocalProtocolError("blocks were played back outside the forward of their model")
        given: Tensor = args[0] if args else kwargs[proxy.first_argument]
        hidden = given
        num_blocks, first = self.__dict__["num_blocks"], self.__dict__["first"]
        start = max([0, *(bound for bound in call.hooked if bound <= block_idx)])
        end = min([num_blocks, *(bound for bound in call.hooked if bound > block_idx)])
        if block_idx == start:
            part = None if end - start == num_blocks else Span(first + start, first + end)
            call.played[:] = [proxy.run_call(call, given, part)]
        if block_idx == end - 1:
            hidden = call.played[0]
        elif inner is not None and block_idx in inner.outputs:
            hidden = inner.found[block_idx]
        for inside in self.children():
            inside(given, hidden)
        return _as_returned(hidden, inner, block_idx, proxy.traits.block_output)

    def __getattr__(self, name: str) -> Any:  # models ask their blocks for attention_type and the like
        if "like" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["like"], name)


class _Inside(_Playback):
    """A block within a block, as in Zamba, on which transformers' hooks are: it returns the output of the outer one."""

    def forward(self, given: Tensor, hidden: Tensor) -> Tensor:
        return hidden


def _as_returned(hidden: Tensor, inner: InnerStates | None, block_idx: int, block_output: int) -> Any:
    """The block's outputs in their local form; attentions that a collector takes are put there."""
    beside: dict[int, Tensor] = {}
    for _, place, weights in inner.maps.get(block_idx, ()) if inner is not None and inner.attentions else ():
        if place:
            beside[place] = weights
        elif (collector := _active_collector.get()) is not None and "attentions" in collector:
            collector["attentions"].append(weights)
    length = max(block_output, 1 + max(beside, default=0))
    if not beside and block_output == 0:
        return hidden
    return (hidden, *(beside.get(place) for place in range(1, length)))


@cache
def _playback_class(kind: Any, cls: Any) -> Any:
    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__})


def _stand_in(kind: Any, like: nn.Module) -> nn.Module:
    bare: Any = next(cls for cls in type(like).__mro__ if not issubclass(cls, HollowModule))
    found: nn.Module = object.__new__(_playback_class(kind, bare))
    nn.Module.__init__(found)
    found.__dict__["like"] = like
    return found


def playback(proxy: BlocksProxy, block_idx: int, like: nn.Module, num_blocks: int, first: int) -> nn.Module:
    """A stand-in for one block of a stack, with the attributes and hooks of `like`.

    `first`: the number of the stack's first block in the whole model.
    """
    found = _stand_in(_Playback, like)
    found.__dict__.update(proxy=proxy, block_idx=block_idx, num_blocks=num_blocks, first=first)
    share_hooks(found, like)
    for name, inside in like.named_children():
        if isinstance(inside, GradientCheckpointingLayer):
            found._modules[name] = _stand_in(_Inside, inside)
    return found


# ---------------------------------------------------------------------- hooks of users


class _Hook:
    """A user's hook, which is called with the block instead of its stand-in."""

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
        """Refuse a change of anything but the first value, the hidden states."""
        fits = len(was) == len(now) and all(a is b for a, b in zip(was[1:], now[1:], strict=True))
        if not fits or not was or not isinstance(now[0], Tensor) or now[0].shape != was[0].shape:
            self.refuse()

    def refuse(self) -> Never:
        """Refuse a hook that has changed other things than hidden states, which servers compute themselves."""
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
    """torch's counter of changes in place."""
    return 0 if tensor.is_inference() else tensor._version


class _Table(ClosedTable):
    """The pre-hooks or the hooks of a block."""

    block: nn.Module
    where: ModulePlace
    kind: type[_Hook]
    cut: int
    """The block before which these hooks cut the model."""
    forbidden: frozenset[int]
    """Blocks before which it can't be cut."""
    num_used: Counter[int]
    """Hooks of users by the block before which they cut the model; all tables of a stack count here."""

    def __setitem__(self, key: Any, hook: Any) -> None:
        if getattr(hook, "__module__", None) != output_capturing.__name__:  # transformers' own, which only read
            if self.cut in self.forbidden:
                raise ConfigurationError(
                    f"no hook can run {'behind' if self.kind is _ForwardHook else 'before'} {self.where}, because this "
                    "model can't be cut there: hook another block"
                )
            hook = self.kind(hook, self.block, self.where)
            self.num_used[self.cut] += 1
        super(ClosedTable, self).__setitem__(key, hook)

    def __delitem__(self, key: Any) -> None:
        self.num_used[self.cut] -= isinstance(self.get(key), _Hook)
        super().__delitem__(key)


def open_to_hooks(
    block: nn.Module, where: ModulePlace, block_idx: int, end: int, forbidden: Iterable[int], num_used: Counter[int]
) -> None:
    """Make a hollow block accept forward hooks and forward pre-hooks.

    Args:
        block_idx: its number in the whole model; `end`: the last block's in its stack, plus one.
        forbidden: blocks before which the model can't be cut.
        num_used: counts the hooks of users by the block before which they cut the model.
    """
    for name, kind, cut in zip(TABLES, (_PreHook, _ForwardHook), (block_idx, block_idx + 1), strict=True):
        table = _Table()
        table.block, table.where, table.kind, table.cut, table.num_used = block, where, kind, cut, num_used
        table.forbidden = frozenset(forbidden) - {end}  # it is cut there anyway
        block.__dict__[name] = table


def share_hooks(stand_in: nn.Module, block: nn.Module) -> None:
    """Give the stand-in of a hollow block the block's hooks."""
    if isinstance(block._forward_hooks, _Table):
        for name in (*TABLES, *_FLAGS):
            stand_in.__dict__[name] = block.__dict__[name]
