"""Packed weights as published checkpoints hold them: their own codes, with scales for groups of a row.

To round a published weight once more would cost accuracy that its makers have saved, and nothing here takes more memory
than the checkpoint takes on disk, but for scales. Made by `models/published_formats`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarmllm.models.quantization import cuda, kernels
from swarmllm.models.quantization.codes import E2M1, FP4, INT4, NF4, UINT4, scaled, values_of_pairs
from swarmllm.models.quantization.decoded import Decoded


class Published(Decoded):
    """Codes that are numbers, `[…, out, in]` (float8_e4m3fn, int8 or uint8), with scales `[…, out, groups]`."""

    values: ClassVar[tuple[float, ...] | None] = None
    """What the codes stand for, if two are in a byte, `[…, out, in/2]`, the first of two below."""
    divides: ClassVar[bool] = False
    """Whether what is named `factor` divides the scales: its inverse would be rounded."""

    @property
    def shape(self) -> torch.Size:
        per_byte = 1 if self.values is None else 2
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * per_byte))

    def _decoded(self, rows: dict[str, Tensor]) -> Tensor:
        codes, scale, zero, factor, least = (rows.get(name) for name in ("codes", "scale", "zero", "factor", "least"))
        assert codes is not None
        assert scale is not None
        if factor is not None:
            scale = scale.float() / factor[:, None] if self.divides else scale.float() * factor[:, None]
        weights = scaled(codes if self.values is None else values_of_pairs(codes, self.values), scale, zero)
        if least is not None:
            weights.view(*least.shape, -1).add_(least[..., None])
        return weights

    def _cuda_matrix(self) -> cuda.Matrix:
        return cuda.Matrix(**self.tensors(), divides=self.divides, values=self.values)  # type: ignore[arg-type]

    def _matrix(self) -> kernels.Matrix:
        return kernels.Matrix(**self.tensors(), divides=self.divides, values=self.values)  # type: ignore[arg-type]


class Int4(Published):
    """Whole numbers from -8 to 7."""

    values = INT4


class Nf4Pairs(Published):
    """4-bit normal floats in groups of any size."""

    values = NF4


class Fp4Pairs(Published):
    """bitsandbytes' 4-bit floats."""

    values = FP4


class Mxfp4Pairs(Published):
    """4-bit floats, whose scales are powers of two."""

    values = E2M1


@dataclass(frozen=True, eq=False)
class Uint4(Published):
    """Whole numbers from 0 to 15, of which each group's zero `[…, out, groups]` is taken away: uint8, or fractions."""

    zero: Tensor
    values = UINT4


@dataclass(frozen=True, eq=False)
class ZeroedBytes(Published):
    """The same with whole numbers of 8 bits, int8 or uint8."""

    zero: Tensor


@dataclass(frozen=True, eq=False)
class ShiftedInt4(Published):
    """Whole numbers from -8 to 7, to whose products with the scales something is added: `[…, out, groups]`, of the
    scales' dtype, which has 16 bits: kernels round the products only if they aren't exact."""

    least: Tensor
    values = INT4


@dataclass(frozen=True, eq=False)
class Nvfp4(Published):
    """4-bit floats with scales in 8-bit floats, and a factor of the whole matrix, for each of its rows: `[…, out]`."""

    factor: Tensor
    values = E2M1


class DividedNvfp4(Nvfp4):
    """The same, but the factor is divided by."""

    divides = True
