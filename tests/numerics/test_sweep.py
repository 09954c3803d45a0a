"""Every decoder architecture of transformers: exact through a client and two spans, or refused with a reason."""

from pathlib import Path

import pytest
import torch
from tests.numerics.exactness import CHECKS, assisted
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.tiny_models import VARIANTS, save_tiny, tiny_model
from tests.selection import part_of, sampled
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from swarmllm.data_structures import Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.architecture import ENCODERS, REFUSED_ARCHITECTURES, check_supported
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span import probes
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.trials import kind_of

ENCODER_DECODERS = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "mvp",
        "pegasus",
        "plbart",
        "prophetnet",
        "whisper",
    }
)
"""Their default configs are encoder-decoders (`test_encoder_decoders`); only parts of them have a causal head."""
NO_DEFAULT_CONFIG = frozenset({"gemma3n", "gemma4_assistant", "gemma4_unified_assistant"})
"""Their default configs need further packages, or contradict themselves."""
ROUNDS_DIFFERENTLY = {
    # Before blocks with shared keys and values, transformers leaves out positions whose logits nobody wants.
    "gemma4_shared_kv": 1e-6
}
"""Relative tolerance."""
SEEING = frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
"""Looked at by `test_vision_models`."""
ARCHITECTURES = sorted(
    {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*REFUSED_ARCHITECTURES} - ENCODERS - ENCODER_DECODERS - SEEING
)


@pytest.mark.parametrize("model_type", sampled([*ARCHITECTURES, *VARIANTS], 12))
def test_exact(model_type: str, tmp_path: Path) -> None:
    local = save_tiny(model_type, tmp_path)
    swarm = InProcessSwarm(tmp_path, tolerance=ROUNDS_DIFFERENTLY.get(model_type, 0.0))
    random_state = torch.get_rng_state()
    failures = {check.__name__: problem for check in CHECKS if (problem := check(local, swarm)) is not None}
    if problem := assisted(local, swarm, tiny_model(model_type, seed=5)):
        failures["assisted"] = problem
    assert not failures
    assert torch.equal(random_state, torch.get_rng_state()), "a random state that is the user's was used"


@pytest.mark.parametrize("model_type", sampled([*ARCHITECTURES, *VARIANTS], 3))
def test_exact_with_offloaded_blocks(model_type: str, tmp_path: Path) -> None:
    """Two of three blocks have one slot, so that none stays where it was; or all three of them have two."""
    local = save_tiny(model_type, tmp_path)
    num_offloaded = 1 + part_of(model_type, 2)
    swarm = InProcessSwarm(tmp_path, tolerance=ROUNDS_DIFFERENTLY.get(model_type, 0.0), num_offloaded=num_offloaded)
    assert {check.__name__: problem for check in CHECKS if (problem := check(local, swarm)) is not None} == {}


def test_as_many_as_promised() -> None:
    assert len(ARCHITECTURES) >= 115


@pytest.mark.parametrize("model_type", sorted(REFUSED_ARCHITECTURES))
def test_refused_with_a_reason(model_type: str) -> None:
    config = _named(model_type) if model_type in NO_DEFAULT_CONFIG else CONFIG_MAPPING[model_type]()
    with pytest.raises(UnsupportedModelError, match=model_type):
        check_supported(config)


def test_refused_when_it_is_opened(tmp_path: Path) -> None:
    AutoConfig.for_model("xlstm").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="recurrent states"):
        open_checkpoint(str(tmp_path))


def _named(model_type: str) -> object:
    """A config of another class under this name."""
    config = AutoConfig.for_model("llama")
    config.model_type = model_type
    return config


@pytest.mark.parametrize("model_type", sampled([*ARCHITECTURES, *VARIANTS], 24))
def test_one_block_answers_for_its_kind(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found with one block of each kind is what is found with each block by itself."""
    save_tiny(model_type, tmp_path)
    found = []
    for kinds in (kind_of, lambda _, block_idx: block_idx):
        monkeypatch.setattr(probes, "kind_of", kinds)
        try:
            checkpoint = open_checkpoint(str(tmp_path))
            found.append(load_block_span(checkpoint, Span(0, checkpoint.num_blocks), progress=False).traits)
        except UnsupportedModelError as error:
            found.append(str(error))
    assert found[0] == found[1]
