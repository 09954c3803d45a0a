"""What only the first block of a stack has, and computes for all others: T5's table of relative positions.

Such a model hands what its first block has made of it from block to block. A block makes it itself if it has the same
module and the same flags set, so a server without the first block reads that one module of it. Found by comparing
blocks, whatever the names; `span/probes` would refuse blocks that come out differently.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


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
    """What the first block has and no other one, beside a flag that is set in the first block alone."""
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
    """A module that does nothing but hold those modules of `block` under their names."""
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
    """Let a block do itself what `first`, the first block or the holder of its modules, would do for it."""
    for one in given:
        part = block.get_submodule(one.path)
        part.add_module(one.child, first.get_submodule(one.name))
        for flag in one.flags:
            setattr(part, flag, True)
