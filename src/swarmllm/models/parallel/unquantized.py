"""Weights as they are. Made by `shared`, multiplied in the server's process and in followers."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmllm.models.quantization.packed import Packed


@dataclass(frozen=True, eq=False)
class Plain(Packed):
    """Weights `[…, out, in]`, multiplied by the very function that the model would call."""

    scale: None = field(init=False, default=None)  # type: ignore[assignment]

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes}

    def multiply(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """`bias` is added within the product, as the model does it: afterwards it could be rounded otherwise."""
        return F.linear(inputs, self.codes.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))

    def multiply_transposed(self, grads: Tensor) -> Tensor:
        return grads @ self.codes.to(grads.dtype)

    def dequantize(self) -> Tensor:
        return self.codes.to(self.dtype)

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.codes[start:end].to(dtype)

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return False

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError
