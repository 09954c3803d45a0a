"""4-bit normal floats (QLoRA, section 3), multiplied by bitsandbytes' kernels on CUDA.

For CPUs `loading` packs them as `published.Nf4Pairs`, which our own kernels multiply. Used by `loading`.
"""

import functools

import torch
from torch import Tensor

from swarmllm.models.quantization import cuda
from swarmllm.models.quantization.codes import NF4
from swarmllm.models.quantization.packed import Packed, row_slices, scale_dtype
from swarmllm.models.quantization.rules import GROUP

STEPS = 1 << 16
"""How finely a weight is looked at to find the nearest code."""


class Nf4(Packed):
    """4-bit normal floats (QLoRA, section 3): two codes per byte, `[…, out, in/2]`, the first column above.

    There is a scale for 64 columns of a row, `[…, out, in/64]`.
    """

    @classmethod
    def quantize(cls, weight: Tensor) -> "Nf4":
        """Round to the nearest of the 16 values."""
        columns = weight.shape[-1]
        codes = torch.empty(*weight.shape[:-1], columns // 2, dtype=torch.uint8)
        scale = torch.empty(*weight.shape[:-1], columns // GROUP, dtype=scale_dtype(weight.dtype))
        flat_codes, flat_scale = codes.view(-1, codes.shape[-1]), scale.view(-1, scale.shape[-1])
        for start, end, part in row_slices(weight):
            groups = part.reshape(-1, GROUP)
            largest = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny).to(scale.dtype)
            steps = (groups / largest).add_(1).mul_(STEPS / 2).round_().clamp_(0, STEPS).to(torch.int32)
            nearest = _nearest().index_select(0, steps.flatten()).view(end - start, -1, 2)
            flat_codes[start:end] = (nearest[..., 0] << 4) | nearest[..., 1]
            flat_scale[start:end] = largest.view(end - start, -1)
        return cls(codes, scale, weight.dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        import bitsandbytes  # noqa: F401 - registers the operator

        codes, scale = self.codes[start:end].contiguous(), self.scale[start:end].float().contiguous()
        shape = (len(codes), codes.shape[1] * 2)
        rows: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scale, GROUP, "nf4", shape, dtype)
        return rows

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return False

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def _multiply_on_cuda(self, inputs: Tensor) -> Tensor:
        return cuda.multiply_nf4(inputs, self.codes, self.scale, GROUP)


@functools.cache
def _nearest() -> Tensor:
    """The code nearest to each of `STEPS + 1` numbers from -1 to 1: six times as fast as bitsandbytes finds it."""
    values, steps = torch.tensor(NF4), torch.linspace(-1, 1, STEPS + 1)
    return torch.bucketize(steps, (values[1:] + values[:-1]) / 2).to(torch.uint8)
