"""Packed weights whose codes are decoded row by row: by `kernels.c`, or by torch where it isn't there and on CUDA.

Few inputs multiply by the kernels, many by rows that are decoded a few at a time. On CUDA, few inputs multiply by
`cuda_products` where the form describes itself to it. Used by `published`, `gguf_blocks`
and `kbit`.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.speeds import kernels_take


class Decoded(Packed):
    """A form that knows what its codes stand for, and leaves the products to this class."""

    @property
    def _in_kernels(self) -> bool:
        """Whether the kernels know these codes."""
        return True

    @abstractmethod
    def _matrix(self) -> kernels.Matrix:
        """This matrix, as the kernels want it."""

    @abstractmethod
    def _decoded(self, rows: dict[str, Tensor]) -> Tensor:
        """What the kernels would decode, in float32, from these rows of `tensors()`."""

    def _rows(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        if self._in_kernels and self.device.type == "cpu" and kernels.library() is not None:
            return self._matrix().dequantize(start, end).to(dtype)
        return self._decoded({name: tensor[start:end] for name, tensor in self.tensors().items()}).to(dtype)

    def _output_scale(self) -> None:
        return None

    def _kernel_takes(self, inputs: Tensor) -> bool:
        return self._in_kernels and kernels_take(inputs)

    def _multiply_by_kernel(self, inputs: Tensor) -> Tensor:
        return self._matrix().multiply(inputs.float()).to(inputs.dtype)
