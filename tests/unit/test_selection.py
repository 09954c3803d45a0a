"""Parts are disjoint and cover everything, samples come round, and a deadline says what it left out."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import selection

Run = Callable[..., tuple[int, str]]
NAMES = [f"tests/room/test_file.py::test_{index}[{index % 7}]" for index in range(400)]
COMMITS = [f"{index * 2654435761:040x}" for index in range(1, 41)]
TESTS = """
import pytest
times = 0
@pytest.mark.parametrize("number", range(30))
def test_many(number): pass
@pytest.mark.rotates(3)
@pytest.mark.parametrize("number", range(30))
def test_rotating(number): pass
@pytest.mark.slow
@pytest.mark.rotates(3)
def test_rotating_always_slow(): pass
@pytest.mark.share("costly")
@pytest.mark.parametrize("number", range(4))
def test_sharing(number): pass
@pytest.mark.lane("gpu")
def test_elsewhere(): pass
def test_flaky():
    global times
    times += 1
    assert times > 1
"""


@pytest.mark.parametrize("num_parts", [1, 4, 7])
def test_each_name_is_in_one_part(num_parts: int) -> None:
    parts = [selection.part_of(name, num_parts) for name in NAMES]
    assert set(parts) == set(range(1, num_parts + 1))
    assert min(map(parts.count, parts)) > 0.6 * len(NAMES) / num_parts


def test_over_the_commits_each_part_has_its_turn() -> None:
    assert {selection.turn_of(commit, 4) for commit in COMMITS} == {1, 2, 3, 4}
    assert selection.turn_of(selection.NO_COMMIT, 4) == 1


def test_a_sample_is_small_and_over_the_commits_nothing_is_lost() -> None:
    chosen: set[str] = set()
    for commit in COMMITS:
        parameters = selection.sampled(NAMES, 8, commit)
        assert [parameter.values[0] for parameter in parameters] == NAMES
        fast = {parameter.values[0] for parameter in parameters if not parameter.marks}
        assert 0 < len(fast) < len(NAMES) / 5
        chosen |= fast
        with_one = selection.sampled(NAMES, 8, commit, always=NAMES[:1])
        assert {parameter.values[0] for parameter in with_one if not parameter.marks} == fast | {NAMES[0]}
    assert chosen == set(NAMES)


def test_the_commit_of_a_directory(repo_root: Path, tmp_path: Path) -> None:
    assert selection.current_commit(tmp_path) == selection.NO_COMMIT
    assert int(selection.current_commit(repo_root), 16) >= 0


@pytest.fixture
def run(repo_root: Path, tmp_path: Path) -> Run:
    """pytest with these options on 66 tests, and what it says."""
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(*options: str) -> tuple[int, str]:
        plugins = ["-p", "tests.selection", "-p", "pytest_rerunfailures"]
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, *plugins, "--rootdir", tmp_path, tmp_path]
        environment = {**os.environ, "PYTHONPATH": str(repo_root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout

    return run


@pytest.mark.slow
def test_parts_deadlines_and_repetitions_in_a_run(run: Run) -> None:
    whole, parts = run("--collect-only")[1], [run("--collect-only", "--part", f"{part}/4")[1] for part in range(1, 5)]
    names = [{line for line in text.splitlines() if "::" in line} for text in (whole, *parts)]
    assert len(names[0]) == 66 == sum(map(len, names[1:]))
    assert names[0] == set().union(*names[1:])
    assert [sum("test_sharing" in name for name in part) for part in names[1:]].count(4) == 1
    fast, slow = (
        {line for line in run("--collect-only", "-m", which)[1].splitlines() if "::" in line}
        for which in ("not slow", "slow")
    )
    assert fast | slow == names[0]
    assert 35 < len(fast) < 35 + 20
    assert all("test_rotating" in name for name in slow)
    turns = {line for line in run("--collect-only", "--turns")[1].splitlines() if "::" in line}
    assert turns == {name for name in slow if "always_slow" not in name}

    for processes in ((), ("-p", "xdist.plugin", "-n", "1")):
        said = run("-m", "not slow", "-k", "rotating or elsewhere", *processes)[1]
        assert f"{len(turns)} tests are fast on other commits only: make test-turns runs them" in said
    assert "1 tests of the lane gpu are left out: make gpu runs them" in run("-k", "flaky or elsewhere")[1]
    assert run("--lane", "gpu")[1].splitlines()[-1].startswith("1 passed")
    code, said = run("-k", "flaky", "--part", "1/1000")
    assert (code, "67 deselected" in said, "part 1 of 1000" in said) == (0, True, True), said
    code, said = run("--deadline", str(time.time() - 1))
    assert code == 0, said
    assert "the deadline left out 66 tests" in said
    assert "test_it.py::test_many[17]" in said
    assert run("-k", "flaky", "--deadline", str(time.time() + 3600))[0] == 1
    assert run("-k", "flaky", "--deadline", str(time.time() + 3600), "--reruns", "1")[0] == 0
