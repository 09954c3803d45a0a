"""Quantized blocks compute what the model would with its dequantized weights, and lose as little as they should."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.numerics.loading_memory import OVERHEAD_BYTES, measure
from tests.numerics.tiny_models import save_tiny
from tests.selection import COMMIT, part_of, sampled, turn_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers import MixtralForCausalLM as Mixtral

from swarmllm.data_structures import Span
from swarmllm.demo.local_swarm import embedded_heldout_texts, embedded_model_path
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.quantization import FULL_PRECISION, QUANT_TYPES, Quantization, QuantizedWeight
from swarmllm.models.quantization.decoded import KBit
from swarmllm.models.quantization.nf4 import Nf4
from swarmllm.models.quantization.packed import Int8
from swarmllm.models.quantization.rules import BITS, FOR_OTHER_ROWS
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span

EVERYTHING = {quant_type: Quantization(quant_type, smallest=0) for quant_type in QUANT_TYPES if quant_type != "none"}
"""Tiny models have tiny weights."""
ARCHITECTURES = {
    "llama": "the usual",
    "gpt2": "weights stored transposed",
    "bloom": "biases, and slices of weights",
    "falcon": "multiplies by hand",
    "opt": "biases",
    "gemma2": "keeps activations large",
    "mixtral": "fused experts",
    "qwen3_moe": "many small experts",
    "gpt_oss": "fused experts stored transposed, with biases",
    "llama4_text": "batched experts stored transposed, and shared ones",
    "dbrx": "experts as parts of one matrix",
    "jetmoe": "experts in attention, too",
    "deepseek_v4": "grouped projections",
    "zamba2": "blocks that share weights",
}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Relative. Rounding to bfloat16 in other places than the reference changes which expert a token goes to."""
NO_WORSE = 1.5
"""Times the error of bfloat16's own products, from those in float32: some models add roundings up. Measured with AVX2
alone: up to 0.27 (bloom in 2 bits) by torch, 0.04 by our kernels."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _inputs(blocks: BlockSpan, seq: int = 20) -> BlockInputs:
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(2, seq, blocks.embedding_dim, generator=generator).to(blocks.dtype)
    ids = torch.randint(3, 100, (2, seq), generator=generator)
    everything = BlockInputs(hidden_states=embeds, batch_size=2, seq_len=seq, input_ids=ids, inputs_embeds=embeds)
    hidden = torch.randn(blocks.preamble(everything).shape, generator=generator).to(blocks.dtype)
    extras = {name: getattr(everything, name) for name in blocks.traits.extra_inputs}
    return BlockInputs(hidden_states=hidden, batch_size=2, seq_len=seq, **extras)


def _forward_and_gradients(blocks: BlockSpan) -> tuple[Tensor, Tensor]:
    inputs = _inputs(blocks)
    leaf = inputs.hidden_states.detach().clone().requires_grad_()
    with torch.enable_grad():
        outputs = blocks.forward(inputs.with_hidden(leaf))
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad((outputs.float() * weights).sum(), leaf)
    return outputs.detach().float(), grad.float()


def _decode(blocks: BlockSpan) -> Tensor:
    """The same positions one by one, with a cache."""
    inputs, cache = _inputs(blocks), blocks.new_cache()
    start = 0 if blocks.traits.chunked_prefill else inputs.seq_len
    outputs = [
        blocks.forward(inputs.columns(position, position + 1, position, blocks.traits), cache=cache)
        for position in range(start, inputs.seq_len)
    ]
    return torch.cat(outputs, dim=blocks.traits.batch_axis + 1).float() if outputs else torch.empty(0)


def _error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm()) if wanted.numel() else 0.0


def _dequantized(blocks: BlockSpan, like: BlockSpan) -> BlockSpan:
    """`like` in full precision, with the weights that the quantized blocks stand for."""
    modules = dict(blocks.slots.named_modules())
    for name, parameter in like.slots.named_parameters():
        weight = modules.get(name)
        if isinstance(weight, QuantizedWeight):
            assert weight.shape == parameter.shape
            parameter.data = weight.dequantize().contiguous().to(like.dtype)
    return like


def _one_of_few_bits(model_type: str) -> str:
    """Another for each architecture, and for each commit."""
    kinds = [*BITS, "q8_0", *FOR_OTHER_ROWS]
    return kinds[(part_of(model_type, len(kinds)) + turn_of(COMMIT, len(kinds))) % len(kinds)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", sampled(ARCHITECTURES, 12))
def test_computes_with_the_dequantized_weights(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    full = load_block_span(checkpoint, Span(0, 4), dtype=dtype, progress=False)
    exact = load_block_span(checkpoint, Span(0, 4), dtype=torch.float32, progress=False)
    for quant_type in ("int8", "nf4", _one_of_few_bits(model_type)):
        quantization = EVERYTHING[quant_type]
        blocks = load_block_span(checkpoint, Span(0, 4), dtype=dtype, quantization=quantization, progress=False)
        reference = _dequantized(blocks, full)
        assert blocks.traits == reference.traits
        assert blocks.dtype == dtype
        with torch.no_grad():
            decoded = _decode(blocks)
        got = decoded, *_forward_and_gradients(blocks)  # after inference has run
        usual, wanted = (
            (_decode(one), *_forward_and_gradients(one)) for one in (reference, _dequantized(blocks, exact))
        )
        for mine, torchs, right in zip(got, usual, wanted, strict=True):
            usual_error = _error(torchs, right)
            assert _error(mine, right) <= NO_WORSE * usual_error or _error(mine, torchs) <= TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("quant_type", "limit"), [("int8", 0.03), ("q8_0", 0.03), ("int6", 0.1), ("int4", 0.4), ("nf4", 0.4), ("q4_k", 0.3)]
)
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_loses_little(model_type: str, quant_type: str, limit: float, tmp_path: Path) -> None:
    """Outputs and gradients of a dense model and of one with experts, next to full precision; random weights."""
    save_tiny(model_type, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    full = load_block_span(checkpoint, Span(0, 4), progress=False)
    blocks = load_block_span(checkpoint, Span(0, 4), quantization=EVERYTHING[quant_type], progress=False)
    pairs = list(zip(_forward_and_gradients(blocks), _forward_and_gradients(full), strict=True))
    assert all(0 < _error(got, wanted) < limit for got, wanted in pairs)


def test_a_transposed_weight_is_packed_like_any_other() -> None:
    """As gpt2 stores them; in float32 nothing copies them into another order on the way."""
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    packed = [Nf4.quantize(one, tiled=False).dequantize() for one in (weight.mT, weight.mT.contiguous())]
    assert torch.equal(*packed)


def test_routers_norms_and_small_weights_stay(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    blocks = load_block_span(checkpoint, Span(1, 3), quantization=EVERYTHING["int8"], progress=False)
    left = {name.partition(".")[2] for name, _ in blocks.slots.named_parameters()}
    assert left == {"input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight"}
    untouched = load_block_span(checkpoint, Span(1, 3), quantization=Quantization("int8"), progress=False)
    assert not any(isinstance(module, QuantizedWeight) for module in untouched.slots.modules())


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt2"])
def test_bytes_are_known_beforehand(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    kinds = {"int8", "nf4", _one_of_few_bits(model_type)}
    for quantization in (FULL_PRECISION, *(EVERYTHING[kind] for kind in kinds)):
        dtype = torch.float32 if quantization.quant_type in BITS else torch.bfloat16  # it keeps no scales in float32
        blocks = load_block_span(checkpoint, Span(0, 4), dtype=dtype, quantization=quantization, progress=False)
        in_blocks = [*blocks.slots.parameters(), *blocks.slots.buffers()]
        of_weights = ("codes", "scale", "least")
        rotary = {id(tensor) for name, tensor in blocks.slots.named_buffers() if not name.endswith(of_weights)}
        held = sum(tensor.nbytes for tensor in in_blocks if id(tensor) not in rotary)
        assert sum(block_bytes(checkpoint, dtype, quantization)) == held


def test_rows_that_are_no_groups_get_8_bits(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)  # 64 columns, but 96 of the last matrix
    blocks = load_block_span(
        open_checkpoint(str(tmp_path)), Span(0, 1), quantization=EVERYTHING["q3.5"], progress=False
    )
    modules = blocks.slots.named_modules()
    packed = {name: module.packed for name, module in modules if isinstance(module, QuantizedWeight)}
    assert {isinstance(one, Int8) for name, one in packed.items() if "down_proj" in name} == {True}
    assert {type(one) for name, one in packed.items() if "down_proj" not in name} == {KBit}


# Perplexity of the trained model


@torch.no_grad()
def _log_probabilities(quantization: Quantization, dtype: torch.dtype, texts: list[Tensor]) -> list[Tensor]:
    """Log probabilities of each next token, `[seq, vocabulary]` in float32, for texts `[1, seq]`."""
    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    blocks = load_block_span(open_checkpoint(path), Span(0, 8), dtype=dtype, quantization=quantization, progress=False)
    found = []
    for ids in texts:
        hidden = model.model.embed_tokens(ids)
        hidden = blocks.forward(BlockInputs(hidden_states=hidden, batch_size=1, seq_len=ids.shape[1]))
        found.append(model.lm_head(model.model.norm(hidden))[0, :-1].float().log_softmax(-1))
    return found


def _texts(share: int) -> list[Tensor]:
    """Token ids of one in `share` of the held-out texts."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    return [tokenizer(text, return_tensors="pt").input_ids for text in embedded_heldout_texts()[::share]]


