"""Where a processor multiplies bfloat16 slowly: torch's bits where its order is known, and otherwise products in
float32, from the same weights, and at least as exactly."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.numerics.tiny_models import save_tiny
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import QuantizedWeight, kernels, loading, whole
from swarmllm.models.quantization.line import why_no_steps
from swarmllm.models.quantization.loading import NATIVE_TOKENS, Whole, check_matrix
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import PackedForward, Packing, SessionCall
from swarmllm.models.span.traced_step import MOST_ROWS

HALF_A_STEP = 2.0**-8
"""Rounding of bfloat16, relative to the number."""


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> BlockSpan:
    return load_block_span(open_checkpoint(str(path)), Span(1, 3), dtype=dtype, progress=False)


def held(blocks: BlockSpan) -> dict[str, QuantizedWeight]:
    return {name: one for name, one in blocks.slots.named_modules() if isinstance(one, QuantizedWeight)}


def slow_bfloat16(monkeypatch: pytest.MonkeyPatch, speedup: float = 7.0) -> None:
    """Be a processor without instructions for it; tiny models have tiny weights."""
    monkeypatch.setattr(kernels, "float32_speedup", lambda: speedup)
    monkeypatch.setattr(loading, "SMALLEST", 1)


@pytest.mark.parametrize("tokens", [1, NATIVE_TOKENS + 1, 16, 40])
def test_a_product_is_rounded_once(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_bfloat16(monkeypatch)
    generator = torch.Generator().manual_seed(tokens)
    weight, inputs, grads = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((96, 512), (tokens, 512), (tokens, 96))
    )
    matrix = Whole(weight, torch.bfloat16)
    leaf = inputs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(matrix.linear(leaf), leaf, grads)
    check_matrix(matrix, tokens)
    for got, native, exact in (
        (matrix.multiply(inputs), F.linear(inputs, weight), F.linear(inputs.double(), weight.double())),
        (grad, grads @ weight, grads.double() @ weight.double()),
    ):
        assert got.dtype == torch.bfloat16
        errors = [(one.double() - exact).abs() for one in (got, native)]
        assert errors[0].norm() <= errors[1].norm() * (1 + 1e-3)
        if tokens > NATIVE_TOKENS:
            assert (errors[0] <= HALF_A_STEP * exact.abs() + 1e-6 * exact.abs().max()).all()


def test_measuring_leaves_the_number_of_threads_as_it_is() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert kernels.float32_speedup.__wrapped__() > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def outputs_and_gradients(blocks: BlockSpan) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 20, blocks.embedding_dim, generator=generator).bfloat16().to(blocks.dtype)
    leaf = hidden.requires_grad_()
    outputs = blocks.forward(BlockInputs(hidden_states=leaf, batch_size=2, seq_len=20))
    (grad,) = torch.autograd.grad(outputs.square().sum(), leaf)
    return [outputs.detach().double(), grad.double()]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "falcon", "mixtral", "gpt_oss"])
def test_blocks(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(model_type, tmp_path)
    exact, native = load(tmp_path, torch.float32), load(tmp_path)
    for name, parameter in exact.slots.named_parameters():
        parameter.data = native.slots.get_parameter(name).float()
    assert not held(native)
    slow_bfloat16(monkeypatch)
    blocks = load(tmp_path)
    weights = held(blocks)
    assert weights
    for name, weight in weights.items():
        assert torch.equal(weight.dequantize(), native.slots.get_parameter(name)), name
    assert blocks.num_bytes == native.num_bytes
    assert not blocks.is_quantized
    assert (native.shares_keys, blocks.shares_keys) == (False, False)
    results = [outputs_and_gradients(one) for one in (blocks, native, exact)]
    for got, usual, wanted in zip(*results, strict=True):
        assert (got - wanted).norm() <= 1.1 * (usual - wanted).norm()


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text", "mixtral"])
def test_blocks_have_the_bits_of_torch_where_its_order_is_known(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias and without, also where gradients are wanted."""
    save_tiny(model_type, tmp_path)
    native = load(tmp_path)
    assert not held(native)
    slow_bfloat16(monkeypatch)
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    monkeypatch.setattr(whole, "_found", {})
    blocks = load(tmp_path)
    matrices = [one.packed.codes if one.ndim == 2 else one.packed.codes[0] for one in held(blocks).values()]
    if not all(whole.knows(one, whole.MANY) for one in matrices):
        pytest.skip("torch adds in another order here")
    generator = torch.Generator().manual_seed(0)
    for seq_len in (1, 2, 5, 17, 33, 100, 257):
        hidden = torch.randn(2, seq_len, blocks.embedding_dim, generator=generator).bfloat16()
        for leaf in (hidden, hidden.clone().requires_grad_()):
            inputs = BlockInputs(hidden_states=leaf, batch_size=2, seq_len=seq_len)
            assert torch.equal(blocks.forward(inputs), native.forward(inputs)), (seq_len, leaf.requires_grad)


