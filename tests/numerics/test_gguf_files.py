"""GGUF files that the package gguf has written: the config and the weights of the models that they were made from."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import Checkpoint, load_tokenizer, open_checkpoint
from swarmllm.models.checkpoint.skeleton import block_bytes, client_tensor_names
from swarmllm.models.quantization import QuantizedWeight
from swarmllm.models.span.loading import load_block_span

DIRECTORY = Path(__file__).parent / "data/gguf"
EXPECTED: dict[str, dict[str, Any]] = json.loads((DIRECTORY / "expected.json").read_text())
IN_WORDS_OF_ITS_OWN = {
    "_name_or_path", "architectures", "dtype", "eos_token_id", "rms_norm_eps", "transformers_version",
}  # fmt: skip
"""Fields in which a GGUF file says the same otherwise, or says more: each is tested below."""


def opened(name: str) -> Checkpoint:
    return open_checkpoint(str(DIRECTORY / f"{name}.gguf"))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_config(name: str) -> None:
    fields = dict(EXPECTED[name]["config"])
    expected = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    config = opened(name).config
    got = config.to_dict()
    if expected.get("head_dim") is None:  # which says what it is all the same
        assert got.pop("head_dim", None) == config.hidden_size // config.num_attention_heads
    for field in (expected.keys() | got.keys()) - IN_WORDS_OF_ITS_OWN:
        assert got.get(field) == expected.get(field), field
    assert config.architectures == expected["architectures"]
    assert config.rms_norm_eps == pytest.approx(expected["rms_norm_eps"], rel=1e-6)
    assert config.eos_token_id == [2, 3], "the end of a turn ends the text as well"


@pytest.mark.parametrize("name", EXPECTED)
def test_the_weights(name: str) -> None:
    checkpoint = opened(name)
    weights = checkpoint.tensors(checkpoint.weight_map())
    digests = {
        key: hashlib.sha256(lazy[...].float().contiguous().numpy().tobytes()).hexdigest()
        for key, lazy in weights.items()
    }
    assert digests == EXPECTED[name]["weights"]
    for lazy in weights.values():
        assert list(lazy[...].shape) == lazy.get_shape()
        assert torch.equal(lazy[:3], lazy[...][:3])


@pytest.mark.parametrize("name", EXPECTED)
def test_blocks_compute_what_the_local_model_does(name: str, tmp_path: Path) -> None:
    """Weights of unlike kinds in one block: some stay packed, some don't."""
    checkpoint = opened(name)
    weights = checkpoint.tensors(checkpoint.weight_map())
    save_file({key: lazy[...].float().contiguous() for key, lazy in weights.items()}, tmp_path / "model.safetensors")
    checkpoint.config.save_pretrained(tmp_path)
    local = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    blocks = load_block_span(checkpoint, Span(0, 2), dtype=torch.float32, progress=False)
    assert any(isinstance(part, QuantizedWeight) for part in blocks.slots.modules())
    ids = torch.randint(4, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    stack = local.model
    stack.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    stack.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        local(ids)
        outputs = blocks.forward(BlockInputs(hidden_states=seen[0], batch_size=2, seq_len=20))
    torch.testing.assert_close(outputs, seen[1], rtol=1e-4, atol=1e-4 * float(seen[1].abs().max()))


def test_sizes_are_known_before_anything_is_read() -> None:
    checkpoint = opened("qwen3moe")
    blocks = load_block_span(checkpoint, Span(0, 2), dtype=torch.bfloat16, progress=False)
    assert sum(block_bytes(checkpoint, torch.bfloat16)) == pytest.approx(blocks.num_bytes, rel=0.1)


def test_a_client_asks_for_nothing_of_the_blocks() -> None:
    assert sorted(client_tensor_names(opened("qwen2"))) == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ]


def test_the_tokenizer_is_in_the_file() -> None:
    tokenizer = load_tokenizer(str(DIRECTORY / "llama.gguf"))
    ids = tokenizer("hello world</s>").input_ids
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.convert_ids_to_tokens(ids)[1:3] == ["hello", "Ġw"]
    assert ids[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world"
