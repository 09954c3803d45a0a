"""accelerate's loops, which are what most training scripts are: through a swarm they train what they train locally."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from swarm_models import connected, prompt
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, get_linear_schedule_with_warmup

pytestmark = pytest.mark.rotates(6, whole_file=True)

LORA = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
PROMPT = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
STEPS = 6


class Run:
    """A loop as in accelerate's examples, that can be left and taken up again."""

    def __init__(self, model: Any, config: peft.PeftConfig) -> None:
        set_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        adapted = peft.get_peft_model(model, copy.deepcopy(config))
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        texts = list(torch.cat([prompt(2, 10, seed=seed) for seed in range(STEPS)]))
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            adapted,
            optimizer,
            DataLoader(texts, batch_size=2),  # type: ignore[arg-type]
            get_linear_schedule_with_warmup(optimizer, 1, 2 * STEPS),
        )
        self.losses: list[float] = []

    def train(self) -> None:
        """One epoch."""
        self.model.train()
        for ids in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=ids, labels=ids).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(float(self.accelerator.gather(loss.detach()).mean()))

    def trained(self) -> dict[str, Tensor]:
        model = self.accelerator.unwrap_model(self.model)
        return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("config", [LORA, PROMPT], ids=["lora", "prompt tuning"])
def test_a_loop_and_its_continuation(
    config: peft.PeftConfig, llama: Path, swarm: Any, local: PreTrainedModel, tmp_path: Path
) -> None:
    expected = Run(copy.deepcopy(local), config)
    expected.train()
    after_one = expected.trained()
    expected.train()

    with connected(llama, swarm.initial_peers) as model:
        run = Run(model, config)
        untrained = run.trained()
        run.train()
        assert_close(run.trained(), after_one)
        assert any(not torch.equal(untrained[name], one) for name, one in after_one.items())
        run.accelerator.save_state(str(tmp_path))
        losses = run.losses
    with connected(llama, swarm.initial_peers) as model:
        again = Run(model, config)
        assert_close(again.trained(), untrained)
        again.accelerator.load_state(str(tmp_path))
        again.train()
        assert_close(again.trained(), expected.trained())
    assert [*losses, *again.losses] == pytest.approx(expected.losses, rel=1e-5)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
