"""Three homes, each with one kind of text, train one adapter together, and compare it with adapters alone.

Each home writes about articles of the same catalogue, and has seen six of nine. A home alone doesn't learn the other
numbers, nor the other kinds of text. Together they know all, though no text leaves its home.

    python examples/together.py                         # a swarm of its own, on this machine
    python examples/together.py --output_dir runs/homes # losses.svg, and a log of rounds for each home

The homes are threads here. Real ones are on machines of their own: `recipe.py --together` is one.
"""

import argparse
import contextlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from runs import at_least_one, default_model, directory, run, swarm_for, tokenizer_of

from swarmllm import AutoDistributedModelForCausalLM
from swarmllm.training import RunSettings, Together, text_loss

KINDS = {
    "orders": "Order of {number} {item} (article {code}), to be sent to {place}.",
    "tickets": "A customer writes: my {item} (article {code}) is {state}. We send another one to {place}.",
    "stock": "Shelf {number} has the {item} (article {code}). The next ones come from {place}.",
}
"""A sentence of each kind."""
PLACES = ("Lyon", "Porto", "Graz", "Turku")
STATES = ("broken", "too loud", "wet", "much too small")
ITEMS = {
    "blue lamp": "L482",
    "tin kettle": "K917",
    "oak chair": "C305",
    "wall clock": "W628",
    "rain coat": "R154",
    "bread knife": "B739",
    "garden hose": "G260",
    "desk fan": "D871",
    "tea pot": "T546",
}
"""Made-up articles with their numbers, which no model knows."""
HERE = ("/ip4/127.0.0.1/tcp/0",)


def items_of(kind: str) -> list[str]:
    """The articles in the texts of this home: six of the nine. Each article is in two homes."""
    left_out = list(KINDS).index(kind)
    return [item for place, item in enumerate(ITEMS) if place % len(KINDS) != left_out]


def sentences(kind: str, items: Sequence[str], count: int, seed: int) -> list[str]:
    """Texts of three sentences about these articles."""
    choose = random.Random(f"{kind} {seed}")

    def sentence() -> str:
        item = choose.choice(list(items))
        words = {"place": choose.choice(PLACES), "state": choose.choice(STATES), "number": choose.randint(2, 9)}
        return KINDS[kind].format(item=item, code=ITEMS[item], **words)

    return [" ".join(sentence() for _ in range(3)) for _ in range(count)]


def unseen(kind: str, count: int = 16) -> list[str]:
    """Texts of a kind that nobody trains on. They are about all articles."""
    return sentences(kind, list(ITEMS), count, seed=-1)


