"""The block list of a model that has only some of its blocks.

The model's own forward still loops over all blocks, so that layer indices, layer types and everything between blocks
stay right. In a call of blocks [c, d), the loop meets:

    blocks 0 … c-1    placeholders, which return their input
    block c           the real block, but its input is replaced by the given hidden states
    blocks … d-1      real blocks
    block d           takes the result and ends the forward (or block N-1 itself does, if d == N)

The forward stops at the *entry* of block d. So the work between two blocks is done by exactly one server, the server of
the first block. Used by `BlockSpan` and `load_block_span`; knows no caches and devices.

In some models the first block computes a value for all blocks, such as T5's table of relative positions. Another block
computes the same value if it gets the same module and flags. So a server without the first block reads that one module
of it (`only_in_first`). The module is found by comparing blocks, not by its name; `span/probes` refuses blocks that
still have other results.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from swarmllm.data_structures import Span


class ForwardStopped(Exception):  # noqa: N818 - not an error: it ends a forward that has done its part
    """Leaves the model's forward after the last wanted block."""


Observer = Callable[[int, Tensor], None]
"""Called with (block index, its input) for each real block of a call."""


Recorder = Callable[[int, Callable[[], Any]], Any]
"""Called with (block index, a call of that block) for each real block; returns the block's result."""


class BlockSlots(nn.ModuleList):
    """Stands in for the block list of a model; registers only the hosted blocks, under their indices there."""

    def __init__(self, blocks: Sequence[nn.Module], hosted: Span, first: int = 0) -> None:
        """`first` is the number that the first of the `blocks` has in the whole model."""
        super().__init__()
        self.first = first
        for block_idx in hosted:
            self.add_module(str(block_idx - first), blocks[block_idx - first])
        self.hosted = hosted
        self.given: Sequence[Given] = ()
        """Modules and flags that only the model's first block has, and uses for all others."""
        self.source_dim = 0
        """Width of an encoder's outputs that the blocks attend to; 0: there are none."""
        self.block_output = 0
        """`BlockTraits.block_output`: the number of results of a placeholder."""
        self.hidden: Tensor | None = None
        self.output: Tensor | None = None
        self.result: Any = None
        """All that the last wanted block returned."""
        self.extras: tuple[Any, ...] | None = None
        """Results of placeholders besides hidden states; None: only None (the probes try other values)."""
        self._placeholders = [_Placeholder(self, block) for block in blocks]
        self._routes: dict[Span, list[Any]] = {}
        self._entries: list[Any] = self._list(hosted)

    @cached_property
    def _first_argument(self) -> str:
        return next(iter(inspect.signature(self.block(self.hosted.start).forward).parameters))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __getitem__(self, index: int | slice) -> Any:
        return self._entries[index]  # a plain list for slices: rebuilding a ModuleList costs 0.2 ms per step

    def block(self, block_idx: int) -> nn.Module:
        """A hosted block itself."""
        return self.get_submodule(str(block_idx - self.first))

    def adopt(self, block: nn.Module) -> None:
        """Host one block more: the one after the last."""
        self.add_module(str(self.hosted.end - self.first), block)
        self.hosted = Span(self.hosted.start, self.hosted.end + 1)
        self._routes.clear()
        self._entries = self._list(self.hosted)

    def begin(
        self, span: Span, hidden: Tensor, observer: Observer | None = None, recorder: Recorder | None = None
    ) -> None:
        """Prepare a forward of the model that runs `span` on `hidden`."""
        self.hidden, self.output = hidden, None
        if observer is not None or recorder is not None:
            self._entries = self._list(span, observer, recorder)
            return
        if span not in self._routes:
            self._routes[span] = self._list(span)
        self._entries = self._routes[span]

    def begin_preamble(self) -> None:
        """Prepare a forward that stops where the first hosted block would begin; `end` returns that block's input."""
        self.hidden, self.output = None, None
        start = self.hosted.start - self.first
        self._entries = [*self._placeholders[:start], *(_Exit(self, one.block) for one in self._placeholders[start:])]

    def begin_first_block(self, hidden: Tensor) -> None:
        """Prepare a forward of the first hosted block that keeps in `result` all that it returns."""
        self.hidden, self.output = hidden, None
        start = self.hosted.start
        self._entries = self._list(Span(start, start + 1))
        self._entries[start - self.first] = _Entry(self, _Last(self, self.block(start)))

    def end(self) -> Tensor | None:
        """Finish the call and return its result; None if the forward never came that far."""
        output, self.hidden, self.output = self.output, None, None
        return output

    def finish(self, result: Any) -> None:
        """Called by the last wanted block (or the first unwanted one): keep the result and leave the forward.

        Raises:
            ForwardStopped: always.
        """
        self.output = result[0] if isinstance(result, tuple) else result
        self.result = result
        raise ForwardStopped

    def hidden_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The hidden states among the arguments of a block."""
        found: Tensor = args[0] if args else kwargs[self._first_argument]
        return found

    def with_hidden(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a block with these hidden states in their place."""
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, self._first_argument: hidden}

    def _list(self, span: Span, observer: Observer | None = None, recorder: Recorder | None = None) -> list[Any]:
        entries: list[Any] = list(self._placeholders)
        for block_idx in span:
            block: Any = self.block(block_idx)
            if recorder is not None:
                block = _Recorded(self, block, block_idx, recorder)
            place = block_idx - self.first
            if block_idx == span.end - 1 and place == len(entries) - 1:
                block = _Last(self, block)
            if observer is not None:
                block = _Observed(self, block, block_idx, observer)
            entries[place] = _Entry(self, block) if block_idx == span.start else block
        if (end := span.end - self.first) < len(entries):
            entries[end] = _Exit(self, self._placeholders[end].block)
        return entries


