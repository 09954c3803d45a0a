"""Choice of the tests of a run: samples and parts by the commit's hash, lanes, and no test after a deadline.

`--turns` runs the tests that are fast on other commits only, because the next commit's run would choose some of them.
All processes of a run and all runs of a commit choose the same tests. Over the commits no test is lost: a test's place
is a hash of its name, and the commit's hash gives the turn.
"""

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

NO_COMMIT = "0"
LEFT_OUT = "left out: the deadline has come"
NOT_NOW = pytest.mark.slow("until the commit whose turn it is")
"""Mark of a test that is slow on this commit and fast on others; `--turns` runs these."""
LANES = {"gpu": "make gpu", "triton": "make test-kernels", "trainers": "make test-trainers"}
"""Tests that need what a usual machine or environment lacks, and the command that runs them."""


def current_commit(repository: Path) -> str:
    """Its hash; outside of a git repository always the same."""
    try:
        command = ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"]  # also where others own the checkout
        found = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    except FileNotFoundError:
        return NO_COMMIT
    return found.stdout.strip() if found.returncode == 0 else NO_COMMIT


COMMIT = current_commit(Path(__file__).parent)


def part_of(name: str, num_parts: int) -> int:
    """In which part this name is, 1 to `num_parts`."""
    return crc32(name.encode()) % num_parts + 1


def turn_of(commit: str, num_parts: int) -> int:
    """Which part's turn it is, 1 to `num_parts`."""
    return int(commit, 16) % num_parts + 1


def sampled(names: Sequence[str], num_parts: int, commit: str = COMMIT, *, always: Container[str] = ()) -> list[object]:
    """Parameters of a test over many similar cases: the part whose turn it is, and the others marked slow.

    So `make test` and `make test-slow` together run all of them on any commit. `always`: what `make test` never misses.
    """
    turn = turn_of(commit, num_parts)
    fast = [name in always or part_of(name, num_parts) == turn for name in names]
    return [pytest.param(name, marks=() if now else NOT_NOW) for name, now in zip(names, fast, strict=True)]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "rotates(n, whole_file=False): on each commit one of n parts of these tests is fast, the others are slow;"
        " whole_file: the tests of a file take their turn together, because what they share costs most",
    )
    config.addinivalue_line("markers", "lane(name): left out but for `--lane name`")
    config.addinivalue_line(
        "markers", "share(name): tests of one name are in the same part, as they share what is costly"
    )


def place_of(item: pytest.Item) -> str:
    """The name whose hash gives the test its part: `share(name)`, or its own."""
    mark = item.get_closest_marker("share")
    return item.nodeid if mark is None else str(mark.args[0])


def lane_of(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("lane")
    if mark is None:
        return None
    (name,) = mark.args
    if name not in LANES:
        raise pytest.UsageError(f"{item.nodeid}: no lane {name!r}, only {', '.join(LANES)}")
    return str(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption(
        "--part", metavar="I/N", type=_part, help="part I of N; I may be `commit`: the one whose turn it is"
    )
    group.addoption(
        "--turns", action="store_true", help="the tests that `make test` runs on other commits, not on this"
    )
    group.addoption("--lane", choices=LANES, help="the tests of this lane alone; without it those of none")
    group.addoption("--deadline", metavar="T", type=float, help="begin no test after T seconds since 1970")


def _part(text: str) -> tuple[int, int]:
    which, slash, number = text.partition("/")
    num_parts = int(number)
    part = turn_of(COMMIT, num_parts) if which == "commit" else int(which)
    if not slash or not 1 <= part <= num_parts:
        raise ValueError(text)
    return part, num_parts


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks before -m and -k choose, and takes the part of what they have left."""
    for item in items:
        for mark in item.iter_markers("rotates"):
            (num_parts,) = mark.args
            name = item.nodeid.partition("::")[0] if mark.kwargs.get("whole_file") else item.nodeid
            if part_of(name, num_parts) != turn_of(COMMIT, num_parts):
                item.add_marker(NOT_NOW)
    if config.getoption("turns"):
        _keep(config, items, is_fast_elsewhere)
    waiting = sum(map(is_fast_elsewhere, items)) if config.getoption("markexpr") == "not slow" else 0
    yield
    of_other_lanes = _keep(config, items, lambda item: lane_of(item) == config.getoption("lane"))
    lanes = Counter(lane for item in of_other_lanes if (lane := lane_of(item)) is not None)
    config.stash[NOT_HERE] = [
        *(f"{count} tests of the lane {lane} are left out: {LANES[lane]} runs them" for lane, count in lanes.items()),
        *([f"{waiting} tests are fast on other commits only: make test-turns runs them"] if waiting else []),
    ]
    if (wanted := config.getoption("part")) is not None:
        part, num_parts = wanted
        _keep(config, items, lambda item: part_of(place_of(item), num_parts) == part)


def is_fast_elsewhere(item: pytest.Item) -> bool:
    """True if only its turn keeps this test from `make test`: on other commits it is there."""
    marks = list(item.iter_markers("slow"))
    return bool(marks) and all(mark == NOT_NOW.mark for mark in marks)


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> list[pytest.Item]:
    """Leave these tests in `items`, and return the others."""
    others = [item for item in items if not wanted(item)]
    items[:] = [item for item in items if wanted(item)]
    if others:
        config.hook.pytest_deselected(items=others)
    return others


NOT_HERE = pytest.StashKey[list[str]]()
"""Lines about tests that this run leaves to others."""
_begun: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """One that has begun is repeated in any case, or its failure would be forgotten."""
    deadline = item.config.getoption("deadline")
    if deadline is not None and time.time() > deadline and item.nodeid not in _begun:
        pytest.skip(LEFT_OUT)
    _begun.add(item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which part this is, and what was left out."""
    for line in terminalreporter.config.stash.get(NOT_HERE, []):
        terminalreporter.write_line(line)
    if (wanted := terminalreporter.config.getoption("part")) is not None:
        terminalreporter.write_line(f"part {wanted[0]} of {wanted[1]} of the tests, at commit {COMMIT[:12]}")
    left_out = [report.nodeid for report in terminalreporter.getreports("skipped") if LEFT_OUT in report.longreprtext]
    if left_out:
        terminalreporter.section(f"the deadline left out {len(left_out)} tests")
        for nodeid in left_out:
            terminalreporter.write_line(nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A part in which there is no test is no failure. A process of xdist hands on what its run leaves to others."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_here"] = session.config.stash.get(NOT_HERE, [])
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("part") is not None:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over a process's lines: all processes choose the same tests, and this one collects none."""
    node.config.stash[NOT_HERE] = getattr(node, "workeroutput", {}).get("not_here", [])
