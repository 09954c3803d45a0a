"""Blocks on a GPU compute what they compute on the CPU, by themselves and packed with others."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.client.local_blocks import LocalSpan
from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization import QUANT_TYPES, Quantization, QuantizedWeight, cuda
from swarmllm.models.quantization.decoded import FORMS, KINDS
from swarmllm.models.quantization.loading import Whole, check_matrix, pack
from swarmllm.models.quantization.packed import Packed
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, SessionCall
from swarmllm.models.span.packing_probe import right_ways

sys.path.append(str(Path(__file__).parents[1] / "numerics"))
from gguf_writer import BLOCKS
from published_checkpoints import ALL_KINDS, NUM_BLOCKS, save_published
from test_published_weights import KEPT_BITS, kept

pytestmark = pytest.mark.lane("gpu")

CONFIG = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8)
SPAN = Span(0, 4)
LENGTHS = (5, 17, 40)
DEVICE = "cuda"
TOLERANCE = {"none": 2e-2, "int8": 6e-2, "nf4": 2e-1}
"""Relative error of bf16, and of weights rounded to 8 and 4 bits, through four blocks. Assumed: not yet measured."""
SAME_WEIGHTS = dict.fromkeys(QUANT_TYPES, 3e-2) | {"llm_int8": 6e-2}
"""The same where both sides have the weights of the same few bits; llm_int8 rounds the inputs as well."""
FLOAT32 = 1e-3
"""Relative error of float32 through three blocks. Assumed: CUDA may multiply by TF32 only where a user asks for it."""
PRODUCTS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error of one product, whose outputs are rounded to these."""
GGUF_KINDS = {KINDS[kind][0]: kind for kind in sorted(KINDS)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(path)
    return path


def load(
    directory: Path, device: str, dtype: torch.dtype, quant_type: str = "none", num_offloaded: int = 0
) -> BlockSpan:
    return load_block_span(
        open_checkpoint(str(directory)),
        SPAN,
        dtype=dtype,
        device=device,
        quantization=Quantization(quant_type, smallest=0),
        progress=False,
        num_offloaded=num_offloaded,
    )


def inputs(seq_len: int, dtype: torch.dtype, device: str, seed: int = 0) -> BlockInputs:
    hidden = torch.randn(1, seq_len, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))
    return BlockInputs(hidden_states=hidden.to(device, dtype), batch_size=1, seq_len=seq_len)


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.float().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("quant_type", list(TOLERANCE))
def test_as_on_the_cpu(directory: Path, quant_type: str) -> None:
    exact = load(directory, "cpu", torch.float32)
    blocks = load(directory, "cuda", torch.bfloat16, quant_type)
    expected = exact.forward(inputs(12, torch.float32, "cpu"))
    with torch.inference_mode():
        found = blocks.forward(inputs(12, torch.bfloat16, "cuda"))
    assert found.device.type == "cuda"
    assert relative_error(found, expected) < TOLERANCE[quant_type]


@pytest.mark.parametrize("quant_type", list(TOLERANCE))
def test_gradients_as_on_the_cpu(directory: Path, quant_type: str) -> None:
    gradients = []
    for device, dtype, kind in (("cpu", torch.float32, "none"), ("cuda", torch.bfloat16, quant_type)):
        given = inputs(12, dtype, device)
        given.hidden_states.requires_grad_(True)
        load(directory, device, dtype, kind).forward(given).float().square().sum().backward()
        assert given.hidden_states.grad is not None
        gradients.append(given.hidden_states.grad.float().cpu())
    assert relative_error(gradients[1], gradients[0]) < 2 * TOLERANCE[quant_type]


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_few_bits_are_the_same_weights_as_on_the_cpu(directory: Path, quant_type: str) -> None:
    """Outputs and gradients with each number of bits, few tokens and many."""
    there, here = (load(directory, device, torch.bfloat16, quant_type) for device in (DEVICE, "cpu"))
    for name, module in here.slots.named_modules():
        if isinstance(module, QuantizedWeight) and not isinstance(module.packed, Whole):
            assert torch.equal(there.slots.get_submodule(name).dequantize().cpu(), module.dequantize()), name
    for tokens in (1, 5, 40):
        results = []
        for blocks, device in ((there, DEVICE), (here, "cpu")):
            given = inputs(tokens, torch.bfloat16, device)
            given.hidden_states.requires_grad_(True)
            output = blocks.forward(given)
            output.float().square().sum().backward()
            assert given.hidden_states.grad is not None
            results.append((output.detach().float().cpu(), given.hidden_states.grad.float().cpu()))
        for found, expected in zip(*results, strict=True):
            assert relative_error(found, expected) < SAME_WEIGHTS[quant_type]


