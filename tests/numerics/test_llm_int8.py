"""LLM.int8: inputs of 8 bits, outliers as they are, and what one input gives doesn't depend on the others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmllm.models.quantization.loading import check_matrix
from swarmllm.models.quantization.packed import OUTLIER_THRESHOLD, Int8, LlmInt8


def inputs(num_inputs: int, columns: int, *, outliers: bool) -> Tensor:
    """Inputs with outliers have them in different columns."""
    found = torch.randn(num_inputs, columns, generator=torch.Generator().manual_seed(num_inputs)).clamp_(-5, 5)
    if outliers:
        found[torch.arange(num_inputs), torch.arange(num_inputs) % columns] = 60.0
    return found


@settings(max_examples=20)
@given(st.integers(1, 70), st.sampled_from([(32, 64), (40, 72), (33, 50)]), st.booleans())
def test_is_what_the_paper_says(num_inputs: int, shape: tuple[int, int], outliers: bool) -> None:
    """Section 3: products of 8 bits, with a scale for each input and each row, and of outliers in full."""
    weight = LlmInt8.quantize(torch.randn(*shape))
    given_inputs = inputs(num_inputs, shape[1], outliers=outliers)
    is_outlier = given_inputs.abs() > OUTLIER_THRESHOLD
    assert is_outlier.any() == outliers
    usual = given_inputs.masked_fill(is_outlier, 0.0).double()
    largest = usual.abs().amax(1, keepdim=True)
    rounded = (usual / (largest / 127)).round() * (largest / 127)
    expected = (rounded + (given_inputs.double() - usual)) @ weight.dequantize().double().T
    found = weight.multiply(given_inputs)
    assert (found - expected).norm() <= 2e-3 * expected.norm(), "a tie may be rounded to the other side"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_far_outliers_in_other_rows_change_nothing(dtype: torch.dtype) -> None:
    weight = LlmInt8.quantize(torch.randn(64, 128).to(dtype))
    alone, others = inputs(1, 128, outliers=False).to(dtype), inputs(15, 128, outliers=True).to(dtype)
    together = weight.multiply(torch.cat([alone, others]))[:1]
    torch.testing.assert_close(together, weight.multiply(alone), rtol=1e-6, atol=1e-6)


def test_without_outliers_inputs_are_rounded_and_with_them_they_are_no_coarser() -> None:
    whole = torch.randn(64, 128)
    weight, exact = LlmInt8.quantize(whole), Int8.quantize(whole)
    assert torch.equal(weight.codes, exact.codes)
    for outliers in (False, True):
        given_inputs = inputs(5, 128, outliers=outliers)
        expected = exact.multiply(given_inputs)
        error = float((weight.multiply(given_inputs) - expected).norm() / expected.norm())
        assert 1e-4 < error < (5e-3 if outliers else 2e-2)


def test_what_is_no_number_stays_none() -> None:
    weight = LlmInt8.quantize(torch.randn(32, 64))
    given_inputs = inputs(3, 64, outliers=False)
    given_inputs[1, 5] = torch.nan
    assert weight.multiply(given_inputs).isnan().any(1).tolist() == [False, True, False]
    assert weight.multiply(given_inputs[:0]).shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_gradients(dtype: torch.dtype) -> None:
    for tokens in (1, 5, 40):
        check_matrix(LlmInt8.quantize(torch.randn(96, 128).to(dtype)), tokens)
