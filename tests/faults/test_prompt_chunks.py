"""A prompt's way over several servers: in how many steps it arrives, and that its outputs are right. In process."""

from itertools import pairwise

import pytest
import torch
from swarm_in_process import Blocks, InProcessSwarm, Reference

from swarmllm.network.wire.protocol import Message, MessageType


@pytest.mark.parametrize(
    ("bounds", "length", "expected"),
    [
        ([0, 2, 6], 127, [127]),
        ([0, 2, 6], 128, [64, 64]),
        ([0, 2, 6], 200, [67, 67, 66]),
        ([0, 2, 4, 6], 400, [67, 67, 67, 67, 67, 65]),
        ([0, 6], 128, [128]),
    ],
)
def test_all_servers_of_a_prompt_have_something_to_do(
    blocks: Blocks, bounds: list[int], length: int, expected: list[int]
) -> None:
    seen: dict[str, list[int]] = {}

    def note(server: object, message: Message) -> None:
        if message.type is MessageType.STEP:
            seen.setdefault(str(id(server)), []).append(message.header["seq_len"])

    layout = list(pairwise(bounds))
    with InProcessSwarm(blocks, layout) as swarm, swarm.session(max_length=500) as session:
        swarm.on_message = note
        reference = Reference(blocks.all)
        for given in (torch.randn(1, length, blocks.all.embedding_dim), torch.randn(1, 1, blocks.all.embedding_dim)):
            assert torch.allclose(session.step(given), reference.step(given), atol=1e-4)
    assert list(seen.values()) == [[*expected, 1]] * len(layout)
