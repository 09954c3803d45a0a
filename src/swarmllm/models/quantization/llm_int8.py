"""LLM.int8 (Dettmers et al., 2022): weights and inputs in 8 bits, but for inputs that are far out.

`int8` has the same weights and leaves the inputs as they are, which is more exact, and faster where a few inputs are
multiplied; this is for comparing with the paper and with bitsandbytes. Unlike there, inputs are far out one by one and
not by columns of the whole batch, so nobody's outputs depend on others who are computed with them. Made by `loading`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmllm.models.quantization.packed import Int8

OUTLIER_THRESHOLD = 6.0
"""Inputs beyond this are multiplied as they are (section 3.2)."""
LARGEST = 127
WHOLE_BYTES = 8
"""cuBLAS multiplies matrices of whole numbers whose sides are multiples of this."""
PADDED_ROWS = 32
"""And it wants more than 16 inputs."""


class LlmInt8(Int8):
    """Codes and scales of `Int8`; each input has a scale of its own, as each row of the weight has."""

    def multiply(self, inputs: Tensor) -> Tensor:
        wide = inputs.float()
        is_outlier = ~(wide.abs() <= OUTLIER_THRESHOLD)  # what is no number goes the exact way, and stays none
        usual = wide.masked_fill(is_outlier, 0.0)
        steps = (usual.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        products = _product(usual.div_(steps).round_().to(torch.int8), self.codes)
        outputs = products.mul_(steps).mul_(self.scale.float())
        # Their columns differ from input to input, and to find them, the GPU would have to be waited for.
        return outputs.add_(super().multiply(inputs.masked_fill(~is_outlier, 0.0))).to(inputs.dtype)


def _product(inputs: Tensor, codes: Tensor) -> Tensor:
    """`[tokens, in]`, `[out, in]`, both int8 → `[tokens, out]` in float32."""
    if not len(inputs) or any(size % WHOLE_BYTES for size in codes.shape):
        return inputs.float() @ codes.float().T
    padded = F.pad(inputs, (0, 0, 0, -len(inputs) % PADDED_ROWS))
    return torch._int_mm(padded, codes.T)[: len(inputs)].float()
