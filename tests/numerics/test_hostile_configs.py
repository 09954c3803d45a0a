"""Configs of strangers: what one of them says is done or refused in one sentence, soon, whatever it is."""

import copy
import json
import random
import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics import tiny_encoder_decoders, tiny_models, tiny_speech_models, tiny_vision_models
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.models.architecture import stacks, task_class, task_of
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import block_bytes, drop_blocks, load_pruned, pruned
from swarmllm.models.span.loading import load_block_span
from swarmllm.server.device.device import cache_bytes_per_token

PER_CHUNK, LOADED_PER_CHUNK = 50, 10
CHUNKS = [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in range(100)]
MOST_SECONDS = 2.0
"""Seconds of this thread's own time: a busy machine makes no difference."""
LOADED = [
    "llama",
    "gpt2",
    "qwen3_moe",
    "mamba",
    "deepseek_v3",
    "gemma3_text",
    "opt",
    "falcon",
    "bloom",
    "phi3",
    "jamba",
]
KINDS = {
    **dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, tiny_models),
    **dict.fromkeys(tiny_encoder_decoders.names(), tiny_encoder_decoders),
    **dict.fromkeys(tiny_vision_models.names(), tiny_vision_models),
    **dict.fromkeys(tiny_speech_models.names(), tiny_speech_models),
}
NAMES = sorted(KINDS.keys() - {"dots3_note", "gemma3n", "gemma4_assistant", "t5gemma2"})
"""All but those for which the helpers make no config under this name."""
VALUES: list[Any] = [
    *(0, -1, 1, 2, 3, -(10**9), 10**9, 2**31, 2**40, 2**63, 10**30, 1e308, 0.5, -0.5, float("nan"), float("inf")),
    *(None, True, False, "", "x", "org/kernel", "1", "int8", "banana", "float8_e4m3fn"),
    *([], [1], [[]], ["x"] * 4, ["full_attention"] * 3, [None] * 4, {}, {"a": 1}),
    *({"rope_type": kind, "factor": 0} for kind in ("x", "dynamic", "yarn", "longrope", "llama3")),
]


@cache
def _config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KINDS[name].tiny_config(name).to_json_string(use_diff=False))
    return found


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All fields, however deep."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def _changed(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        where, key = chance.choice(list(_places(config)))
        if chance.random() < 0.1:
            del where[key]
        else:
            where[key] = copy.deepcopy(chance.choice(VALUES))
    return config


def _look(directory: Path) -> None:
    checkpoint = open_checkpoint(str(directory))
    stacks(checkpoint.config)
    task_of(checkpoint.config)
    block_bytes(checkpoint, torch.float32)
    cache_bytes_per_token(checkpoint.config, torch.float32)


def _load(directory: Path) -> None:
    _look(directory)
    checkpoint = open_checkpoint(str(directory))
    fingerprint(checkpoint)
    load_block_span(checkpoint, Span(0, 1), progress=False)
    cls = pruned(task_class(checkpoint.config, task_of(checkpoint.config)), drop_blocks)
    load_pruned(cls, checkpoint, dtype=torch.float32, progress=False)
    checkpoint.generation_config()


def _tried(directory: Path, config: dict[str, Any], do: Any) -> None:
    """Every other exception fails the test."""
    (directory / "config.json").write_text(json.dumps(config))
    for is_last in (False, True):
        began = time.thread_time()
        try:
            do(directory)
        except SwarmError as error:
            refusal = str(error)
        else:
            refusal = ""
        assert "\n" not in refusal
        if time.thread_time() - began <= MOST_SECONDS:
            return
        assert not is_last, f"took {time.thread_time() - began:.1f} s"  # the first time, modules were imported


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", CHUNKS)
def test_changed_configs_are_opened_or_refused(seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"open {seed}")
    for _ in range(PER_CHUNK):
        _tried(tmp_path, _changed(_config(chance.choice(NAMES)), chance), _look)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", CHUNKS)