@pytest.mark.parametrize("largest", [whole.LARGEST_TRIED, 0])
def test_products_have_the_bits_of_torch_where_its_order_is_known(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of inputs of all kinds; also where a weight is so large that it is tried itself."""
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    monkeypatch.setattr(whole, "_found", {})
    monkeypatch.setattr(whole, "_known", {})
    monkeypatch.setattr(whole, "LARGEST_TRIED", largest)
    generator = torch.Generator().manual_seed(0)
    weight = whole._at(torch.randn(256, 512, generator=generator).bfloat16(), 0)
    bias, matrix = torch.randn(256, generator=generator).bfloat16(), Whole(weight, torch.bfloat16)
    for has_bias in (False, True):
        whole.find_orders(weight, has_bias=has_bias)
    if not whole.knows(weight, whole.MANY):
        pytest.skip("torch adds in another order here")
    for num_inputs in (1, 4, 5, 16, 17, 40, 100):
        wide = torch.randn(2, num_inputs, 1024, generator=generator).bfloat16()
        for inputs in (wide[..., :512].contiguous(), wide[..., :512], wide[:, :, ::2].transpose(0, 1)):
            for added in (None, bias, bias.clone().requires_grad_()):
                got, expected = matrix.linear(inputs, added), F.linear(inputs, weight, added)
                assert torch.equal(got, expected), (num_inputs, inputs.stride(), added is None)
                if added is not None and added.requires_grad:
                    (gradient,) = torch.autograd.grad(got.float().sum(), added)
                    torch.testing.assert_close(gradient, torch.full_like(added, 2.0 * num_inputs))


@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_bfloat16(monkeypatch)
    weight, bias, inputs, grads = (
        torch.randn(*shape).bfloat16() for shape in ((32, 64), (32,), (3, 5, 64), (3, 5, 32))
    )
    results = []
    for linear in (Whole(weight, torch.bfloat16).linear, lambda inputs, bias: F.linear(inputs, weight, bias)):
        leaves = [one.clone().requires_grad_() for one in ([inputs, bias] if has_bias else [inputs])]
        outputs = linear(leaves[0], leaves[1] if has_bias else None)
        results.append([outputs, *torch.autograd.grad(outputs, leaves, grads)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize(("speedup", "dtype"), [(loading.WORTH - 0.1, torch.bfloat16), (7.0, torch.float32)])
def test_where_nothing_changes(
    speedup: float, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", tmp_path)
    slow_bfloat16(monkeypatch, speedup)
    assert not held(load(tmp_path, dtype))


@pytest.mark.skipif(bool(why_no_steps()), reason="needs the compiled kernels")
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2"])
def test_steps_are_lines(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_bfloat16(monkeypatch)
    save_tiny(model_type, tmp_path)
    blocks = load(tmp_path)
    assert held(blocks)
    forward = PackedForward(blocks)
    assert forward.traced.is_exact
    most = forward.traced.most_rows
    assert most == min(MOST_ROWS, *(one.packed.most_inputs() for one in held(blocks).values())) >= NATIVE_TOKENS
    for num_rows in sorted({1, NATIVE_TOKENS, min(most, 17), most}):
        caches = [blocks.new_cache() for _ in range(2)]
        generator = torch.Generator().manual_seed(0)
        for seq_len in (4, 1, 1, 1):
            hidden = torch.randn(num_rows, seq_len, blocks.embedding_dim, generator=generator).bfloat16()
            inputs = BlockInputs(hidden_states=hidden, batch_size=num_rows, seq_len=seq_len)
            expected = blocks.forward(inputs, cache=caches[0])
            if seq_len > 1:
                blocks.forward(inputs, cache=caches[1])
                continue
            (got,) = forward.run_packed([SessionCall(inputs, blocks.span, caches[1])], Packing.TRACED)
            assert torch.equal(got, expected)


def test_transposed_weights_and_unknown_orders_are_recorded_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own code multiplies more of them in float32, recorded steps in bfloat16."""
    known = {4, 5, 6, 7, 8}
    monkeypatch.setattr(whole, "knows", lambda _, num_inputs: num_inputs in known)
    weight = torch.randn(64, 64).bfloat16()
    assert Whole(weight, torch.bfloat16).most_inputs() == 8
    assert Whole(weight.mT, torch.bfloat16).most_inputs() == NATIVE_TOKENS
    known.add(kernels.NO_LIMIT)
    assert Whole(weight, torch.bfloat16).most_inputs() == kernels.NO_LIMIT
    known.remove(5)
    assert Whole(weight, torch.bfloat16).most_inputs() == NATIVE_TOKENS
