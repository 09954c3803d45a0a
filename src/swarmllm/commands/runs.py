"""`swarmllm runs`: trainings that several homes share, from the logs that `swarmllm.training.Together` writes here."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from swarmllm.command_line import Parser, run_program
from swarmllm.data_structures import printable
from swarmllm.errors import ConfigurationError
from swarmllm.files import user_path
from swarmllm.training.run_log import RunSummary, logs_in, run_summary

EXAMPLES = """examples:
  swarmllm runs
  swarmllm runs runs/pirate --json
"""
BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 40


def as_text(runs: Iterable[RunSummary]) -> str:
    """A table for each run."""
    return "\n\n".join(map(_run_as_text, runs)) or "no run has left a log here: name the directory of a training"


def _run_as_text(run: RunSummary) -> str:
    count = run.homes_in_last_round
    done = 0 if run.round is None else run.round + 1
    rounds, homes = f"{done} round{'s' * (done != 1)}", f"{count} home{'s' * (count != 1)} in the last one"
    head = f"{run.directory}: {rounds}, {homes}, {run.tokens:,} tokens"
    rows: list[tuple[str, ...]] = [("home", "rounds", "tokens", "shortened", "loss", "", "common texts", "")]
    for home in sorted(run.homes.values(), key=lambda home: home.name):
        sums = (str(home.rounds), f"{home.tokens:,}", str(home.shortened))
        rows.append((printable(home.name), *sums, *_curve(home.losses), *_curve(home.own_losses)))
    if run.shared_losses:
        rows.append(("all together", "", "", "", "", "", *_curve(run.shared_losses)))
    else:
        rows = [row[:6] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    notes = [f"  {run.wrong_lines} lines of the log have a wrong signature"] * bool(run.wrong_lines)
    for home in run.homes.values():
        if home.contradicted:
            told = f"told another loss of the shared values than this home measured, in {home.contradicted} rounds"
            notes.append(f"  {printable(home.name)} {told}")
    return "\n".join([head, *table, *notes])


def _curve(points: Sequence[tuple[int, float]]) -> tuple[str, str]:
    """The first and the last loss, and a picture of all."""
    losses = [loss for _, loss in points]
    return (f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "-"), bars(losses)


def bars(values: Sequence[float]) -> str:
    """The values as small bars; of many values, some."""
    if not values:
        return ""
    shown = (
        [values[place * len(values) // MOST_BARS] for place in range(MOST_BARS)] if len(values) > MOST_BARS else values
    )
    low, high = min(shown), max(shown)
    return "".join(BARS[round((one - low) / ((high - low) or 1) * (len(BARS) - 1))] for one in shown)


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """The look at runs."""

    json: bool = False
    """Print JSON, for programs."""


def build_parser() -> Parser:
    """The directories, and a flag for each field of RunsConfig."""
    parser = Parser(
        prog="swarmllm runs", description="List trainings that several homes share, by their logs.", epilog=EXAMPLES
    )
    parser.usage = "swarmllm runs [OPTIONS] [DIRECTORY ...]"
    parser.add_argument("output", nargs="*", help="directories of trainings; default: runs")
    parser.add_settings(RunsConfig, [RunsConfig])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    def program() -> None:
        settings = build_parser().parse_settings(argv)
        named = settings.pop("output", [])
        config = RunsConfig(**settings)
        places = [user_path(place) for place in named or ["runs"]]
        if missing := [str(place) for place in places if named and not place.is_dir()]:
            raise ConfigurationError(f"{missing[0]} is no directory: name the directory of a training")
        found = [run_summary(path) for place in places for path in logs_in(place)]
        print(json.dumps(list(map(asdict, found)), indent=2) if config.json else as_text(found))

    return run_program(program, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())
