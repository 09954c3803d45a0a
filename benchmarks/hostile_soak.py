"""The cost of one hostile peer of each kind for 8 honest clients, in phases with and without such peers.

Each text is compared with the local model's. Prints the time from token to token in both kinds of phases, and their
ratio; each process group's share of the cores; wrong and failed texts; the memory of the servers over time; and how
often each hostile peer did its task. tests/faults/hostile_peers.py defines these tasks. With `--each`, a hostile phase
has one kind only, which shows the cost of each.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
REPO = Path(__file__).resolve().parent.parent
sys.path += [str(REPO), str(REPO / "tests" / "faults"), str(REPO / "tests" / "swarm")]

import transformers  # noqa: E402
from common import save_results, table  # noqa: E402
from soak_run import ALL, Figures, Phase, Soak, share  # noqa: E402
from tests import forked  # noqa: E402

from swarmllm.demo import local_swarm  # noqa: E402

PARTS = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def seconds_of(figures: Figures, *phases: Phase) -> list[float]:
    """Times from token to token in these phases, ascending."""
    return sorted(token.seconds for token in figures.tokens if any(phase.has(token.at) for phase in phases))


def ratios(figures: Figures, part: float, kinds: tuple[str, ...] | None = None) -> list[float]:
    """Ratio of each hostile phase of these kinds to the calm phases before and after it."""
    return [
        share(seconds_of(figures, phase), part) / share(seconds_of(figures, *calm), part)
        for phase, calm in hostile_phases(figures, kinds)
    ]


def hostile_phases(figures: Figures, kinds: tuple[str, ...] | None) -> list[tuple[Phase, list[Phase]]]:
    phases = figures.phases
    return [
        (phase, [one for one in phases[max(0, index - 1) : index + 2] if not one.hostile])
        for index, phase in enumerate(phases)
        if phase.hostile and kinds in (None, phase.kinds)
    ]


def cores(phases: Sequence[Phase], group: str) -> float:
    """Cores that this group kept busy, on average."""
    return sum(phase.cpu_s.get(group, 0.0) for phase in phases) / sum(
        phase.ended_at - phase.began_at for phase in phases
    )


def cores_taken(figures: Figures) -> str:
    """Results without hostile peers, and with each kind."""
    groups = list(dict.fromkeys(group for phase in figures.phases for group in phase.cpu_s))
    kinds = list(dict.fromkeys(phase.kinds for phase in figures.phases if phase.hostile))
    rows = [["none", 1.0, 1.0] + [cores([one for one in figures.phases if not one.hostile], group) for group in groups]]
    for some in kinds:
        name = "all" if some == ALL else ", ".join(some)
        middle = [statistics.median(ratios(figures, part, some)) for part in (0.5, 0.95)]
        rows.append([name, *middle, *(cores([one for one, _ in hostile_phases(figures, some)], one) for one in groups)])
    return table(["hostile peers", "p50 ratio", "p95 ratio", *groups], rows)


def report(figures: Figures) -> dict[str, object]:
    calm, hostile = (figures.seconds(hostile=kind) for kind in (False, True))
    rows = [
        [name, *(1000 * share(seconds, part) for seconds in (calm, hostile)), share(hostile, part) / share(calm, part)]
        for name, part in PARTS.items()
    ]
    print(
        f"\n{len(calm)} tokens without hostile peers, {len(hostile)} beside them; of {len(figures.texts)} texts",
        end=" ",
    )
    print(f"{len(figures.wrong)} wrong, {len(figures.failed)} failed\n")
    print(table(["token to token", "without, ms", "beside, ms", "ratio"], rows))
    pairs = ratios(figures, 0.95)
    print(f"\nratio of p95, pair by pair: {', '.join(f'{one:.2f}' for one in pairs)};", end=" ")
    print(f"median {statistics.median(pairs):.2f}")
    print(f"load at the end of each phase: {', '.join(f'{phase.load:.1f}' for phase in figures.phases)}\n")
    print(f"processors that were busy, on average, and the ratio to the calm phases beside:\n{cores_taken(figures)}\n")
    memory = [(name, held[0], max(held), held[-1]) for name, held in sorted(figures.memory.items())]
    print(table(["process", "MB at first", "most", "at last"], memory))
    print(f"\n{table(['hostile peer', 'times'], sorted(figures.did.items()))}")
    for failed in figures.failed:
        print(f"client {failed.client} failed: {failed.error}")
    for line in (*figures.logged, *(f"died: {one}" for one in figures.died)):
        print(line)
    last = {text.client: dict(text.counts or {}) for text in figures.texts}
    for client, counts in sorted(last.items()):
        print(f"client {client} has seen {counts}")
    return {
        "tokens": [len(calm), len(hostile)],
        "texts": len(figures.texts),
        "wrong": len(figures.wrong),
        "failed": [failed.error for failed in figures.failed],
        "seconds": {name: [share(calm, part), share(hostile, part)] for name, part in PARTS.items()},
        "p95_ratio_of_pairs": pairs,
        "phases": [vars(phase) for phase in figures.phases],
        "memory_mb": figures.memory,
        "did": dict(figures.did),
        "logged": figures.logged,
        "seen": last,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6, help="phases of each kind, at most 100")
    parser.add_argument("--phase_s", type=float, default=25.0, help="seconds of each, at most 600")
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--kinds", nargs="+", choices=ALL, default=ALL, help="of hostile peers")
    parser.add_argument("--each", action="store_true", help="one kind in each hostile phase, in turns")
    args = parser.parse_args()
    if not (1 <= args.pairs <= 100 and 1 <= args.phase_s <= 600):
        parser.error("give 1 to 100 pairs of 1 to 600 s")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("swarmllm").setLevel(os.environ.get("SWARMLLM_LOG_LEVEL", "ERROR"))
    local_swarm.Popen = forked.popen  # type: ignore[attr-defined]  # liars come within a phase: they start quickly
    try:
        with tempfile.TemporaryDirectory() as directory:
            kinds = [(kind,) for kind in args.kinds] if args.each else [tuple(args.kinds)]
            figures = Soak(Path(directory), hidden_size=args.hidden_size).run(args.pairs, args.phase_s, kinds)
    finally:
        forked.stop_warm_process()
    print(f"\nwritten to {save_results('hostile_soak', report(figures))}")
    return 1 if figures.wrong or figures.died or figures.logged else 0


if __name__ == "__main__":
    sys.exit(main())
