"""What the examples of training share: a swarm to train on, and a picture of the loss."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from swarmllm import LocalSwarm, embedded_model_path


def swarm_for(stack: contextlib.ExitStack, model_path: str, initial_peers: Sequence[str] | None) -> Sequence[str]:
    """Peers of an existing swarm, or of one on this machine that ends with the stack."""
    if initial_peers:
        return initial_peers
    options = {"num_servers": 2, "num_threads": 1, "quant_type": "none", "dtype": "float32"}
    return stack.enter_context(LocalSwarm(model_path, **options)).initial_peers


def tokenizer_of(model_path: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def default_model() -> str:
    return str(embedded_model_path())


def settings(output_dir: Path, *, steps: int, lr: float, batch_size: int) -> dict[str, Any]:
    """For `TrainingArguments` and its kin: a progress bar, the loss of each step, and four checkpoints."""
    return {
        "output_dir": str(output_dir),
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": lr,
        "logging_steps": 1,
        "save_steps": max(1, steps // 4),
        "save_total_limit": 2,
        "report_to": [],
        "use_cpu": not torch.cuda.is_available(),
        "seed": 0,
    }


def save_loss_curve(history: list[dict[str, Any]], path: Path) -> None:
    """A picture of the training loss by step, as SVG."""
    points = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    if not points:
        return
    points = [(step, float(loss)) for step, loss in points]
    last, highest = max(step for step, _ in points), max(loss for _, loss in points) or 1.0
    line = " ".join(f"{40 + 540 * step / last:.1f},{280 - 250 * loss / highest:.1f}" for step, loss in points)
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 310" font-family="sans-serif" font-size="12">'
        '<rect width="600" height="310" fill="white"/><path d="M40 30V280H580" fill="none" stroke="gray"/>'
        f'<text x="4" y="34">{highest:.2f}</text><text x="26" y="284">0</text><text x="560" y="298">{last}</text>'
        f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/></svg>\n'
    )
