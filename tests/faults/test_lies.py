"""Lies that spot checks find, and which server they are sure about. In process; `test_spot_checks` has real servers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from swarm_in_process import Blocks, InProcessSwarm, Reference, Server
from torch import Tensor

from swarmllm.client.view import routes
from swarmllm.client.view.servers import BY_DTYPE, BY_QUANT_TYPE, honest_error, is_checkable
from swarmllm.config import ClientConfig
from swarmllm.data_structures import ServerInfo
from swarmllm.errors import ConfigurationError, MissingBlocksError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.protocol import Message, MessageType
from swarmllm.network.wire.tensor_codec import decode_tensors, encode_tensors
from swarmllm.swarm import retry

Lie = Callable[[Tensor], Tensor]
FASTEST, FAST, SLOW = ({"decode_ms_per_block": ms} for ms in (0.1, 1.0, 2.0))
"""The fastest of several servers of the same blocks is used; the others are asked for comparison."""
CHECKED = {"verify_fraction": 1.0, "min_gain_to_move": 1, "max_parallel_routes": 1}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "RETRY_LOOKUP_S", 0.01)
    monkeypatch.setattr(retry, "LOOK_AGAIN_S", 0.01)


class Liar:
    """Changes the hidden states that one server answers to requests of one kind."""

    def __init__(self, swarm: InProcessSwarm, server: int, lie: Lie, *kinds: MessageType) -> None:
        self._server, self._lie, self._kinds = swarm.servers[server], lie, kinds
        self._kind_of: dict[int, MessageType] = {}
        swarm.on_message, swarm.on_send = self._on_message, self._on_send

    def _on_message(self, _: Server, message: Message) -> None:
        if isinstance(message.header.get("id"), int):
            self._kind_of[message.header["id"]] = message.type

    def _on_send(self, server: Server, kind: MessageType, header: dict[str, Any], chunks: Any) -> Any:
        if server is self._server and header.get("tensors") and self._kind_of[header["id"]] in self._kinds:
            given = decode_tensors(header["tensors"], b"".join(map(bytes, chunks)), max_bytes=1 << 28)
            header["tensors"], chunks = encode_tensors({"hidden_states": self._lie(given["hidden_states"].clone())})
        return kind, header, chunks


BOTH = MessageType.STEP, MessageType.FORWARD


def at_one_position(hidden_states: Tensor) -> Tensor:
    """A third of what is there at one of many positions: 3 % of all."""
    hidden_states[:, -1] *= 4 / 3
    return hidden_states


def batch(swarm: InProcessSwarm) -> None:
    given = torch.randn(1, 80, swarm.blocks.all.embedding_dim)
    inputs = BlockInputs(hidden_states=given, batch_size=1, seq_len=80)
    torch.testing.assert_close(swarm.batches(inputs, swarm.blocks.all.span), swarm.blocks.all.forward(inputs))


def session(swarm: InProcessSwarm) -> None:
    reference = Reference(swarm.blocks.all)
    with swarm.session(max_length=256) as session:
        for length in (80, 1, 1):
            given = torch.randn(1, length, swarm.blocks.all.embedding_dim)
            torch.testing.assert_close(session.step(given), reference.step(given))


WORK = pytest.mark.parametrize("work", [batch, session])


@WORK
def test_plausible_lie_per_position(blocks: Blocks, work: Callable[[InProcessSwarm], None]) -> None:
    announced = [FASTEST | {"quant_type": "int8"}, FAST, SLOW]
    with InProcessSwarm(blocks, [(0, 6)] * 3, announced=announced, **CHECKED) as swarm:
        Liar(swarm, 0, at_one_position, *BOTH)
        work(swarm)
        assert swarm.view.health.quarantined == {swarm.servers[0].peer_id}
        assert swarm.view.health.avoided(now=0.0) == swarm.view.health.quarantined


@WORK
def test_no_announcement_makes_a_lie_pass(blocks: Blocks, work: Callable[[InProcessSwarm], None]) -> None:
    """Servers that announce the coarsest or unknown weights aren't used where checks are asked for."""
    for coarse in ({"quant_type": "nf4"}, {"quant_type": "int1"}, {"quant_type": "none", "dtype": "float4"}):
        announced = [FASTEST, FAST, SLOW]
        with InProcessSwarm(blocks, [(0, 6)] * 3, announced=announced, **CHECKED) as swarm:
            liar = swarm.servers[0]
            liar.info = liar.info.model_copy(update=coarse)
            blocks.loop.run_coroutine(swarm.view.look_ups.refresh())
            Liar(swarm, 0, lambda hidden: hidden * 1.4, *BOTH)
            work(swarm)
            assert liar.peer_id not in {server.peer_id for server in swarm.view.servers()}
            assert swarm.view.health.avoided(now=0.0) == set()


