"""An adapter for each row: several personas answer at once, and the plain model with them.

    python examples/adapters_per_row.py                 # a swarm of its own, on this machine; trains two personas first

peft calls it `adapter_names`: one name for each row, `__base__` for none. The adapters belong to this client, and
travel to the servers once.
"""

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from recipe import PERSONAS, train
from runs import at_least_one, default_model, run, swarm_for, tokenizer_of

from swarmllm import AutoDistributedModelForCausalLM

ROWS = (
    ("pirate", "What is your name?"),
    ("robot", "What is your name?"),
    ("__base__", "What is your name?"),
    ("robot", "Tell me about the sea."),
)


@torch.no_grad()
def answers(model: Any, tokenizer: Any, rows: tuple[tuple[str, str], ...]) -> list[str]:
    """The answers of each row's adapter to its question, all in one `generate()`."""
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for _, text in rows
    ]
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    names = [name for name, _ in rows]
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    ids = model.eval().generate(**batch, adapter_names=names, **options)
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description="Several adapters in one batch, through a swarm.")
    parser.add_argument("--steps", type=at_least_one, default=40, help="of training each persona")
    parser.add_argument("--model", default=default_model(), help="default: the model that comes with swarmllm")
    parser.add_argument("--initial_peers", nargs="+", help="an existing swarm; default: one on this machine")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        peers = swarm_for(stack, args.model, args.initial_peers)
        tokenizer = tokenizer_of(args.model)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        base = AutoDistributedModelForCausalLM.from_pretrained(args.model, initial_peers=peers, dtype="float32")
        stack.enter_context(base)
        for persona in PERSONAS:
            train(base, tokenizer, persona, directory / persona, steps=args.steps).unload()
        first, *others = PERSONAS
        model = PeftModel.from_pretrained(base, str(directory / first / "adapter"), adapter_name=first)
        for persona in others:
            model.load_adapter(str(directory / persona / "adapter"), adapter_name=persona)
        for (name, question), text in zip(ROWS, answers(model, tokenizer, ROWS), strict=True):
            print(f"{name}: {question} {text}", flush=True)


if __name__ == "__main__":
    run(main)
