"""Prompt tuning: teach a model of the swarm one sentence by training a few soft prompt tokens.

    python examples/prompt_tuning.py                                # a swarm of its own, on this machine
    python examples/prompt_tuning.py --initial_peers ADDRESS --model M

The soft prompts and the optimizer are on this machine. The blocks run, forwards and backwards, on servers, which don't
change their weights. So many users can tune one model at the same time.
"""

import argparse
import contextlib

import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from runs import above_zero, at_least_one, default_model, run, swarm_for, tokenizer_of

from swarmllm import AutoDistributedModelForCausalLM

TEXT = "The little robot painted the moon green, because nobody had told it not to."


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains soft prompts through a swarm.")
    parser.add_argument("--steps", type=at_least_one, default=60)
    parser.add_argument("--lr", type=above_zero, default=0.3)
    parser.add_argument("--num_virtual_tokens", type=at_least_one, default=16)
    parser.add_argument("--model", default=default_model(), help="default: the model that comes with swarmllm")
    parser.add_argument("--initial_peers", nargs="+", help="an existing swarm; default: one on this machine")
    args = parser.parse_args()

    with contextlib.ExitStack() as stack:
        peers = swarm_for(stack, args.model, args.initial_peers)
        tokenizer = tokenizer_of(args.model)
        base = AutoDistributedModelForCausalLM.from_pretrained(args.model, initial_peers=peers, dtype="float32")
        stack.enter_context(base)

        torch.manual_seed(0)
        model = get_peft_model(
            base, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=args.num_virtual_tokens)
        )
        model.print_trainable_parameters()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
        batch = tokenizer(TEXT, return_tensors="pt")
        for step in range(args.steps):
            loss = model(**batch, labels=batch.input_ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}  loss {loss.item():.4f}", flush=True)

        start = tokenizer(" ".join(TEXT.split()[:3]), return_tensors="pt")
        said = model.generate(
            **start, max_new_tokens=batch.input_ids.shape[1] - start.input_ids.shape[1], do_sample=False
        )
        print("it says:", tokenizer.decode(said[0], skip_special_tokens=True))


if __name__ == "__main__":
    run(main)
