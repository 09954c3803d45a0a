"""Blocks of checkpoints in published formats compute what blocks of the same weights do that are stored as ever."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from published_checkpoints import ALL_KINDS, KINDS, NUM_BLOCKS, save_published
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from swarmllm.data_structures import Span
from swarmllm.errors import UnsupportedModelError, WeightsError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.quantization import Quantization, QuantizedWeight
from swarmllm.models.quantization.loading import Whole
from swarmllm.models.span.loading import load_block_span

MOST_OF_BFLOAT16 = {
    "fp8": 0.57, "fp8_tensor": 0.55, "fbgemm": 0.57, "mxfp4": 0.6, "int4": 0.65, "ct_int4_ordered": 1.01,
    "ct_int8": 0.57, "ct_fp8": 0.57, "ct_fp8_blocks": 0.57, "ct_nvfp4": 0.35, "ct_mxfp4": 0.35, "modelopt_fp8": 0.55,
    "modelopt_nvfp4": 0.35, "awq": 0.35, "gptq": 0.35, "gptq_v2": 0.35, "gptq_ordered": 1.01, "gptq_2_bits": 0.35,
    "gptq_8_bits": 0.6, "nf4": 0.35, "nf4_nested": 0.35, "fp4": 0.35, "bnb_int8": 0.57, "gguf_q4_0": 0.3,
    "gguf_q4_k": 0.35, "gguf_experts": 0.35, "hqq": 0.35, "hqq_2_bits": 0.35, "hqq_3_bits": 0.35, "hqq_8_bits": 0.6,
    "torchao": 0.35, "ao_int8": 0.57, "ao_float8": 0.57,
}  # fmt: skip
"""Memory of the blocks. Where only the experts are in few bits, these tiny models are mostly something else;
where groups are ordered, weights don't stay packed."""


@pytest.mark.rotates(3)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_blocks(kind: str, tmp_path: Path) -> None:
    published, plain = (open_checkpoint(str(path)) for path in save_published(kind, tmp_path))
    assert published.weight_map().keys() == plain.weight_map().keys()
    assert fingerprint(published) != fingerprint(plain)
    span = Span(1, NUM_BLOCKS)
    kept, whole = (load_block_span(one, span, dtype=torch.float32, progress=False) for one in (published, plain))
    weights = {name: part for name, part in kept.slots.named_modules() if isinstance(part, QuantizedWeight)}
    assert bool(weights) == (MOST_OF_BFLOAT16[kind] < 1)
    for name, weight in weights.items():
        # bitsandbytes multiplies codes by two numbers, one after the other; here their product is kept.
        tolerance = 2e-7 if kind == "bnb_int8" else 0
        torch.testing.assert_close(weight.dequantize(), whole.slots.get_parameter(name), rtol=tolerance, atol=0)
    for tokens in (1, 5, 40):
        hidden = torch.randn(2, tokens, plain.config.hidden_size, generator=torch.Generator().manual_seed(tokens))
        results = []
        for blocks in (kept, whole):
            leaf = hidden.clone().requires_grad_()
            outputs = blocks.forward(BlockInputs(hidden_states=leaf, batch_size=2, seq_len=tokens))
            results.append((outputs, *torch.autograd.grad(outputs.square().sum(), leaf)))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3 * float(expected.detach().abs().max()))


OTHER_SIZES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda tensor: tensor[: len(tensor) // 2],
    lambda tensor: tensor[..., :-1],
    lambda tensor: torch.cat([tensor, tensor], -1),
    lambda tensor: tensor.flatten()[:1],
)
NUMBERS = ("scale", "scales", "zeros", "zero_point", "absmax", "SCB", "g_idx")


