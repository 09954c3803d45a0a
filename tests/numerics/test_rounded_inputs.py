"""Products with inputs that are rounded to 8 bits (`--activations int8`): what whole numbers say they are."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.kernel_levels import LEVELS
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import QUANT_TYPES, Quantization, kernels
from swarmllm.models.quantization.block_search import quantize
from swarmllm.models.quantization.decoded import FORMS, KERNELS, KINDS, Published
from swarmllm.models.quantization.kernels import ROUNDED
from swarmllm.models.quantization.loading import (
    FEW_BITS,
    Whole,
    check_rounded,
    resolve_activations,
    round_inputs,
)
from swarmllm.models.quantization.nf4 import Nf4
from swarmllm.models.quantization.packed import Int8, LlmInt8, Packed, exact_inputs, rounding
from swarmllm.models.quantization.weight import QuantizedWeight
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packing
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.trials import random_inputs

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="the kernels are not compiled")

VERSIONS = sorted(
    {2 for level in LEVELS if level == 3} | {kernels.library().swarmllm_int8_version(one) for one in LEVELS}
)
"""Not all up to the last: processors with AVX-512's VNNI may lack AVX-VNNI."""
SHAPES = [(12, 1024), (21, 576), (5, 768), (1, 96)]
"""Whole pieces and parts of them, tiles of rows and single ones."""
SEARCHED = (6, 7, 8, 12, 13, 14)
SCALES = {2: (0,), 3: (0, 2), 10: (80, 82), 11: (108,), 20: (0,), 23: (0,)}
"""For kinds without a search: where a block's float16 numbers are."""


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each compiled version that runs here."""
    monkeypatch.setattr(kernels, "int8_version", lambda: request.param)
    found: int = request.param
    return found


def of_gguf(kind: int, weight: Tensor) -> Packed:
    _, weights, size = KINDS[kind]
    if kind in SEARCHED:
        return FORMS[kind](quantize(weight, kind), weight.dtype)
    codes = torch.randint(0, 256, (len(weight), weight.shape[1] // weights, size), dtype=torch.uint8)
    for at in SCALES[kind]:
        codes[..., at : at + 2] = (torch.rand(*codes.shape[:2], 1) * 0.02).half().view(torch.uint8)
    return FORMS[kind](codes.flatten(1), weight.dtype)


def forms(rows: int, columns: int) -> Iterator[Packed]:
    torch.manual_seed(rows)
    weight = torch.randn(rows, columns) * 0.02
    yield Int8.quantize(weight)
    yield Int8.quantize(weight.bfloat16())
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    yield Published(codes, torch.rand(rows, columns // 32) * 1e-3, torch.float32)
    for kind in sorted(KERNELS):
        if columns % KINDS[kind][1] == 0:
            yield of_gguf(kind, weight)


def whole_inputs(num: int, columns: int) -> Tensor:
    """Inputs that lose nothing: whole numbers up to 127, which occurs in each group, times a power of two."""
    numbers = torch.randint(-127, 128, (num, columns // ROUNDED, ROUNDED)).float()
    numbers[..., 3] = 127
    return (numbers * 2.0 ** torch.randint(-6, 4, (num, columns // ROUNDED, 1))).flatten(1)


def multiply(matrix: Packed, inputs: Tensor) -> Tensor:
    found: Tensor = rounding(type(matrix))(**matrix.tensors(), dtype=torch.float32).linear(inputs)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_that_lose_nothing_have_exact_products(shape: tuple[int, int], version: int) -> None:
    for matrix in forms(*shape):
        inputs = whole_inputs(7, shape[1])
        weight = replace(matrix, dtype=torch.float32).dequantize().double()
        expected, scale = inputs.double() @ weight.T, (inputs.double().abs() @ weight.abs().T).max()
        assert matrix.can_round_inputs()
        assert (multiply(matrix, inputs) - expected).abs().max() <= 1e-6 * scale, type(matrix).__name__


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_depends_on_that_row_alone(shape: tuple[int, int], version: int) -> None:
    """Bit for bit, whatever is computed beside it, and in how many threads."""
    for matrix in forms(*shape):
        inputs = torch.randn(70, shape[1]) * torch.rand(70, 1)
        together = multiply(matrix, inputs)
        for some in (inputs[:1], inputs[:2], inputs[:33]):
            assert torch.equal(multiply(matrix, some), together[: len(some)])
        assert torch.equal(multiply(matrix, inputs.flip(0)), together.flip(0))


def test_rounding_is_to_the_nearest_of_255_steps(version: int) -> None:
    matrix = Int8.quantize(torch.eye(64))
    inputs = torch.randn(50, 64)
    steps = inputs.view(50, 2, ROUNDED).abs().amax(-1, keepdim=True) / 127
    error = (multiply(matrix, inputs) - inputs).view(50, 2, ROUNDED).abs()
    assert (error <= steps * 0.501).all()
    assert (error.mean() / steps.mean()).item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_no_numbers_make_no_numbers(odd: float, version: int) -> None:
    matrix, inputs = Int8.quantize(torch.randn(9, 128)), torch.randn(5, 128)
    expected = multiply(matrix, inputs)
    inputs[2, 70] = odd
    found = multiply(matrix, inputs)
    assert not found[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], expected[others])


def test_inputs_of_any_size(version: int) -> None:
    matrix = Int8.quantize(torch.randn(9, 128))
    inputs = torch.randn(1, 128)
    expected = multiply(matrix, inputs)
    for exponent in (-90, 90):
        torch.testing.assert_close(multiply(matrix, inputs * 2.0**exponent) * 2.0**-exponent, expected)
    assert (multiply(matrix, torch.zeros(2, 128)) == 0).all()
    assert multiply(matrix, torch.zeros(0, 128)).shape == (0, 9)


def test_parts_of_large_matrices_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WORTH_A_THREAD", 1024)
    matrix, inputs = Int8.quantize(torch.randn(301, 128)), torch.randn(3, 128)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = multiply(matrix, inputs)
        torch.set_num_threads(3)
        assert torch.equal(multiply(matrix, inputs), expected)
    finally:
        torch.set_num_threads(threads)


def test_gradients_and_trainings_are_exact() -> None:
    exact = QuantizedWeight(Int8.quantize(torch.randn(24, 64)))
    weight = QuantizedWeight(exact.packed)
    assert weight.round_inputs()
    inputs = torch.randn(3, 64)
    rounded = F.linear(inputs, weight)
    assert not torch.equal(rounded, F.linear(inputs, exact))
    with exact_inputs():
        assert torch.equal(F.linear(inputs, weight), F.linear(inputs, exact))
    found, wanted = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    F.linear(found, weight).sum().backward()
    F.linear(wanted, exact).sum().backward()
    assert torch.equal(found.grad, wanted.grad)
    assert torch.equal(F.linear(found, weight), F.linear(wanted, exact))


def test_experts_round_their_inputs() -> None:
    weight = QuantizedWeight(Int8.quantize(torch.randn(4, 24, 64)))
    assert weight.round_inputs()
    inputs = torch.randn(3, 64)
    expected = F.linear(inputs, QuantizedWeight(rounding(Int8)(*weight.packed[2].tensors().values(), torch.float32)))
    assert torch.equal(F.linear(inputs, weight[2]), expected)


@pytest.mark.parametrize(
    "packed",
    [
        Whole(torch.randn(8, 64).bfloat16(), torch.bfloat16),
        LlmInt8.quantize(torch.randn(8, 64)),
        Int8.quantize(torch.randn(8, 40)),
        Nf4.quantize(torch.randn(64, 64), tiled=False),
    ],
    ids=["bfloat16", "llm_int8", "40 columns", "nf4"],
)
def test_other_weights_are_left_as_they_are(packed: Packed) -> None:
    weight = QuantizedWeight(packed)
    inputs = torch.randn(2, packed.shape[1]).to(packed.dtype)
    before = F.linear(inputs, weight)
    round_inputs([weight])
    assert not weight.packed.rounds_inputs
    assert torch.equal(F.linear(inputs, weight), before)


def test_sessions_round_and_forwards_without_them_do_not(llama: Path) -> None:
    """Steps, packed or alone, have the same bits; a whole prompt differs by what attention adds up in another order."""
    checkpoint, quantization = open_checkpoint(str(llama)), Quantization("int8", smallest=0)
    span = Span(0, checkpoint.num_blocks)
    exact, rounded = (
        load_block_span(checkpoint, span, quantization=quantization, activations=one, progress=False)
        for one in ("none", "int8")
    )
    assert rounded.rounds_inputs
    assert not exact.rounds_inputs
    inputs = random_inputs(rounded, 12)
    assert torch.equal(rounded.forward(inputs), exact.forward(inputs))
    grads = []
    for blocks in (exact, rounded):
        hidden = inputs.hidden_states.clone().requires_grad_()
        blocks.forward(inputs.with_hidden(hidden)).square().sum().backward()
        grads.append(hidden.grad)
    assert torch.equal(*grads)

    def in_session(blocks: BlockSpan, sizes: Sequence[int]) -> Tensor:
        cache, outputs, start = blocks.new_cache(), [], 0
        for size in sizes:
            part = inputs.hidden_states[:, start : start + size]
            step = BlockInputs(hidden_states=part, batch_size=1, seq_len=size)
            outputs.append(blocks.forward(step, cache=cache))
            start += size
        return torch.cat(outputs, 1)

    whole = in_session(rounded, [12])
    assert 1e-4 < relative_error(whole, in_session(exact, [12])) < 3e-2
    assert relative_error(in_session(rounded, [1] * 12), whole) < 1e-2


@pytest.mark.parametrize(("difference", "is_rounding"), [(1e-3, True), (1.0, False)])
def test_ways_of_packing_may_round_other_numbers(
    difference: float, is_rounding: bool, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last bit decides between two of 255 numbers, ways differ by more than the last bit, and are right."""
    checkpoint, quantization = open_checkpoint(str(llama)), Quantization("int8", smallest=0)
    blocks = load_block_span(checkpoint, Span(0, 2), quantization=quantization, activations="int8", progress=False)
    expected = right_ways(blocks)
    assert Packing.TRACED in expected
    multiply = Packed._multiply_rounded

    def depending_on_others(packed: Packed, inputs: Tensor) -> Tensor:
        return multiply(packed, inputs) * (1 + difference * len(inputs))

    monkeypatch.setattr(Packed, "_multiply_rounded", depending_on_others)
    found = right_ways(blocks)
    assert set(found) - {Packing.TRACED} == ({*expected} - {Packing.TRACED} if is_rounding else {Packing.ONE_BY_ONE})


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("columns", "gains"), [(512, True), (2048, True), (960, True), (576, False), (64, False)])
def test_auto_rounds_for_weights_that_gain_by_it(columns: int, gains: bool) -> None:
    weight = QuantizedWeight(Int8.quantize(torch.randn(8, columns)))
    round_inputs([weight], if_faster=True)
    assert weight.packed.rounds_inputs == gains


