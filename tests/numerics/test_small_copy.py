"""The traits that a client finds on a small copy of a large model, from its config alone; and what it keeps of them.

`test_architectures` compares them with servers' traits for every architecture.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.numerics import tiny_models
from tests.selection import sampled
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmllm.data_structures import BlockTraits
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.span import small_copy
from swarmllm.models.span.small_copy import traits_of


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_copy, "_known", {})


LARGE: dict[str, dict[str, Any]] = {
    "llama": {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "deepseek_v3": {},
    "mixtral": {"num_hidden_layers": 56, "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48},
    "falcon": {},
    "gpt_oss": {},
    "gemma3n_text": {},
    "falcon_h1": {},
    "qwen3_next": {},
    "codegen": {},
    "zamba": {},
    "phi3": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.1] * 48,
            "long_factor": [1.0 + place for place in range(48)],
        },
    },
    "bloom": {"n_layer": 70, "hidden_size": 14336, "n_head": 112, "vocab_size": 250880},
}
"""Sizes of published models; where nothing is said, they are transformers' defaults."""
FOUND: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "extra_inputs": ("input_ids", "inputs_embeds"),
        "forbidden_cuts": tuple(range(19, 35)),
        "batch_axis": 1,
    },
    "falcon": {"block_output": 2},
    "falcon_h1": {"block_output": 1, "rollback": False},
    "qwen3_next": {"rollback": False},
    "codegen": {"block_output": 2},
    "zamba": {"extra_inputs": ("inputs_embeds",), "chunked_prefill": False, "rollback": False},
    "phi3": {"length_borders": (4096,), "skips_padding": ()},
    "bloom": {"block_output": 2},
}


def large(name: str, directory: Path) -> Path:
    """A directory with nothing but the config of a large model."""
    config = CONFIG_MAPPING[name](**LARGE[name], dtype="float32")
    config.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", sampled([*LARGE], 4, always=("llama", "phi3")))
def test_of_large_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    make = small_copy.with_random_weights

    def with_random_weights(*args: Any, **options: Any) -> Any:
        model = make(*args, **options)
        sizes.append(sum(parameter.nbytes for parameter in model.parameters()))
        return model

    monkeypatch.setattr(small_copy, "with_random_weights", with_random_weights)
    found = traits_of(open_checkpoint(str(large(name, tmp_path))))
    assert found is not None
    usual = BlockTraits(skips_padding=("left", "right"))
    assert found == usual.model_copy(update=FOUND.get(name, {}))
    assert max(sizes) < small_copy.MOST_BYTES


def config_alone(name: str, directory: Path) -> Checkpoint:
    """A tiny model without weights."""
    config = tiny_models.tiny_config(name)
    config.dtype = "float32"
    config.save_pretrained(directory)
    return open_checkpoint(str(directory))


def test_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory and in files."""
    probed = []
    probe = small_copy.probe
    monkeypatch.setattr(small_copy, "probe", lambda blocks: (probed.append(blocks), probe(blocks)))
    one, two = (config_alone(name, tmp_path / name) for name in ("llama", "bloom"))
    found = [traits_of(checkpoint, tmp_path / "kept") for checkpoint in (one, two, one, two)]
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert len(probed) == len(list((tmp_path / "kept").iterdir())) == 2
    monkeypatch.setattr(small_copy, "_known", {})
    assert traits_of(one, tmp_path / "kept") == found[0]
    assert len(probed) == 2
    monkeypatch.setattr(small_copy, "_known", {})
    assert traits_of(one, tmp_path / "elsewhere") == found[0]
    assert len(probed) == 3


def test_a_model_that_no_copy_is_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the sizes of tensors must match")

    monkeypatch.setattr(small_copy, "probe", fail)
    assert traits_of(config_alone("llama", tmp_path)) is None
