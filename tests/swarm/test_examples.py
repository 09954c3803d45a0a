"""The examples of training do what they say: accuracy, and going on after an interruption."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run_example(repo_root: Path, name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, repo_root / "examples" / name, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_classifier_is_right_about_texts_that_it_has_not_seen(repo_root: Path, tmp_path: Path) -> None:
    output = run_example(repo_root, "classification.py", "--output_dir", str(tmp_path))
    (accuracy,) = re.findall(r"^accuracy on held-out texts: ([\d.]+)$", output, re.MULTILINE)
    assert float(accuracy) >= 0.95
    assert "<polyline" in (tmp_path / "loss.svg").read_text()


def test_a_persona_goes_on_from_its_checkpoint(repo_root: Path, tmp_path: Path) -> None:
    arguments = ("--steps", "4", "--output_dir", str(tmp_path))
    first = run_example(repo_root, "persona.py", *arguments)
    again = run_example(repo_root, "persona.py", *arguments, "--resume")  # the last checkpoint is that of the last step
    assert first.splitlines()[-4:] == again.splitlines()[-4:]  # what it says
    assert again.count("'loss'") < first.count("'loss'")
