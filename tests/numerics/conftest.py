"""A tiny llama, which most tests here are about if they are about one model."""

from pathlib import Path
from typing import Any

import pytest
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.tiny_models import save_tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint."""
    directory: Path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return directory


@pytest.fixture(scope="module")
def client(llama: Path) -> Any:
    """A client of it, with two servers in this process."""
    return InProcessSwarm(llama).client