def _perplexity(quantization: Quantization, dtype: torch.dtype, texts: list[Tensor]) -> float:
    found = _log_probabilities(quantization, dtype, texts)
    of_tokens = [one.gather(1, ids[0, 1:, None]) for one, ids in zip(found, texts, strict=True)]
    return math.exp(-float(torch.cat(of_tokens).mean()))


@pytest.mark.parametrize(
    ("dtype", "share"),
    [
        pytest.param(torch.bfloat16, 15, id="bfloat16"),
        pytest.param(torch.float32, 1, id="float32, all texts", marks=pytest.mark.slow),
    ],
)
def test_perplexity_of_the_embedded_model(dtype: torch.dtype, share: int) -> None:
    texts = _texts(share)
    full = _perplexity(FULL_PRECISION, dtype, texts)
    assert _perplexity(Quantization("int8"), dtype, texts) == pytest.approx(full, rel=0.01)
    assert _perplexity(Quantization("nf4"), dtype, texts) == pytest.approx(full, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "quant_types", [(*BITS, "int8"), ("int4", "q4_k", "q5_k", "q6_k", "q8_0")], ids=["even", "search"]
)
def test_more_bits_change_the_embedded_model_less(quant_types: tuple[str, ...]) -> None:
    texts = _texts(10)
    full = torch.cat(_log_probabilities(FULL_PRECISION, torch.float32, texts))
    divergences = []
    for quant_type in quant_types:
        found = torch.cat(_log_probabilities(Quantization(quant_type), torch.float32, texts))
        divergences.append(float((full.exp() * (full - found)).sum(-1).mean()))
    assert all(less < 0.7 * more for more, less in pairwise(divergences))
    assert divergences[0] < 0.2


