"""`swarmllm runs`: trainings that several homes share, from the logs that `swarmllm.training.Together` writes here.

Each line of a log is signed by the home that wrote it, and holds what the others signed. A line whose signature is
wrong is counted and left out.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmllm.command_line import Parser, run_program
from swarmllm.data_structures import printable
from swarmllm.errors import ConfigurationError
from swarmllm.files import read_text, user_path

EXAMPLES = """examples:
  swarmllm runs
  swarmllm runs runs/pirate --json
"""
BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 40


def logs_in(place: Path) -> list[Path]:
    """The logs in this directory, and up to three levels below it."""
    from swarmllm.training.rounds import LOG_FILE

    return sorted({path for depth in range(4) for path in place.glob("*/" * depth + LOG_FILE)})


def summary(path: Path) -> dict[str, Any]:
    """The sums of one log."""
    from swarmllm.training.rounds import is_genuine_line

    lines, num_wrong = [], 0
    for text in read_text(path).splitlines():
        try:
            line = json.loads(text)
            is_right = is_genuine_line(line) and all(isinstance(one, dict) for one in line["members"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_right = False
        if is_right:
            lines.append(line)
        else:
            num_wrong += 1
    homes: dict[str, dict[str, Any]] = {}
    for line in lines:
        for member in line["members"]:
            home = homes.setdefault(
                member["peer_id"], {"name": member["name"], "rounds": 0, "tokens": 0, "shortened": 0, "losses": []}
            )
            home["rounds"] += 1
            home["tokens"] += member["tokens"]
            home["shortened"] += member["share"] < 1
            if member["loss"] is not None:
                home["losses"].append(member["loss"])
    last = lines[-1] if lines else {}
    return {
        "directory": str(path.parent),
        "run": last.get("run", ""),
        "round": last.get("round"),
        "homes_in_last_round": len(last.get("members", ())),
        "tokens": last.get("tokens", 0),
        "at": last.get("at"),
        "wrong_lines": num_wrong,
        "homes": homes,
    }


def as_text(runs: Iterable[dict[str, Any]]) -> str:
    """A table for each run."""
    return "\n\n".join(map(_run_as_text, runs)) or "no run has left a log here: name the directory of a training"


def _run_as_text(run: dict[str, Any]) -> str:
    count = run["homes_in_last_round"]
    head = f"{run['directory']}: round {run['round']}, {count} home{'s' * (count != 1)} in it, {run['tokens']:,} tokens"
    rows = [("home", "rounds", "tokens", "shortened", "loss", "")]
    for home in sorted(run["homes"].values(), key=lambda home: str(home["name"])):
        losses = home["losses"]
        loss = f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "-"
        name = printable(str(home["name"]))
        rows.append((name, str(home["rounds"]), f"{home['tokens']:,}", str(home["shortened"]), loss, bars(losses)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    wrong = [f"  {run['wrong_lines']} lines of the log have a wrong signature"] * bool(run["wrong_lines"])
    return "\n".join([head, *table, *wrong])


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
        found = [summary(path) for place in places for path in logs_in(place)]
        print(json.dumps(found, indent=2) if config.json else as_text(found))

    return run_program(program, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())
