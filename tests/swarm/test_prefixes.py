"""Clients with the same prompt: servers compute it once, and everybody gets the same tokens."""

import asyncio
from pathlib import Path

import pytest
import torch
from raw_peer import RawPeers
from swarm_models import NUM_BLOCKS, OPTIONS, assert_same_tokens, connected, metric, prompt
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.network.wire.protocol import MessageType

pytestmark = pytest.mark.rotates(3, whole_file=True)

LENGTH = 512
SPANS = [(0, 3), (3, NUM_BLOCKS)]


def reused(server: LocalServer) -> float:
    return metric(server, "reused_tokens_total")


def test_the_same_prompt_is_computed_once(llama: Path, local: PreTrainedModel) -> None:
    ids = prompt(length=LENGTH)
    with (
        LocalSwarm(llama, spans=SPANS, metrics_port=0, **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as first,
        connected(llama, swarm.initial_peers) as second,
    ):
        assert_same_tokens(first, local, ids, max_new_tokens=6)
        assert [reused(server) for server in swarm.servers] == [0, 0]
        for num_texts, model in enumerate((second, first, second), start=1):
            assert_same_tokens(model, local, ids, max_new_tokens=6)
            for server in swarm.servers:
                assert reused(server) >= num_texts * (LENGTH - 64)

        other = ids.clone()  # another continuation of the same beginning
        other[0, 300:] = prompt(length=LENGTH - 300, seed=1)
        before = [reused(server) for server in swarm.servers]
        assert_same_tokens(second, local, other, max_new_tokens=6)
        assert [reused(server) - count for server, count in zip(swarm.servers, before, strict=True)] == [256, 256]


def test_poisoning(llama: Path, local: PreTrainedModel) -> None:
    """A peer that sends the beginning of another's text, and its own between it, changes nobody's answer.

    The same positions with other tokens and a choice of rows: the page would be kept under the hash of what was sent.
    """
    ids, own = prompt(length=128), prompt(length=128, seed=1)
    with LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], metrics_port=0, **OPTIONS) as swarm:
        asyncio.run(poison(swarm.servers[0], *(local.get_input_embeddings()(text).detach() for text in (ids, own))))
        with connected(llama, swarm.initial_peers) as model:
            for num_reused in (0, 64):  # only what an honest client has sent
                assert_same_tokens(model, local, ids, max_new_tokens=12)
                assert reused(swarm.servers[0]) >= num_reused


async def poison(server: LocalServer, victims: Tensor, own: Tensor) -> None:
    async with RawPeers.join(server) as peers:
        raw = await peers.open_stream(server)
        for with_positions in (False, True):
            session = await raw.open(end=NUM_BLOCKS, max_length=128)
            assert (await raw.answer()).type is MessageType.RESULT
            for text, start, end, rows in ((victims, 0, 47, 0), (own, 0, 47, 1), (victims, 47, 64, 1)):
                chosen = {"rows": rows, "batch_index": [0]} if rows else {}
                positions = {"position_ids": torch.arange(start, end)[None]} if with_positions else {}
                header = {"session": session, "epoch": 0, "position": start, "batch_size": 1, "seq_len": end - start}
                tensors = {"hidden_states": text[:, start:end].contiguous(), **positions}
                await raw.say(MessageType.STEP, tensors, ones_mask=True, **header, **chosen)
                assert (await raw.answer()).type is MessageType.RESULT


@pytest.mark.slow
def test_the_flag_switches_it_off(llama: Path, local: PreTrainedModel) -> None:
    with LocalSwarm(llama, spans=[(0, NUM_BLOCKS)], metrics_port=0, prefix_cache_tokens=0, **OPTIONS) as swarm:
        for _ in range(2):
            with connected(llama, swarm.initial_peers) as model:
                assert_same_tokens(model, local, prompt(length=128), max_new_tokens=2)
        (server,) = swarm.servers
        assert reused(server) == metric(server, "prefix_cache_bytes") == 0
