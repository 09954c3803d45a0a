"""The loss of a common run of several homes, compared with one run on all their data, over seeds.

    python benchmarks/together.py [--seeds 3] [--homes 3 8] [--steps 640] [--only WORD …]

All homes are computed in one process, with the functions that real homes use for differences and shared values. The
model is the tiny one of `tests/swarm/together_homes.py`. A round may take some of the homes' steps, and one
home may lie. The figures are the loss on unseen texts, compared with one run on the honest homes' data.
Writes results/together.json.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from common import save_results, table
from torch.func import functional_call, vmap

sys.path.append(str(Path(__file__).parents[1] / "tests" / "swarm"))

import together_homes as tiny

from swarmllm.training.differences import Difference, Floats, Rules, SharedState, quantize

EVERY = 32
Weights = dict[str, torch.Tensor]
Liar = Callable[[Sequence[Difference]], Floats]
"""Makes the liar's difference from those of the others."""


def constant(honest: Sequence[Difference]) -> Floats:
    """A random direction, always the same, far too large."""
    return 1000 * np.random.default_rng(5).standard_normal(honest[0].size, np.float32)


def spoils(honest: Sequence[Difference]) -> Floats:
    """Against the mean of the others, whose differences it has seen, far too large."""
    return -1000 * np.mean([one.values() for one in honest], axis=0, dtype=np.float32)


class Models:
    """Many copies of the tiny model that are trained at the same time, each on rows of its own."""

    def __init__(self, weights: Weights, count: int) -> None:
        self._model = tiny.untrained_model()
        self._model.config._attn_implementation = "eager"
        self.stacked = {name: one.repeat(count, *[1] * one.dim()).requires_grad_() for name, one in weights.items()}
        self._optimizer = torch.optim.AdamW(self.stacked.values(), lr=tiny.LR)
        self._losses = vmap(self._loss)

    def _loss(self, values: Weights, rows: torch.Tensor) -> torch.Tensor:
        logits = functional_call(self._model, values, (), {"input_ids": rows, "use_cache": False}).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    def step(self, rows: torch.Tensor, share_left: float) -> None:
        """`rows`: `[models, batch, length]`"""
        for group in self._optimizer.param_groups:
            group["lr"] = tiny.LR * max(0.02, share_left)
        self._losses(self.stacked, rows).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def held_out(self) -> list[float]:
        rows = torch.cat([tiny.texts(kind, 32, [9, kind]) for kind in range(tiny.NUM_KINDS)])
        count = len(next(iter(self.stacked.values())))
        found: list[float] = self._losses(self.stacked, rows[None].expand(count, -1, -1)).tolist()
        return found

    def flat(self, idx: int) -> Floats:
        return np.concatenate([one.detach()[idx].numpy().reshape(-1) for one in self.stacked.values()])

    @torch.no_grad()
    def write(self, idx: int, values: Floats) -> None:
        start = 0
        for one in self.stacked.values():
            part = values[start : start + one[idx].numel()]
            one[idx] = torch.from_numpy(part).reshape(one[idx].shape)
            start += part.size


def rows_of(home: int, seed: int, step: int) -> torch.Tensor:
    return tiny.texts(home % tiny.NUM_KINDS, tiny.BATCH, [seed, home, step])


def one_run(weights: Weights, num_homes: int, steps: int, seeds: int) -> list[float]:
    """The loss of one run on the data of these homes, for each seed."""
    models = Models(weights, seeds)
    for step in range(steps):
        rows = [torch.cat([rows_of(home, seed, step) for home in range(num_homes)]) for seed in range(seeds)]
        models.step(torch.stack(rows), 1 - step / steps)
    return models.held_out()


@dataclass(frozen=True)
class Case:
    """A run: how many steps a round takes, its rules, and a liar among the homes."""

    name: str
    steps_of_round: int = 0
    rules: Rules = field(default_factory=Rules)
    liar: Liar | None = None


@dataclass
class Run:
    """The homes of a run, as `Together` lets them train: those from `first` on of some models."""

    case: Case
    models: Models
    first: int
    count: int
    state: SharedState = field(init=False)
    sent: list[Difference] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = SharedState.initial(self.models.flat(self.first))

    def begin_round(self) -> None:
        places = range(self.first, self.first + self.count)
        self.sent = [quantize(self.state.values - self.models.flat(place)) for place in places]

    def end_round(self) -> None:
        if not self.sent:
            return
        told = {str(number): one for number, one in enumerate(self.sent)}
        if self.case.liar is not None:
            told["liar"] = quantize(self.case.liar(self.sent))
        after = self.state.after(told, 0, self.case.rules)
        move = after.values - self.state.values
        for place, sent in enumerate(self.sent, self.first):
            self.models.write(place, self.models.flat(place) + (move + sent.values()))
        self.state, self.sent = after, []


def together(weights: Weights, case: Case, honest: int, steps: int, seeds: int) -> list[float]:
    """The loss of the shared values in the end, for each seed."""
    models = Models(weights, honest * seeds)
    runs = [Run(case, models, seed * honest, honest) for seed in range(seeds)]
    for step in range(1, steps + 1):
        rows = [rows_of(home, seed, step - 1) for seed in range(seeds) for home in range(honest)]
        models.step(torch.stack(rows), 1 - (step - 1) / steps)
        for run in runs:
            if step % EVERY == case.steps_of_round % EVERY:
                run.end_round()
            if step % EVERY == 0:
                run.begin_round()
                if not case.steps_of_round:
                    run.end_round()
    for run in runs:
        run.end_round()
        models.write(run.first, run.state.values)
    return models.held_out()[::honest]


CASES = (
    Case("homes wait"),
    Case("background, a round takes 1 step", 1),
    Case("background, half of the steps", EVERY // 2),
    Case("background, all steps", EVERY),
    Case("trim a quarter", rules=Rules(trim=0.25)),
    Case("a constant liar", liar=constant),
    Case("a constant liar, trim a quarter", liar=constant, rules=Rules(trim=0.25)),
    Case("a spoiler", liar=spoils),
    Case("a spoiler, trim a quarter", liar=spoils, rules=Rules(trim=0.25)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--homes", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--only", nargs="*", help="words of the cases to run; default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights = tiny.base_weights()
    alone: dict[int, list[float]] = {}
    rows: list[list[object]] = []
    for num_homes in args.homes:
        for case in CASES:
            if args.only and not any(word in case.name for word in args.only):
                continue
            honest = num_homes - (case.liar is not None)
            if honest not in alone:
                alone[honest] = one_run(weights, honest, args.steps, args.seeds)
            losses = together(weights, case, honest, args.steps, args.seeds)
            above = [100 * (loss / one - 1) for loss, one in zip(losses, alone[honest], strict=True)]
            rows.append([num_homes, case.name, *(f"{one:+.2f} %" for one in above)])
            print(*rows[-1], time.strftime("%X"), flush=True)
    print(table(["homes", "case", *(f"seed {seed}" for seed in range(args.seeds))], rows))
    save_results("together", {"steps": args.steps, "every": EVERY, "cases": rows})


if __name__ == "__main__":
    main()
