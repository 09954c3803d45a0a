"""Forwards that are kept for their backward: used once, the oldest given up, none of them for ever."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import RemoteProtocolError, SessionLostError
from swarmllm.server.device import forward_backward
from swarmllm.server.device.forward_backward import Graph, KeptForward, KeptForwards, Turns, _turn_spans


def graph(num_tokens: int = 4, factor: float = 3.0) -> Graph:
    hidden, embeds = (torch.ones(1, num_tokens, 2, requires_grad=True) for _ in range(2))
    inputs = {"hidden_states": hidden, "inputs_embeds": embeds}
    return Graph(hidden * factor + embeds, inputs, [], Span(0, 1), num_tokens)


def batch(num_tokens: int = 4) -> KeptForward:
    return KeptForward([[graph(num_tokens)]])


def run(turns: Turns[dict[str, Tensor]]) -> tuple[dict[str, Tensor], int]:
    """Their result, and how many there were."""
    count = 1
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value, count
        count += 1


async def test_a_kept_forward_is_used_once_and_only_by_its_peer() -> None:
    kept, mine = KeptForwards(max_tokens=8), batch()
    kept.put("me", 1, mine)
    for peer_id, request in (("you", 1), ("me", 2)):
        with pytest.raises(SessionLostError):
            kept.take(peer_id, request)
    assert kept.take("me", 1) is mine
    with pytest.raises(SessionLostError):
        kept.take("me", 1)


async def test_the_oldest_make_room() -> None:
    kept = KeptForwards(max_tokens=10)
    newest = batch(num_tokens=5)
    for request in (1, 2):
        kept.put("me", request, batch())
    kept.put("you", 1, newest)
    with pytest.raises(SessionLostError):
        kept.take("me", 1)
    kept.take("me", 2)
    assert kept.take("you", 1) is newest


async def test_none_outlives_its_time_or_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptForwards(max_tokens=10)
    kept.put("me", 1, batch())
    kept.clear()
    with pytest.raises(SessionLostError):
        kept.take("me", 1)
    monkeypatch.setattr(forward_backward, "KEEP_S", 0.0)
    kept.put("me", 2, batch())
    await asyncio.sleep(0.001)
    with pytest.raises(SessionLostError):
        kept.take("me", 2)


def test_the_gradient_must_have_the_shape_of_the_outputs() -> None:
    with pytest.raises(RemoteProtocolError, match="grad_outputs"):
        run(batch().gradients(torch.ones(1, 1, 2)))
    grads, num_turns = run(batch().gradients(torch.ones(1, 4, 2)))
    assert num_turns == 1
    assert torch.equal(grads["hidden_states"], torch.full((1, 4, 2), 3.0))


def test_parts_pass_gradients_on_and_rows_are_joined() -> None:
    groups = [[graph(), graph(factor=5.0)], [graph(), graph(factor=7.0)]]
    grads, num_turns = run(KeptForward(groups).gradients(torch.ones(2, 4, 2)))
    assert num_turns == 4
    assert grads["hidden_states"][:, 0, 0].tolist() == [15.0, 21.0]
    assert grads["inputs_embeds"][:, 0, 0].tolist() == [6.0, 8.0]


@pytest.mark.parametrize(
    ("device", "num_tokens", "expected"),
    [
        ("cpu", 4, [0, 1, 3, 4, 5, 6, 7, 8]),
        ("cuda", 256, [0, 8]),
        ("cuda", 1024, [0, 4, 8]),
        ("cuda", 2048, [0, 3, 5, 7, 8]),
        ("cuda", 9000, [0, 1, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_turn_on_a_device_is_of_more_blocks_the_fewer_tokens(
    device: str, num_tokens: int, expected: list[int]
) -> None:
    traits = type("Traits", (), {"forbidden_cuts": (2,)})()
    blocks: Any = type("Blocks", (), {"device": torch.device(device), "traits": traits})()
    cuts = _turn_spans(blocks, Span(0, 8), num_tokens)
    assert [part.start for part in cuts] + [cuts[-1].end] == expected
