"""The examples of training do what they say: accuracy, and going on after an interruption."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run_example(repo_root: Path, name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, repo_root / "examples" / name, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FutureWarning" not in done.stderr
    assert "from: None" not in done.stderr + done.stdout
    return done.stdout


def refusal(repo_root: Path, name: str, *arguments: str) -> str:
    """What an example says that refuses its arguments."""
    command = [sys.executable, repo_root / "examples" / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


STEP = re.compile(r"^step (\d+) of (\d+): loss ([\d.]+), [\d.]+ s, (\d+)% of it servers and network$", re.MULTILINE)


def assert_steps(output: str, count: int) -> None:
    """A line for each step, with how much of it was the network."""
    found = STEP.findall(output)
    assert [int(step) for step, *_ in found] == list(range(1, count + 1))
    assert all(0 < int(share) <= 100 for *_, share in found)


def assert_picture(path: Path) -> None:
    """It says what it shows, and in which units."""
    text = path.read_text()
    assert "<polyline" in text
    assert all(words in text for words in ("Training loss", "optimizer step", "nats"))


def test_a_classifier_is_right_about_texts_that_it_has_not_seen(repo_root: Path, tmp_path: Path) -> None:
    output = run_example(repo_root, "classification.py", "--output_dir", str(tmp_path))
    (accuracy,) = re.findall(r"^accuracy on held-out texts: ([\d.]+)$", output, re.MULTILINE)
    assert float(accuracy) >= 0.85
    assert_steps(output, 40)
    assert_picture(tmp_path / "loss.svg")


def test_a_persona_goes_on_from_its_checkpoint(repo_root: Path, tmp_path: Path) -> None:
    arguments = ("--steps", "4", "--output_dir", str(tmp_path))
    first = run_example(repo_root, "persona.py", *arguments)
    assert_steps(first, 4)
    arguments = ("--steps", "6", *arguments[2:], "--resume")
    again = run_example(repo_root, "persona.py", *arguments)
    assert [int(step) for step, *_ in STEP.findall(again)] == [5, 6]
    assert "has made 6 steps: give more --steps" in refusal(repo_root, "persona.py", *arguments)
    state = (tmp_path / "checkpoint-6" / "trainer_state.json").rename(tmp_path / "moved.json")
    assert "checkpoint-6 is not whole" in refusal(repo_root, "persona.py", *arguments)
    state.rename(tmp_path / "checkpoint-6" / "trainer_state.json")
    assert "trains LORA, not PROMPT_TUNING: give its --method" in refusal(
        repo_root, "persona.py", *arguments, "--steps", "7", "--method", "prompt"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipe.py", "--together", "nosuch.swarm"], "can't read the invite in nosuch.swarm: No such file"),
        (["recipe.py", "--together", "./nosuch"], "there is no file ./nosuch, and an invite"),
        (["recipe.py", "--together", "ours", "--homes", "99"], "wait_for must be 1 to 16 homes, not 99"),
        (["recipe.py", "--together", "ours", "--every", "0"], "argument --every: give at least 1"),
        (["classification.py", "--steps", "0"], "argument --steps: give at least 1"),
        (["steering.py", "--initial_peers", "here"], "must look like /ip4/"),
        (["recipe.py", "--output_dir", "/dev/null"], "/dev/null is no directory that can be written to"),
        (["own_head.py", "--output_dir", "/dev/null/runs"], "/dev/null is no directory that can be written to"),
        (["prompt_tuning.py", "--lr", "nan"], "argument --lr: give a number above 0"),
        (["prompt_tuning.py", "--model", "/nosuch"], "the directory '/nosuch' does not exist"),
    ],
)
def test_what_can_not_work_is_one_sentence(
    arguments: list[str], words: str, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refusal(repo_root, *arguments)


def test_the_usual_recipe(repo_root: Path, tmp_path: Path) -> None:
    output = run_example(repo_root, "recipe.py", "--steps", "3", "--output_dir", str(tmp_path))
    assert_steps(output, 3)
    assert_picture(tmp_path / "loss.svg")
    assert '"lora_dropout": 0.05' in (tmp_path / "adapter" / "adapter_config.json").read_text()


@pytest.mark.slow
def test_three_homes(repo_root: Path, tmp_path: Path) -> None:
    output = run_example(repo_root, "together.py", "--steps", "2", "--output_dir", str(tmp_path))
    rows = re.findall(r"^(only \w+|together) ", output, re.MULTILINE)
    assert rows == ["only orders", "only tickets", "only stock", "together"]
    assert (tmp_path / "losses.svg").read_text().count("<rect") == 1 + 4 * 3


@pytest.mark.slow
def test_the_usual_recipe_in_a_run(repo_root: Path, tmp_path: Path) -> None:
    arguments = ("--steps", "4", "--together", "ours", "--every", "2", "--output_dir", str(tmp_path))
    output = run_example(repo_root, "recipe.py", *arguments)
    assert f"with the invite in {tmp_path / 'together' / 'invite.swarm'}" in output
    first, second, end = map(json.loads, (tmp_path / "together" / "rounds.jsonl").read_text().splitlines())
    assert [len(line["members"]) for line in (first, second, end)] == [1, 1, 0]
    assert first["members"][0]["shared_loss"] > end["shared_loss"]


def test_a_shared_adapter_says_the_same_everywhere(repo_root: Path) -> None:
    output = run_example(repo_root, "sharing.py", "--steps", "6")
    said = dict(line.split(": ", 1) for line in output.splitlines() if line.startswith(("by ", "from ", "merged: ")))
    assert set(said) == {"by who trained it", "by another client", "from the servers", "merged"}
    assert len(set(said.values())) == 1


def test_an_adapter_for_each_row(repo_root: Path) -> None:
    output = run_example(repo_root, "adapters_per_row.py", "--steps", "3")
    names = [line.partition(":")[0] for line in output.splitlines() if "?" in line or "the sea." in line]
    assert names == ["pirate", "robot", "__base__", "robot"]


def test_steering(repo_root: Path) -> None:
    lines = [line.partition(": ") for line in run_example(repo_root, "steering.py").splitlines()]
    assert len(lines) == 9
    assert all(animals[2] != food[2] for animals, food in zip(lines[1::3], lines[2::3], strict=True))

    def animals(name: str) -> int:
        """Words of the little world that the embedded model knows."""
        texts = " ".join(text for kind, _, text in lines if kind == name)
        return len(re.findall(r"\b(fox|owl|hen|cat|bear|frog|rabbit|horse|turtle|goose|squirrel|deer|wolf)s?\b", texts))

    assert animals("to animals") > max(animals("as it is"), animals("to food"))


def test_a_head_of_ones_own(repo_root: Path, tmp_path: Path) -> None:
    output = run_example(repo_root, "own_head.py", "--output_dir", str(tmp_path))
    assert_steps(output, 60)
    assert_picture(tmp_path / "loss.svg")
    (accuracy,) = re.findall(r"^accuracy on held-out texts: ([\d.]+)$", output, re.MULTILINE)
    assert float(accuracy) >= 0.8


@pytest.mark.parametrize("name", ["classification.py", "persona.py", "recipe.py"])
def test_nothing_to_go_on_from(name: str, repo_root: Path, tmp_path: Path) -> None:
    assert "there is no checkpoint in" in refusal(repo_root, name, "--resume", "--output_dir", str(tmp_path / "none"))
