"""transformers' Seq2SeqTrainer on a distributed encoder-decoder: losses, weights and texts of a local model."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import OPTIONS
from tests.numerics.tiny_encoder_decoders import save_tiny_model, tiny_model
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments

from swarmllm import AutoDistributedModelForSeq2SeqLM, LocalSwarm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # accelerate warns of what is its own
PAD, IGNORED = 0, -100


@pytest.fixture(scope="module", params=["t5", "bart"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def directory(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def swarm(directory: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(str(directory), spans=[(0, 2), (2, 5), (5, 7)], **OPTIONS) as swarm:
        yield swarm


def examples() -> list[dict[str, Any]]:
    """Sources and targets of different lengths, as tokenizers give them."""
    random = torch.Generator().manual_seed(1)

    def text(length: int) -> list[int]:
        return torch.randint(3, 100, (length,), generator=random).tolist()

    return [{"input_ids": text(4 + idx % 5), "labels": text(2 + idx % 4)} for idx in range(8)]


class Tokenizer:
    """The tokenizer methods that the collator and the trainer call."""

    pad_token_id, padding_side = PAD, "right"

    def pad(self, features: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        longest = max(len(one["input_ids"]) for one in features)
        ids = [one["input_ids"] + [PAD] * (longest - len(one["input_ids"])) for one in features]
        mask = [[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"])) for one in features]
        longest = max(len(one["labels"]) for one in features)
        labels = [one["labels"] + [IGNORED] * (longest - len(one["labels"])) for one in features]
        tensors = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {key: torch.tensor(value) for key, value in tensors.items()}


def run(model: Any, directory: Path) -> dict[str, Any]:
    """Train, then let the trainer write."""
    arguments = Seq2SeqTrainingArguments(
        str(directory),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        max_steps=3,
        optim="sgd",
        learning_rate=0.01,  # random weights are so large that rounding grows from step to step
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        seed=1,
        predict_with_generate=True,
        generation_max_length=9,
        generation_num_beams=2,
    )
    trainer = Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=examples(), eval_dataset=examples(), data_collator=Tokenizer().pad
    )
    trainer.train()
    predicted = trainer.predict(examples())
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "texts": predicted.predictions.tolist(),
        "loss": predicted.metrics["test_loss"],
        "weights": {key: value.detach().clone() for key, value in model.named_parameters() if value.requires_grad},
    }


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-4)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert found["texts"] == wanted["texts"]
    for key, value in found["weights"].items():
        torch.testing.assert_close(value, wanted["weights"][key], rtol=1e-4, atol=1e-5)


def local_model(name: str) -> PreTrainedModel:
    """Parameters that belong to servers are frozen."""
    local = tiny_model(name)
    for stack in (local.get_encoder(), local.get_decoder()):
        for blocks in (part for part in stack.children() if isinstance(part, torch.nn.ModuleList)):
            blocks.requires_grad_(False)
    return local


def test_embeddings_and_head(name: str, directory: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    local = local_model(name)
    settings = copy.deepcopy(local.generation_config)
    wanted = run(local, tmp_path)
    with AutoDistributedModelForSeq2SeqLM.from_pretrained(str(directory), initial_peers=swarm.initial_peers) as model:
        model.generation_config = settings
        assert_alike(run(model, tmp_path), wanted)


def test_lora_in_both_stacks(name: str, directory: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    targets = ["q", "v", "wo"] if name == "t5" else ["q_proj", "v_proj", "fc1"]
    recipe = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=targets, r=2)

    def tuned(base: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(base, recipe)

    local = tiny_model(name)
    settings = copy.deepcopy(local.generation_config)
    wanted = run(tuned(local), tmp_path)
    assert any("encoder" in key for key in wanted["weights"])
    assert any("decoder" in key for key in wanted["weights"])
    with AutoDistributedModelForSeq2SeqLM.from_pretrained(str(directory), initial_peers=swarm.initial_peers) as model:
        model.generation_config = settings
        found = run(tuned(model), tmp_path)
        assert found["weights"].keys() == wanted["weights"].keys()
        assert_alike(found, wanted)
