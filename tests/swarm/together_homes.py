"""Homes that train a tiny local model together, each in a process of its own, and the run alone that they equal.

Run as a program, it is one home: `python together_homes.py JSON` (a `HomePlan`). It says "round N" after each round,
and at the end a JSON object.
"""

import hashlib
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from swarmllm.training import RunSettings, Together, differences, together
from swarmllm.training.together import INVITE_FILE

NUM_TOKENS, NUM_KINDS, LENGTH, BATCH = 48, 3, 32, 4
LR, WARM_STEPS = 0.002, 300
HERE = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True)
class HomePlan:
    """A home of a run."""

    directory: str
    run: str
    """A name, or the invite of another home."""
    number: int
    """Decides which kind of text is here, and which examples of it."""
    steps: int
    steps_of_run: int
    """Steps of a home that is there from the beginning."""
    base: str
    """File with the weights of `base_model`."""
    every: int = 32
    wait_for: int = 1
    fault: str = ""
    """nan or big: each difference is NaN, or has 1000 times the size."""
    patience_s: float = 120.0


def texts(kind: int, count: int, seed: list[int]) -> Tensor:
    """Texts of one kind, `[count, LENGTH]`: the first token names the kind, and each kind has a grammar of its own."""
    successors = np.random.default_rng(1000 + kind).integers(NUM_KINDS, NUM_TOKENS, (NUM_TOKENS, 3))
    random = np.random.default_rng(seed)
    rows = np.zeros((count, LENGTH), np.int64)
    rows[:, 0] = kind
    rows[:, 1] = random.integers(NUM_KINDS, NUM_TOKENS, count)
    for place in range(2, LENGTH):
        rows[:, place] = successors[rows[:, place - 1], random.choice(3, count, p=[0.8, 0.15, 0.05])]
    return torch.from_numpy(rows)


def step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, rows: Tensor, share_left: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = LR * max(0.02, share_left)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM) -> float:
    """The loss on texts of all kinds that nobody trains on."""
    rows = torch.cat([texts(kind, 32, [9, kind]) for kind in range(NUM_KINDS)])
    return model(input_ids=rows, labels=rows).loss.item()


def untrained_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(vocab_size=NUM_TOKENS, **sizes, **heads))


@cache
def base_weights() -> dict[str, Tensor]:
    """Weights that know a little of all kinds of text."""
    model = untrained_model()
    warm = torch.optim.AdamW(model.parameters(), lr=LR)
    for number in range(WARM_STEPS):
        step(model, warm, torch.cat([texts(kind, BATCH, [7, number, kind]) for kind in range(NUM_KINDS)]), 1.0)
    return model.state_dict()


def base_model(weights: dict[str, Tensor]) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    """The model with which all homes begin, and an optimizer."""
    model = untrained_model()
    model.load_state_dict(weights)
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def rows_of(home: int, number: int) -> Tensor:
    """The batch of a home's step."""
    return texts(home % NUM_KINDS, BATCH, [home, number])


def loss_of_one_run(num_homes: int, steps: int) -> float:
    """The loss after one run on the data of all homes: as many tokens, all in one place."""
    model, optimizer = base_model(base_weights())
    for number in range(steps):
        rows = torch.cat([rows_of(home, number) for home in range(num_homes)])
        step(model, optimizer, rows, 1 - number / steps)
    return held_out_loss(model)


def train(plan: HomePlan, say: Callable[[str], None]) -> dict[str, Any]:
    """Be this home to the end of its steps."""
    model, optimizer = base_model(torch.load(plan.base))
    settings = RunSettings(
        wait_for=plan.wait_for,
        name=f"home {plan.number}",
        host_maddrs=HERE,
        patience_s=plan.patience_s,
        in_background=False,  # steps of milliseconds are shorter than a round, which would be a whole round late
    )
    with Together(optimizer, plan.run, plan.every, directory=plan.directory, settings=settings) as run:
        at = run.round
        for number in range(plan.steps):
            rows = rows_of(plan.number, number)
            done = max(number, run.round * plan.every) / plan.steps_of_run  # who comes late follows the run's schedule
            step(model, optimizer, rows, 1 - done)
            run.count(rows.numel())
            if run.round != at:
                at = run.round
                say(f"round {at}")
    values = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    return {
        "loss": held_out_loss(model),
        "round": run.round,
        "sent_bytes": run.sent_bytes,
        "received_bytes": run.received_bytes,
        "values": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
        "num_values": values.numel(),
    }


class Spoilt(differences.Difference):
    """Travels as something else than its home believes."""

    honest: differences.Difference

    def values(self) -> differences.Floats:
        return self.honest.values()


def spoil(fault: str) -> None:
    """Make this process send wrong differences."""
    quantize, factor = together.quantize, np.float32(np.nan if fault == "nan" else 1000)

    def wrong(values: differences.Floats) -> differences.Difference:
        honest = quantize(values)
        spoilt = Spoilt(honest.codes, honest.scales * factor, honest.size)
        object.__setattr__(spoilt, "honest", honest)
        return spoilt

    together.quantize = wrong


class Home:
    """The process of a home, as its test sees it."""

    def __init__(self, plan: HomePlan) -> None:
        from tests import forked  # not in the process of a home, which has another path

        Path(plan.directory).mkdir(parents=True, exist_ok=True)
        self.plan, self.round, self.result = plan, 0, dict[str, Any]()
        self._changed = threading.Condition()
        self._log = Path(plan.directory, "log.txt").open("w")  # noqa: SIM115 - until `end`
        line = [sys.executable, __file__, json.dumps(asdict(plan))]
        self.process = forked.popen(line, stderr=self._log, stdin=PIPE, stdout=PIPE, text=True)
        self._reader = threading.Thread(target=self._read, name=f"home {plan.number}")
        self._reader.start()

    def _read(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    if line.startswith("round "):
                        self.round = int(line.split()[1])
                    elif line.startswith("{"):
                        self.result = json.loads(line)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def log(self) -> str:
        return Path(self.plan.directory, "log.txt").read_text()

    def invite(self) -> str:
        """An invite to its run."""
        path = Path(self.plan.directory, INVITE_FILE)
        while not path.exists():
            assert self.process.poll() is None, self.log
            self._reader.join(0.05)
        return str(path)

    def wait_for_round(self, number: int) -> None:
        """Return when this home is in that round, or has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.round >= number or bool(self.result) or not self._reader.is_alive(), 280
            )
        assert self.round >= number, self.log

    def finish(self) -> dict[str, Any]:
        """What it says at its end."""
        self._reader.join(280)
        assert self.process.wait(60) == 0, self.log
        assert self.result, self.log
        return self.result

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self.process.stdin.close()
        self._log.close()


@contextmanager
def homes() -> Iterator[Callable[[HomePlan], Home]]:
    """Starts homes, and ends them all."""
    started: list[Home] = []

    def start(plan: HomePlan) -> Home:
        started.append(Home(plan))
        return started[-1]

    try:
        yield start
    finally:
        for home in started:
            home.end()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    plan = HomePlan(**json.loads(sys.argv[1]))
    if plan.fault:
        spoil(plan.fault)
    print(json.dumps(train(plan, lambda line: print(line, flush=True))), flush=True)


if __name__ == "__main__":
    main()
