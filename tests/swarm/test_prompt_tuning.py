"""Prompt tuning with peft: the example's loss falls, and loss, gradients and text are those of the local model."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from swarm_models import connected, load_local, prompt

from swarmllm import LocalSwarm


@pytest.mark.slow
def test_the_example_reaches_its_loss(repo_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, repo_root / "examples" / "prompt_tuning.py", "--steps", "60"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 60
    assert losses[0] > 9
    assert losses[-1] < 4  # it was 3.45
    assert "it says: The little robot" in done.stdout


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
def test_peft_on_a_swarm_is_peft_on_the_local_model(llama: Path, swarm: LocalSwarm) -> None:
    def tune(model: Any) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tuned = get_peft_model(model, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5))
        ids = prompt()
        loss = tuned(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        text = tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        return loss.detach(), tuned.prompt_encoder["default"].embedding.weight.grad, text.tolist()

    expected = tune(load_local(llama))
    with connected(llama, swarm.initial_peers, speculation="ngram") as model:
        loss, gradient, text = tune(model)
    assert torch.equal(loss, expected[0])
    assert gradient.abs().max() > 0
    torch.testing.assert_close(gradient, expected[1])
    assert text == expected[2]
