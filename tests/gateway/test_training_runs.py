"""Common trainings for pages: the newest logs, thinned curves, and only where their names may be seen."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from swarmllm.gateway.settings import GatewayConfig
from swarmllm.gateway.training_runs import MAX_POINTS, MAX_RUNS, TrainingRuns, thinned
from swarmllm.network.p2p.identity import Identity
from swarmllm.training.run_log import LOG_FILE, signed_line


def log(directory: Path, run: str, *, at: int, num_rounds: int = 1) -> None:
    home = Identity.generate()
    directory.mkdir(parents=True, exist_ok=True)
    member = {"peer_id": home.peer_id, "name": "a\x1b[31m", "tokens": 1, "loss": 2.0, "share": 1.0}
    lines = [{"run": run, "round": number, "members": [member], "at": 1.0} for number in range(num_rounds)]
    path = directory / LOG_FILE
    path.write_text("".join(json.dumps(signed_line(line, home)) + "\n" for line in lines))
    os.utime(path, (at, at))


def test_the_newest_log_of_a_run_tells_it(tmp_path: Path) -> None:
    runs = TrainingRuns(tmp_path)
    log(tmp_path / "old", "R", at=1000)
    log(tmp_path / "new" / "together", "R", at=2000, num_rounds=3)
    log(tmp_path / "other", "S", at=1500)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / LOG_FILE).touch()
    first, second = runs._look(tmp_path)
    assert (first["directory"], first["round"], second["directory"]) == ("new/together", 2, "other")
    assert first["homes"][0]["is_here"]
    assert first["homes"][0]["name"] == "a?[31m"
    log(tmp_path / "other", "S", at=3000, num_rounds=2)
    assert [(run["directory"], run["round"]) for run in runs._look(tmp_path)] == [("other", 1), ("new/together", 2)]
    for number in range(2 * MAX_RUNS):
        log(tmp_path / f"more {number}", str(number), at=4000)
    assert len(runs._look(tmp_path)) == MAX_RUNS
    assert runs._look(tmp_path / "missing") == []


def test_long_curves_keep_their_ends() -> None:
    curve = [(number, float(number)) for number in range(1000)]
    short = thinned(curve)
    assert len(short) == MAX_POINTS
    assert (short[0], short[-1]) == (curve[0], curve[-1])
    assert thinned(curve[:5]) == curve[:5]


@pytest.mark.parametrize(
    ("settings", "directory"),
    [
        ({}, "runs"),
        ({"host": "0.0.0.0"}, None),
        ({"api_keys_file": "keys"}, None),
        ({"host": "0.0.0.0", "runs": "mine"}, "mine"),
    ],
)
def test_names_of_homes_are_shown_to_this_machine_only(settings: dict[str, Any], directory: str | None) -> None:
    config = GatewayConfig(model=("m",), initial_peers=("/ip4/1.2.3.4/tcp/1/p2p/Q",), **settings)
    assert config.runs_directory() == (None if directory is None else Path(directory))
