"""Common parts of the training examples: a swarm to train on, a line for each step, and a chart of the loss.

In a notebook the chart grows with each step, below a progress bar.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from swarmllm import LocalSwarm, SwarmError, embedded_model_path, load_tokenizer

# peft looks for config.json beside the model; a GGUF file needs none.
warnings.filterwarnings("ignore", message="Could not find a config file")


def swarm_for(stack: contextlib.ExitStack, model_path: str, initial_peers: Sequence[str] | None) -> Sequence[str]:
    """Peers of an existing swarm, or of one on this machine that ends with the stack."""
    if initial_peers:
        return initial_peers
    options = {"num_servers": 2, "num_threads": 1, "quant_type": "none", "dtype": "float32"}
    return stack.enter_context(LocalSwarm(model_path, **options)).initial_peers


def check_resumes(output_dir: Path, steps: int, adapter: PeftConfig) -> None:
    """Exit if there is no checkpoint to continue from, with so many steps to make, and with such an adapter."""
    found = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
    if found is None:
        raise SystemExit(f"there is no checkpoint in {output_dir} to go on from: leave --resume out to begin anew")
    try:
        done = int(json.loads((Path(found) / "trainer_state.json").read_text())["global_step"])
        trained = json.loads((Path(found) / "adapter_config.json").read_text())["peft_type"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{found} is not whole ({error}): remove it, to go on from the one before") from None
    if done >= steps:
        raise SystemExit(f"the run in {output_dir} has made {done} steps: give more --steps to go on")
    if trained != adapter.peft_type.value:
        raise SystemExit(f"the run in {output_dir} trains {trained}, not {adapter.peft_type.value}: give its --method")


def at_least_one(text: str) -> int:
    """The type of arguments that count something."""
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("give at least 1")
    return count


def above_zero(text: str) -> float:
    """The type of a learning rate."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError("give a number above 0")
    return number


def directory(text: str) -> Path:
    """The type of `--output_dir`: a directory, or a place for a new one."""
    path = Path(text)
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{existing} is no directory that can be written to")
    return path


def run(main: Callable[[], None]) -> None:
    """Run an example. What can't work is told in a sentence."""
    try:
        main()
    except SwarmError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None


def tokenizer_of(model_path: str) -> Any:
    tokenizer = load_tokenizer(model_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def default_model() -> str:
    return str(embedded_model_path())


def settings(output_dir: Path, *, steps: int, lr: float, batch_size: int) -> dict[str, Any]:
    """Arguments for `TrainingArguments` and its subclasses: the loss of each step, and four checkpoints."""
    return {
        "output_dir": str(output_dir),
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": lr,
        "logging_steps": 1,
        "save_steps": max(1, steps // 4),
        "save_total_limit": 2,
        "report_to": [],
        "disable_tqdm": True,  # `show_steps` has a line or a bar for each step
        "use_cpu": not torch.cuda.is_available(),
        "seed": 0,
    }


class StepTimes(TrainerCallback):
    """Prints a line for each step: its loss, its time, and the share of waiting for servers and network."""

    def __init__(self, remote_blocks: Any) -> None:
        self._batches = remote_blocks.batches
        self._began, self._waited_s = time.perf_counter(), 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began, self._waited_s = time.perf_counter(), self._batches.waited_s

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, Any] | None = None, **___: Any) -> None:
        if logs and "loss" in logs:
            self.show(step_line(state.global_step, state.max_steps, float(logs["loss"]), *self.times()), state)

    def show(self, line: str, state: Any) -> None:
        print(line, flush=True)

    def times(self) -> tuple[float, float]:
        """Seconds since the step began, and the seconds of waiting among them."""
        return time.perf_counter() - self._began, self._batches.waited_s - self._waited_s


class LiveCurve(StepTimes):
    """In a notebook: the same line above a progress bar and the loss so far, in one picture that each step replaces."""

    def __init__(self, remote_blocks: Any) -> None:
        super().__init__(remote_blocks)
        self._shown: Any = None

    def show(self, line: str, state: Any) -> None:
        from IPython.display import SVG, display

        left_s = (state.max_steps - state.global_step) * self.times()[0]
        title = f"{line}; {left_s:.0f} s left" if left_s else line
        axes = {"x": "optimizer step", "y": "loss (nats per token or text)", "right": state.max_steps}
        done = state.global_step / state.max_steps
        picture = SVG(curve(losses_by_step(state.log_history), title=title, done=done, **axes))
        if self._shown is None:
            self._shown = display(picture, display_id=True)
        else:
            self._shown.update(picture)


def show_steps(trainer: Trainer, remote_blocks: Any) -> None:
    """A line for each step; in a notebook, a growing picture."""
    if "ipykernel" in sys.modules:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(LiveCurve(remote_blocks))
    else:
        trainer.add_callback(StepTimes(remote_blocks))


def step_line(step: int, num_steps: int, loss: float, took_s: float, waited_s: float) -> str:
    share = waited_s / took_s if took_s else 0.0
    return f"step {step} of {num_steps}: loss {loss:.4f}, {took_s:.2f} s, {share:.0%} of it servers and network"


def losses_by_step(history: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(entry["step"], float(entry["loss"])) for entry in history if "loss" in entry]


def save_loss_curve(history: list[dict[str, Any]], path: Path) -> None:
    """A chart of the training loss by step, as SVG."""
    if points := losses_by_step(history):
        save_curve(points, path, title="Training loss", x="optimizer step", y="loss (nats per token or text)")


def save_curve(points: Sequence[tuple[float, float]], path: Path, *, title: str, x: str, y: str) -> None:
    """A line through points, with a title and named axes that begin at 0."""
    path.write_text(curve(points, title=title, x=x, y=y))


def curve(
    points: Sequence[tuple[float, float]],
    *,
    title: str,
    x: str,
    y: str,
    right: float | None = None,
    done: float | None = None,
) -> str:
    """The same as SVG. `right`: the end of the axis, if further than the points; `done`: a share, for a bar above."""
    right = right or max(one for one, _ in points) or 1
    top = max(one for _, one in points) or 1.0
    line = " ".join(f"{60 + 520 * one / right:.1f},{260 - 220 * other / top:.1f}" for one, other in points)
    bar = "" if done is None else f'<path d="M60 29H{60 + 520 * done:.1f}" stroke="#2563eb" stroke-width="4"/>'
    ground = "" if done is None else '<path d="M60 29H580" stroke="#dbe4f8" stroke-width="4"/>'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 310" font-family="sans-serif" font-size="12">'
        f'<rect width="600" height="310" fill="white"/>{ground}{bar}'
        '<path d="M60 40V260H580" fill="none" stroke="gray"/>'
        f'<text x="320" y="20" font-size="{15 if done is None else 13}" text-anchor="middle">{title}</text>'
        f'<text x="320" y="300" text-anchor="middle">{x}</text>'
        f'<text x="14" y="150" text-anchor="middle" transform="rotate(-90 14 150)">{y}</text>'
        f'<text x="54" y="44" text-anchor="end">{top:.2f}</text><text x="54" y="264" text-anchor="end">0</text>'
        f'<text x="580" y="278" text-anchor="end">{right}</text>'
        f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/></svg>\n'
    )
