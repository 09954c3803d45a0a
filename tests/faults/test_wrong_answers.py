"""Nonsense in a server's answers to a session, and the order of its inputs: only its own session notices.

In process, with the real client; `test_fuzzed_conversations` is the other direction.
"""

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from swarm_in_process import Blocks, InProcessSwarm, Reference, Server
from torch import Tensor

from swarmllm.network.wire import compression
from swarmllm.network.wire.protocol import MessageType

HIDDEN = 64
CHUNK_TOKENS = 4
TWICE = [(0, 2), (2, 4), (4, 6)] * 2
PHASES = set(Phase) - {Phase.shrink}


def hidden_states(batch_size: int, seq_len: int) -> Tensor:
    return torch.randn(batch_size, seq_len, HIDDEN, generator=torch.Generator().manual_seed(seq_len))


class Liar:
    """Says another position in all results of one server."""

    def __init__(self, server: int) -> None:
        self._server = server
        self.begins = False

    def __call__(self, server: Server, kind: MessageType, header: dict[str, Any], chunks: Any) -> Any:
        if self.begins and kind is MessageType.RESULT and server.peer_id[:7] == f"server{self._server}":
            header = header | {"position": 3}
        return kind, header, chunks


@pytest.mark.parametrize("in_replay", [False, True])
@pytest.mark.parametrize("server", [0, 1, 2])
def test_a_wrong_position(blocks: Blocks, server: int, in_replay: bool) -> None:
    """`test_client_model` has any nonsense, and checks that each session's steps are right."""
    with InProcessSwarm(
        blocks, TWICE, push=False, min_gain_to_move=1, step_timeout_s=5, prefill_chunk_tokens=CHUNK_TOKENS
    ) as swarm:
        swarm.on_send = liar = Liar(server)
        honest = [swarm.hop(number, *TWICE[number]) for number in (3, 4, 5)]
        theirs = [swarm.hop(number, *TWICE[number]) for number in (0, 1, 2)]
        with swarm.session(max_length=64) as session, swarm.session(max_length=64) as other:
            expected, others = Reference(blocks.all), Reference(blocks.all)
            swarm.first_route(honest)
            torch.testing.assert_close(other.step(hidden_states(1, 3)), others.step(hidden_states(1, 3)))
            swarm.first_route(theirs)
            torch.testing.assert_close(session.step(hidden_states(1, 7)), expected.step(hidden_states(1, 7)))
            if in_replay:
                swarm.kill(swarm.servers[(server + 1) % 3])
            liar.begins = True
            for length in (1, 9):
                torch.testing.assert_close(
                    session.step(hidden_states(1, length)), expected.step(hidden_states(1, length))
                )
                torch.testing.assert_close(other.step(hidden_states(1, length)), others.step(hidden_states(1, length)))
            assert other.num_repairs == 0


# ---------------------------------------------------------------------- the order of what is relayed


def assert_in_order(
    blocks: Blocks, length: int, batch_size: int, chunk_tokens: int, setting: str, thread_bytes: int, victim: int
) -> None:
    """From `thread_bytes` on a chunk is packed in a thread, which takes longer than the smaller one behind it."""
    tolerance = 0.1 if setting == "int8" else 1e-4
    reference = Reference(blocks.all)
    with (
        pytest.MonkeyPatch.context() as patch,
        InProcessSwarm(
            blocks, TWICE, push=False, compression=setting, prefill_chunk_tokens=chunk_tokens, min_gain_to_move=1
        ) as swarm,
        swarm.session(max_length=400, batch_size=batch_size) as session,
    ):
        patch.setattr(compression, "THREAD_BYTES", thread_bytes)
        for is_repaired, seq_len in enumerate((length, 1)):
            if is_repaired:
                swarm.kill(swarm.server(session.route[victim].server.peer_id))
            given = hidden_states(batch_size, seq_len)
            torch.testing.assert_close(session.step(given), reference.step(given), rtol=tolerance, atol=tolerance)
        assert set(swarm.view.counts) <= {"unreachable", "repairs"}


def test_a_replay_of_300_tokens_is_relayed_in_order(blocks: Blocks) -> None:
    assert_in_order(blocks, 300, 1, 256, "int8", 64 << 10, 1)


@pytest.mark.slow
@settings(max_examples=30, phases=PHASES)
@given(
    st.integers(1, 330),
    st.integers(1, 3),
    st.sampled_from([64, 256, 1024]),
    st.sampled_from(["none", "int8"]),
    st.sampled_from([1, 16 << 10, 64 << 10]),
    st.integers(0, 2),
)
def test_what_is_relayed_arrives_in_order(
    blocks: Blocks, length: int, batch_size: int, chunk_tokens: int, setting: str, thread_bytes: int, victim: int
) -> None:
    assert_in_order(blocks, length, batch_size, chunk_tokens, setting, thread_bytes, victim)
