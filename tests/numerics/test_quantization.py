"""Quantized blocks compute what the model would with its dequantized weights, and lose as little as they should."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.numerics.loading_memory import OVERHEAD_BYTES, measure
from tests.numerics.tiny_models import save_tiny
from tests.selection import sampled
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers import MixtralForCausalLM as Mixtral

from swarmllm.data_structures import Span
from swarmllm.demo.embedded_model import embedded_heldout_texts, embedded_model_path
from swarmllm.models.block_inputs import BlockInputs
from swarmllm.models.block_span import BlockSpan, load_block_span
from swarmllm.models.checkpoint import open_checkpoint
from swarmllm.models.quantization import FULL_PRECISION, Quantization, QuantizedWeight

EVERYTHING = {quant_type: Quantization(quant_type, smallest=0) for quant_type in ("int8", "nf4")}
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
            parameter.data = weight.dequantize().contiguous()
    return like


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", sampled(ARCHITECTURES, 6))
def test_computes_with_the_dequantized_weights(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    full = load_block_span(checkpoint, Span(0, 4), dtype=dtype, progress=False)
    tolerance = TOLERANCES[dtype]
    for quantization in EVERYTHING.values():
        blocks = load_block_span(checkpoint, Span(0, 4), dtype=dtype, quantization=quantization, progress=False)
        reference = _dequantized(blocks, full)
        assert blocks.traits == reference.traits
        assert blocks.dtype == dtype
        with torch.no_grad():
            decoded = _decode(blocks)
        outputs, gradients = _forward_and_gradients(blocks)  # after inference has run
        wanted_outputs, wanted_gradients = _forward_and_gradients(reference)
        assert _error(decoded, _decode(reference)) <= tolerance
        assert _error(outputs, wanted_outputs) <= tolerance
        assert _error(gradients, wanted_gradients) <= tolerance


@pytest.mark.parametrize(("quant_type", "limit"), [("int8", 0.03), ("nf4", 0.4)])
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_loses_little(model_type: str, quant_type: str, limit: float, tmp_path: Path) -> None:
    """Outputs and gradients of a dense model and of one with experts, next to full precision; random weights."""
    save_tiny(model_type, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    full = load_block_span(checkpoint, Span(0, 4), progress=False)
    blocks = load_block_span(checkpoint, Span(0, 4), quantization=EVERYTHING[quant_type], progress=False)
    pairs = list(zip(_forward_and_gradients(blocks), _forward_and_gradients(full), strict=True))
    assert all(0 < _error(got, wanted) < limit for got, wanted in pairs)


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
    for quantization in (FULL_PRECISION, *EVERYTHING.values()):
        blocks = load_block_span(
            checkpoint, Span(0, 4), dtype=torch.bfloat16, quantization=quantization, progress=False
        )
        in_blocks = [*blocks.slots.parameters(), *blocks.slots.buffers()]
        rotary = {id(tensor) for name, tensor in blocks.slots.named_buffers() if not name.endswith(("codes", "scale"))}
        held = sum(tensor.nbytes for tensor in in_blocks if id(tensor) not in rotary)
        assert sum(checkpoint.block_bytes(torch.bfloat16, quantization)) == held


# Perplexity of the trained model


@torch.no_grad()
def _perplexity(quantization: Quantization, dtype: torch.dtype, texts: list[str]) -> float:
    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(path)
    blocks = load_block_span(open_checkpoint(path), Span(0, 8), dtype=dtype, quantization=quantization, progress=False)
    loss, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        hidden = model.model.embed_tokens(ids)
        hidden = blocks.forward(BlockInputs(hidden_states=hidden, batch_size=1, seq_len=ids.shape[1]))
        logits = model.lm_head(model.model.norm(hidden)).float()
        loss += float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return math.exp(loss / count)


@pytest.mark.parametrize(
    ("dtype", "share"),
    [
        pytest.param(torch.bfloat16, 15, id="bfloat16"),
        pytest.param(torch.float32, 1, id="float32, all texts", marks=pytest.mark.slow),
    ],
)
def test_perplexity_of_the_embedded_model(dtype: torch.dtype, share: int) -> None:
    texts = embedded_heldout_texts()[::share]
    full = _perplexity(FULL_PRECISION, dtype, texts)
    assert _perplexity(Quantization("int8"), dtype, texts) == pytest.approx(full, rel=0.01)
    assert _perplexity(Quantization("nf4"), dtype, texts) == pytest.approx(full, rel=0.05)


# Memory while loading

SHARD_BYTES = 30_000_000
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


@pytest.mark.parametrize("case", sampled(["llama-int8", "llama-nf4", "mixtral-int8", "mixtral-nf4"], 16))
def test_loading_never_holds_more_than_one_shard_beyond_the_result(case: str, tmp_path: Path) -> None:
    name, quant_type = case.split("-")
    share = {"int8": 0.55, "nf4": 0.32}[quant_type]
    tiny = LlamaConfig(vocab_size=8, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(tiny).save_pretrained(tmp_path / "tiny")
    model = (LlamaForCausalLM if name == "llama" else Mixtral)(LARGE[name]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "large", max_shard_size=SHARD_BYTES)
    full = sum(open_checkpoint(str(tmp_path / "large")).block_bytes())
    assert full > 150_000_000
    num_blocks = LARGE[name].num_hidden_layers
    used = measure(tmp_path / "large", tmp_path / "tiny", torch.bfloat16, quant_type, num_blocks)
    assert used.blocks <= share * full
    assert used.end <= used.blocks + OVERHEAD_BYTES
    assert used.peak <= used.blocks + SHARD_BYTES + OVERHEAD_BYTES
