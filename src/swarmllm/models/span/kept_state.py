"""State that modules keep after a call, and how it is put back before the next one.

A server has one rotary module for all sessions. With dynamic NTK it keeps the frequencies of the longest call so far,
and another session's call must not find them. `probes` compares all attributes before and after it has tried the
blocks. `BlockSpan` puts the changed ones back before each call, so that a call depends on its own inputs alone.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

MAX_COPIED_BYTES = 1 << 20
"""The content of larger tensors is not copied: frequencies and counters are small. Assumed."""
_ABSENT = object()
_OF_TORCH = frozenset(vars(nn.Module()))
_KINDS = (bool, int, float, str, tuple, Tensor, type(None))


@dataclass(slots=True)
class _Attribute:
    """One attribute or buffer, with its value at some time."""

    module: nn.Module
    name: str
    value: Any
    content: Tensor | None = None
    version: int = 0
    """The number of writes to a tensor."""

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Self:
        value = module._buffers.get(name, vars(module).get(name, _ABSENT))
        found = cls(module, name, value)
        if isinstance(value, Tensor) and not value.is_meta:
            found.version = _version(value)
            found.content = value.detach().clone() if value.nbytes <= MAX_COPIED_BYTES else None
        return found

    def has_changed(self) -> bool:
        now = _Attribute.of(self.module, self.name)
        if not isinstance(self.value, Tensor) or not isinstance(now.value, Tensor):
            is_equal = isinstance(self.value, bool | int | float | str) and now.value == self.value
            return now.value is not self.value and not is_equal
        if self.content is None or now.content is None:
            return now.value is not self.value or now.version != self.version
        return now.content.shape != self.content.shape or not torch.equal(now.content.to(self.content), self.content)

    def put_back(self) -> None:
        """Give the module its earlier value; a tensor keeps its address."""
        if self.content is not None and _version(self.value) != self.version:
            self.value.copy_(self.content)
            self.version = _version(self.value)
        place = self.module._buffers if self.name in self.module._buffers else vars(self.module)
        if self.value is not _ABSENT:
            place[self.name] = self.value
        else:
            place.pop(self.name, None)


class KeptState:
    """Attributes of a model's modules by name, with their values when this object is made."""

    def __init__(self, root: nn.Module, names: Iterable[str]) -> None:
        self._attributes = {name: _Attribute.of(*_place(root, name)) for name in names}
        self._left_out: set[int] = set()

    @classmethod
    def everything(cls, root: nn.Module, without: Iterable[Tensor] = ()) -> "KeptState":
        """All state that a call might change, `without` these buffers, which another object manages."""
        left_out = {id(tensor) for tensor in without}
        found = cls(root, sorted(_names(root, left_out)))
        found._left_out = left_out
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._attributes)

    def changed(self, root: nn.Module) -> "KeptState":
        """The attributes that have changed, with their earlier values; new ones had been absent."""
        found = KeptState(root, ())
        found._attributes = {name: one for name, one in self._attributes.items() if one.has_changed()}
        for name in sorted(_names(root, self._left_out) - self._attributes.keys()):
            module, attribute = _place(root, name)
            found._attributes[name] = _Attribute(module, attribute, _ABSENT)
        return found

    def add(self, others: "KeptState") -> None:
        """Put these attributes back as well, now and later."""
        self._attributes |= others._attributes
        self.put_back()

    def put_back(self) -> None:
        """Give the modules their earlier values."""
        for one in self._attributes.values():
            one.put_back()


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return root.get_submodule(path), attribute


def _names(root: nn.Module, left_out: Container[int]) -> set[str]:
    named = ((path, name) for path, module in root.named_modules() for name in _state(module, left_out))
    return {f"{path}.{name}" if path else name for path, name in named}


def _state(module: nn.Module, left_out: Container[int]) -> Iterator[str]:
    """Names of the state that an architecture's own module may keep: numbers, texts, tensors, but no weights."""
    if type(module).__module__.startswith("swarmllm."):
        return
    yield from (name for name, buffer in module._buffers.items() if id(buffer) not in left_out)
    for name, value in vars(module).items():
        if name not in _OF_TORCH and isinstance(value, _KINDS):
            yield name


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