@WORK
def test_a_checker_that_lies_costs_nobody_else_the_trust(
    blocks: Blocks, work: Callable[[InProcessSwarm], None]
) -> None:
    with InProcessSwarm(blocks, [(0, 6)] * 3, announced=[FAST, FASTEST, SLOW], **CHECKED) as swarm:
        Liar(swarm, 0, lambda hidden: hidden * 1.4, *BOTH)
        work(swarm)
        assert swarm.view.health.quarantined == {swarm.servers[0].peer_id}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("liar", [0, 1])
@WORK
def test_none_of_two_different_answers_is_believed(
    blocks: Blocks, work: Callable[[InProcessSwarm], None], liar: int
) -> None:
    """Whichever of them lies: nothing wrong comes out, and nobody is quarantined for good."""
    config = CHECKED | {"route_timeout_s": 0.3, "max_retries": 3}
    with InProcessSwarm(blocks, [(0, 6)] * 2, announced=[FASTEST, FAST], **config) as swarm:
        Liar(swarm, liar, lambda hidden: hidden * 1.4, *BOTH)
        with pytest.raises(SwarmError) as caught:
            work(swarm)
        assert isinstance(caught.value, MissingBlocksError)
        assert "two servers differ" in str(caught.value)
        assert swarm.view.health.quarantined == set()
        assert swarm.view.counts["spot_checks_undecided"]


def test_a_lie_in_the_session_only_is_proven_to_nobody(blocks: Blocks) -> None:
    """The servers of its route are avoided for a while, since each of them may have been lied to."""
    layout = [(0, 3), (3, 6)] * 3
    announced = [FASTEST] * 2 + [FAST] * 4
    with InProcessSwarm(blocks, layout, announced=announced, **CHECKED) as swarm:
        Liar(swarm, 1, lambda hidden: hidden * 1.4, MessageType.STEP)
        session(swarm)
        route = {server.peer_id for server in swarm.servers[:2]}
        assert swarm.view.health.quarantined == set()
        assert swarm.view.health.avoided(now=0.0) == route


@pytest.mark.parametrize("quant_type", [*BY_QUANT_TYPE, "from the future"])
@pytest.mark.parametrize("dtype", [*BY_DTYPE, "from the future"])
@pytest.mark.parametrize("tolerance", [0.001, 0.1, 0.15, 0.5])
def test_which_servers_can_be_checked(quant_type: str, dtype: str, tolerance: float) -> None:
    server = ServerInfo(peer_id="p" * 46, start=0, end=1, quant_type=quant_type, dtype=dtype)
    needed = max(BY_QUANT_TYPE.get(quant_type, math.inf), BY_DTYPE.get(dtype, math.inf))
    assert honest_error(server) == needed
    assert is_checkable(server, ClientConfig(verify_tolerance=tolerance)) is (needed <= tolerance)


@pytest.mark.parametrize(("activations", "needed"), [("none", 0.1), ("int8", 0.15), ("from the future", math.inf)])
def test_servers_that_round_activations_differ_more(activations: str, needed: float) -> None:
    assert (
        honest_error(ServerInfo(peer_id="p" * 46, start=0, end=1, dtype="bfloat16", activations=activations)) == needed
    )


@pytest.mark.parametrize("tolerance", [0.0, -1.0, 1.0, math.nan])
def test_tolerances_that_make_no_sense(tolerance: float) -> None:
    with pytest.raises(ConfigurationError, match="verify_tolerance"):
        ClientConfig(verify_tolerance=tolerance)