def _moved(packed: Packed) -> Packed:
    """One matrix on the GPU, as `model.to` moves its buffers."""
    tensors = {name: tensor.to(DEVICE) for name, tensor in packed.tensors().items()}
    return type(packed)(**tensors, dtype=packed.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name, bits in KEPT_BITS.items() if bits])
def test_published_weights(name: str, dtype: torch.dtype) -> None:
    """To the last bit what they are on the CPU, and products and gradients with them."""
    packed = kept(name, dtype)
    moved = _moved(packed)
    assert torch.equal(moved.dequantize().cpu(), packed.dequantize())
    for tokens in (1, 16, 40):
        check_matrix(moved, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GGUF_KINDS)
def test_blocks_of_gguf(name: str, dtype: torch.dtype) -> None:
    kind = GGUF_KINDS[name]
    with safe_open(BLOCKS, framework="pt") as file:
        packed = FORMS[kind](file.get_tensor(str(kind)), dtype)
    moved = _moved(packed)
    as_loaded = _moved(packed.for_device(torch.device(DEVICE)))
    for one in (moved, as_loaded):
        assert torch.equal(one.dequantize().cpu(), packed.dequantize())
        for tokens in (1, 16, 40):
            check_matrix(one, tokens)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_published_checkpoints(kind: str, tmp_path: Path) -> None:
    """Loaded onto the GPU they stay packed, and compute what they compute on the CPU."""
    checkpoint = open_checkpoint(str(save_published(kind, tmp_path)[0]))
    span = Span(1, NUM_BLOCKS)
    there, here = (
        load_block_span(checkpoint, span, dtype=torch.float32, device=device, progress=False)
        for device in (DEVICE, "cpu")
    )
    names = [
        {name for name, one in blocks.slots.named_modules() if isinstance(one, QuantizedWeight)}
        for blocks in (there, here)
    ]
    assert names[0] == names[1]
    results = []
    for blocks, device in ((there, DEVICE), (here, "cpu")):
        hidden = torch.randn(2, 12, checkpoint.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(
            device
        )
        leaf = hidden.requires_grad_()
        output = blocks.forward(BlockInputs(hidden_states=leaf, batch_size=2, seq_len=12))
        (grad,) = torch.autograd.grad(output.square().sum(), leaf)
        results.append((output.detach().cpu(), grad.cpu()))
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < FLOAT32


@pytest.mark.parametrize("num_offloaded", [2, 4])
@pytest.mark.parametrize("quant_type", list(TOLERANCE))
def test_offloaded_blocks_are_those_that_stay(directory: Path, quant_type: str, num_offloaded: int) -> None:
    """Steps one right after the other, and a backward after forwards that have used the same slots."""
    outcomes = []
    for number in (0, num_offloaded):
        blocks = load(directory, "cuda", torch.bfloat16, quant_type, number)
        given = inputs(12, torch.bfloat16, "cuda")
        given.hidden_states.requires_grad_(True)
        output = blocks.forward(given)
        with torch.inference_mode():
            cache = blocks.new_cache()
            steps = [blocks.forward(inputs(1, torch.bfloat16, "cuda", seed), cache=cache) for seed in range(20)]
        output.float().square().sum().backward()
        assert given.hidden_states.grad is not None
        outcomes.append(torch.cat([output.detach(), given.hidden_states.grad, *steps], dim=1).cpu())
    assert torch.equal(*outcomes)


def test_packed_steps_are_those_of_each_session_alone(directory: Path) -> None:
    blocks = load(directory, "cuda", torch.float32)
    alone, caches = [], []
    with torch.inference_mode():
        for seed, length in enumerate(LENGTHS):
            cache, other = blocks.new_cache(), blocks.new_cache()
            for each in (cache, other):
                blocks.forward(inputs(length, torch.float32, "cuda", seed), SPAN, each)
            alone.append(blocks.forward(inputs(1, torch.float32, "cuda", 10 + seed), SPAN, other))
            caches.append(cache)
    calls = [SessionCall(inputs(1, torch.float32, "cuda", 10 + seed), SPAN, cache) for seed, cache in enumerate(caches)]
    for expected, found in zip(alone, Packer(blocks, right_ways(blocks)).run_calls(calls), strict=True):
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_blocks_of_a_client_follow_its_model(directory: Path) -> None:
    """Moved to the GPU when they have been used on the CPU; what comes and goes stays where it was."""
    here = LocalSpan(load(directory, "cpu", torch.float32))
    given = inputs(12, torch.float32, "cpu")
    expected = here.forward(given)
    nn.ModuleList(here.modules().values()).to("cuda")
    for cache in (None, here.new_cache(record_past=False)):
        found = here.forward(given, cache=cache)
        assert found.device.type == "cpu"
        assert relative_error(found, expected) < TOLERANCE["none"]
    moved = here.forward(inputs(12, torch.float32, "cuda"))
    assert moved.device.type == "cuda"
    assert relative_error(moved, expected) < TOLERANCE["none"]


def _quantized(quant_type: str, rows: int = 1000, columns: int = 1024) -> Packed:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = pack(weight, quant_type, torch.device(DEVICE))  # type: ignore[arg-type]
    assert packed.device.type == DEVICE, "quantized there"
    return packed


def _inputs_of_product(num_inputs: int, columns: int, dtype: torch.dtype) -> Tensor:
    given = torch.randn(num_inputs, columns, generator=torch.Generator().manual_seed(num_inputs))
    return given.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_products_are_those_of_float64(quant_type: str, dtype: torch.dtype) -> None:
    """By the kernel, and by dequantized weights where inputs are too many for it."""
    packed = _quantized(quant_type)
    weight = packed._rows(0, packed.shape[0], torch.float32).double()  # `dequantize` would round to bfloat16
    if quant_type == "int8":
        weight *= packed.scale[:, None]
    for num_inputs in (1, 8, 16, 17, 33, 64, 65, 300):
        given = _inputs_of_product(num_inputs, packed.shape[1], dtype)
        expected = given.double() @ weight.T
        found = packed.multiply(given)
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= PRODUCTS[dtype] * expected.norm(), num_inputs


@pytest.mark.parametrize("name", [name for name, bits in KEPT_BITS.items() if bits])
def test_published_products_are_those_of_float64(name: str) -> None:
    packed = kept(name, torch.bfloat16)
    moved = _moved(packed)
    matrix = moved.cuda_matrix()
    assert matrix is not None
    given = _inputs_of_product(5, packed.shape[1], torch.bfloat16)
    expected = given.double() @ moved.dequantize().double().T
    assert (moved.multiply(given).double() - expected).norm() <= PRODUCTS[torch.bfloat16] * expected.norm()


@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_what_one_input_gives_does_not_depend_on_others(quant_type: str, dtype: torch.dtype) -> None:
    """To the last bit, for all numbers of inputs that the kernel takes."""
    packed = _quantized(quant_type)
    given = _inputs_of_product(cuda.MOST_INPUTS, packed.shape[1], dtype)
    alone = torch.cat([packed.multiply(row[None]) for row in given])
    for num_inputs in (2, 8, 16, 17, 32, 33, cuda.MOST_INPUTS):
        assert torch.equal(packed.multiply(given[:num_inputs]), alone[:num_inputs]), num_inputs


@pytest.mark.parametrize("num_inputs", [1, 40, 100])
@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_a_cuda_graph_can_hold_a_product(quant_type: str, num_inputs: int) -> None:
    packed = _quantized(quant_type)
    given = _inputs_of_product(num_inputs, packed.shape[1], torch.bfloat16)
    expected = packed.multiply(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = packed.multiply(given)
    graph.replay()
    assert torch.equal(found, expected)
    given.mul_(2)  # exact
    graph.replay()
    assert torch.equal(found, 2 * expected)
