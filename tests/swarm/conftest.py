"""One swarm of tiny servers for most tests, models on disk, and the local models that they are compared with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm_models import NUM_BLOCKS, OPTIONS, connected, load_local, save_llama
from transformers import PreTrainedModel

from swarmllm import LocalSwarm


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 8 blocks."""
    return save_llama(tmp_path_factory.mktemp("llama") / "checkpoint")


@pytest.fixture(scope="session")
def local(llama: Path) -> PreTrainedModel:
    """The same model in this process."""
    return load_local(llama)


@pytest.fixture(scope="session")
def swarm(llama: Path) -> Iterator[LocalSwarm]:
    """Two servers that nobody kills."""
    with LocalSwarm(llama, spans=[(0, 3), (3, NUM_BLOCKS)], **OPTIONS) as swarm:
        yield swarm


@pytest.fixture(scope="session")
def model(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """A client of that swarm. It doesn't guess, as it would on a busy machine: some tests count its steps."""
    with connected(llama, swarm.initial_peers, speculation="off") as model:
        yield model
