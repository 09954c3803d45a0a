"""A real server whose sessions are in pages, on a CPU: it generates what the local model does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paged_server import PROGRAM
from pages import CHECKS, assert_on_pages
from swarm_models import NUM_BLOCKS, OPTIONS, connected
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer

pytestmark = pytest.mark.rotates(6, whole_file=True)

ROOM = {"attn_cache_tokens": 4096, "prefix_cache_tokens": 1024}
"""Plain torch reads all pages there are."""


@pytest.fixture(scope="module")
def paged(llama: Path) -> Iterator[tuple[LocalServer, Any]]:
    with (
        LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], program=PROGRAM, **ROOM, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
    ):
        yield swarm.servers[0], model


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_as_the_local_model(
    check: Callable[[Any, PreTrainedModel], None], paged: tuple[LocalServer, Any], local: PreTrainedModel
) -> None:
    server, model = paged
    check(model, local)
    assert_on_pages(server)
