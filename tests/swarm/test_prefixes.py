"""Clients with the same prompt: servers compute it once, and everybody gets the same tokens."""

import re
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from swarm_models import NUM_BLOCKS, OPTIONS, assert_same_tokens, connected, generate_seeded, prompt
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer

LENGTH = 512
SPANS = [(0, 3), (3, NUM_BLOCKS)]


def counter(server: LocalServer, name: str) -> float:
    """What the server tells Prometheus."""
    address = re.search(r"metrics are at (http://\S+)", server.log_path.read_text())
    assert address is not None
    with urlopen(address[1], timeout=120) as answer:
        value = re.search(rf"^swarmllm_server_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert value is not None, f"no counter {name}"
    return float(value[1])


def reused(server: LocalServer) -> float:
    return counter(server, "reused_tokens_total")


def test_the_same_prompt_is_computed_once(llama: Path, local: PreTrainedModel) -> None:
    ids = prompt(length=LENGTH)
    with LocalSwarm(llama, spans=SPANS, metrics_port=0, **OPTIONS) as swarm:

        def ask() -> Any:
            with connected(llama, swarm.initial_peers) as model:
                return assert_same_tokens(model, local, ids, max_new_tokens=6)

        ask()
        assert [reused(server) for server in swarm.servers] == [0, 0]
        for num_clients in (1, 2, 3):
            ask()
            for server in swarm.servers:
                assert reused(server) >= num_clients * (LENGTH - 64)

        with connected(llama, swarm.initial_peers) as model:  # another continuation of the same beginning
            other = ids.clone()
            other[0, 300:] = prompt(length=LENGTH - 300, seed=1)
            before = [reused(server) for server in swarm.servers]
            assert generate_seeded(model, other, max_new_tokens=6).tolist() == (
                generate_seeded(local, other, max_new_tokens=6).tolist()
            )
            assert [reused(server) - count for server, count in zip(swarm.servers, before, strict=True)] == [256, 256]


@pytest.mark.slow
def test_the_flag_switches_it_off(llama: Path, local: PreTrainedModel) -> None:
    with LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], metrics_port=0, prefix_cache_tokens=0, **OPTIONS) as swarm:
        for _ in range(2):
            with connected(llama, swarm.initial_peers) as model:
                assert_same_tokens(model, local, prompt(length=128), max_new_tokens=2)
        (server,) = swarm.servers
        assert reused(server) == counter(server, "prefix_cache_bytes") == 0
