"""Benchmarks run without matplotlib, which only their pictures need."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture
def plots(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/plots.py, without the models of its neighbour."""
    monkeypatch.setitem(sys.modules, "common", SimpleNamespace(RESULTS=tmp_path / "results"))
    spec = spec_from_file_location("plots_of_benchmarks", repo_root / "benchmarks/plots.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_matplotlib_there_is_a_line_and_no_picture(
    plots: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plots.lines("rates", "tokens/s", "servers", {"512x8": ([1, 2], [0.8, 0.7])})
    plots.bars("routes", "ms per token", {"one": 3.0, "two": 2.0}, {"two": 1.5})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("no picture") for line in lines)
    assert not list(tmp_path.rglob("*.svg"))
