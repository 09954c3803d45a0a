"""Prompt tuning with your own head, without peft and without a Trainer: the figure of the Petals paper.

    python examples/own_head.py                         # a swarm of its own, on this machine

The blocks of the swarm are a module like any other (`model.remote_blocks`; its slices are modules too). Trained vectors
before the text, the head after the blocks and the optimizer are on this machine. Servers only compute. Writes the loss
curve (loss.svg) to --output_dir.
"""

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from classification import examples
from runs import (
    above_zero,
    at_least_one,
    default_model,
    directory,
    run,
    save_loss_curve,
    step_line,
    swarm_for,
    tokenizer_of,
)
from torch import Tensor, nn

from swarmllm import AutoDistributedModelForCausalLM


class Classifier(nn.Module):
    """Embeddings of the swarm's model, trained prompts, the swarm's blocks, and a head of our own."""

    def __init__(self, model: Any, num_prompts: int, num_classes: int) -> None:
        super().__init__()
        self.embeddings = model.get_input_embeddings().requires_grad_(False)
        self.blocks = model.remote_blocks
        hidden_size = self.embeddings.embedding_dim
        self.prompts = nn.Parameter(torch.randn(num_prompts, hidden_size) * 0.02)
        self.adapter = nn.Sequential(nn.LayerNorm(hidden_size), nn.Linear(hidden_size, 32))
        self.head = nn.Linear(32, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids `[batch, seq]` → logits `[batch, classes]`."""
        hidden = self.embeddings(ids)
        hidden = torch.cat([self.prompts.expand(len(ids), -1, -1), hidden], dim=1)
        hidden = self.blocks(hidden)
        return self.head(torch.tanh(self.adapter(hidden[:, -1])))


def batch_of(rows: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
    """The texts of each length together, so that no padding is needed."""
    lengths = sorted({len(row["input_ids"]) for row in rows})
    groups = [[row for row in rows if len(row["input_ids"]) == length] for length in lengths]
    return [(torch.tensor([r["input_ids"] for r in g]), torch.tensor([r["labels"] for r in g])) for g in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains prompts and a head of one's own through a swarm.")
    parser.add_argument("--steps", type=at_least_one, default=60)
    parser.add_argument("--lr", type=above_zero, default=0.005)
    parser.add_argument("--output_dir", type=directory, default=Path("runs/own_head"))
    parser.add_argument("--model", default=default_model(), help="default: the model that comes with swarmllm")
    parser.add_argument("--initial_peers", nargs="+", help="an existing swarm; default: one on this machine")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        peers = swarm_for(stack, args.model, args.initial_peers)
        tokenizer = tokenizer_of(args.model)
        model = AutoDistributedModelForCausalLM.from_pretrained(args.model, initial_peers=peers, dtype="float32")
        stack.enter_context(model)
        torch.manual_seed(0)
        classifier = Classifier(model, num_prompts=8, num_classes=2)
        trained = [classifier.prompts, *classifier.adapter.parameters(), *classifier.head.parameters()]
        optimizer = torch.optim.AdamW(trained, lr=args.lr)
        history = []
        for step in range(1, args.steps + 1):
            began, waited_s = time.perf_counter(), model.remote_blocks.batches.waited_s
            losses = []
            for ids, labels in batch_of(examples(tokenizer, 16, seed=step + 1)):
                loss = nn.functional.cross_entropy(classifier(ids), labels, reduction="sum") / 16
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            took_s, waited_s = time.perf_counter() - began, model.remote_blocks.batches.waited_s - waited_s
            history.append({"step": step, "loss": sum(losses)})
            print(step_line(step, args.steps, sum(losses), took_s, waited_s), flush=True)
        save_loss_curve(history, args.output_dir / "loss.svg")
        with torch.no_grad():
            right = sum(
                int((classifier(ids).argmax(-1) == labels).sum())
                for ids, labels in batch_of(examples(tokenizer, 64, seed=1))
            )
        print(f"accuracy on held-out texts: {right / 64:.3f}", flush=True)


if __name__ == "__main__":
    run(main)