@pytest.mark.rotates(3)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_groups_that_do_not_fit(kind: str, tmp_path: Path) -> None:
    """Kernels would read memory beyond them, and torch would repeat them. One number may count for the whole weight."""
    path, plain = save_published(kind, tmp_path)
    stored = load_file(path / "model.safetensors")
    with safe_open(path / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    whole = load_block_span(open_checkpoint(str(plain)), Span(0, 1), dtype=torch.float32, progress=False)
    hidden = torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(0))
    first = {name.split("proj")[-1]: name for name in stored if ".0." in name and "proj" in name}
    for name in [name for part, name in first.items() if part.endswith(NUMBERS) and stored[name].ndim]:
        for changed in OTHER_SIZES:
            wrong = changed(stored[name]).clone()
            if wrong.shape == stored[name].shape or not wrong.numel():
                continue
            save_file({**stored, name: wrong}, path / "model.safetensors", metadata)
            try:
                blocks = load_block_span(open_checkpoint(str(path)), Span(0, 1), dtype=torch.float32, progress=False)
            except WeightsError:
                continue
            if wrong.numel() > 1 and not kind.startswith("ao_"):  # torchao's are of rectangles of any size
                given = BlockInputs(hidden_states=hidden, batch_size=1, seq_len=5)
                with torch.no_grad():
                    torch.testing.assert_close(blocks.forward(given), whole.forward(given), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_biases_that_the_model_has_no_place_for(value: float, tmp_path: Path) -> None:
    path = save_published("hqq", tmp_path)[0]
    stored = load_file(path / "model.safetensors")
    bias = "model.layers.1.mlp.down_proj.bias"
    save_file({**stored, bias: torch.full((128,), value)}, path / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(str(path))
    assert load_block_span(checkpoint, Span(0, 1), dtype=torch.float32, progress=False)
    if not value:
        assert load_block_span(checkpoint, Span(1, 2), dtype=torch.float32, progress=False)
        return
    with pytest.raises(UnsupportedModelError, match=f"has {bias}, which its architecture lacks"):
        load_block_span(checkpoint, Span(1, 2), dtype=torch.float32, progress=False)


@pytest.mark.rotates(3)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_memory(kind: str, tmp_path: Path) -> None:
    published, plain = (open_checkpoint(str(path)) for path in save_published(kind, tmp_path))
    span = Span(1, NUM_BLOCKS)
    kept = load_block_span(published, span, dtype=torch.bfloat16, progress=False)
    assert kept.num_bytes <= MOST_OF_BFLOAT16[kind] * sum(block_bytes(plain, torch.bfloat16)[1:])
    planned = sum(block_bytes(published, torch.bfloat16)[1:])
    # Rows are so short here that one number for each of them (NVFP4's factor) is 5 %.
    assert 0.94 * kept.num_bytes < planned < 1.1 * kept.num_bytes
    rest_in_int8 = load_block_span(
        published, span, dtype=torch.bfloat16, quantization=Quantization("int8", smallest=1), progress=False
    )
    assert rest_in_int8.num_bytes <= kept.num_bytes
    forms = [
        {
            name: type(one.packed)
            for name, one in blocks.slots.named_modules()
            # Processors that are slow at bfloat16 hold what isn't stored in few bits as a `Whole`.
            if isinstance(one, QuantizedWeight) and not isinstance(one.packed, Whole)
        }
        for blocks in (kept, rest_in_int8)
    ]
    assert forms[0].items() <= forms[1].items(), "what is stored in few bits stays as it is"


def test_a_config_of_model_opt_beside_that_of_transformers(tmp_path: Path) -> None:
    path = save_published("modelopt_nvfp4", tmp_path)[0]
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (path / "hf_quant_config.json").write_text(json.dumps(beside))
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.kept_bits("model.layers.0.mlp.down_proj.weight") == 4.5
    assert checkpoint.weight_map().keys() == open_checkpoint(str(tmp_path / "plain")).weight_map().keys()
    beside["quantization"]["quant_algo"] = "W4A16_AWQ"
    (path / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(UnsupportedModelError, match="ModelOpt's W4A16_AWQ"):
        open_checkpoint(str(path))
