"""Weights of 2 to 6 bits: packing loses nothing, rounding half a step, and the C kernels decode what torch does."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_levels import LEVELS
from torch import Tensor

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.decoded import PLANES, KBit, num_values, pack, unpack
from swarmllm.models.quantization.loading import check_matrix
from swarmllm.models.quantization.rules import GROUP

BITS = list(PLANES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
bits_of_a_weight, dtypes, seeds = st.sampled_from(BITS), st.sampled_from(DTYPES), st.integers(0, 1 << 30)
needs_kernels = pytest.mark.skipif(kernels.library() is None, reason="swarmllm was installed without a C compiler")


@st.composite
def weights(draw: st.DrawFn, experts: bool = True) -> Tensor:
    """Weights of any spread around any middle, some stored transposed; some groups are all one number."""
    sizes = [draw(st.integers(1, 3))] if experts and draw(st.booleans()) else []
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 18)) * GROUP
    generator = torch.Generator().manual_seed(draw(seeds))
    weight = torch.randn(*sizes, columns, rows, generator=generator).mT
    weight = weight if draw(st.booleans()) else weight.contiguous()
    weight = weight * 10.0 ** draw(st.integers(-4, 2)) + draw(st.sampled_from([0.0, 0.5]))
    weight[..., :GROUP] = draw(st.sampled_from([0.0, -1.0, 0.3]))
    return weight.to(draw(dtypes))


@given(bits_of_a_weight, st.lists(st.integers(1, 3), max_size=3), seeds)
def test_packing_loses_nothing(bits: float, sizes: list[int], seed: int) -> None:
    codes = torch.randint(
        num_values(bits), (*sizes, GROUP), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
    )
    packed = pack(codes, bits)
    assert packed.shape == (*sizes, GROUP * bits / 8)
    assert torch.equal(unpack(packed, bits), codes)


@settings(max_examples=40)
@given(weights(), bits_of_a_weight)
def test_no_weight_is_off_by_more_than_half_a_step(weight: Tensor, bits: float) -> None:
    packed = KBit.quantize(weight, bits)
    assert (packed.shape, packed.dtype, packed.bits) == (weight.shape, weight.dtype, bits)
    groups = weight.float().reshape(*weight.shape[:-1], -1, GROUP)
    spread = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    # The least value and the step are bfloat16, and what comes out is rounded to the weight's dtype: 2^-9 each.
    limit = spread / (num_values(bits) - 1) / 2 + (groups.abs().amax(-1, keepdim=True) + spread) * 2**-7
    assert ((packed.dequantize().float().view(groups.shape) - groups).abs() <= limit + 1e-30).all()


@settings(max_examples=40)
@given(weights(), bits_of_a_weight)
def test_experts_and_transposed_weights_are_packed_like_any_other(weight: Tensor, bits: float) -> None:
    packed, weight = KBit.quantize(weight, bits), weight.contiguous()
    alone = [weight] if weight.ndim == 2 else list(weight)
    matrices = [packed] if weight.ndim == 2 else [packed[idx] for idx in range(len(weight))]
    for matrix, one in zip(matrices, alone, strict=True):
        again = KBit.quantize(one, bits)
        assert all(torch.equal(matrix.tensors()[name], tensor) for name, tensor in again.tensors().items())
        parts = again.split(len(one))
        assert parts.shape == (1, *one.shape)
        assert torch.equal(parts.dequantize()[0], again.dequantize())


@needs_kernels
@settings(max_examples=40)
@given(weights(experts=False), bits_of_a_weight, st.data())
def test_kernels_decode_exactly_what_torch_does(weight: Tensor, bits: float, data: st.DataObject) -> None:
    packed = KBit.quantize(weight, bits)
    start = data.draw(st.integers(0, len(weight) - 1))
    end = data.draw(st.integers(start + 1, len(weight)))
    by_torch = packed._decoded({name: tensor[start:end] for name, tensor in packed.tensors().items()})
    for level in LEVELS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "level", lambda level=level: level)
            assert torch.equal(packed._rows(start, end, torch.float32), by_torch)


@needs_kernels
@settings(max_examples=40)
@given(weights(experts=False), bits_of_a_weight, st.integers(1, 3), st.sampled_from(LEVELS or [0]))
def test_a_product_does_not_depend_on_other_rows(weight: Tensor, bits: float, threads: int, level: int) -> None:
    packed = KBit.quantize(weight.float(), bits)
    inputs = torch.randn(kernels.AT_A_TIME, weight.shape[-1], generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "level", lambda: level)
        patch.setattr(kernels, "WORTH_A_THREAD", 1)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        together = packed.multiply(inputs)
        wanted = F.linear(inputs, packed.dequantize())
        torch.testing.assert_close(together, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
        for count in (1, 2, 3, 4, 7):
            assert torch.equal(packed.multiply(inputs[-count:]), together[-count:])


@pytest.mark.rotates(4)
@pytest.mark.parametrize("without_kernels", [False, True], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_products_and_gradients(
    bits: float, dtype: torch.dtype, without_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_kernels:
        monkeypatch.setattr(kernels, "library", lambda: None)
    weight = torch.randn(50, 1152, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for tokens in (1, 3, 16, 17, 40):
        check_matrix(KBit.quantize(weight, bits), tokens)


def test_gradients_keep_nothing_but_the_packed_weight() -> None:
    packed = KBit.quantize(torch.randn(64, 128), 4)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        outputs = packed.linear(torch.randn(40, 128, requires_grad=True))
    assert outputs.requires_grad
    assert [tensor.data_ptr() for tensor in kept] == [tensor.data_ptr() for tensor in packed.tensors().values()]


def test_more_bits_lose_less() -> None:
    weight = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    errors = [float((KBit.quantize(weight, bits).dequantize() - weight).norm() / weight.norm()) for bits in BITS]
    assert all(less < 0.8 * more for more, less in pairwise(errors))
    assert errors[0] < 0.5
    assert errors[-1] < 0.025
