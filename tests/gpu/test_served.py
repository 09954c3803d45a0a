"""A real server on a GPU, in float32: it generates what transformers does, token by token."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer

sys.path.append(str(Path(__file__).parents[1] / "swarm"))
from pages import CHECKS, assert_on_pages
from swarm_models import NUM_BLOCKS, connected, load_local, save_llama

pytestmark = pytest.mark.lane("gpu")

OPTIONS = {"device": "cuda", "dtype": "float32", "quant_type": "none", "num_threads": 1}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalServer, Any, PreTrainedModel]]:
    directory = save_llama(tmp_path_factory.mktemp("served") / "llama", vocab_size=128)
    with (
        LocalSwarm(directory, spans=[(0, NUM_BLOCKS)], **OPTIONS) as swarm,
        connected(directory, swarm.initial_peers) as model,
    ):
        yield swarm.servers[0], model, load_local(directory)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_as_the_local_model(
    check: Callable[[Any, PreTrainedModel], None], served: tuple[LocalServer, Any, PreTrainedModel]
) -> None:
    server, model, local = served
    check(model, local)
    assert "decode steps are run by fused kernels" in assert_on_pages(server)
