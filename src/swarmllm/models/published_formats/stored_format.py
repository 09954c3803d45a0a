"""The interface of a format of published weights, and a checkpoint as if every weight were one tensor of its own name.

transformers' renaming and merging of tensors, fingerprints and loaders see a `LogicalView`, so they need not know
formats. `Checkpoint` uses it.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from swarmllm.errors import CorruptWeightsError
from swarmllm.machine_memory import memory_ran_out
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.weight import PackedView

logger = logging.getLogger(__name__)

Parts = Mapping[str, Tensor]
"""The tensors stored for one weight: suffix → tensor."""


class StoredFormat(ABC):
    """The storage of quantized weights in one checkpoint; other weights are plain tensors."""

    parts: ClassVar[tuple[str, ...]]
    """Suffixes of stored names; the first one that fits counts."""
    main: ClassVar[tuple[str, ...]]
    """The suffixes of the codes: a weight without any of them is stored whole."""
    target: ClassVar[str] = ".weight"
    """The end of the weight's own name, in place of the suffix."""

    described: ClassVar[str] = ""
    """The suffix, if there is one, for the description of the weight in the file's header: its text as bytes."""
    transposed: ClassVar[bool] = False
    """True if models hold the transposition of this format's `[…, out, in]`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        """The config's `quantization_config`."""
        self._said = False

    def unread(self) -> str | None:
        """A setting that can't be read; None if all can."""
        return None

    def split(self, name: str) -> tuple[str, str]:
        """Name of a stored tensor → (name of the weight that it belongs to, its part); "" is no part of any."""
        for suffix in self.parts:
            if name.endswith(suffix):
                return name.removesuffix(suffix) + self.target, suffix
        return name, ""

    @abstractmethod
    def dequantize(self, parts: Parts) -> Tensor:
        """The weight as the format defines it, `[…, out, in]` unless `transposed`, exact in float32."""

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        """The same weight at its own bits `[…, out, in]`, which stands for one of `dtype`; None if that can't be."""
        return None

    def say_not_kept(self, name: str) -> None:
        """Log, once, that there are weights which can't be kept."""
        if not self._said:
            logger.warning(
                "%s, and perhaps others, can't stay in the bits that the checkpoint stores it in: they go by "
                "--quant_type (int8, the default, changes such weights by less than 1 %%; none keeps their values)",
                name,
            )
        self._said = True

    def kept_bits(self) -> float | None:
        """Bits of a weight that is kept, with its scales, at most; None if weights aren't kept. To plan memory by."""
        return None


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
        """Weights that consist of several tensors, with all tensors that a format stores for them."""
        of_several = {name for parts in self._parts.values() for name in parts.values()}
        self._plain = {name for parts in found.values() for name in parts.values()} - of_several

    def names(self) -> dict[str, str]:
        """Name of each weight → the stored tensor that has its codes, or all of it."""
        mains = {w: next(parts[part] for part in self._form.main if part in parts) for w, parts in self._parts.items()}
        return {**{name: name for name in self._plain}, **mains}

    def is_packed(self, weight: str) -> bool:
        """True if the weight is stored in the format."""
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
        """Lazy weights of these names from the lazy stored tensors; packed if possible, unless `packed_for` is None.

        `described` finds a weight's description in headers, if the format needs it.
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
                    packed.require_sizes()
                    return PackedTensor(packed, transposed=self._form.transposed)
                self._form.say_not_kept(self._name)
            weight = self._form.dequantize(parts)
        except (ArithmeticError, LookupError, RuntimeError, StopIteration, TypeError, ValueError) as error:
            if memory_ran_out(error):
                raise
            shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in parts.items())
            raise CorruptWeightsError(
                f"{self._name} is stored in a form that can't be read as {type(self._form).__name__} ({shapes})"
            ) from error
        return (weight.mT if self._form.transposed else weight)[index]

    def get_shape(self) -> list[int]:
        return list(self[...].shape)

    def get_dtype(self) -> str:
        """The dtype in which the weight is put together."""
        return "F32"


class PackedTensor(PackedView):
    """A packed weight on its way through transformers' loader, which moves, converts, joins and transposes tensors."""

    def to(self, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> "PackedTensor":
        """The same weight; it then stands for `dtype`."""
        packed = self.packed if dtype is None else replace(self.packed, dtype=dtype)
        return PackedTensor(packed, transposed=self.transposed)

    def contiguous(self) -> "PackedTensor":
        return self

    def __getitem__(self, index: Any) -> Any:
        return self if index is Ellipsis else super().__getitem__(index)