@pytest.mark.skipif(not kernels.has_strips(), reason="this processor has no strips of int8")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [16, 32])
def test_auto_rounds_where_no_tiles_multiply(rows: int, dtype: torch.dtype) -> None:
    weight = QuantizedWeight(Int8.quantize(torch.randn(rows, 512).to(dtype)).for_device(torch.device("cpu")))
    by_tiles = rows == 32 and kernels.has_tiles(dtype)
    assert weight.packed.can_round_inputs()
    round_inputs([weight], if_faster=True)
    assert weight.packed.rounds_inputs != by_tiles


def test_a_machine_that_rounds_wrongly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = rounding(Int8)(*Int8.quantize(torch.randn(8, 64)).tensors().values(), torch.float32)
    check_rounded(matrix)
    wrong = kernels.Matrix.multiply_rounded
    monkeypatch.setattr(kernels.Matrix, "multiply_rounded", lambda self, inputs: wrong(self, inputs) * 1.1)
    with pytest.raises(ValueError, match="rounded inputs wrongly"):
        check_rounded(matrix)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_types_that_never_round_are_refused_before_they_are_read(quant_type: str, llama: Path) -> None:
    quantization = Quantization(quant_type, smallest=1)  # type: ignore[arg-type]
    blocks = load_block_span(
        open_checkpoint(str(llama)), Span(0, 1), quantization=quantization, activations="int8", progress=False
    )
    resolved = partial(resolve_activations, device=torch.device("cpu"), quantization=quantization)
    assert resolved("none", comes_packed=False) == "none"
    assert resolved("int8", comes_packed=True) == "int8", "loading shows whether the checkpoint's own types can round"
    if blocks.rounds_inputs:
        assert resolved("int8", comes_packed=False) == "int8"
    else:
        with pytest.raises(ConfigurationError, match=f"--quant_type {quant_type} can't be multiplied by rounded"):
            resolved("int8", comes_packed=False)


