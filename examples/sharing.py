"""One adapter used in four ways: by its trainer, by another client, offered by servers to everybody, and merged.

    python examples/sharing.py                          # trains the pirate of recipe.py first
    python examples/sharing.py --adapter runs/recipe/adapter

All four give the same text.
"""

import argparse
import tempfile
from pathlib import Path

from peft import PeftModel
from persona import answer
from recipe import train
from runs import at_least_one, default_model, run, tokenizer_of
from transformers import AutoModelForCausalLM

from swarmllm import AutoDistributedModelForCausalLM, ClientConfig, LocalSwarm
from swarmllm.commands import adapters

QUESTION = "What is your name?"
OPTIONS = {"num_servers": 2, "num_threads": 1, "quant_type": "none", "dtype": "float32"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Shares an adapter in four ways.")
    parser.add_argument("--adapter", type=Path, help="one that is trained; default: trained now")
    parser.add_argument("--steps", type=at_least_one, default=40)
    args = parser.parse_args()
    path, tokenizer = default_model(), tokenizer_of(default_model())
    with tempfile.TemporaryDirectory() as directory:
        adapter = args.adapter or Path(directory) / "adapter"
        with LocalSwarm(path, **OPTIONS) as swarm:
            peers = {"initial_peers": swarm.initial_peers, "dtype": "float32"}
            if args.adapter is None:
                with AutoDistributedModelForCausalLM.from_pretrained(path, **peers) as base:
                    mine = train(base, tokenizer, "pirate", Path(directory), steps=args.steps)
                    print(f"by who trained it: {answer(mine, tokenizer, QUESTION)}", flush=True)
            with AutoDistributedModelForCausalLM.from_pretrained(path, **peers) as base:
                print(f"without it: {answer(base, tokenizer, QUESTION)}", flush=True)
                theirs = PeftModel.from_pretrained(base, str(adapter))
                print(f"by another client: {answer(theirs, tokenizer, QUESTION)}", flush=True)

        # `swarmllm server --adapters PATH` on every machine; clients name it and need no file.
        with LocalSwarm(path, adapters=str(adapter), **OPTIONS) as swarm:
            config = ClientConfig(initial_peers=tuple(swarm.initial_peers), active_adapter=adapter.name)
            with AutoDistributedModelForCausalLM.from_pretrained(path, client_config=config, dtype="float32") as base:
                print(f"from the servers: {answer(base, tokenizer, QUESTION)}", flush=True)

        # `swarmllm adapters merge --adapter PATH --base M --output DIR`: an ordinary checkpoint.
        merged = Path(directory) / "merged"
        adapters.merge(adapters.Merge(adapter=str(adapter), base=path, output=str(merged)))
        local = AutoModelForCausalLM.from_pretrained(merged, dtype="float32")
        print(f"merged: {answer(local, tokenizer, QUESTION)}", flush=True)


if __name__ == "__main__":
    run(main)
