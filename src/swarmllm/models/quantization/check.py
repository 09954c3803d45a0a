"""A self-test when quantized blocks are loaded: kernels differ between processors, and some have been wrong in silence.

Multiplies by some rows of one weight of each kind and shape, a few tokens and many, and compares outputs and gradients
with those of the dequantized weight. Called by `load_block_span`.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmllm.errors import ConfigurationError
from swarmllm.models.quantization.llm_int8 import LlmInt8
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.quantization.weight import QuantizedWeight

TOKENS = (1, 5, 40)
"""Numbers of tokens that take the kernels for few tokens, and the way for many."""
ROWS = 256
"""Rows of a weight that are compared, if it has a multiple of these: kernels work on rows in parts, and a whole large
weight takes 25 times as long, at each start (measured: 9 s with AVX2, hidden 2048)."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative errors that rounding explains, some three times those measured."""
LLM_INT8_TOLERANCE = 5e-2
"""The same of outputs where inputs are rounded to 8 bits as well."""


def check_quantized(modules: Iterable[nn.Module]) -> int:
    """Test each kind of quantized weight among the modules; how many kinds there are.

    Raises:
        ConfigurationError: this machine computes something else than it should.
    """
    kinds: dict[object, Packed] = {}
    for module in modules:
        if isinstance(module, QuantizedWeight):
            packed = module.packed
            matrix = packed[0] if len(packed.shape) > 2 else packed
            kinds.setdefault((type(matrix), matrix.shape, matrix.dtype), matrix)
    for whole in kinds.values():
        matrix = whole if whole.shape[0] % ROWS else whole.split(ROWS)[0]
        for tokens in TOKENS:
            check_matrix(matrix, tokens)
    return len(kinds)


def check_matrix(matrix: Packed, tokens: int) -> None:
    """Compare outputs and gradients of one matrix with those of its dequantized self.

    Raises:
        ConfigurationError: they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(tokens)
    rows, columns = matrix.shape
    inputs, grads = (
        torch.randn(tokens, size, generator=generator).to(matrix.dtype).to(matrix.device) for size in (columns, rows)
    )
    whole = matrix.dequantize()
    with torch.no_grad():
        without_gradients = matrix.linear(inputs)
    leaf = inputs.requires_grad_()
    with torch.enable_grad():
        outputs = matrix.linear(leaf)
    (grad,) = torch.autograd.grad(outputs, leaf, grads)
    wide = torch.promote_types(matrix.dtype, torch.float32)  # as precise, and fast on every processor
    whole, expected = whole.to(wide), F.linear(inputs.detach().to(wide), whole.to(wide))
    tolerance = TOLERANCES[matrix.dtype]
    for what, got, wanted in (
        ("outputs", without_gradients, expected),
        ("outputs", outputs.detach(), expected),
        ("gradients", grad, grads.to(wide) @ whole),
    ):
        limit = LLM_INT8_TOLERANCE if isinstance(matrix, LlmInt8) and what == "outputs" else tolerance
        if not _relative_error(got, wanted) <= limit:
            raise ConfigurationError(
                f"this machine multiplies {type(matrix).__name__} weights wrongly ({what} of {tokens} tokens, "
                f"{rows}×{columns} in {matrix.dtype}): serve with --quant_type none"
            )


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).float().norm() / wanted.float().norm().clamp_min(1e-30))