# Memory while loading

SHARD_BYTES = 30_000_000
SHARES = {"int8": 0.55, "nf4": 0.32, "int4": 0.3, "q3.5": 0.27, "q4_k": 0.3}
"""Share of the memory of bfloat16, at most."""
LARGE = {
    "llama": LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16
    ),
    "mixtral": MixtralConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_local_experts=8,
    ),
}


@pytest.mark.parametrize("case", sampled([f"{name}-{kind}" for name in LARGE for kind in SHARES], 16))
def test_loading_never_holds_more_than_one_shard_beyond_the_result(case: str, tmp_path: Path) -> None:
    name, quant_type = case.split("-")
    share = SHARES[quant_type]
    tiny = LlamaConfig(vocab_size=8, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(tiny).save_pretrained(tmp_path / "tiny")
    model = (LlamaForCausalLM if name == "llama" else Mixtral)(LARGE[name]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "large", max_shard_size=SHARD_BYTES)
    full = sum(block_bytes(open_checkpoint(str(tmp_path / "large"))))
    assert full > 150_000_000
    num_blocks = LARGE[name].num_hidden_layers
    used = measure(tmp_path / "large", tmp_path / "tiny", torch.bfloat16, quant_type, num_blocks)
    assert used.blocks <= share * full
    assert used.end <= used.blocks + OVERHEAD_BYTES
    assert used.peak <= used.blocks + SHARD_BYTES + OVERHEAD_BYTES
