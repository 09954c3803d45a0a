"""`.ci/commit_subjects.py` looks at new commits, in full and in shallow clones, and outside of repositories."""

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

LONG = "Say in one subject line everything that should have been the body of this commit"


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "commit_subjects.py"), run_name="commit_subjects")


def git(root: Path, *arguments: str) -> str:
    settings = [
        "-c",
        "user.name=n",
        "-c",
        "user.email=e",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "protocol.file.allow=always",
    ]
    command = ["git", *settings, "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("subject", "complaint"),
    [
        ("Merge inbox and outbox into stream", None),
        ("x" * 72, None),
        ("x" * 73, "73 characters"),
        ("Mend the relay.", "full stop"),
        ("wip", "squash"),
        ("fixup! Mend the relay", "squash"),
        ("Wipe the cache", None),
    ],
)
def test_subjects(script: dict[str, Any], subject: str, complaint: str | None) -> None:
    found = script["problems_of"](subject)
    assert len(found) == (complaint is not None)
    assert all(complaint in problem for problem in found)


def test_only_new_commits_count_and_no_merges(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, shallow = tmp_path / "full", tmp_path / "shallow"
    full.mkdir()
    git(full, "init", "-q", "-b", "main")
    git(full, "commit", "-q", "--allow-empty", "-m", LONG)
    since = git(full, "rev-parse", "HEAD")
    assert script["check"](full, since) == []
    git(full, "checkout", "-q", "-b", "other")
    git(full, "commit", "-q", "--allow-empty", "-m", "Short")
    git(full, "checkout", "-q", "main")
    git(full, "merge", "-q", "--no-ff", "-m", LONG, "other")
    assert script["check"](full, since) == []
    git(full, "commit", "-q", "--allow-empty", "-m", LONG, "-m", "And why.")
    (problem,) = script["check"](full, since)
    assert LONG in problem
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{full}", str(shallow))
    assert len(script["check"](shallow, since)) == 1
    assert "shallow" in capsys.readouterr().out
    assert script["check"](full, "0" * 40) == []
    assert "doesn't hold" in capsys.readouterr().out


def test_outside_of_a_repository_there_is_nothing_to_check(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert script["check"](tmp_path) == []
    assert "no git repository" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "")
    assert script["check"](tmp_path) == []
