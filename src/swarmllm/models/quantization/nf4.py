"""4-bit normal floats (QLoRA, section 3), multiplied by bitsandbytes' kernel if the processor has its instructions.

On other processors `loading` packs them as `decoded.Nf4Pairs`, for our own kernels. Used by `loading`.
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.quantization import cuda
from swarmllm.models.quantization.decoded import NF4
from swarmllm.models.quantization.packed import TILE, Packed, row_slices, scale_dtype
from swarmllm.models.quantization.rules import GROUP

KERNEL_TOKENS = 32
"""Most tokens for the kernel of bitsandbytes. Measured (5632×2048 bfloat16): 32 tokens take 5.1 ms, dequantized 9."""
STEPS = 1 << 16
"""Steps in which a weight is looked up to find the nearest code."""


class Nf4(Packed):
    """4-bit normal floats (QLoRA, section 3): two codes per byte, `[…, out, in/2]`, and one scale per 64 of a row.

    `tiled` weights are laid out for the kernel of bitsandbytes: in each tile of 32 rows, byte j of the 32 that hold a
    pair of columns has column j % 2 of row j // 2 below, and of row 16 + j // 2 above; scales are `[…, in/64, out]`.
    The others are row by row, the first column above; scales are `[…, out, in/64]`.
    """

    @classmethod
    def quantize(cls, weight: Tensor, *, tiled: bool | None = None) -> "Nf4":
        """Round to the nearest of the 16 values; `tiled` None = if this processor has the kernel for it."""
        rows, columns = weight.shape[-2:]
        if tiled is None:
            tiled = weight.dtype == torch.bfloat16 and rows % TILE == 0 and bitsandbytes_kernel()
        device = weight.device
        codes = torch.empty(*weight.shape[:-1], columns // 2, dtype=torch.uint8, device=device)
        scale = torch.empty(*weight.shape[:-1], columns // GROUP, dtype=scale_dtype(weight.dtype), device=device)
        flat_codes, flat_scale = codes.view(-1, codes.shape[-1]), scale.view(-1, scale.shape[-1])
        for start, end, part in row_slices(weight):
            groups = part.reshape(-1, GROUP)
            largest = torch.maximum(groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True).neg_())
            largest = largest.clamp_min_(torch.finfo(torch.float32).tiny).to(scale.dtype)
            steps = groups.div_(largest).add_(1).mul_(STEPS / 2).round_().clamp_(0, STEPS).to(torch.int32)
            nearest = _nearest(device).index_select(0, steps.flatten()).view(end - start, -1, 2)
            pairs = (nearest[..., 0] << 4) | nearest[..., 1]
            flat_codes[start:end] = _tile(pairs) if tiled else pairs
            flat_scale[start:end] = largest.view(end - start, -1)
        if not tiled:
            return cls(codes, scale, weight.dtype)
        return TiledNf4(codes, scale.mT.contiguous(), weight.dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self._dequantize_rows(self.codes[start:end], self.scale[start:end], dtype)

    def _dequantize_rows(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        import bitsandbytes  # noqa: F401 - registers the operator

        shape = (len(codes), codes.shape[1] * 2)
        dequantize = torch.ops.bitsandbytes.dequantize_4bit
        rows: Tensor = dequantize(codes.contiguous(), scale.float().contiguous(), GROUP, "nf4", shape, dtype)
        return rows

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return False

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def cuda_matrix(self) -> cuda.Matrix | None:
        return cuda.Matrix(codes=self.codes, scale=self.scale, values=NF4, high_first=True)


class TiledNf4(Nf4):
    """`Nf4` as the kernel for CPUs wants it."""

    def split(self, rows: int) -> Nf4:  # type: ignore[override]
        if rows % TILE:  # the kernel would end the process
            return Nf4(_untile(self.codes), self.scale.T.contiguous(), self.dtype).split(rows)
        codes = self.codes.view(-1, rows, self.codes.shape[-1])
        scale = self.scale.view(self.scale.shape[0], -1, rows).transpose(0, 1)
        return TiledNf4(codes, scale, self.dtype)

    def rows(self, start: int, end: int) -> "TiledNf4":
        """They have to be whole tiles."""
        codes, scale = self.codes.narrow(-2, start, end - start), self.scale.narrow(-1, start, end - start)
        return TiledNf4(codes, scale, self.dtype)

    def columns(self, start: int, end: int) -> "TiledNf4":
        by_rows = Nf4(_untile(self.codes), self.scale.mT, self.dtype).columns(start, end)
        return TiledNf4(_tile(by_rows.codes), by_rows.scale.mT.contiguous(), self.dtype)

    def cuda_matrix(self) -> None:
        return None  # made for a CPU; the model was moved since

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self._dequantize_rows(_untile(self.codes[start:end]), self.scale[:, start:end].T, dtype)

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return inputs.dtype == torch.bfloat16 and len(inputs) <= KERNEL_TOKENS

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.bitsandbytes.gemv_4bit(
            inputs, self.codes, tuple(self.shape), self.scale.contiguous(), _values(), GROUP
        )
        return outputs


def _tile(codes: Tensor) -> Tensor:
    """Row by row → tiled, both `[out, in/2]`."""
    rows, half = codes.shape
    first, second = codes.view(-1, 2, 16, half).unbind(1)  # [tiles, 16, in/2]: below, above
    even = (first >> 4) | (second & 0xF0)  # the even columns of both rows
    odd = (first & 0xF) | ((second & 0xF) << 4)
    return torch.stack([even, odd], dim=-1).transpose(1, 2).reshape(rows, half)


def _untile(codes: Tensor) -> Tensor:
    """Tiled → row by row, both `[out, in/2]`."""
    rows, half = codes.shape
    even, odd = codes.view(-1, half, 16, 2).transpose(1, 2).unbind(-1)
    first = ((even & 0xF) << 4) | (odd & 0xF)
    second = (even & 0xF0) | (odd >> 4)
    return torch.stack([first, second], dim=1).view(rows, half)


@functools.cache
def _functional() -> Any:
    """bitsandbytes costs seconds to import, and logs a line for each matrix."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional


def bitsandbytes_kernel() -> bool:
    """True if bitsandbytes has its NF4 kernel for this processor (AVX512 with bfloat16)."""
    return bool(_functional().has_avx512bf16())


@functools.cache
def _nearest(device: torch.device) -> Tensor:
    """The code nearest to each of `STEPS + 1` numbers from -1 to 1: six times as fast as bitsandbytes finds it."""
    values, steps = _values(), torch.linspace(-1, 1, STEPS + 1)
    return torch.bucketize(steps, (values[1:] + values[:-1]) / 2).to(device, torch.uint8)


@functools.cache
def _values() -> Tensor:
    values: Tensor = _functional().get_4bit_type("nf4", device="cpu")
    return values
