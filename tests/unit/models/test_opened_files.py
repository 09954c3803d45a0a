"""Files of a checkpoint that have changed since it was opened."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmllm import embedded_model_path
from swarmllm.errors import CorruptWeightsError
from swarmllm.models.checkpoint import checkpoint as checkpoint_module
from swarmllm.models.checkpoint.checkpoint import OpenedFiles, open_checkpoint

FILE = "model.safetensors"
NAME = "model.layers.5.self_attn.q_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded_model_path(), tmp_path / "model"))


@pytest.fixture
def files(directory: Path) -> OpenedFiles:
    files = open_checkpoint(str(directory)).opened_files
    assert files.changed() == []
    return files


def rewrite(directory: Path, change: float) -> None:
    path = directory / FILE
    tensors = load_file(path)
    tensors[NAME] = tensors[NAME] * change
    save_file(tensors, path.with_suffix(".new"), metadata={"format": "pt"})
    path.with_suffix(".new").replace(path)


def test_other_numbers_and_a_file_that_went(directory: Path, files: OpenedFiles) -> None:
    kept = shutil.copy2(directory / FILE, directory / "kept")
    rewrite(directory, 1.01)
    assert files.changed() == [FILE]
    (directory / FILE).unlink()
    assert files.changed() == [FILE]
    kept.replace(directory / FILE)
    assert files.changed() == [], "what was there is there again"


def test_written_over_in_place(directory: Path, files: OpenedFiles) -> None:
    """By a program that keeps size and inode; only the time tells."""
    with (directory / FILE).open("r+b") as file:
        file.seek(-100_000, os.SEEK_END)
        file.write(bytes(100_000))
    assert files.changed() == [FILE]


def test_the_same_again_is_no_change(directory: Path, files: OpenedFiles) -> None:
    os.utime(directory / FILE)
    assert files.changed() == []
    rewrite(directory, 1.0)
    assert files.changed() == []
    rewrite(directory, 1.01)
    assert files.changed() == [FILE], "the control: it is still compared with what was there first"


@pytest.mark.parametrize("content", [b"", b"half a file"])
def test_damaged_counts_as_changed(directory: Path, files: OpenedFiles, content: bytes) -> None:
    (directory / FILE).write_bytes(content)
    assert files.changed() == [FILE]


def test_damaged_from_the_start(directory: Path) -> None:
    os.truncate(directory / FILE, 1000)
    with pytest.raises(CorruptWeightsError, match="download it again"):
        open_checkpoint(str(directory)).opened_files.samples()


def test_large_tensors_are_sampled_in_more_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 16 experts in one tensor has changed."""
    monkeypatch.setattr(checkpoint_module, "BYTES_PER_SPOT", 64 * 64 * 4)
    directory = shutil.copytree(embedded_model_path(), tmp_path / "model")
    experts = torch.rand(16, 64, 64)

    def samples() -> object:
        save_file({"experts": experts}, directory / FILE)
        return open_checkpoint(str(directory)).opened_files.samples()

    before = samples()
    assert samples() == before, "the control"
    experts[11] *= 1.01
    assert samples() != before
