"""Nothing is left in the temporary directory, whichever way a process ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swarmllm.files import LOCK, PrivateDirectory

HOLD = """
import sys
from swarmllm.files import PrivateDirectory
print(PrivateDirectory().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_it_is_removed_once(temporary: Path) -> None:
    with PrivateDirectory() as private:
        (private.path / "file").touch()
        assert private.path.parent == temporary
        assert private.path.stat().st_mode & 0o077 == 0
    private.remove()
    assert not list(temporary.iterdir())


def test_the_next_process_removes_those_of_killed_ones_and_no_others(temporary: Path) -> None:
    foreign = temporary / "swarmllm-foreign"
    foreign.mkdir()  # without a lock: of somebody who is making it, or another program's
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, living = (Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout)
        os.kill(holders[0].pid, signal.SIGKILL)
        holders[0].wait()
        assert killed.exists()
        with PrivateDirectory() as own, PrivateDirectory() as other:
            assert set(temporary.iterdir()) == {foreign, living, own.path, other.path}
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_link_is_not_followed(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    precious = tmp_path_factory.mktemp("precious")
    (precious / LOCK).touch()
    (temporary / "swarmllm-link").symlink_to(precious)
    with PrivateDirectory():
        assert (precious / LOCK).exists()


def test_too_long_a_name_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with PrivateDirectory(max_path_bytes=90) as private:
        assert private.path.parent == Path("/tmp")
