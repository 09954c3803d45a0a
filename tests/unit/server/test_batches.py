"""Forwards that are kept for their backward: used once, the oldest given up, none of them for ever."""

import asyncio

import pytest
import torch

from swarmllm.errors import RemoteProtocolError, SessionLostError
from swarmllm.server import batches
from swarmllm.server.batches import Graph, KeptGraphs


def graph(num_tokens: int = 4) -> Graph:
    hidden = torch.ones(1, num_tokens, 2, requires_grad=True)
    return Graph(hidden * 3, {"hidden_states": hidden}, [], num_tokens)


async def test_a_kept_forward_is_used_once_and_only_by_its_peer() -> None:
    kept, mine = KeptGraphs(max_tokens=8), graph()
    kept.put("me", 1, mine)
    for peer_id, request in (("you", 1), ("me", 2)):
        with pytest.raises(SessionLostError):
            kept.take(peer_id, request)
    assert kept.take("me", 1) is mine
    with pytest.raises(SessionLostError):
        kept.take("me", 1)


async def test_the_oldest_make_room() -> None:
    kept = KeptGraphs(max_tokens=10)
    newest = graph(num_tokens=5)
    for request in (1, 2):
        kept.put("me", request, graph())
    kept.put("you", 1, newest)
    with pytest.raises(SessionLostError):
        kept.take("me", 1)
    kept.take("me", 2)
    assert kept.take("you", 1) is newest


async def test_none_outlives_its_time_or_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptGraphs(max_tokens=10)
    kept.put("me", 1, graph())
    kept.clear()
    with pytest.raises(SessionLostError):
        kept.take("me", 1)
    monkeypatch.setattr(batches, "KEEP_S", 0.0)
    kept.put("me", 2, graph())
    await asyncio.sleep(0.001)
    with pytest.raises(SessionLostError):
        kept.take("me", 2)


def test_the_gradient_must_have_the_shape_of_the_outputs() -> None:
    with pytest.raises(RemoteProtocolError, match="grad_outputs"):
        graph().gradients(torch.ones(1, 1, 2))
    assert torch.equal(graph().gradients(torch.ones(1, 4, 2))["hidden_states"], torch.full((1, 4, 2), 3.0))
