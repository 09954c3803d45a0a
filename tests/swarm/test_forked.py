"""A forked process is a process like any other, and ends with the test that started it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from swarm_models import wait_until
from tests import forked

MARKER = "SWARMLLM_TEST_SESSION"
UNTIL_EOF = "import sys; print('runs', flush=True); sys.stdin.read()"
KILLED_WITH_A_SERVER = """
import os, signal, subprocess, sys
from tests import forked
server = forked.popen([sys.executable, *sys.argv[1:]], stderr=sys.stderr)
print(server.stdout.readline().strip(), forked.warm_pid(), server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program of these lines with these arguments."""
    started: list[Any] = []

    def start(lines: str, *arguments: str) -> Any:
        (script := tmp_path / f"{len(started)}.py").write_text(lines)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (tmp_path / "log").open("wb") as log:
            command = [sys.executable, str(script), *arguments]
            started.append(forked.popen(command, stderr=log, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("import os; os._exit(5)", 5),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_exit_codes(start: Start, tmp_path: Path, lines: str, code: int) -> None:
    assert start(lines).wait() == code
    assert ("ZeroDivisionError" in (tmp_path / "log").read_text()) == (lines == "1 / 0")


def test_it_is_a_process_of_its_own(start: Start) -> None:
    start(UNTIL_EOF)  # another one, of whose pipes it must know nothing
    process = start("import os, sys; print(os.getpid(), os.getsid(0), os.getcwd(), *sys.argv[1:]); input()", "a", "b")
    process.stdin.write("")
    wait_until(lambda: psutil.Process(process.pid).num_fds() == 3, "only standard input, output and error were open")
    assert psutil.Process(process.pid).num_threads() == 1
    assert psutil.Process(process.pid).environ()[MARKER] == os.environ[MARKER]
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline().split() == [*[str(process.pid)] * 2, str(Path.cwd()), "a", "b"]
    assert process.wait() == 0


def test_the_end_of_standard_input(start: Start) -> None:
    first, second = start(UNTIL_EOF), start(UNTIL_EOF)
    for process in (first, second):
        process.stdout.readline()
        process.stdin.close()
        assert process.wait() == 0


def test_signals(start: Start) -> None:
    process = start(UNTIL_EOF)
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it stopped")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.send_signal(signal.SIGCONT)
    process.terminate()
    assert process.wait() == -signal.SIGTERM == process.poll()
    assert not psutil.pid_exists(process.pid)
    process.kill()  # harmless


@pytest.mark.parametrize(
    ("variable", "kind"), [("SWARMLLM_LOG_LEVEL", forked.Forked), ("HF_ENDPOINT", subprocess.Popen)]
)
def test_the_environment(start: Start, monkeypatch: pytest.MonkeyPatch, variable: str, kind: type) -> None:
    """A program that changes what libraries read at import starts with imports of its own."""
    monkeypatch.setenv(variable, "other")
    monkeypatch.delenv("SWARMLLM_CACHE")
    process = start(f"import os; print(os.environ['{variable}'], os.environ.get('SWARMLLM_CACHE'))")
    assert isinstance(process, kind)
    assert process.stdout.readline() == "other None\n"


@pytest.mark.slow
def test_a_session_that_is_killed_leaves_nothing(repo_root: Path, tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(UNTIL_EOF)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WITH_A_SERVER, program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(repo_root), os.environ.get("PYTHONPATH", "")])},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    said, *pids = killed.stdout.split()
    assert said == "runs"
    wait_until(lambda: not any(runs(int(pid)) for pid in pids), "they ended")


def runs(pid: int) -> bool:
    """Also where nobody collects orphans that have ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
