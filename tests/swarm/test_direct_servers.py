"""Real servers: hidden states leave the daemons, between the client and servers and between servers."""

import math
from pathlib import Path

import pytest
import torch
from near_server import PROGRAM
from swarm_models import NUM_BLOCKS, OPTIONS, connected, metric, prompt, wait_until
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.network.p2p import direct

pytestmark = pytest.mark.rotates(3, whole_file=True)

SPANS = [(0, 4), (4, NUM_BLOCKS)]


def test_streams_in_use_are_direct_and_tokens_the_same(
    llama: Path, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "NEAR_S", math.inf)  # as in the servers
    ids = prompt()
    expected = local.generate(ids, max_new_tokens=40, do_sample=False)
    with (
        LocalSwarm(llama, spans=SPANS, metrics_port=0, program=PROGRAM, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
        model.inference_session(max_length=64) as session,
    ):

        def all_are_direct() -> bool:
            """Each server has a stream with the client, and one with the other server."""
            session.position = 0
            assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False), expected)
            return all(metric(server, "direct_streams") >= 2 for server in swarm.servers)

        wait_until(all_are_direct, "leaving the daemons")


def test_servers_without_direct_port_use_the_daemons(llama: Path, local: PreTrainedModel) -> None:
    ids = prompt()
    expected = local.generate(ids, max_new_tokens=40, do_sample=False)
    with (
        LocalSwarm(llama, spans=SPANS, metrics_port=0, direct_port=0, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
        model.inference_session(max_length=64) as session,
    ):
        for _ in range(3):
            session.position = 0
            assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False), expected)
        assert [metric(server, "direct_streams") for server in swarm.servers] == [0, 0]
