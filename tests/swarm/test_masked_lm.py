"""Masked places through real servers: transformers' pipeline, and training, as with the local model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import OPTIONS
from tests.numerics.test_task_classes import save_tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, pipeline

from swarmllm import AutoDistributedModelForMaskedLM, LocalSwarm
from swarmllm.models.architecture import Task

pytestmark = pytest.mark.rotates(6, whole_file=True)

WORDS = [*"abcdefghijkl", "the", "cat", "ran", "over", "mat", "tree", "big", "sat", "on", "then"]
SPECIAL = {
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "unk_token": "[UNK]",
}
TEXTS = ["the big [MASK] sat on the mat", "a [MASK] ran", "then it [MASK] over the very small house and the tree"]


def tokenizer_of() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    local = save_tiny(request.param, Task.MASKED_LM, directory)
    with (
        LocalSwarm(directory, spans=[(0, 2), (2, 4)], **OPTIONS) as swarm,
        AutoDistributedModelForMaskedLM.from_pretrained(str(directory), initial_peers=swarm.initial_peers) as model,
    ):
        yield local, model


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"targets": ["cat", "dog"]}], ids=str)
def test_the_pipeline(options: dict[str, Any], both: tuple[Any, Any]) -> None:
    tokenizer = tokenizer_of()
    expected, found = (pipeline("fill-mask", model=model, tokenizer=tokenizer, **options)(TEXTS) for model in both)
    assert len(found) == len(TEXTS)
    for wanted, got in zip(expected, found, strict=True):
        assert [one["sequence"] for one in got] == [one["sequence"] for one in wanted]
        assert [one["score"] for one in got] == pytest.approx([one["score"] for one in wanted], rel=1e-6)


def test_training(both: tuple[Any, Any]) -> None:
    """Gradients of embeddings, to which the head is tied, and of the head."""
    tokenizer = tokenizer_of()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.input_ids == tokenizer.mask_token_id] = 7
    found = []
    for model in both:
        model.get_input_embeddings().requires_grad_(True)
        model.zero_grad()
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        loss.backward()
        found.append((loss.item(), model.get_input_embeddings().weight.grad.clone()))
    (expected, wanted), (loss, gradient) = found
    assert loss == pytest.approx(expected, rel=1e-6)
    assert float((gradient - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
