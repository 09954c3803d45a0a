"""A swarm in which every block has two servers, for tests that kill some; each test finds it whole again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import Doom, Faulty
from hostile import ALL, HIDDEN, load_blocks
from swarm_in_process import Blocks
from swarm_models import connected, load_local, save_llama
from transformers import PreTrainedModel

from swarmllm.models.span.block_span import BlockSpan


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 6 blocks."""
    return save_llama(tmp_path_factory.mktemp("llama") / "checkpoint", num_blocks=6)


@pytest.fixture(scope="session")
def local(llama: Path) -> PreTrainedModel:
    """The same model in this process: what an undisturbed run gives."""
    return load_local(llama)


@pytest.fixture(scope="session")
def blocks(llama: Path) -> Iterator[Blocks]:
    """The checkpoint's blocks for swarms in this process: loading them for each file took longer than many a test."""
    blocks = Blocks(llama)
    yield blocks
    blocks.close()


@pytest.fixture(scope="session")
def two_blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """Two blocks of three, so that sessions keep what they send on, for servers that hostile clients talk to."""
    torch.set_num_threads(1)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN}
    directory = save_llama(tmp_path_factory.mktemp("hostile") / "checkpoint", num_blocks=3, **sizes)
    return load_blocks(directory, ALL)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a test's own fixtures, so that the new servers don't count as started by the test."""
    if Faulty.running is not None:
        Faulty.running.mend()


@pytest.fixture(scope="module")
def swarm(llama: Path) -> Iterator[Faulty]:
    """Two servers for each of three spans, at the begin of each test."""
    with Faulty(llama) as swarm:
        yield swarm


@pytest.fixture
def model(llama: Path, swarm: Faulty) -> Iterator[Any]:
    """A client of it that knows nothing of earlier tests, nor of the dead that the DHT still remembers."""
    living = [server.peer_id for server in swarm.living]
    with connected(llama, swarm.initial_peers, allowed_servers=living) as model:
        yield model


@pytest.fixture
def doom() -> Iterator[Doom]:
    doom = Doom()
    yield doom
    doom.fulfil()