def test_weights_with_changed_configs_are_loaded_or_refused(seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"load {seed}")
    name = chance.choice(LOADED)
    tiny_models.save_tiny(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for _ in range(LOADED_PER_CHUNK):
        _tried(tmp_path, _changed(config, chance), _load)


def _nested(depth: int) -> str:
    return '{"model_type": "llama", "rope_parameters": ' + '{"a":' * depth + "1" + "}" * (depth + 1)


HOSTILE: dict[str, tuple[str, str | dict[str, Any], str]] = {
    "nested until Python's own parser fails": ("llama", _nested(100_000), "not valid JSON"),
    "nested until its copies fail": ("llama", _nested(400), "nested deeper than 32 levels"),
    "a list": ("llama", "[1]", "must hold a JSON object"),
    "a number of 5000 digits": ("llama", '{"num_hidden_layers": 1' + "0" * 5000 + "}", "not valid JSON"),
    "no blocks": ("llama", {"num_hidden_layers": 0}, "a model has 1 to 4096"),
    "negative blocks": ("llama", {"num_hidden_layers": -2}, "a model has 1 to 4096"),
    "half a block": ("gpt2", {"n_layer": 1.5}, "1.5"),
    "blocks in words": ("llama", {"num_hidden_layers": "two"}, "num_hidden_layers"),
    "10^9 blocks": ("qwen2", {"num_hidden_layers": 10**9}, r"num_hidden_layers = 1e\+09, but models have at most 4096"),
    "10^9 blocks, each listed": ("gemma3_text", {"num_hidden_layers": 10**9, "layer_types": None}, "at most 4096"),
    "10^9 classes": ("llama", {"num_labels": 10**9}, "num_labels = 1e"),
    "wide as nothing else": ("llama", {"hidden_size": 2**40}, "hidden_size = .*, but models have at most 1048576"),
    "wider than an address": ("llama", {"hidden_size": 2**20, "intermediate_size": 2**80}, "intermediate_size"),
    "types of layers that there aren't": ("qwen2", {"layer_types": ["x"] * 4}, "layer_types"),
    "too few types of layers": ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    "types of layers that are none": ("gemma3_text", {"layer_types": [[], {}, None, 1]}, "layer_types|TypeError"),
    "an activation that there isn't": ("llama", {"hidden_act": "x"}, "KeyError"),
    "no model type": ("llama", {"model_type": None}, "model_type|None"),
    "a model type of another kind": ("llama", {"model_type": {}}, "unhashable"),
    "code of its own, of no kind": ("llama", {"model_type": [], "auto_map": 1}, "brings code of its own"),
    "no format of weights": ("llama", {"quantization_config": 5}, "AttributeError"),
    "a format that there isn't": ("llama", {"quantization_config": {"quant_method": []}}, "swarmllm can't read"),
    "bits that aren't a number": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": "x"}}, "can't"),
    "a dtype that torch hasn't": ("llama", {"dtype": "banana"}, "banana"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_says_what_is_wrong(case: str, tmp_path: Path) -> None:
    name, said, expected = HOSTILE[case]
    (tmp_path / "config.json").write_text(said if isinstance(said, str) else json.dumps(_config(name) | said))
    with pytest.raises(ConfigurationError, match=expected) as caught:
        _look(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("said", ['{"max_new_tokens": -5}', "[]", '{"cache_implementation": 5}'])
def test_a_generation_config_that_makes_no_sense(said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_config("llama")))
    (tmp_path / "generation_config.json").write_text(said)
    with pytest.raises(ConfigurationError, match=r"can't be used: .*correct the file or delete it"):
        open_checkpoint(str(tmp_path)).generation_config()


def test_blocks_of_unlike_sizes_are_counted_by_the_largest(tmp_path: Path) -> None:
    """Gemma 4 has heads of two sizes: no field of its config says one for all."""
    (tmp_path / "config.json").write_text(json.dumps(_config("gemma4_unified")))
    checkpoint = open_checkpoint(str(tmp_path))
    assert cache_bytes_per_token(checkpoint.config, torch.float32) > 0
    shutil.rmtree(tmp_path)
