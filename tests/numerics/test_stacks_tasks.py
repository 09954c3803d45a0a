"""Heads of encoder-decoders other than the language model's, on blocks of both stacks: the local model's numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.test_encoder_decoders import EXACT, client_of
from tests.numerics.tiny_encoder_decoders import tiny_config
from tests.selection import sampled
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from swarmllm.errors import UnsupportedModelError
from swarmllm.models.architecture import Task, task_class, task_of

MAPPINGS = {
    Task.SEQUENCE_CLASSIFICATION: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    Task.QUESTION_ANSWERING: MODEL_FOR_QUESTION_ANSWERING_MAPPING,
}
LABELS: dict[Task, dict[str, torch.Tensor]] = {
    Task.SEQUENCE_CLASSIFICATION: {"labels": torch.tensor([0, 1])},
    Task.QUESTION_ANSWERING: {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([4, 3])},
}
CASES = [
    f"{name} {task.name}" for task, mapping in MAPPINGS.items() for name in EXACT if type(tiny_config(name)) in mapping
]


@pytest.mark.parametrize("case", sampled(CASES, 6, always=["bart SEQUENCE_CLASSIFICATION"]))
def test_logits_and_gradients(case: str, tmp_path: Path) -> None:
    name, _, of_task = case.partition(" ")
    task, config = Task[of_task], tiny_config(name)
    cls = task_class(config, task)
    torch.manual_seed(0)
    local: Any = cls(config).eval()
    local.save_pretrained(tmp_path)
    assert task_of(AutoConfig.from_pretrained(tmp_path)) == task
    client: Any = client_of(tmp_path, cls).eval()
    ids, mask = torch.randint(3, 100, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    ids[:, -1], mask[1, :3] = config.eos_token_id, 0
    given = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        want, got = local(**given), client(**given)
    for key in ("logits",) if task == Task.SEQUENCE_CLASSIFICATION else ("start_logits", "end_logits"):
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5)
    grads = []
    for model in (local, client):
        model.zero_grad()
        model(**given, **LABELS[task]).loss.backward()
        grads.append({key: one.grad for key, one in model.named_parameters() if one.grad is not None})
    for key, grad in grads[1].items():
        torch.testing.assert_close(grad, grads[0][key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", [Task.TOKEN_CLASSIFICATION, Task.FEATURES, Task.CAUSAL_LM])
def test_other_tasks_are_refused_with_a_mend(task: Task) -> None:
    """T5's class for tokens, for one, has no decoder."""
    with pytest.raises(UnsupportedModelError, match="use AutoDistributedModelForSeq2SeqLM"):
        task_class(tiny_config("t5"), task)
