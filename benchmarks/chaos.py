"""Texts of all kinds on random layouts of servers, each disturbed at a random moment: does each end as it should?

    python benchmarks/chaos.py [--texts 1000] [--workers 3] [--load 0]
    python benchmarks/chaos.py --seed 417 --texts 1          # that text alone (perhaps another server of it)
    python benchmarks/chaos.py --only "prompt lookup"        # that kind alone
    CHAOS_QUANT_TYPE=int8 python benchmarks/chaos.py         # with weights of 8 bits

Every text is compared with the local model's. Counts wrong texts and errors, and measures how long a disturbance keeps
a client waiting: the longest time between two tokens from then on, less the usual one. What the texts are, and what
disturbs them, is in tests/faults/chaos_*.py.
"""

import argparse
import logging
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
REPO = Path(__file__).resolve().parent.parent
sys.path += [str(REPO), str(REPO / "tests" / "faults"), str(REPO / "tests" / "swarm"), str(REPO / "tests" / "numerics")]

import torch  # noqa: E402
import transformers  # noqa: E402
from chaos_plan import Disturbance, Kind, Text, layout_of, text  # noqa: E402
from chaos_run import Outcome, Verdict, run_layout  # noqa: E402
from common import median, save_results, table  # noqa: E402
from tests import forked  # noqa: E402

from swarmllm.demo import local_swarm  # noqa: E402

BUSY = "while True: pass"


def prepare() -> None:
    """Initialize a worker."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("swarmllm").setLevel(os.environ.get("SWARMLLM_LOG_LEVEL", "ERROR"))
    torch.set_num_threads(1)
    local_swarm.Popen = forked.popen  # type: ignore[attr-defined]


def run(number: int, texts: Sequence[Text], verbose: bool) -> list[Outcome]:
    """Runs in a worker: the texts of one layout."""
    outcomes = []
    for outcome in run_layout(number, texts):
        outcomes.append(outcome)
        if not outcome.passed or verbose:
            print(f"\n{outcome}", flush=True)
    return outcomes


def run_all(texts: Sequence[Text], num_workers: int, verbose: bool) -> Iterator[list[Outcome]]:
    """The outcomes of each layout, as they are done."""
    layouts = [(number, list(group)) for number, group in groupby(texts, lambda one: layout_of(one.number))]
    # Processes: threads would share the state of torch's random generator.
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"), initializer=prepare) as workers:
        for done in as_completed([workers.submit(run, *one, verbose) for one in layouts]):
            yield done.result()


@contextmanager
def load(num_processes: int) -> Iterator[None]:
    """Busy loops at the lowest priority during the run."""
    loops = [subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", BUSY]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def share(ascending: Sequence[float], part: float) -> float | str:
    """The value below which this share of them lies."""
    return ascending[min(len(ascending) - 1, int(part * len(ascending)))] if ascending else "–"


def recoveries(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Seconds of each text, by its number, that felt its disturbance and ended right."""
    right = [outcome for outcome in outcomes if outcome.verdict is Verdict.RIGHT]
    first_s: dict[Kind, list[float]] = defaultdict(list)
    for outcome in right:
        if outcome.text.moment:  # the first step was over by then
            first_s[outcome.text.kind].append(outcome.first_s)
    usual_s = {kind: median(seconds) for kind, seconds in first_s.items()}
    return {
        outcome.text.number: outcome.recovery_s(usual_s.get(outcome.text.kind, outcome.first_s))
        for outcome in right
        if outcome.struck and outcome.felt
    }


def rows(outcomes: Sequence[Outcome], by: type[Kind] | type[Disturbance]) -> list[list[object]]:
    """For each kind or disturbance: counts of texts, and their waiting times."""
    waits = recoveries(outcomes)
    result: list[list[object]] = []
    for key in by:
        some = [one for one in outcomes if key in (one.text.kind, one.text.disturbance)]
        covered = [one for one in some if one.covered]
        counts = [
            len(some),
            sum(one.struck for one in some),
            sum(one.struck and one.felt for one in some),
            sum(one.verdict is Verdict.WRONG for one in some),
            sum(one.verdict not in (Verdict.RIGHT, Verdict.WRONG) for one in covered),
            len(some) - len(covered),
            sum(one.verdict is Verdict.ENDED for one in some),
        ]
        seconds = sorted(waits[one.text.number] for one in some if one.text.number in waits)
        result.append([key.value, *counts, *(share(seconds, part) for part in (0.5, 0.95, 1.0))])
    return result


HEADER = ["texts", "struck", "felt", "wrong", "errors", "not covered", "ended so", "recovery p50 s", "p95 s", "max s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="number of the first text")
    parser.add_argument("--only", choices=[kind.value for kind in Kind], help="texts of this kind alone")
    parser.add_argument("--disturbance", choices=[one.value for one in Disturbance], help="this one alone")
    parser.add_argument("--workers", type=int, default=3, help="layouts at the same time")
    parser.add_argument("--load", type=int, default=0, help="busy loops beside it")
    parser.add_argument("--verbose", action="store_true", help="a line for each text, not only for those that fail")
    args = parser.parse_args()
    texts = [text(number) for number in range(args.seed, args.seed + args.texts)]
    texts = [one for one in texts if args.only in (None, one.kind.value)]
    texts = [one for one in texts if args.disturbance in (None, one.disturbance.value)]
    if not texts:
        parser.error("these texts have no such disturbance: ask for more --texts, 96 for each kind with each")
    outcomes: list[Outcome] = []
    began_at = time.monotonic()
    with load(args.load):
        for some in run_all(texts, args.workers, args.verbose or len(texts) < 5):
            outcomes += some
            result = summary(outcomes) | {"load": args.load, "took_s": time.monotonic() - began_at}
            path = save_results("chaos", result)  # after each layout, so that an interrupted run keeps its results
            print(f"{result['texts']:5} texts, {len(result['failed'])} failed, {result['took_s']:.0f} s", flush=True)
    for by in (Disturbance, Kind):
        print(f"\n{table([by.__name__.lower(), *HEADER], rows(outcomes, by))}")
    print(f"\nthe longest that a text without servers took to end: {result['ended_s']:.1f} s; written to {path}")
    return 1 if result["failed"] else 0


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The stored results of a run."""
    figures = {
        by.__name__: [dict(zip(["name", *HEADER], row, strict=True)) for row in rows(outcomes, by)]
        for by in (Disturbance, Kind)
    }
    return {
        "texts": len(outcomes),
        "failed": [str(outcome) for outcome in outcomes if not outcome.passed],
        "ended_s": max((one.took_s for one in outcomes if one.verdict is Verdict.ENDED), default=0.0),
        **figures,
    }


if __name__ == "__main__":
    sys.exit(main())
