"""The traits that a client finds on a small copy of a model are those that a server observes of its blocks.

For every architecture; and they are found of models of hundreds of gigabytes, of which nothing but the config is there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics import tiny_encoder_decoders, tiny_hearing_models, tiny_models, tiny_vision_models
from tests.numerics.test_encoder_decoders import EXACT as ENCODER_DECODERS
from tests.numerics.test_hearing_models import EXACT as HEARING
from tests.numerics.test_sweep import ARCHITECTURES
from tests.numerics.test_vision_models import EXACT as SEEING
from tests.numerics.tiny_models import VARIANTS
from tests.selection import sampled
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmllm.client.view.servers import check_claims, lacking_abilities
from swarmllm.data_structures import BlockTraits, ServedBlocks, Span
from swarmllm.models.architecture import stacks
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.quantization import FULL_PRECISION, Quantization
from swarmllm.models.span import small_copy
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.small_copy import traits_of

SAVE: dict[str, Callable[[str, Path], object]] = {
    "text": tiny_models.save_tiny,
    "seeing": tiny_vision_models.save_tiny_model,
    "encoder-decoder": tiny_encoder_decoders.save_tiny_model,
    "hearing": tiny_hearing_models.save_tiny_model,
}
ALL = [
    *(f"text {name}" for name in (*ARCHITECTURES, *VARIANTS)),
    *(f"seeing {name}" for name in SEEING),
    *(f"encoder-decoder {name}" for name in ENCODER_DECODERS),
    *(f"hearing {name}" for name in HEARING),
]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_copy, "_known", {})


def observed(directory: Path, dtype: torch.dtype | None = None) -> list[BlockTraits]:
    """What servers of each stack see."""
    checkpoint = open_checkpoint(str(directory))
    spans = [stack.span for stack in stacks(checkpoint.config)]
    return [load_block_span(checkpoint, span, dtype=dtype, progress=False).traits for span in spans]


@pytest.mark.parametrize("name", sampled(ALL, 24))
def test_as_servers_observe_them(name: str, tmp_path: Path) -> None:
    kind, name = name.split(" ")
    SAVE[kind](name, tmp_path)
    random_state = torch.get_rng_state()
    found = traits_of(open_checkpoint(str(tmp_path)))
    assert torch.equal(random_state, torch.get_rng_state()), "a random state that is the user's was used"
    assert found is not None
    *encoder, decoder = observed(tmp_path)
    cuts = tuple(cut for traits in (*encoder, decoder) for cut in traits.forbidden_cuts)
    assert found.model_copy(update={"encoder": None}) == decoder.model_copy(update={"forbidden_cuts": cuts})
    for traits in encoder:
        assert found.of_encoder == traits


@pytest.mark.parametrize("name", sampled([*ARCHITECTURES, *VARIANTS], 24))
def test_in_half_precision(name: str, tmp_path: Path) -> None:
    """Servers compute in the dtype of the checkpoint, in which some things can't be observed."""
    tiny_models.save_tiny(name, tmp_path, dtype=torch.bfloat16)
    assert [traits_of(open_checkpoint(str(tmp_path)))] == observed(tmp_path)


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


@pytest.mark.parametrize("name", sampled([*ARCHITECTURES, *VARIANTS], 24))
def test_no_honest_server_contradicts_it(name: str, tmp_path: Path) -> None:
    """Whichever blocks it has, and however it keeps their weights."""
    tiny_models.save_tiny(name, tmp_path, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(str(tmp_path))
    found = traits_of(checkpoint)
    assert found is not None
    for span in (Span(0, 3), Span(1, 4)):
        if found.forbidden_cuts and {span.start, span.end} & {*found.forbidden_cuts}:
            continue
        for quantization in (FULL_PRECISION, Quantization("int8", smallest=1)):
            blocks = load_block_span(checkpoint, span, progress=False, quantization=quantization)
            served = ServedBlocks(start=span.start, end=span.end, traits=blocks.traits)
            check_claims("server", served, found, None)
            assert lacking_abilities(served, found, None) == ()
