"""Digests of blocks: of what is stored, whatever is made of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.data_structures import DIGEST_CHARS, Span
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.quantization import resolve_quantization
from swarmllm.models.span.loading import load_block_span

NUM_BLOCKS = 3
NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=NUM_BLOCKS, num_attention_heads=2
            )
        )
    model.save_pretrained(tmp_path)
    return tmp_path


def digests(directory: Path, span: Span | None = None, quant_type: str = "none", **options: torch.dtype) -> list[str]:
    quantization = resolve_quantization(quant_type)
    checkpoint, span = open_checkpoint(str(directory)), span or Span(0, NUM_BLOCKS)
    text = load_block_span(checkpoint, span, quantization=quantization, progress=False, **options).digests
    assert len(text) == DIGEST_CHARS * len(span)
    return [text[start : start + DIGEST_CHARS] for start in range(0, len(text), DIGEST_CHARS)]


def test_are_the_same_however_the_blocks_are_kept(directory: Path) -> None:
    expected = digests(directory)
    assert len(set(expected)) == NUM_BLOCKS
    assert digests(directory, dtype=torch.bfloat16) == expected
    assert digests(directory, quant_type="int8") == expected
    assert digests(directory, quant_type="nf4", dtype=torch.bfloat16) == expected
    assert digests(directory, Span(1, 3)) == expected[1:]


@pytest.mark.parametrize("layout", ["safetensors", "pickle"])
def test_see_one_bit(directory: Path, layout: str) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if layout == "pickle":
        path.unlink()

    def write() -> tuple[str, list[str]]:
        if layout == "pickle":
            torch.save(tensors, directory / "pytorch_model.bin")
        else:
            save_file(tensors, path, metadata={"format": "pt"})
        return fingerprint(open_checkpoint(str(directory))), digests(directory)

    name, before = write()
    tensors[NAME].view(torch.int32)[0, 0] ^= 1
    same_name, after = write()
    if layout == "safetensors":  # torch writes a hash of everything into pickles
        assert same_name == name, "else there would be no need of digests"
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]
