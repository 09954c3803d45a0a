"""Heads other than the language model's, on blocks of decoders and encoders: the local model's logits and gradients."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics import tiny_vision_models
from tests.numerics.in_process_swarm import InProcessSwarm, SwarmUser
from tests.numerics.tiny_models import tiny_config
from tests.selection import sampled
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from swarmllm.client.distributed_model import DistributedModel
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.architecture import (
    ENCODERS,
    REFUSED_ARCHITECTURES,
    Task,
    check_supported,
    find_blocks,
    task_class,
    task_of,
)
from swarmllm.models.checkpoint.checkpoint import open_checkpoint

ENCODER_DECODERS = frozenset({"bart", "bigbird_pegasus", "mbart", "mvp", "plbart", "t5gemma2"})
CLASSIFY = {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES} - ENCODER_DECODERS - REFUSED_ARCHITECTURES.keys()
SEEING = sorted(CLASSIFY & {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
DECODERS = sorted((CLASSIFY & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}) - ENCODERS - {*SEEING})
WITH_POOLERS = sorted(
    name
    for name in ENCODERS
    if "add_pooling_layer" in inspect.signature(task_class(tiny_config(name), Task.FEATURES)).parameters
)
IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
HEADS = ("score", "classifier", "qa_", "cls.", "lm_head", "decoder", "head", "vocab_", "generator_", "predictions")
RELATIVE = 1e-5
"""Nearly all are equal bit by bit; matrix products before a trained embedding may be added up in another order."""


def save_tiny(model_type: str, task: Task, directory: Path) -> PreTrainedModel:
    """A tiny model with this head, saved; returned as transformers loads it, its blocks frozen."""
    config = tiny_vision_models.tiny_config(model_type) if model_type in SEEING else tiny_config(model_type)
    config.num_labels = 3 if task != Task.QUESTION_ANSWERING else 2
    cls = task_class(config, task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(directory, max_shard_size="60KB")
    local: PreTrainedModel = cls.from_pretrained(directory, dtype="auto")
    find_blocks(local).blocks.requires_grad_(False)
    return local


WITH_MASKS = sorted(name for name in ENCODERS if type(tiny_config(name)) in MODEL_FOR_MASKED_LM_MAPPING)
LABELS: dict[Task, dict[str, Tensor]] = {
    Task.MASKED_LM: {"labels": IDS.where((MASK > 0) & (IDS % 3 == 0), -100)},
    Task.SEQUENCE_CLASSIFICATION: {"labels": torch.tensor([0, 2])},
    Task.TOKEN_CLASSIFICATION: {"labels": IDS % 3},
    Task.QUESTION_ANSWERING: {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([4, 5])},
}


def results(model: PreTrainedModel, task: Task) -> dict[str, Tensor]:
    """Outputs of the head without gradients, then the gradients of embeddings and head."""
    with torch.no_grad():
        output: Any = model(input_ids=IDS, attention_mask=MASK)
    if task == Task.QUESTION_ANSWERING:
        found = {"start": output.start_logits, "end": output.end_logits}
    else:
        found = {"output": output[0]}
    embeddings = model.get_input_embeddings().weight
    trained = {"embeddings": embeddings.requires_grad_(True)}
    if task in LABELS:
        loss = model(input_ids=IDS, attention_mask=MASK, **LABELS[task]).loss
        trained |= {name: p for name, p in model.named_parameters() if name.startswith(HEADS)}
    else:
        loss = model(input_ids=IDS, attention_mask=MASK)[0].square().sum()
    model.zero_grad()
    loss.backward()
    return found | {f"gradient of {name}": p.grad for name, p in trained.items() if p.grad is not None}


def assert_same(local: PreTrainedModel, remote: PreTrainedModel, task: Task) -> None:
    expected, got = results(local, task), results(remote, task)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if not value.numel():  # MobileBERT's, where embeddings are as wide as blocks
            continue
        assert value.isfinite().all()
        error = float((got[name] - value).abs().max())
        assert error <= RELATIVE * float(value.abs().max()), f"{name} differs by {error:.1e}"


def check(model_type: str, task: Task, directory: Path, user: type = SwarmUser) -> None:
    local = save_tiny(model_type, task, directory)
    assert_same(local, InProcessSwarm(directory, task=task, user=user).client, task)


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        ("llama", Task.SEQUENCE_CLASSIFICATION),
        ("bert", Task.SEQUENCE_CLASSIFICATION),
        ("qwen3", Task.TOKEN_CLASSIFICATION),
        ("roberta", Task.QUESTION_ANSWERING),
        ("gpt2", Task.FEATURES),
    ],
)
def test_heads(model_type: str, task: Task, tmp_path: Path) -> None:
    check(model_type, task, tmp_path)


class User(DistributedModel):
    """With the names that a real client has, but no swarm of which somebody could have entered a session."""

    def active_cache_session(self) -> None:
        return None


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        ("modernbert", Task.SEQUENCE_CLASSIFICATION),
        ("modernbert", Task.TOKEN_CLASSIFICATION),
        ("modernbert-decoder", Task.SEQUENCE_CLASSIFICATION),
        ("bert", Task.QUESTION_ANSWERING),
    ],
)
def test_no_name_of_ours_hides_a_module(model_type: str, task: Task, tmp_path: Path) -> None:
    check(model_type, task, tmp_path, User)


@pytest.mark.parametrize("model_type", sampled(WITH_POOLERS, 12))
@pytest.mark.parametrize("task", [Task.FEATURES, Task.SEQUENCE_CLASSIFICATION])
def test_a_checkpoint_without_a_pooler_gets_a_new_one(model_type: str, task: Task, tmp_path: Path) -> None:
    """As with transformers: the same with the same seed."""
    config = tiny_config(model_type)
    cls = task_class(config, Task.FEATURES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        cls(config, add_pooling_layer=False).save_pretrained(tmp_path, max_shard_size="60KB")
        torch.manual_seed(4)
        local = task_class(config, task).from_pretrained(tmp_path, dtype="auto")
        torch.manual_seed(4)
        remote = InProcessSwarm(tmp_path, task=task).client
    with torch.no_grad():
        expected, got = (model(input_ids=IDS, attention_mask=MASK) for model in (local, remote))
    assert expected.keys() == got.keys()
    assert all(map(torch.equal, got.values(), expected.values()))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", DECODERS)
def test_decoders_classify_sequences(model_type: str, tmp_path: Path) -> None:
    check(model_type, Task.SEQUENCE_CLASSIFICATION, tmp_path)


@pytest.mark.parametrize("model_type", sampled(SEEING, 6))
def test_models_that_see_classify_sequences(model_type: str, tmp_path: Path) -> None:
    """With a picture and without one."""
    local = save_tiny(model_type, Task.SEQUENCE_CLASSIFICATION, tmp_path)
    remote = InProcessSwarm(tmp_path, task=Task.SEQUENCE_CLASSIFICATION).client
    assert_same(local, remote, Task.SEQUENCE_CLASSIFICATION)
    picture = tiny_vision_models.inputs_of(local)
    with torch.no_grad():
        expected = local(**picture).logits
        assert (remote(**picture).logits - expected).abs().max() <= RELATIVE * expected.abs().max()
        if (pixels := picture.get("pixel_values")) is not None:  # Mistral 4 takes none, but stands among those that do
            assert not torch.equal(local(**picture | {"pixel_values": -pixels}).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_encoders_classify_sequences(model_type: str, tmp_path: Path) -> None:
    check(model_type, Task.SEQUENCE_CLASSIFICATION, tmp_path)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # mobilebert, a block of which is elsewhere
@pytest.mark.parametrize("model_type", sampled(WITH_MASKS, 12))
def test_masked_places(model_type: str, tmp_path: Path) -> None:
    check(model_type, Task.MASKED_LM, tmp_path, User)


def test_as_many_as_promised() -> None:
    assert len(WITH_MASKS) >= 22
    assert len(DECODERS) >= 55
    assert len(ENCODERS) >= 8


def test_a_new_head_is_the_one_that_transformers_would_make(tmp_path: Path) -> None:
    """A checkpoint of a language model has no `score`; with the same seed it is the same, here and there."""
    config = tiny_config("llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        task_class(config, Task.CAUSAL_LM)(config).save_pretrained(tmp_path, max_shard_size="60KB")
        torch.manual_seed(4)
        local = task_class(config, Task.SEQUENCE_CLASSIFICATION).from_pretrained(tmp_path, dtype="auto")
        torch.manual_seed(4)
        remote = InProcessSwarm(tmp_path, task=Task.SEQUENCE_CLASSIFICATION).client
    assert local.score.weight.std() > 0
    assert torch.equal(remote.score.weight, local.score.weight)


def test_the_head_follows_the_checkpoint() -> None:
    config = tiny_config("llama")
    assert task_of(config) == Task.CAUSAL_LM
    config.architectures = ["LlamaForSequenceClassification"]
    assert task_of(config) == Task.SEQUENCE_CLASSIFICATION
    config = tiny_config("bert")
    assert task_of(config) == Task.FEATURES
    config.architectures = ["BertForMaskedLM"]
    assert task_of(config) == Task.MASKED_LM


def test_an_encoder_decoder_that_is_refused_has_no_heads_either() -> None:
    """`test_encoder_decoders` has the heads of others."""
    with pytest.raises(UnsupportedModelError, match=r"can.t be split over servers"):
        task_class(CONFIG_MAPPING["bigbird_pegasus"](), Task.SEQUENCE_CLASSIFICATION)


def test_encoders_do_not_generate(tmp_path: Path) -> None:
    config = tiny_config("bert")
    check_supported(config)
    with pytest.raises(UnsupportedModelError, match=r"encoder.*AutoDistributedModelForSequenceClassification"):
        task_class(config, Task.CAUSAL_LM)
    with pytest.raises(UnsupportedModelError, match="no sequence classification model for olmoe"):
        task_class(tiny_config("olmoe"), Task.SEQUENCE_CLASSIFICATION)
    save_tiny("bert", Task.SEQUENCE_CLASSIFICATION, tmp_path)
    assert task_of(open_checkpoint(str(tmp_path)).config) == Task.SEQUENCE_CLASSIFICATION
    server = InProcessSwarm(tmp_path, task=Task.SEQUENCE_CLASSIFICATION).route[0][0]
    with pytest.raises(UnsupportedModelError, match="no sessions"):
        server.new_cache()


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("llava", "with vision|images"),
        ("qwen2_vl", "with vision|images"),
        ("vit", "images"),
        ("clip", "images"),
        ("albert", "blocks"),
    ],
)
@pytest.mark.parametrize("task", [Task.TOKEN_CLASSIFICATION, Task.SEQUENCE_CLASSIFICATION])
def test_what_is_no_text_model_is_refused_for_what_it_is(model_type: str, reason: str, task: Task) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        task_class(CONFIG_MAPPING[model_type](), task)
    assert "causal" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_answers_of_classes_that_call_their_stack_otherwise(model_type: str, tmp_path: Path) -> None:
    """Servers know the blocks as `model.layers`, and the checkpoint has `transformer.layers`."""
    check(model_type, Task.QUESTION_ANSWERING, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert task_of(checkpoint.config) == Task.QUESTION_ANSWERING
    assert any(name.startswith("transformer.") for name in checkpoint.weight_map())