class _Slot:
    """An entry of the list that is no module: costs no hooks, owns no parameters, looks like its block."""

    def __init__(self, slots: BlockSlots, block: Any) -> None:
        self.slots = slots
        self.block = block

    def __getattr__(self, name: str) -> Any:  # models ask their blocks for attention_type and the like
        if name in ("slots", "block"):
            raise AttributeError(name)
        return getattr(self.block, name)


class _Placeholder(_Slot):
    """A block that is elsewhere, before the span; `block` is its module on the meta device."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden, slots = self.slots.hidden_argument(args, kwargs), self.slots
        if slots.block_output == 0:
            return hidden
        return (hidden, *(slots.extras or (None,) * (slots.block_output - 1)))


class _Entry(_Slot):
    """The first block of a call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.slots.with_hidden(args, kwargs, self.slots.hidden)
        return self.block(*args, **kwargs)


class _Exit(_Slot):
    """The block after the last one of a call."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.slots.finish(self.slots.hidden_argument(args, kwargs))


class _Last(_Slot):
    """The last block of the model, or a block whose return value is examined."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.slots.finish(self.block(*args, **kwargs))


class _Observed(_Slot):
    """A real block that reports its input, for the probes."""

    def __init__(self, slots: BlockSlots, block: Any, block_idx: int, observer: Observer) -> None:
        super().__init__(slots, block)
        self.block_idx, self.observer = block_idx, observer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.observer(self.block_idx, self.slots.hidden_argument(args, kwargs))
        return self.block(*args, **kwargs)


class _Recorded(_Slot):
    """A real block whose call goes through a `Recorder`."""

    def __init__(self, slots: BlockSlots, block: Any, block_idx: int, recorder: Recorder) -> None:
        super().__init__(slots, block)
        self.block_idx, self.recorder = block_idx, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.recorder(self.block_idx, partial(self.block, *args, **kwargs))


@dataclass(frozen=True)
class Given:
    """A child module that the first block has at `path`, and the flags there that are set because of it."""

    path: str
    child: str
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.path}.{self.child}"


def only_in_first(blocks: Sequence[nn.Module]) -> tuple[Given, ...]:
    """Modules that the first block has and no other block, if a flag is set in the first block alone."""
    found: list[Given] = []
    others = [dict(block.named_modules()) for block in blocks[1:]]
    for path, part in blocks[0].named_modules() if others else ():
        twins = [modules.get(path) for modules in others]
        if any(type(twin) is not type(part) for twin in twins):
            continue
        flags = tuple(
            name
            for name, value in vars(part).items()
            if value is True and name != "training" and all(vars(twin).get(name) is False for twin in twins)
        )
        children = (name for name, _ in part.named_children() if not any(hasattr(twin, name) for twin in twins))
        found += [Given(path, child, flags) for child in children if flags]
    return tuple(found)


def holder_of(block: nn.Module, given: Sequence[Given]) -> nn.Module:
    """A module that only holds these modules of `block` under their names."""
    root = nn.Module()
    for one in given:
        holder = root
        for part in one.path.split("."):
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.add_module(one.child, block.get_submodule(one.name))
    return root


def give(first: nn.Module, block: nn.Module, given: Sequence[Given]) -> None:
    """Make a block do by itself what `first` would do for it; `first` is the first block or the holder of its
    modules."""
    for one in given:
        part = block.get_submodule(one.path)
        part.add_module(one.child, first.get_submodule(one.name))
        for flag in one.flags:
            setattr(part, flag, True)