@pytest.mark.parametrize("quant_type", ["int8", "q8_0", "q6_k", "q5_k", "q4_k", "nf4"])
def test_with_avx2_alone_auto_rounds_for_weights_in_strips(quant_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantization, strips = Quantization(quant_type), kernels.strips_version  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "multiplies_bytes", lambda: False)
    monkeypatch.setattr(kernels, "strips_version", lambda: min(2, strips()))
    found = resolve_activations("auto", torch.device("cpu"), quantization, comes_packed=False)
    assert found == ("auto" if quant_type in FEW_BITS and strips() else "none")
    assert (quant_type in FEW_BITS) == (quant_type in ("q5_k", "q4_k"))
    assert resolve_activations("auto", torch.device("cpu"), quantization, comes_packed=True) == "none"
    monkeypatch.setattr(kernels, "strips_version", lambda: 0)
    assert resolve_activations("auto", torch.device("cpu"), quantization, comes_packed=False) == "none"


@pytest.mark.parametrize(("columns", "expected"), [(768, ["none", "int8", "int8"]), (576, ["none", "int8", "auto"])])
def test_blocks_tell_which_inputs_they_round(columns: int, expected: list[str], tmp_path: Path) -> None:
    """`auto` may leave some exact: rows that are in no strips, and whose columns fill no pieces. Then a server that
    rounds all of them computes something else."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=columns, intermediate_size=1536, num_hidden_layers=1,
        num_attention_heads=columns // 24, num_key_value_heads=1, head_dim=24,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    found = [
        load_block_span(
            open_checkpoint(str(tmp_path)),
            Span(0, 1),
            quantization=Quantization("int8"),
            activations=activations,
            progress=False,
        ).activations
        for activations in ("none", "int8", "auto")
    ]
    assert found == expected
