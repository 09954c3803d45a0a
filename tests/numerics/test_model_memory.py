"""The tables of docs/real-model.md are what the code computes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_memory", ROOT / ".ci" / "model_memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["model_memory"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_document_has_the_tables_of_today(script: ModuleType) -> None:
    text = script.DOCUMENT.read_text()
    assert text.count("| Qwen3-32B |") == 1
    assert script.filled(text) == text


def test_a_model_by_hand(script: ModuleType) -> None:
    """Llama 3.1 8B: what its config says, added up by hand."""
    found = script.needs("meta-llama/Llama-3.1-8B-Instruct")
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    block = attention + 3 * 4096 * 14336 + 2 * 4096
    assert found.by_quant_type["none"] == [2 * block] * 32
    assert block < found.by_quant_type["int8"][0] < 1.02 * block + 4 * 4096
    assert found.cache == 8192 * 8 * 128 * 2 * 2
    assert found.ends == 2 * 2 * 128256 * 4096
    assert found.fit("none", 24) == 32
    assert found.fit("none", 12) == int(0.8 * 12e9 // (2 * block + found.cache))
