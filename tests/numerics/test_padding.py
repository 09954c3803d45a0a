"""Padding is not computed, unless the head of a model looks at it."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.padded_runner import NothingForPadding, skipping_padding
from tests.numerics.test_task_classes import DECODERS
from tests.numerics.test_task_classes import save_tiny as save_tiny_with_head
from tests.numerics.tiny_models import save_tiny, tiny_config
from tests.selection import sampled
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmllm.data_structures import Span
from swarmllm.models.architecture import ENCODERS, Task
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.loading import load_block_span

LENGTHS = (5, 24, 9, 1, 17, 24)
WIDTH = 24
IDS = torch.randint(3, 100, (len(LENGTHS), WIDTH), generator=torch.Generator().manual_seed(7))
NO_SIDE = {"convbert", "nystromformer"}
"""Their blocks look at neighbours, or at averages, whatever the mask says."""
INDEXED = {"axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp_text"}
"""Which of equally good keys they attend to depends on the width of the batch."""
RIGHT_ONLY = {"roformer"}
"""It counts positions from the begin of the batch, whatever they are said to be."""
RELATIVE = {"output": 1e-5, "loss": 1e-5, "gradient": 3e-5}
"""Other shapes round differently; a gradient passes everything twice (gemma4_text: 1.4e-5 on a Zen 5)."""


def mask_of(side: str) -> Tensor:
    places, lengths = torch.arange(WIDTH)[None], torch.tensor(LENGTHS)[:, None]
    return (places >= WIDTH - lengths if side == "left" else places < lengths).long()


def expected_sides(model_type: str) -> tuple[str, ...]:
    if model_type in NO_SIDE | INDEXED:
        return ()
    return ("right",) if model_type in RIGHT_ONLY else ("left", "right")


def assert_close(got: Tensor, want: Tensor, name: str, side: str) -> None:
    assert want.isfinite().all()
    error = float((got - want).abs().max())
    assert error <= RELATIVE[name] * float(want.abs().max()), f"{side}: {name} differs by {error:.1e}"


def read_and_trained(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """Outputs for the texts, and the gradient of the embeddings for a loss on them."""
    embeddings = model.get_input_embeddings().weight.requires_grad_()
    if model.can_generate():
        labels = IDS.where((mask != 0) & (mask.roll(1, 1) != 0), -100)  # none is predicted from padding
        result = model(input_ids=IDS, attention_mask=mask, labels=labels, use_cache=False)
        output, loss = result.logits, result.loss
    else:
        output = model(input_ids=IDS, attention_mask=mask)[0]
        loss = output[mask != 0].square().sum()
    (grad,) = torch.autograd.grad(loss, [embeddings])
    return {"output": output.detach()[mask != 0], "loss": loss.detach(), "gradient": grad}


def check_skipped_padding(model_type: str, local: Any, swarm: InProcessSwarm) -> None:
    """Padding that isn't computed changes nothing of texts and gradients."""
    runner = skipping_padding(swarm, 2 * WIDTH)
    sides = expected_sides(model_type)
    assert runner.traits.skips_padding == sides
    for side in ("left", "right"):
        runner.shapes.clear()
        got, want = (read_and_trained(model, mask_of(side)) for model in (swarm.client, local))
        axis = runner.traits.batch_axis
        num_computed = sum(shape[axis] * shape[axis + 1] for shape in runner.shapes)
        if side in sides:
            assert num_computed < 1.3 * sum(LENGTHS)
        else:
            assert num_computed == IDS.numel()
        for name in want:
            assert_close(got[name], want[name], name, side)


@pytest.mark.parametrize("model_type", sampled(sorted(ENCODERS), 12))
def test_encoders_skip_padding(model_type: str, tmp_path: Path) -> None:
    """`test_architectures` has decoders."""
    local = save_tiny_with_head(model_type, Task.FEATURES, tmp_path)
    check_skipped_padding(model_type, local, InProcessSwarm(tmp_path, task=Task.FEATURES))


def test_frequencies_chosen_by_the_longest_row(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    blocks = load_block_span(open_checkpoint(str(tmp_path)), Span(1, 3), progress=False)
    assert blocks.traits.even_length == config.max_position_embeddings
    assert blocks.traits.skips_padding == ()


RIGHT = mask_of("right")
CLASSES = {"input_ids": IDS.where(RIGHT != 0, 0), "attention_mask": RIGHT, "labels": torch.arange(len(IDS)) % 3}


def outcome(model: Any, **inputs: Tensor) -> tuple[Tensor, ...]:
    result = model(**inputs)
    return result.loss, *(value for name, value in result.items() if "logits" in name)


def assert_not_missed(directory: Path, local: Any, task: Task, *, whole: bool, **inputs: Tensor) -> None:
    """Without what the mask hides, unless the head has it computed, all is as locally."""
    swarm = InProcessSwarm(directory, task=task)
    assert inspect.signature(swarm.client.forward) == inspect.signature(local.forward)  # trainers read it
    nothing = NothingForPadding(swarm.route)
    swarm.runner.run_blocks = nothing.run_blocks  # type: ignore[method-assign]
    with torch.no_grad():
        got, want = outcome(swarm.client, **inputs), outcome(local, **inputs)
    assert nothing.was_whole == [whole]
    shown = inputs["attention_mask"] != 0
    for pair in zip(got, want, strict=True):
        of_positions = pair[0].shape[:2] == shown.shape and not whole
        assert_close(*(one[shown] if of_positions else one for one in pair), "output", "heads")


@pytest.mark.parametrize("model_type", sampled(sorted({*DECODERS, *ENCODERS}), 24))
def test_classes_need_no_padding(model_type: str, tmp_path: Path) -> None:
    task = Task.SEQUENCE_CLASSIFICATION
    local = save_tiny_with_head(model_type, task, tmp_path)
    assert_not_missed(tmp_path, local, task, whole=False, **CLASSES)


@pytest.mark.parametrize("change", ["embeddings", "no padding among the ids"])
def test_a_class_read_from_padding(change: str, tmp_path: Path) -> None:
    """Where a head can't see where the text ends, it takes the last position."""
    task = Task.SEQUENCE_CLASSIFICATION
    local = save_tiny_with_head("llama", task, tmp_path)
    inputs = CLASSES | {"input_ids": IDS}
    if change == "embeddings":
        inputs["inputs_embeds"] = local.get_input_embeddings()(inputs.pop("input_ids")).detach()
    assert_not_missed(tmp_path, local, task, whole=True, **inputs)


def test_answers_are_looked_for_everywhere(tmp_path: Path) -> None:
    task = Task.QUESTION_ANSWERING
    local = save_tiny_with_head("bert", task, tmp_path)
    places = {"start_positions": torch.zeros(len(IDS), dtype=torch.long), "end_positions": torch.tensor(LENGTHS) - 1}
    assert_not_missed(tmp_path, local, task, whole=True, input_ids=IDS, attention_mask=RIGHT, **places)


@pytest.mark.parametrize(
    ("side", "labels", "whole"),
    [
        ("right", IDS, True),
        ("right", IDS.where(RIGHT != 0, -100), False),
        ("left", IDS.where(mask_of("left") != 0, -100), True),  # the first token of a text is predicted from padding
    ],
)
def test_labels_of_language_models(side: str, labels: Tensor, whole: bool, tmp_path: Path) -> None:
    local = save_tiny("llama", tmp_path)
    assert_not_missed(
        tmp_path, local, Task.CAUSAL_LM, whole=whole, input_ids=IDS, attention_mask=mask_of(side), labels=labels
    )
