"""Classification through a swarm with transformers' Trainer: a head, and soft prompts or LoRA inside the blocks.

    python examples/classification.py                       # LoRA, a swarm of its own on this machine
    python examples/classification.py --method prompt
    python examples/classification.py --resume --output_dir runs/mine    # continues after an interruption

The task is generated: is the text about an animal or about food? The adapter, the head and the optimizer are on this
machine. Servers compute forwards and backwards and don't change their weights. Writes the adapter, checkpoints and the
loss curve (loss.svg) to --output_dir.
"""

import argparse
import contextlib
import random
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PromptTuningConfig, TaskType, get_peft_model
from runs import (
    above_zero,
    at_least_one,
    check_resumes,
    default_model,
    directory,
    run,
    save_loss_curve,
    settings,
    show_steps,
    swarm_for,
    tokenizer_of,
)
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from swarmllm import AutoDistributedModelForSequenceClassification

WORDS = (
    ("cat", "dog", "bird", "fish", "bear", "rabbit", "fox", "frog"),
    ("cake", "bread", "apple", "soup", "cookie", "pie", "banana", "cheese"),
)
PATTERNS = (
    "One day, Tom saw a {}.",
    "Lily had a big {}.",
    "There was a little {} in the garden.",
    "Mom gave him a {}, and he was happy.",
    "They looked at the {} for a long time.",
    "The {} was very nice.",
)


def examples(tokenizer: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Texts with their class. Another seed gives other texts of the same kind."""
    choose = random.Random(seed)
    found = []
    for _ in range(count):
        label = choose.randrange(2)
        text = " ".join(choose.choice(PATTERNS).format(choose.choice(WORDS[label])) for _ in range(2))
        found.append({"input_ids": tokenizer(text).input_ids, "labels": label})
    return found


def adapter(method: str) -> PeftConfig:
    """The adapter to train, besides the head."""
    if method == "prompt":
        return PromptTuningConfig(task_type=TaskType.SEQ_CLS, num_virtual_tokens=8, modules_to_save=["score"])
    return LoraConfig(task_type=TaskType.SEQ_CLS, r=8, target_modules="all-linear", modules_to_save=["score"])


def train(
    model: Any, tokenizer: Any, output_dir: Path, *, steps: int, lr: float, resume: bool = False
) -> tuple[Trainer, float]:
    """Train and save; return the trainer and the accuracy on unseen texts."""
    held_out = examples(tokenizer, 64, seed=1)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**settings(output_dir, steps=steps, lr=lr, batch_size=16)),
        train_dataset=examples(tokenizer, 512, seed=0),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    show_steps(trainer, model.get_base_model().remote_blocks)
    trainer.train(resume_from_checkpoint=resume)
    save_loss_curve(trainer.state.log_history, output_dir / "loss.svg")
    model.save_pretrained(output_dir / "adapter")
    predictions = trainer.predict(held_out)
    logits = predictions.predictions[0] if isinstance(predictions.predictions, tuple) else predictions.predictions
    return trainer, float((logits.argmax(-1) == predictions.label_ids).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a classifier through a swarm.")
    parser.add_argument("--method", choices=("lora", "prompt"), default="lora")
    parser.add_argument("--steps", type=at_least_one, default=40)
    parser.add_argument("--lr", type=above_zero, help="default: 0.005 for LoRA, 0.05 for soft prompts")
    parser.add_argument("--output_dir", type=directory, default=Path("runs/classification"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output_dir")
    parser.add_argument("--model", default=default_model(), help="default: the model that comes with swarmllm")
    parser.add_argument("--initial_peers", nargs="+", help="an existing swarm; default: one on this machine")
    args = parser.parse_args()
    if args.resume:
        check_resumes(args.output_dir, args.steps, adapter(args.method))
    with contextlib.ExitStack() as stack:
        peers = swarm_for(stack, args.model, args.initial_peers)
        tokenizer = tokenizer_of(args.model)
        torch.manual_seed(0)
        base = AutoDistributedModelForSequenceClassification.from_pretrained(
            args.model,
            initial_peers=peers,
            dtype="float32",
            num_labels=2,
            pad_token_id=tokenizer.pad_token_id,
        )
        stack.enter_context(base)
        model = get_peft_model(base, adapter(args.method))
        model.print_trainable_parameters()
        lr = (0.05 if args.method == "prompt" else 0.005) if args.lr is None else args.lr
        _, accuracy = train(model, tokenizer, args.output_dir, steps=args.steps, lr=lr, resume=args.resume)
        print(f"accuracy on held-out texts: {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    run(main)
