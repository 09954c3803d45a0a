"""Servers that claim what isn't true of a model's blocks: nobody follows them, and they are sent nothing but greetings.

In process: real handlers and client code. `test_what_is_sent` has real servers.
"""

import logging
from collections import defaultdict
from typing import Any

import pytest
import torch
from swarm_in_process import Blocks, InProcessSwarm, Reference, Server

from swarmllm.client.view import routes
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import (
    ConfigurationError,
    LocalProtocolError,
    MissingBlocksError,
    SessionClosedError,
    SessionLengthExceededError,
    WeightsMismatchError,
)
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.protocol import Message, MessageType
from swarmllm.swarm import retry

FAST = {"decode_ms_per_block": 0.01}
LIES: dict[str, dict[str, Any]] = {
    "ids": {"extra_inputs": ("input_ids",)},
    "embeddings": {"extra_inputs": ("inputs_embeds",)},
    "batch_axis": {"batch_axis": 1},
    "block_output": {"block_output": 3},
    "source": {"takes_source": True},
}


class Greetings:
    """False claims of some servers about their blocks, and a record of all that servers were sent."""

    def __init__(self, swarm: InProcessSwarm, lies: dict[int, dict[str, Any]]) -> None:
        self._lies = {swarm.servers[number].peer_id: lie for number, lie in lies.items()}
        self.taken: dict[str, set[MessageType]] = defaultdict(set)
        swarm.on_send, swarm.on_message = self._on_send, self._on_message

    def _on_send(self, server: Server, kind: MessageType, header: dict[str, Any], chunks: Any) -> Any:
        if kind is MessageType.WELCOME and server.peer_id in self._lies:
            info = header["info"]
            header["info"] = {**info, "traits": {**info["traits"], **self._lies[server.peer_id]}}
        return kind, header, chunks

    def _on_message(self, server: Server, message: Message) -> None:
        self.taken[server.peer_id].add(message.type)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "RETRY_LOOKUP_S", 0.01)
    monkeypatch.setattr(retry, "LOOK_AGAIN_S", 0.01)


async def new_traits(swarm: InProcessSwarm, own: bool = True) -> BlockTraits:
    """As a new client finds them."""
    swarm.view = await swarm.new_view()
    if not own:
        swarm.view.own_traits = None
    swarm.traits = await swarm.view.traits()
    return swarm.traits


