"""The way of one token through the files, as docs/architecture.md draws it."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from swarm_in_process import Blocks, InProcessSwarm
from transformers import PreTrainedModel, StoppingCriteria

from swarmllm.client.distributed_model import DistributedModelForCausalLM
from swarmllm.client.remote_blocks import RemoteBlocks
from swarmllm.data_structures import Span
from swarmllm.models.architecture import Task, task_class
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.quantization.line import why_no_steps
from swarmllm.models.shell.loading import load_client_shell
from swarmllm.server.device.scheduler import Priority

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "swarmllm"
MOST_FILES = 41
"""Files that one token may enter on a client and two servers, as many as on 2026-11-29. To be lowered, never raised."""


class Watch(StoppingCriteria):
    """Notes which files are entered by any thread while the fifth token is made."""

    def __init__(self, blocks: Blocks, num_prompt: int) -> None:
        self.files: set[str] = set()
        self._blocks, self._begin = blocks, num_prompt + 4

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if input_ids.shape[1] in (self._begin, self._begin + 1):
            profile = self._note if input_ids.shape[1] == self._begin else None
            self._blocks.loop.run_coroutine(self._set(profile))
            sys.setprofile(profile)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    async def _set(self, profile: Any) -> None:
        await self._blocks.device_thread.run_call(lambda: sys.setprofile(profile), Priority.DECODE)
        sys.setprofile(profile)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            self.files.add(str(Path(frame.f_code.co_filename).relative_to(SOURCE)))


@contextmanager
def model_of(swarm: InProcessSwarm, directory: Path) -> Iterator[Any]:
    checkpoint = open_checkpoint(str(directory))
    runner = RemoteBlocks(swarm.view, swarm.batches, swarm.traits, Span(0, checkpoint.num_blocks))
    model: Any = load_client_shell(
        checkpoint,
        model_class=task_class(checkpoint.config, Task.CAUSAL_LM),
        mixin=DistributedModelForCausalLM,
        dtype=torch.float32,
        runner=runner,
        traits=swarm.traits,
        progress=False,
    )
    model.remote_blocks, model.swarm = runner, swarm.view
    yield model


@pytest.mark.skipif(bool(why_no_steps()), reason="the picture is of steps that the compiled kernels run")
def test_the_picture_shows_what_a_token_enters(blocks: Blocks, llama: Path, local: PreTrainedModel) -> None:
    prompt = torch.tensor([[1, 5, 9, 7]])
    watch = Watch(blocks, prompt.shape[1])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with InProcessSwarm(blocks, [(0, 3), (3, 6)]) as swarm, model_of(swarm, llama) as model:
        text = model.generate(prompt, stopping_criteria=[watch], **options)
    assert text.tolist() == local.generate(prompt, **options).tolist()
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    drawn = {f"{name}.py" for name in re.findall(r"(?:[a-z_]+/)+[a-z_]+", picture)}
    assert len(drawn) > 10
    assert not drawn - watch.files
    assert len(watch.files) <= MOST_FILES
