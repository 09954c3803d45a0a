"""The interface of a format of published weights."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from swarmllm.models.quantization.packed import Packed

logger = logging.getLogger(__name__)

Parts = Mapping[str, Tensor]
"""What is stored for one weight: suffix → tensor."""


class StoredFormat(ABC):
    """How one checkpoint stores the weights that are quantized; the others are stored as ever."""

    parts: ClassVar[tuple[str, ...]]
    """Suffixes of stored names; the first one that fits counts."""
    main: ClassVar[tuple[str, ...]]
    """Those of `parts` that hold the codes: a weight with none of them is stored whole."""
    target: ClassVar[str] = ".weight"
    """What the weight's own name has in place of the suffix."""

    described: ClassVar[str] = ""
    """The part, if there is one, that is what the header of the file says of the weight: its text as bytes."""
    transposed: ClassVar[bool] = False
    """Whether models hold what this format stores as `[…, out, in]` the other way round."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        """The config's `quantization_config`."""
        self._said = False

    def unread(self) -> str | None:
        """What these settings name that isn't read here; None if there is no such thing."""
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
