"""The documents: they build without warnings, their commands and settings exist, and their example runs."""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from swarmllm.__main__ import COMMANDS
from swarmllm.command_line import is_in_file
from swarmllm.config import ClientConfig

FLAG = re.compile(r"(?<![\w-])--([a-z][a-z_]+)\b")
OTHERS_FLAGS = {"build-arg", "gpus", "init"}
"""Flags of Docker."""


def pages(repo_root: Path) -> dict[str, str]:
    paths = [repo_root / "README.md", *sorted((repo_root / "docs").rglob("*.md"))]
    return {path.name: path.read_text() for path in paths}


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def shell_blocks(text: str) -> list[str]:
    return re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_commands_of_the_documents_exist(repo_root: Path) -> None:
    known: dict[str, set[str]] = {}
    for name, command in COMMANDS.items():
        parser = import_module(command.module).build_parser()
        in_file = {action.dest for action, _, one in parser.settings if is_in_file(one)}
        actions = [action for action in parser._actions if action.dest not in in_file]
        known[name] = {flag[2:] for action in actions for flag in action.option_strings if flag[:2] == "--"}
    seen = 0
    for page, text in pages(repo_root).items():
        for line in re.sub(r"\\\n\s*", "", "".join(shell_blocks(text))).splitlines():
            if match := re.match(r"^(?:\$ )?(?:swarmllm |python -m swarmllm\.)(\w+)(.*)", line):
                assert match[1] in COMMANDS, f"{page}: {line}"
                unknown = set(FLAG.findall(match[2].partition("#")[0])) - known[match[1]]
                assert not unknown, f"{page}: {line}"
                seen += 1
    assert seen > 10


def test_tests_that_the_documents_name_exist(repo_root: Path) -> None:
    """docs/security.md names one for whatever it says, in short by `file::test` or `file`."""
    text = pages(repo_root)["security.md"].partition("## One hostile peer of each kind")[0]
    short = dict(re.findall(r"`(\w+)`\s=\s`(tests/\S+\.py)`", text))
    assert len(short) > 20
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    named = [re.findall(r"`([\w/]+(?:\.py)?)(?:::(\w+))?`", row.split(" | ")[-1]) for row in rows]
    assert sum(map(len, named)) > 100
    for row, tests in zip(rows, named, strict=True):
        assert tests or row.startswith(("| what |", "| attack |")), row
        for file, test in tests:
            source = (repo_root / short.get(file, file)).read_text()
            assert not test or f"def {test}(" in source, f"{file}::{test}"


def test_python_of_the_documents_compiles(repo_root: Path) -> None:
    for page, text in pages(repo_root).items():
        for block in python_blocks(text):
            compile(block, page, "exec")


def test_links_of_the_readme_lead_somewhere(repo_root: Path) -> None:
    text = re.sub(r"^```.*?^```", "", (repo_root / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert len(links) > 5
    assert all((repo_root / link).exists() for link in links)


@pytest.mark.parametrize("page", ["README.md", "docs/client.md"])
@pytest.mark.slow
def test_the_example_runs(repo_root: Path, page: str) -> None:
    (example,) = [block for block in python_blocks((repo_root / page).read_text()) if "LocalSwarm(" in block]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_asks_nobody_else(repo_root: Path, tmp_path: Path) -> None:
    if shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("needs the extra [docs]: make docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        capture_output=True,
        text=True,
        cwd=repo_root,
    )
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "reference.html").read_text()
    assert "route_timeout_s" in html
    assert ClientConfig.__name__ in html
    foreign = [
        tag
        for path in tmp_path.rglob("*.html")
        for tag in re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]+", path.read_text()
        )
    ]
    assert not foreign