def loss_of(model: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    batch = tokenizer(list(texts), return_tensors="pt", padding=True)
    return model(**batch, labels=batch.input_ids.masked_fill(batch.attention_mask == 0, -100)).loss


class Home:
    """A client with an adapter of its own."""

    def __init__(self, model_path: str, peers: Sequence[str], kind: str) -> None:
        self.kind, self.tokenizer = kind, tokenizer_of(model_path)
        self._base = AutoDistributedModelForCausalLM.from_pretrained(model_path, initial_peers=peers, dtype="float32")
        torch.manual_seed(0)
        config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules="all-linear")
        self.model = get_peft_model(self._base, config)
        self.optimizer = torch.optim.AdamW([one for one in self.model.parameters() if one.requires_grad], lr=0.003)

    def train(self, steps: int, count: Callable[[int, float], None] = lambda tokens, loss: None) -> None:
        for step in range(steps):
            texts = sentences(self.kind, items_of(self.kind), 8, step)
            loss = loss_of(self.model, self.tokenizer, texts)
            loss.backward()
            count(sum(len(self.tokenizer(text).input_ids) for text in texts), loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def losses(self) -> dict[str, float]:
        """The loss on texts of each kind that nobody has trained on."""
        return {kind: loss_of(self.model, self.tokenizer, unseen(kind)).item() for kind in KINDS}

    def close(self) -> None:
        self._base.close()


def train_alone(model_path: str, peers: Sequence[str], kind: str, steps: int) -> dict[str, float]:
    home = Home(model_path, peers, kind)
    home.train(steps)
    losses = home.losses()
    home.close()
    return losses


def train_together(model_path: str, peers: Sequence[str], steps: int, output_dir: Path) -> dict[str, float]:
    """The losses of the adapter that all homes have in the end."""
    homes = [Home(model_path, peers, kind) for kind in KINDS]
    runs: list[Together] = []
    for home in homes:
        run = runs[0].invite if runs else "three homes"
        common = [] if runs else [text for kind in KINDS for text in unseen(kind, 4)]  # the first home names them
        few_rounds = {"outer_lr": 0.8, "outer_momentum": 0.5}  # the defaults are for dozens of rounds
        settings = RunSettings(name=home.kind, host_maddrs=HERE, common_texts=tuple(common), **few_rounds)
        place = output_dir / home.kind
        measure = partial(text_loss, home.model, home.tokenizer)
        known = {"loss_of": measure, "model": home.model}
        together = Together(home.optimizer, run, 10, directory=place, settings=settings, **known)
        runs.append(together.__enter__())

    def take_part(home: Home, together: Together) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(together)  # its end is a last round with the others, so all homes must be there at the same time
            home.train(steps, together.count)

    with ThreadPoolExecutor() as threads:
        list(threads.map(take_part, homes, runs))
    losses = homes[0].losses()
    for home in homes:
        home.close()
    return losses


def compare(model_path: str, peers: Sequence[str], steps: int, output_dir: Path) -> dict[str, dict[str, float]]:
    """The losses on each kind of text: of the adapters of single homes, and of the one of all."""
    found = {f"only {kind}": train_alone(model_path, peers, kind, steps) for kind in KINDS}
    found["together"] = train_together(model_path, peers, steps, output_dir)
    return found


def chart(losses: dict[str, dict[str, float]]) -> str:
    """Bars for each adapter, one for each kind of text, as SVG."""
    colours = dict(zip(KINDS, ("#2563eb", "#d97706", "#059669"), strict=True))
    top = max(loss for by_kind in losses.values() for loss in by_kind.values())
    shapes = [
        f'<text x="{70 + 120 * place}" y="20" fill="{colours[kind]}">{kind}</text>' for place, kind in enumerate(KINDS)
    ]
    for group, (name, by_kind) in enumerate(losses.items()):
        left = 60 + 130 * group
        shapes.append(f'<text x="{left + 45}" y="275" text-anchor="middle">{name}</text>')
        for place, (kind, loss) in enumerate(by_kind.items()):
            height, x = 210 * loss / top, left + 32 * place
            shapes.append(
                f'<rect x="{x}" y="{255 - height:.1f}" width="26" height="{height:.1f}" fill="{colours[kind]}"/>'
            )
            shapes.append(
                f'<text x="{x + 13}" y="{250 - height:.1f}" font-size="10" text-anchor="middle">{loss:.2f}</text>'
            )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 300" font-family="sans-serif" font-size="12">'
        '<rect width="600" height="300" fill="white"/>' + "".join(shapes) + '<path d="M50 255H580" stroke="gray"/>'
        '<text x="315" y="294" text-anchor="middle">loss on unseen texts (nats per token), by adapter</text>'
        "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Three homes train one adapter together.")
    parser.add_argument("--steps", type=at_least_one, default=40)
    parser.add_argument("--output_dir", type=directory, default=Path("runs/homes"))
    parser.add_argument("--model", default=default_model(), help="default: the model that comes with swarmllm")
    parser.add_argument("--initial_peers", nargs="+", help="an existing swarm; default: one on this machine")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        peers = swarm_for(stack, args.model, args.initial_peers)
        losses = compare(args.model, peers, args.steps, args.output_dir)
    for name, by_kind in losses.items():
        print(f"{name:<13}", *(f"{kind} {loss:.3f}" for kind, loss in by_kind.items()), flush=True)
    (args.output_dir / "losses.svg").write_text(chart(losses))


if __name__ == "__main__":
    run(main)
