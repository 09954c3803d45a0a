"""Steering: a direction, found between two blocks, makes the model write about something else.

    python examples/steering.py                         # a swarm of its own, on this machine
    python examples/steering.py --initial_peers ADDRESS --model M --block 12

Hooks on whole blocks work as on a local model, although servers run the blocks: the output of a hooked block passes
through this machine. The first hook only reads (probing). The direction is the mean hidden state over texts of one kind
minus that of another kind: here, texts before the name of an animal, and before a kind of food. The second hook adds it
at each step of `generate()`.
"""

import argparse
import contextlib
from typing import Any

import torch
from runs import default_model, run, swarm_for, tokenizer_of
from torch import Tensor

from swarmllm import AutoDistributedModelForCausalLM

ANIMALS = ("fox", "owl", "hen", "cat", "bear", "frog", "rabbit", "horse")
FOOD = ("apple", "pear", "cake", "plum", "pie", "cookie", "egg", "pancake")
BEGINNINGS = ("Tom had four {}s and three", "Lily had five {}s and three")
PROMPTS = ("One day, Lily saw", "Tom wanted", "Emma came back with three")


def blocks_of(model: Any) -> Any:
    """The model's list of blocks."""
    return model.get_decoder().layers


@torch.no_grad()
def mean_state(model: Any, tokenizer: Any, texts: list[str], block_idx: int) -> Tensor:
    """The mean output of the block at the last token of each text, `[hidden]`."""
    seen: list[Tensor] = []
    handle = blocks_of(model)[block_idx].register_forward_hook(lambda block, args, output: seen.append(output[0, -1]))
    try:
        for text in texts:
            model(**tokenizer(text, return_tensors="pt"), use_cache=False)
    finally:
        handle.remove()
    return torch.stack(seen).mean(0)


def written(model: Any, tokenizer: Any, prompt: str, block_idx: int, direction: Tensor) -> str:
    """Text generated while the direction is added after the block."""
    handle = blocks_of(model)[block_idx].register_forward_hook(lambda block, args, output: output + direction)
    try:
        ids = model.generate(
            **tokenizer(prompt, return_tensors="pt"),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    finally:
        handle.remove()
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Steers a model of a swarm by a hook on one of its blocks.")
    parser.add_argument("--block", type=int, default=5, help="the block that is read and steered")
    parser.add_argument("--strength", type=float, default=2.0)
    parser.add_argument("--model", default=default_model(), help="default: the model that comes with swarmllm")
    parser.add_argument("--initial_peers", nargs="+", help="an existing swarm; default: one on this machine")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        peers = swarm_for(stack, args.model, args.initial_peers)
        tokenizer = tokenizer_of(args.model)
        model = AutoDistributedModelForCausalLM.from_pretrained(args.model, initial_peers=peers, dtype="float32")
        stack.enter_context(model)
        if not 0 <= args.block < (count := len(model.remote_blocks)):
            raise SystemExit(f"--block must be 0 to {count - 1}, not {args.block}")
        animals, food = (
            mean_state(model, tokenizer, [text.format(word) for text in BEGINNINGS for word in words], args.block)
            for words in (ANIMALS, FOOD)
        )
        direction = animals - food
        for prompt in PROMPTS:
            for name, strength in (("as it is", 0.0), ("to animals", args.strength), ("to food", -args.strength)):
                print(f"{name}: {written(model, tokenizer, prompt, args.block, strength * direction)}", flush=True)


if __name__ == "__main__":
    run(main)
