"""`swarmllm runs`: what the logs of common runs say."""

import json
from pathlib import Path

import pytest

from swarmllm.commands.runs import MOST_BARS, bars, main
from swarmllm.network.p2p.identity import Identity
from swarmllm.training.run_log import LOG_FILE, signed_line


def log(directory: Path, num_rounds: int = 3, name: str = "pirate") -> Path:
    """The log of a home with that many rounds."""
    own = Identity.generate()
    directory.mkdir(parents=True)
    lines = []
    for number in range(num_rounds):
        shares = {name: 1.0, "robot": 0.5}
        members = [
            {"peer_id": who, "name": who, "tokens": 100, "loss": 3.0 - number, "share": share}
            for who, share in shares.items()
        ]
        fields = {"run": "R", "round": number, "tokens": 200 * (number + 1), "members": members, "at": 1.0}
        lines.append(json.dumps(signed_line(fields, own)))
    path = directory / LOG_FILE
    path.write_text("\n".join(lines) + "\n")
    return path


def test_runs_below_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path / "one" / "together")
    log(tmp_path / "two", num_rounds=1)
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "one/together: 3 rounds, 2 homes in the last one, 600 tokens" in text
    assert "two: 1 round, 2 homes in the last one, 200 tokens" in text
    robot = next(line.split() for line in text.splitlines() if "robot" in line)
    assert robot == ["robot", "3", "300", "3", "3.0000", "to", "1.0000", "█▅▁"]


def test_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path / "one")
    assert main([str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["homes"]["pirate"]["losses"] == [[0, 3.0], [1, 2.0], [2, 1.0]]
    assert run["wrong_lines"] == 0


def test_changed_lines_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path / "one", name="\x1b[31mred")
    first, second, third = path.read_text().splitlines()
    path.write_text("\n".join([first, second.replace("100", "999"), "nonsense", "[]", third]))
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "3 lines of the log have a wrong signature" in text
    assert "999" not in text
    assert "\x1b" not in text


def test_no_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert "no run has left a log here" in capsys.readouterr().out
    assert main([str(tmp_path / "missing")]) == 2
    assert "is no directory" in capsys.readouterr().err


def test_many_losses_are_as_many_bars_as_fit() -> None:
    assert len(bars(list(range(1000)))) == MOST_BARS
    assert bars([]) == ""
    assert bars([1.0, 1.0]) == "▁▁"
