"""What the examples of training share: a swarm to train on, a line for each step, and a picture of the loss."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from swarmllm import LocalSwarm, embedded_model_path


def swarm_for(stack: contextlib.ExitStack, model_path: str, initial_peers: Sequence[str] | None) -> Sequence[str]:
    """Peers of an existing swarm, or of one on this machine that ends with the stack."""
    if initial_peers:
        return initial_peers
    options = {"num_servers": 2, "num_threads": 1, "quant_type": "none", "dtype": "float32"}
    return stack.enter_context(LocalSwarm(model_path, **options)).initial_peers


def check_resumes(output_dir: Path) -> None:
    """Exit if there is nothing to go on from."""
    if not output_dir.is_dir() or get_last_checkpoint(str(output_dir)) is None:
        raise SystemExit(f"there is no checkpoint in {output_dir} to go on from: leave --resume out to begin anew")


def tokenizer_of(model_path: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def default_model() -> str:
    return str(embedded_model_path())


def settings(output_dir: Path, *, steps: int, lr: float, batch_size: int) -> dict[str, Any]:
    """For `TrainingArguments` and its kin: the loss of each step, and four checkpoints."""
    return {
        "output_dir": str(output_dir),
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": lr,
        "logging_steps": 1,
        "save_steps": max(1, steps // 4),
        "save_total_limit": 2,
        "report_to": [],
        "disable_tqdm": True,  # `StepTimes` has a line for each step
        "use_cpu": not torch.cuda.is_available(),
        "seed": 0,
    }


class StepTimes(TrainerCallback):
    """A line for each step: its loss, its time, and how much of that was waiting for servers and network."""

    def __init__(self, remote_blocks: Any) -> None:
        self._batches = remote_blocks.batches
        self._began, self._waited_s = time.perf_counter(), 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began, self._waited_s = time.perf_counter(), self._batches.waited_s

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, Any] | None = None, **___: Any) -> None:
        if logs and "loss" in logs:
            print(step_line(state.global_step, state.max_steps, float(logs["loss"]), *self.times()), flush=True)

    def times(self) -> tuple[float, float]:
        """Seconds since the step began, and those of them that were spent waiting."""
        return time.perf_counter() - self._began, self._batches.waited_s - self._waited_s


def step_line(step: int, num_steps: int, loss: float, took_s: float, waited_s: float) -> str:
    share = waited_s / took_s if took_s else 0.0
    return f"step {step} of {num_steps}: loss {loss:.4f}, {took_s:.2f} s, {share:.0%} of it servers and network"


def save_loss_curve(history: list[dict[str, Any]], path: Path) -> None:
    """A picture of the training loss by step, as SVG."""
    points = [(entry["step"], float(entry["loss"])) for entry in history if "loss" in entry]
    if points:
        save_curve(points, path, title="Training loss", x="optimizer step", y="loss (nats per token or text)")


def save_curve(points: Sequence[tuple[float, float]], path: Path, *, title: str, x: str, y: str) -> None:
    """A line through points, with a title and named axes that begin at 0."""
    right, top = max(one for one, _ in points) or 1, max(one for _, one in points) or 1.0
    line = " ".join(f"{60 + 520 * one / right:.1f},{260 - 220 * other / top:.1f}" for one, other in points)
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 310" font-family="sans-serif" font-size="12">'
        '<rect width="600" height="310" fill="white"/><path d="M60 40V260H580" fill="none" stroke="gray"/>'
        f'<text x="320" y="20" font-size="15" text-anchor="middle">{title}</text>'
        f'<text x="320" y="300" text-anchor="middle">{x}</text>'
        f'<text x="14" y="150" text-anchor="middle" transform="rotate(-90 14 150)">{y}</text>'
        f'<text x="54" y="44" text-anchor="end">{top:.2f}</text><text x="54" y="264" text-anchor="end">0</text>'
        f'<text x="580" y="278" text-anchor="end">{right}</text>'
        f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/></svg>\n'
    )
