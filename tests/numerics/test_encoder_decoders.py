"""Models with an encoder and a decoder on servers: spans of both stacks, other heads, and what is refused.

`test_architectures` compares every one of them with the local model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.architectures import ENCODER_DECODERS
from tests.numerics.in_process_swarm import encoder_decoder_client
from tests.numerics.tiny_encoder_decoders import BASE, inputs_of, names, save_tiny_model, tiny_config, tiny_model
from tests.selection import sampled
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.models.architecture import Task, parts_of, task_class, task_of
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.loading import load_block_span


def test_the_readme_counts_them(repo_root: Path) -> None:
    """A type is exact if one of its variants is."""
    exact, types = ({BASE.get(name, name) for name in some} for some in (ENCODER_DECODERS, names()))
    text = " ".join((repo_root / "README.md").read_text().split())
    assert f"{len(types)} model types with an encoder and a decoder for text. {len(exact)} of them work" in text
    assert f"The other {len(types - exact)} are refused with the reason (tiny random models of all types," in text


def test_an_encoder_that_pads_the_text(tmp_path: Path) -> None:
    """Whatever its length; what servers are not told of is refused."""
    local, client = tiny_model("led"), encoder_decoder_client(save_tiny_model("led", tmp_path))
    target = torch.randint(3, 100, (2, 5))
    for length in range(1, 10):
        given = {key: value[:, :length] for key, value in inputs_of(local).items()}
        with torch.no_grad():
            want, got = (model(**given, decoder_input_ids=target).logits for model in (local, client))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            with pytest.raises(ConfigurationError, match="leave global_attention_mask out"):
                client(**given, decoder_input_ids=target, global_attention_mask=torch.ones(2, length))


def test_blocks_are_numbered_one_stack_after_the_other(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_tiny_model("t5", tmp_path)))
    assert checkpoint.num_blocks == 7
    assert parts_of(checkpoint.config, Span(3, 6)) == [Span(3, 4), Span(4, 6)]
    with pytest.raises(UnsupportedModelError, match="are in the encoder and in the decoder"):
        load_block_span(checkpoint, Span(3, 5), progress=False)


def test_another_source_mask_in_mid_text_is_refused(tmp_path: Path) -> None:
    client = encoder_decoder_client(save_tiny_model("bart", tmp_path))
    given = inputs_of(client)
    first = client(**given, decoder_input_ids=torch.tensor([[5], [6]]), use_cache=True)
    again = {**given, "attention_mask": torch.ones_like(given["attention_mask"])}
    with torch.no_grad(), pytest.raises(ConfigurationError, match="has changed since the text began"):
        client(**again, decoder_input_ids=torch.tensor([[7], [8]]), past_key_values=first.past_key_values)


# ---------------------------------------------------------------------- other heads

MAPPINGS = {
    Task.SEQUENCE_CLASSIFICATION: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    Task.QUESTION_ANSWERING: MODEL_FOR_QUESTION_ANSWERING_MAPPING,
}


LABELS: dict[Task, dict[str, torch.Tensor]] = {
    Task.SEQUENCE_CLASSIFICATION: {"labels": torch.tensor([0, 1])},
    Task.QUESTION_ANSWERING: {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([4, 3])},
}


CASES = [
    f"{name} {task.name}"
    for task, mapping in MAPPINGS.items()
    for name in ENCODER_DECODERS
    if type(tiny_config(name)) in mapping
]


@pytest.mark.parametrize("case", sampled(CASES, 12, always=["bart SEQUENCE_CLASSIFICATION"]))
def test_other_heads(case: str, tmp_path: Path) -> None:
    name, _, of_task = case.partition(" ")
    task, config = Task[of_task], tiny_config(name)
    cls = task_class(config, task)
    torch.manual_seed(0)
    local: Any = cls(config).eval()
    local.save_pretrained(tmp_path)
    assert task_of(AutoConfig.from_pretrained(tmp_path)) == task
    client: Any = encoder_decoder_client(tmp_path, cls).eval()
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
