"""Scripts whose batches come from worker processes: torch handles SIGCHLD then, and the script ends all the same."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests import forked

from swarmllm import LocalSwarm

pytestmark = pytest.mark.rotates(6, whole_file=True)

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
from swarmllm import AutoDistributedModel

model = AutoDistributedModel.from_pretrained(sys.argv[1], initial_peers=sys.argv[2:], progress=False)
{train}
"""
BY_HAND = """
for batch in DataLoader([torch.arange(5)] * 8, batch_size=2, num_workers=2):
    model(batch, labels=batch).loss.backward()
print("trained", flush=True)
"""
TRAINER = """
from transformers import Trainer, TrainingArguments

texts = [{"input_ids": torch.arange(5), "labels": torch.arange(5)}] * 8
options = {"max_steps": 2, "dataloader_num_workers": 2, "use_cpu": True, "report_to": [], "save_strategy": "no"}
Trainer(model, TrainingArguments(sys.argv[1] + "-trained", **options), train_dataset=texts).train()
print("trained", flush=True)
"""


@pytest.mark.parametrize("train", [BY_HAND, BY_HAND + "model.close()", pytest.param(TRAINER, marks=[pytest.mark.slow])])
def test_a_script_with_workers_that_load_data_ends(train: str, llama: Path, swarm: LocalSwarm) -> None:
    script = SCRIPT.replace("{train}", train)
    process = forked.popen(
        [sys.executable, "-c", script, str(llama), *swarm.initial_peers], stderr=sys.__stderr__, stdout=subprocess.PIPE
    )
    try:
        assert any(line == "trained\n" for line in process.stdout)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
