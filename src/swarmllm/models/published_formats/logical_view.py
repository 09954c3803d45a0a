"""A checkpoint as if every weight were one tensor of its own name, whatever it is stored as.

transformers' renaming and merging of tensors, fingerprints and loaders see that view, so nothing of them knows formats.
Used by `Checkpoint`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from swarmllm.errors import CorruptWeightsError
from swarmllm.models.published_formats.stored_format import StoredFormat
from swarmllm.models.quantization.weight import PackedView


class LogicalView:
    """Names of weights, and which stored tensors each consists of."""

    def __init__(self, form: StoredFormat, stored: Iterable[str]) -> None:
        self._form = form
        found: dict[str, dict[str, str]] = {}
        for name in stored:
            weight, part = form.split(name)
            found.setdefault(weight, {})[part] = name
        self._parts = {
            weight: parts
            for weight, parts in found.items()
            if len(parts) > 1 and any(part in form.main for part in parts)
        }
        """Weights that consist of several tensors; what a format stores beside them is a part as well."""
        of_several = {name for parts in self._parts.values() for name in parts.values()}
        self._plain = {name for parts in found.values() for name in parts.values()} - of_several

    def names(self) -> dict[str, str]:
        """Name of each weight → the stored tensor that has its codes, or all of it."""
        mains = {w: next(parts[part] for part in self._form.main if part in parts) for w, parts in self._parts.items()}
        return {**{name: name for name in self._plain}, **mains}

    def is_packed(self, weight: str) -> bool:
        """Whether it is stored in the format."""
        return weight in self._parts

    def stored(self, weights: Iterable[str]) -> list[str]:
        """Names of the stored tensors that these weights consist of."""
        return [name for weight in weights for name in self._parts.get(weight, {"": weight}).values()]

    def tensors(
        self,
        weights: Iterable[str],
        stored: Mapping[str, Any],
        packed_for: torch.dtype | None,
        described: Callable[[str], Any] | None = None,
    ) -> dict[str, Any]:
        """Lazy weights of those names from the lazy tensors that are stored; packed where that can be, unless None.

        `described` finds what headers say of a weight, if the format wants to know.
        """

        def weight(name: str) -> Any:
            if name not in self._parts:
                return stored[name]
            parts = {part: stored[one] for part, one in self._parts[name].items()}
            if described is not None:
                parts[self._form.described] = described(name)
            return LazyWeight(name, self._form, parts, packed_for)

        return {name: weight(name) for name in weights}


class LazyWeight:
    """A weight that is read, and put together, when it is indexed; for transformers' loader."""

    def __init__(self, name: str, form: StoredFormat, parts: Mapping[str, Any], packed_for: torch.dtype | None) -> None:
        self._name, self._form, self._parts, self._packed_for = name, form, parts, packed_for

    def __getitem__(self, index: Any) -> Any:
        parts = {part: lazy[...] for part, lazy in self._parts.items()}
        try:
            if self._packed_for is not None and index is Ellipsis:
                packed = self._form.keep(parts, self._packed_for)
                if packed is not None:
                    return PackedTensor(packed, transposed=self._form.transposed)
                self._form.say_not_kept(self._name)
            weight = self._form.dequantize(parts)
        except (RuntimeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
            shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in parts.items())
            raise CorruptWeightsError(
                f"{self._name} is stored in a form that can't be read as {type(self._form).__name__} ({shapes})"
            ) from error
        return (weight.mT if self._form.transposed else weight)[index]

    def get_shape(self) -> list[int]:
        return list(self[...].shape)

    def get_dtype(self) -> str:
        """What the weight is put together in."""
        return "F32"


class PackedTensor(PackedView):
    """A packed weight on its way through transformers' loader, which moves, converts, joins and transposes tensors."""

    def to(self, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> "PackedTensor":
        """The same weight; `dtype` is what it then stands for."""
        packed = self.packed if dtype is None else replace(self.packed, dtype=dtype)
        return PackedTensor(packed, transposed=self.transposed)

    def contiguous(self) -> "PackedTensor":
        return self

    def __getitem__(self, index: Any) -> Any:
        return self if index is Ellipsis else super().__getitem__(index)
