"""Weights in bfloat16 as they are, on processors that multiply such numbers slowly.

Without instructions for it (AVX2: most desktops) PyTorch multiplies bfloat16 at a tenth of the speed of float32,
however many tokens there are. So some rows at a time are converted, which is exact, and multiplied in float32; what
comes out is rounded once. That is at least as close to what float32 gives as PyTorch's own product. Elsewhere nothing
changes, and weights in float32 are never touched. Called by `load_block_span`.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm.models.architecture import find_blocks
from swarmllm.models.quantization import speeds
from swarmllm.models.quantization.loading import install
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.rules import SMALLEST, is_transposed, may_be_packed
from swarmllm.models.quantization.weight import PackedView

WORTH = 2.5
"""Times as fast. Measured on one machine: 4 to 8 with AVX2; 1.3 to 1.7 with AVX-512 and its bfloat16, where it isn't
worth giving up the very bits of the local model."""
NATIVE_TOKENS = 3
"""Most tokens for PyTorch's own product. Measured (5632×2048, AVX2): 2 tokens take 5.9 ms, 6.7 converted; 4 tokens 8.9
and 8.0."""


@dataclass(frozen=True, eq=False)
class Whole(Packed):
    """Weights `[…, out, in]` themselves."""

    scale: None = field(init=False, default=None)  # type: ignore[assignment]

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes}

    def dequantize(self) -> Tensor:
        return self.codes.to(self.dtype)

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.codes[start:end].to(dtype)

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return len(inputs) <= NATIVE_TOKENS and inputs.dtype == self.codes.dtype

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.codes)


def hold_whole(model: PreTrainedModel) -> None:
    """Put a `Whole` in the place of each large matrix in bfloat16 of the blocks, if this processor gains by it."""
    blocks = find_blocks(model).blocks
    prefix = next(f"{name}." for name, module in model.named_modules() if module is blocks)
    large = [
        name
        for name, weight in model.named_parameters()
        if name.startswith(prefix) and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        if weight.shape[-2:].numel() >= SMALLEST and may_be_packed(model, name)
    ]
    if not large or speeds.float32_speedup() < WORTH:
        return
    for name in large:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        weight = module._parameters[leaf]
        assert weight is not None
        transposed = is_transposed(module)
        whole = Whole(weight.data.mT if transposed else weight.data, weight.dtype)
        install(module, leaf, PackedView(whole, transposed=transposed), "none", weight.device)
