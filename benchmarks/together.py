"""The loss of a common run of several homes, compared with one run on all their data, over seeds.

    python benchmarks/together.py [--seeds 3] [--homes 3 8] [--steps 640] [--only CASE …]

All homes are computed in one process, with the functions that real homes use for differences and shared values, and with
the tiny model of `tests/swarm/together_homes.py`. A round may take a part of the homes' steps (background), and one
home may lie. The figures are how much the loss on unseen texts is above one run on the honest homes' data.
Writes results/together.json.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save_results, table

sys.path.append(str(Path(__file__).parents[1] / "tests" / "swarm"))

import together_homes as tiny

from swarmllm.training.differences import Difference, Floats, Rules, SharedState, quantize

EVERY = 32
Liar = Callable[[int, dict[str, Difference], np.random.Generator], Floats]


def constant(_: int, honest: dict[str, Difference], random: np.random.Generator) -> Floats:
    """Always the same direction, as large as allowed."""
    direction = np.random.default_rng(5).standard_normal(next(iter(honest.values())).size)
    return np.float32(1e3) * direction.astype(np.float32)


def spoils(round_number: int, honest: dict[str, Difference], random: np.random.Generator) -> Floats:
    """Against the honest mean of this round, which it has seen."""
    return np.float32(-1e3) * np.mean([one.values() for one in honest.values()], axis=0, dtype=np.float32)


@dataclass
class Home:
    """A home that trains, as `Together` lets it."""

    number: int
    seed: int
    weights: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        self.model, self.optimizer = tiny.base_model(self.weights)
        self.parameters = list(self.model.parameters())
        self.sent: Floats | None = None

    def flat(self) -> Floats:
        return torch.cat([one.detach().reshape(-1) for one in self.parameters]).numpy()

    def write(self, values: Floats) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(values), self.parameters)

    def rows(self, step: int) -> torch.Tensor:
        return tiny.texts(self.number % tiny.NUM_KINDS, tiny.BATCH, [self.seed, self.number, step])

    def move(self, before: SharedState, after: SharedState) -> None:
        assert self.sent is not None
        self.write(self.flat() + (after.values - before.values) + self.sent)


@dataclass(frozen=True)
class Case:
    """A run: how many steps a round takes, its rules, and a liar among the homes."""

    name: str
    steps_of_round: int = 0
    rules: Rules = Rules()
    liar: Liar | None = None


def train(case: Case, num_homes: int, steps: int, seed: int, weights: dict[str, torch.Tensor]) -> float:
    """The loss of the shared values in the end. The liar is the last one of the homes."""
    honest = num_homes - (case.liar is not None)
    homes = [Home(number, seed, weights) for number in range(honest)]
    state, pending = SharedState.initial(homes[0].flat()), None
    random = np.random.default_rng(seed)

    def finish() -> None:
        nonlocal state, pending
        if pending is None:
            return
        after = state.after(pending, 0, case.rules)
        for home in homes:
            home.move(state, after)
        state, pending = after, None

    for step in range(steps):
        for home in homes:
            tiny.step(home.model, home.optimizer, home.rows(step), 1 - step / steps)
        if pending is not None and (step + 1) % EVERY == case.steps_of_round % EVERY:
            finish()
        if (step + 1) % EVERY == 0:
            pending = {}
            for home in homes:
                pending[str(home.number)] = one = quantize(state.values - home.flat())
                home.sent = one.values()
            if case.liar is not None:
                pending["liar"] = quantize(case.liar(state.round, pending, random))
            if not case.steps_of_round:
                finish()
    finish()
    homes[0].write(state.values)
    return tiny.held_out_loss(homes[0].model)


def alone(num_homes: int, steps: int, seed: int, weights: dict[str, torch.Tensor]) -> float:
    """The loss of one run on the data of these homes."""
    homes = [Home(number, seed, weights) for number in range(num_homes)]
    for step in range(steps):
        rows = torch.cat([home.rows(step) for home in homes])
        tiny.step(homes[0].model, homes[0].optimizer, rows, 1 - step / steps)
    return tiny.held_out_loss(homes[0].model)


CASES = (
    Case("homes wait"),
    Case("background, a round takes 1 step", 1),
    Case("background, half of the steps", EVERY // 2),
    Case("background, all steps", EVERY),
    Case("trim a quarter", rules=Rules(trim=0.25)),
    Case("a constant liar", liar=constant),
    Case("a constant liar, trim", liar=constant, rules=Rules(trim=0.25)),
    Case("a spoiler", liar=spoils),
    Case("a spoiler, trim", liar=spoils, rules=Rules(trim=0.25)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--homes", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--only", nargs="*", help="names of cases")
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights = tiny.base_weights()
    reference = {}
    rows, found = [], []
    for num_homes in args.homes:
        for case in CASES:
            if args.only and case.name not in args.only:
                continue
            honest, above = num_homes - (case.liar is not None), []
            for seed in range(args.seeds):
                if (honest, seed) not in reference:
                    reference[honest, seed] = alone(honest, args.steps, seed, weights)
                above.append(100 * (train(case, num_homes, args.steps, seed, weights) / reference[honest, seed] - 1))
            print(f"{num_homes} {case.name}: " + " ".join(f"{one:+.2f} %" for one in above), time.strftime("%X"), flush=True)
            rows.append([num_homes, case.name, *(f"{one:+.2f} %" for one in above)])
            found.append({"homes": num_homes, "case": case.name, "above_percent": above})
    print(table(["homes", "case", *(f"seed {seed}" for seed in range(args.seeds))], rows))
    save_results("together", {"steps": args.steps, "cases": found})


if __name__ == "__main__":
    main()
