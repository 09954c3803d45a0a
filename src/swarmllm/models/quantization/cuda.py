"""Multiplying by packed weights on CUDA: kernels of bitsandbytes. Called by `packed` and `nf4`."""

import functools

import torch
from torch import Tensor

OUTLIER_THRESHOLD = 6.0
"""Inputs beyond this are multiplied in 16 bits (LLM.int8, section 3.2)."""


def multiply_int8(inputs: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """LLM.int8: inputs in 8 bits as well, their outlier channels in 16. `[tokens, in]` → `[tokens, out]`."""
    from bitsandbytes.autograd._functions import MatmulLtState, matmul

    state = MatmulLtState()
    state.CB, state.SCB = codes, scale.float() * 127  # bitsandbytes keeps the largest value of a row
    state.has_fp16_weights = state.is_training = False
    state.threshold = OUTLIER_THRESHOLD
    outputs: Tensor = matmul(inputs.detach(), codes, state=state)
    return outputs


def multiply_nf4(inputs: Tensor, codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """`[tokens, in]` → `[tokens, out]`."""
    from bitsandbytes.autograd._functions import matmul_4bit
    from bitsandbytes.functional import QuantState

    shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
    state = QuantState(  # type: ignore[no-untyped-call]
        absmax=scale.float().flatten(),
        shape=shape,
        code=_nf4_values(codes.device),
        blocksize=group,
        quant_type="nf4",
        dtype=inputs.dtype,
    )
    outputs: Tensor = matmul_4bit(inputs.detach(), codes.reshape(-1, 1), quant_state=state)
    return outputs


@functools.cache
def _nf4_values(device: torch.device) -> Tensor:
    """What the codes stand for, copied to the device once and not for each product."""
    from bitsandbytes.functional import get_4bit_type

    values: Tensor = get_4bit_type("nf4", device=device)  # type: ignore[no-untyped-call]
    return values
