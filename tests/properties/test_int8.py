"""Products with weights in 8 bits: the same for each input whoever shares it, on all kinds of processors."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_levels import LEVELS

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization import packed as packed_weights
from swarmllm.models.quantization.packed import Int8

MOST = 70
"""Inputs: more than the kernels multiply at a time."""


@pytest.mark.skipif(kernels.library() is None, reason="swarmllm was installed without a C compiler")
@settings(max_examples=60)
@given(
    st.integers(1, 30),
    st.one_of(st.integers(1, 80), st.sampled_from([512, 528, 1040])),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 3),
    st.sampled_from(LEVELS or [0]),
)
def test_a_product_does_not_depend_on_other_rows(
    rows: int, columns: int, dtype: torch.dtype, threads: int, level: int
) -> None:
    generator = torch.Generator().manual_seed(rows * 10_000 + columns)
    packed = Int8.quantize(torch.randn(rows, columns, generator=generator).to(dtype))
    inputs = torch.randn(MOST, columns, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "level", lambda: level)
        patch.setattr(kernels, "WORTH_A_THREAD", 1)
        patch.setattr(packed_weights, "torch_multiplies_int8_faster", lambda: False)
        patch.setattr(kernels, "most_inputs", lambda dtype, *, in_strips=False: MOST)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        together = packed.multiply(inputs)
        wanted = F.linear(inputs.double(), packed.codes.double() * packed.scale.double()[:, None])
        error = float((together - wanted).norm() / wanted.norm().clamp_min(1e-30))
        assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
        for count in (*range(1, 18), 33, MOST - 1):
            assert torch.equal(packed.multiply(inputs[-count:]), together[-count:])
