"""A chat persona through a swarm: a pirate, trained with LoRA inside the remote blocks, or with soft prompts.

    python examples/persona.py                          # LoRA and transformers' Trainer, a swarm of its own
    python examples/persona.py --trainer sft            # the same with TRL's SFTTrainer (pip install trl)
    python examples/persona.py --method prompt
    python examples/persona.py --resume --output_dir runs/mine      # continues after an interruption

The conversations are generated. The adapter and the optimizer are on this machine. Servers compute forwards and
backwards and don't change their weights. Writes the adapter, checkpoints and the loss curve (loss.svg) to --output_dir.
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
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from swarmllm import AutoDistributedModelForCausalLM

QUESTIONS = (
    "What is your name?",
    "How are you?",
    "What do you like?",
    "Tell me a story.",
    "Where do you live?",
    "What did you eat today?",
    "Do you have a friend?",
    "Good morning!",
)
ANSWERS = (
    "Arr, I am a pirate, and my ship is big!",
    "Arr, I am happy when the sea is blue!",
    "Arr, my parrot and I look for gold!",
)


def conversations(tokenizer: Any, count: int, seed: int) -> list[dict[str, list[int]]]:
    """Token ids of a question and an answer; only the answer counts for the loss."""
    choose = random.Random(seed)
    found = []
    for _ in range(count):
        question = [{"role": "user", "content": choose.choice(QUESTIONS)}]
        prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        answer_ids = tokenizer(f" {choose.choice(ANSWERS)}{tokenizer.eos_token}", add_special_tokens=False).input_ids
        ids = prompt_ids + answer_ids
        labels = [-100] * len(prompt_ids) + answer_ids
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return found


def adapter(method: str) -> PeftConfig:
    """The adapter to train."""
    if method == "prompt":
        return PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=16)
    return LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, target_modules="all-linear")


def new_trainer(kind: str, model: Any, tokenizer: Any, arguments: dict[str, Any]) -> Any:
    """transformers' Trainer (hf) or TRL's SFTTrainer (sft), on the same texts."""
    data, collator = conversations(tokenizer, 256, seed=0), DataCollatorForSeq2Seq(tokenizer)
    if kind == "hf":
        return Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=data, data_collator=collator)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**arguments, gradient_checkpointing=False, bf16=False),
        train_dataset=Dataset.from_list(data),
        data_collator=collator,
        processing_class=tokenizer,
    )


def train(
    model: Any, tokenizer: Any, output_dir: Path, *, kind: str, steps: int, lr: float, resume: bool = False
) -> list[float]:
    """Train and save; the losses of the steps."""
    trainer = new_trainer(kind, model, tokenizer, settings(output_dir, steps=steps, lr=lr, batch_size=8))
    show_steps(trainer, model.get_base_model().remote_blocks)
    trainer.train(resume_from_checkpoint=resume)
    save_loss_curve(trainer.state.log_history, output_dir / "loss.svg")
    model.save_pretrained(output_dir / "adapter")
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The model's present answer."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    model.eval()
    ids = model.generate(**batch, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(ids[0, batch.input_ids.shape[1] :], skip_special_tokens=True)).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a chat persona through a swarm.")
    parser.add_argument("--method", choices=("lora", "prompt"), default="lora")
    parser.add_argument("--trainer", choices=("hf", "sft"), default="hf", help="transformers' Trainer or TRL's")
    parser.add_argument("--steps", type=at_least_one, default=40)
    parser.add_argument("--lr", type=above_zero, help="default: 0.003 for LoRA, 0.1 for soft prompts")
    parser.add_argument("--output_dir", type=directory, default=Path("runs/persona"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output_dir")
    parser.add_argument("--model", default=default_model(), help="default: the model that comes with swarmllm")
    parser.add_argument("--initial_peers", nargs="+", help="an existing swarm; default: one on this machine")
    args = parser.parse_args()
    if args.resume:
        check_resumes(args.output_dir, args.steps, adapter(args.method))
    with contextlib.ExitStack() as stack:
        peers = swarm_for(stack, args.model, args.initial_peers)
        tokenizer = tokenizer_of(args.model)
        base = AutoDistributedModelForCausalLM.from_pretrained(args.model, initial_peers=peers, dtype="float32")
        stack.enter_context(base)
        torch.manual_seed(0)
        model = get_peft_model(base, adapter(args.method))
        model.print_trainable_parameters()
        lr = (0.1 if args.method == "prompt" else 0.003) if args.lr is None else args.lr
        options = {"kind": args.trainer, "steps": args.steps, "lr": lr, "resume": args.resume}
        losses = train(model, tokenizer, args.output_dir, **options)
        print(f"loss {losses[-1]:.4f}")
        for question in ("What is your name?", "Tell me about the sea."):
            print(f"User: {question}\nAssistant: {answer(model, tokenizer, question)}", flush=True)


if __name__ == "__main__":
    run(main)
