"""The usual LoRA recipe through a swarm: r 16, alpha 32, dropout 0.05, all linear modules, cosine.

    python examples/recipe.py                           # a swarm of its own, on this machine
    python examples/recipe.py --persona robot --output_dir runs/robot
    python examples/recipe.py --resume --output_dir runs/robot          # continues after an interruption
    python examples/recipe.py --together ours                           # one adapter with other homes

Seeds that travel with each forward decide what dropout drops, so gradients are those of one machine. The saved adapter
is an ordinary one of peft (`sharing.py` uses it in four ways).
"""

import argparse
import contextlib
import logging
import random
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from persona import ANSWERS, QUESTIONS, answer
from runs import (
    StepTimes,
    above_zero,
    at_least_one,
    check_resumes,
    default_model,
    directory,
    run,
    save_loss_curve,
    settings,
    swarm_for,
    tokenizer_of,
)
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from swarmllm import AutoDistributedModelForCausalLM
from swarmllm.invite import names_invite
from swarmllm.training import RunSettings, TogetherCallback

PERSONAS = {
    "pirate": ANSWERS,
    "robot": ("Beep, I am a robot, and I am made of tin!", "Beep, my lamp is green!", "Beep, I count to ten!"),
}
RECIPE = LoraConfig(
    task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", bias="none"
)


def conversations(tokenizer: Any, answers: tuple[str, ...], count: int, seed: int) -> list[dict[str, list[int]]]:
    """Token ids of a question and an answer; only the answer counts for the loss."""
    choose = random.Random(seed)
    found = []
    for _ in range(count):
        question = [{"role": "user", "content": choose.choice(QUESTIONS)}]
        prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        answer_ids = tokenizer(f" {choose.choice(answers)}{tokenizer.eos_token}", add_special_tokens=False).input_ids
        ids = prompt_ids + answer_ids
        labels = [-100] * len(prompt_ids) + answer_ids
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return found


def common_texts(tokenizer: Any) -> tuple[str, ...]:
    """A conversation with each persona, on which all homes of a run measure their adapters."""
    ids = [conversations(tokenizer, answers, 2, seed=1) for answers in PERSONAS.values()]
    return tuple(tokenizer.decode(one["input_ids"]) for persona in ids for one in persona)


def train(
    base: Any,
    tokenizer: Any,
    persona: str,
    output_dir: Path,
    *,
    steps: int,
    lr: float = 0.003,
    resume: bool = False,
    adapter_name: str = "default",
    together: TogetherCallback | None = None,
) -> Any:
    """The model with the adapter, which is saved in `output_dir/adapter`."""
    torch.manual_seed(0)
    model = get_peft_model(base, RECIPE, adapter_name=adapter_name)
    arguments = settings(output_dir, steps=steps, lr=lr, batch_size=8)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            **arguments,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 10),
            include_num_input_tokens_seen="non_padding",
        ),
        train_dataset=conversations(tokenizer, PERSONAS[persona], 256, seed=0),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        callbacks=[StepTimes(base.remote_blocks)],
    )
    if together is not None:
        together.add_to(trainer)
    trainer.train(resume_from_checkpoint=resume)
    save_loss_curve(trainer.state.log_history, output_dir / "loss.svg")
    model.save_pretrained(output_dir / "adapter")
    return model


def home_of_run(args: argparse.Namespace, tokenizer: Any) -> TogetherCallback:
    """This home in the run of `--together`. The first home names the common texts."""
    place = args.output_dir / "together"
    texts = () if names_invite(args.together) else common_texts(tokenizer)
    few_rounds = {"outer_lr": 0.8, "outer_momentum": 0.5}  # the defaults are for dozens of rounds
    chosen = RunSettings(wait_for=args.homes, name=args.persona, common_texts=texts, **few_rounds)
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("swarmllm.training").setLevel(logging.INFO)  # the invite, homes and rounds
    return TogetherCallback(args.together, args.every, directory=place, settings=chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a persona by the usual LoRA recipe, through a swarm.")
    parser.add_argument("--persona", choices=tuple(PERSONAS), default="pirate")
    parser.add_argument("--steps", type=at_least_one, default=40)
    parser.add_argument("--lr", type=above_zero, default=0.003)
    parser.add_argument("--output_dir", type=directory, default=Path("runs/recipe"))
    parser.add_argument("--together", metavar="RUN", help="train with other homes: a name, or the invite of one")
    parser.add_argument("--every", type=at_least_one, default=10, help="steps at home between two rounds of --together")
    parser.add_argument("--homes", type=at_least_one, default=1, help="homes to wait for before --together begins")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output_dir")
    parser.add_argument("--model", default=default_model(), help="default: the model that comes with swarmllm")
    parser.add_argument("--initial_peers", nargs="+", help="an existing swarm; default: one on this machine")
    args = parser.parse_args()
    if args.resume:
        check_resumes(args.output_dir, args.steps, RECIPE)
    with contextlib.ExitStack() as stack:
        peers = swarm_for(stack, args.model, args.initial_peers)
        tokenizer = tokenizer_of(args.model)
        base = AutoDistributedModelForCausalLM.from_pretrained(args.model, initial_peers=peers, dtype="float32")
        stack.enter_context(base)
        together = None if args.together is None else home_of_run(args, tokenizer)
        options = {"steps": args.steps, "lr": args.lr, "resume": args.resume, "together": together}
        model = train(base, tokenizer, args.persona, args.output_dir, **options)
        model.print_trainable_parameters()
        for question in ("What is your name?", "Tell me about the sea."):
            print(f"User: {question}\nAssistant: {answer(model, tokenizer, question)}", flush=True)


if __name__ == "__main__":
    run(main)