def check_session(swarm: InProcessSwarm) -> None:
    reference = Reference(swarm.blocks.all)
    with swarm.session(max_length=64) as session:
        for length in (5, 1, 1):
            given = torch.randn(1, length, swarm.blocks.all.embedding_dim)
            torch.testing.assert_close(session.step(given), reference.step(given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_the_blocks_is_its_teller_s_fault(
    blocks: Blocks, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At opening: the liar is by far the fastest."""
    with InProcessSwarm(blocks, [(0, 6), (0, 3), (3, 6)], announced=[FAST, {}, {}]) as swarm:
        honest, liar = swarm.traits, swarm.servers[0].peer_id
        greetings = Greetings(swarm, {0: LIES[lie]})
        with caplog.at_level(logging.WARNING):
            assert blocks.loop.run_coroutine(new_traits(swarm)) == honest
            check_session(swarm)
            check_session(swarm)
        assert liar in swarm.view.blamed
        assert greetings.taken[liar] == {MessageType.HELLO}
        told = [record.message for record in caplog.records if liar in record.message]
        assert len(told) == 1
        assert "which is not so for this model" in told[0]
        assert told[0].endswith("it is left out")


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_that_joins_later(blocks: Blocks, lie: str) -> None:
    with InProcessSwarm(blocks, [(0, 3), (3, 6), (3, 6)], announced=[{}, {}, FAST], min_gain_to_move=1) as swarm:
        greetings, liar = Greetings(swarm, {2: LIES[lie]}), swarm.servers[2].peer_id
        swarm.first_route([swarm.hop(0, 0, 3), swarm.hop(2, 3, 6)])
        check_session(swarm)
        assert swarm.view.blamed == {liar}
        assert greetings.taken[liar] == {MessageType.HELLO}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("lie", LIES)
def test_where_only_liars_serve_it_says_so(blocks: Blocks, lie: str) -> None:
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], route_timeout_s=0.1) as swarm:
        greetings = Greetings(swarm, {1: LIES[lie]})
        with pytest.raises(MissingBlocksError, match=r"nobody serves blocks \[?3.* which is not so for this model"):
            blocks.loop.run_coroutine(new_traits(swarm))
        assert greetings.taken[swarm.servers[1].peer_id] == {MessageType.HELLO}


@pytest.mark.parametrize("lack", ["chunked_prefill", "rollback"])
def test_servers_that_can_do_less_are_followed_only_where_nobody_else_is(blocks: Blocks, lack: str) -> None:
    with InProcessSwarm(blocks, [(0, 3), (0, 3), (3, 6)], announced=[FAST, {}, {}]) as swarm:
        honest, weak = swarm.traits, swarm.servers[0]
        greetings = Greetings(swarm, {0: {lack: False}})
        assert blocks.loop.run_coroutine(new_traits(swarm)) == honest
        check_session(swarm)
        assert greetings.taken[weak.peer_id] == {MessageType.HELLO}
        swarm.kill(swarm.servers[1])
        swarm.servers[1].listed = False
        assert blocks.loop.run_coroutine(new_traits(swarm)) == honest.model_copy(update={lack: False})
        check_session(swarm)
        assert MessageType.STEP in greetings.taken[weak.peer_id]


@pytest.mark.parametrize("lie", ["padding", "cuts"])
def test_claims_that_only_concern_the_server_itself(blocks: Blocks, lie: str) -> None:
    """Padding is the client's affair; and a server that allows fewer cuts is used where it fits."""
    lies: dict[str, dict[str, Any]] = {"padding": {"skips_padding": ()}, "cuts": {"forbidden_cuts": (1, 2)}}
    with InProcessSwarm(blocks, [(0, 3), (3, 6)]) as swarm:
        honest = swarm.traits
        Greetings(swarm, {0: lies[lie]})
        assert blocks.loop.run_coroutine(new_traits(swarm)) == honest
        check_session(swarm)
        assert swarm.view.blamed == set()


def test_a_model_that_cannot_be_tried_here_needs_servers_that_the_user_trusts(blocks: Blocks) -> None:
    with InProcessSwarm(blocks, [(0, 3), (3, 6)]) as swarm:
        with pytest.raises(ConfigurationError, match="name the servers that you trust in allowed_servers"):
            blocks.loop.run_coroutine(new_traits(swarm, own=False))
        trusted = tuple(server.peer_id for server in swarm.servers)
    with InProcessSwarm(blocks, [(0, 3), (3, 6)], allowed_servers=trusted) as swarm:
        honest = swarm.traits
        assert blocks.loop.run_coroutine(new_traits(swarm, own=False)) == honest
        check_session(swarm)


def run_batch(swarm: InProcessSwarm, length: int) -> None:
    given = torch.randn(2, length, swarm.blocks.all.embedding_dim)
    inputs = BlockInputs(hidden_states=given, batch_size=2, seq_len=length)
    output, computed = swarm.batches.forward(inputs, swarm.blocks.all.span, keep=True)
    torch.testing.assert_close(output, swarm.blocks.all.forward(inputs), rtol=1e-4, atol=1e-4)
    assert swarm.batches.backward(computed, torch.ones_like(output))["hidden_states"].shape == given.shape


@pytest.mark.parametrize("layout", [[(0, 6), (0, 3), (3, 6)], [(0, 3), (0, 3), (3, 6)]])
def test_a_server_that_claims_to_take_little_at_once_stops_no_batch(
    blocks: Blocks, layout: list[tuple[int, int]]
) -> None:
    """It is by far the fastest, and a row is longer than it takes: only where it is alone, that is an error."""
    little = FAST | {"max_batch_tokens": 1, "throughput": 1e6}
    with InProcessSwarm(blocks, layout, announced=[little, {}, {}]) as swarm:
        taken = Greetings(swarm, {}).taken
        assert swarm.view.max_batch_tokens == swarm.servers[1].info.max_batch_tokens
        run_batch(swarm, 9)
        assert MessageType.FORWARD not in taken[swarm.servers[0].peer_id]
        swarm.servers[1].listed = swarm.servers[2].listed = False
        blocks.loop.run_coroutine(swarm.view.look_ups.refresh())
        if layout[0] == (0, 6):
            with pytest.raises(ConfigurationError, match="one sample of 9 tokens is above the servers' limit of 1"):
                run_batch(swarm, 9)


REFUSALS = {
    "configuration": ConfigurationError,
    "length_exceeded": SessionLengthExceededError,
    "weights_mismatch": WeightsMismatchError,
    "session_closed": SessionClosedError,
    "remote_protocol": LocalProtocolError,
}
"""Codes of errors that say nobody could do what was asked, and what a client makes of them."""


def refuse(swarm: InProcessSwarm, servers: set[int], code: str) -> None:
    """From now on these servers answer every request so."""
    liars = {swarm.servers[number].peer_id for number in servers}

    def say_no(server: Server, kind: MessageType, header: dict[str, Any], chunks: Any) -> Any:
        if kind is not MessageType.RESULT or server.peer_id not in liars:
            return kind, header, chunks
        return MessageType.ERROR, {"code": code, "message": "nobody can do that", "id": header["id"]}, ()

    swarm.on_send = say_no


@pytest.mark.parametrize("code", REFUSALS)
def test_a_server_that_refuses_everything_ends_nothing(blocks: Blocks, code: str) -> None:
    """Its error says that it is the client's mistake, whoever is asked."""
    with InProcessSwarm(blocks, [(0, 6), (0, 3), (3, 6)], announced=[FAST, {}, {}]) as swarm:
        refuse(swarm, {0}, code)
        check_session(swarm)
        assert swarm.view.blamed == {swarm.servers[0].peer_id}
        reference = Reference(blocks.all)
        swarm.on_send = lambda _, *message: message
        swarm.view.health.succeeded(swarm.servers[0].peer_id)
        with swarm.session(max_length=64) as session:
            for step in range(4):
                given = torch.randn(1, 1, blocks.all.embedding_dim)
                torch.testing.assert_close(session.step(given), reference.step(given), rtol=1e-4, atol=1e-4)
                if step == 1:  # in the middle of a text
                    refuse(swarm, {0}, code)
    with InProcessSwarm(blocks, [(0, 6), (0, 6)], announced=[FAST | {"throughput": 1e4}, {}]) as swarm:
        refuse(swarm, {0}, code)
        run_batch(swarm, 9)


@pytest.mark.parametrize("code", REFUSALS)
def test_what_all_servers_refuse_is_the_client_s_mistake(blocks: Blocks, code: str) -> None:
    with InProcessSwarm(blocks, [(0, 6), (0, 6)]) as swarm:
        refuse(swarm, {0, 1}, code)
        with pytest.raises(REFUSALS[code], match="nobody can do that"):
            check_session(swarm)
        assert swarm.view.blamed == set()
        with pytest.raises(REFUSALS[code], match="nobody can do that"):
            run_batch(swarm, 9)
