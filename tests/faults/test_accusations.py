"""Accusations of one server by another: nobody is avoided for them, and repeated ones are the accuser's own fault.

In process, with the real client.
"""

import asyncio
from typing import Any

import pytest
import torch
from swarm_in_process import CLIENT, Blocks, InProcessSwarm, Reference, Server

from swarmllm.client.session.open_route import OpenRoute
from swarmllm.client.view.connection import Connection
from swarmllm.errors import (
    CacheFullError,
    CorruptActivationsError,
    PeerTimeoutError,
    PeerUnreachableError,
    RemoteProtocolError,
    ServerOverloadedError,
    SessionLostError,
    error_from_code,
)
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.protocol import Message, MessageType, send_error

TWICE = [(0, 2), (2, 4), (4, 6)] * 2
FIRST = [(0, 0, 2), (1, 2, 4), (2, 4, 6)]
"""The first route: by server, the blocks."""
SLOWER: list[dict[str, Any]] = [{}] * 3 + [{"decode_ms_per_block": 100.0, "throughput": 1.0}] * 3
"""So the first three are chosen as long as they may be."""
CODES = [
    error.code
    for error in (
        CacheFullError,
        CorruptActivationsError,
        PeerTimeoutError,
        PeerUnreachableError,
        RemoteProtocolError,
        ServerOverloadedError,
        SessionLostError,
    )
]


class Accuser:
    """Says to the client of every session, at every step, that the victim has failed."""

    def __init__(self, swarm: InProcessSwarm, accuser: int, victim: int, code: str, *, names_step: bool) -> None:
        self._swarm, self._accuser, self._names_step = swarm, swarm.servers[accuser], names_step
        self._error = error_from_code(code, "it has failed", swarm.servers[victim].peer_id)

    def __call__(self, server: Server, message: Message) -> None:
        if message.type is MessageType.STEP and server is self._accuser:
            for session in server.sessions:
                request = {"id": message.header["id"]} if self._names_step else {}
                saying = send_error(
                    session.owner, self._error, session=session.id, peer_id=self._error.peer_id, **request
                )
                self._swarm.create_task(saying)


def assert_steps_go_on(blocks: Blocks, swarm: InProcessSwarm) -> None:
    reference = Reference(blocks.all)
    with swarm.session(max_length=64) as session:
        for length in (5, 1, 1):
            given = torch.randn(1, length, blocks.all.embedding_dim)
            torch.testing.assert_close(session.step(given), reference.step(given))


@pytest.mark.parametrize("breaks", ["before it is asked", "while it is asked"])
def test_an_accused_server_that_is_gone_is_blamed(blocks: Blocks, monkeypatch: pytest.MonkeyPatch, breaks: str) -> None:
    """Its neighbour was faster to say so than this client's own stream to break. One repair is enough."""
    look_after, ping = OpenRoute.look_after_accused, Connection.ping
    with InProcessSwarm(blocks, TWICE, announced=SLOWER, min_gain_to_move=1, compression="none") as swarm:
        swarm.first_route([swarm.hop(*hop) for hop in FIRST])
        victim = swarm.servers[1]

        async def look_late(route: OpenRoute, timeout_s: float) -> None:
            for hop in route[:]:
                if breaks == "before it is asked" and hop.peer_id == victim.peer_id:
                    victim.die()
                    while hop.connection.error is None:  # noqa: ASYNC110 - no event tells
                        await asyncio.sleep(0)
            await look_after(route, timeout_s)

        async def hang_up(connection: Connection) -> float:
            if connection.peer_id == victim.peer_id:
                (served,) = (stream for stream in victim.streams if stream.peer_id == CLIENT)
                served.abort()
            return await ping(connection)

        monkeypatch.setattr(OpenRoute, "look_after_accused", look_late)
        monkeypatch.setattr(Connection, "ping", hang_up)
        accuse = Accuser(swarm, 0, 1, PeerUnreachableError.code, names_step=True)
        reference = Reference(blocks.all)
        with swarm.session(max_length=64) as session:
            for length in (5, 1):
                given = torch.randn(1, length, blocks.all.embedding_dim)
                torch.testing.assert_close(session.step(given), reference.step(given))
                swarm.on_message = lambda *message: session.num_repairs or accuse(*message)
            assert session.num_repairs == 1
        assert swarm.view.blamed == {victim.peer_id}


@pytest.mark.rotates(3)
@pytest.mark.parametrize("names_step", [True, False])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("accuser", "victim"), [(1, 0), (1, 2), (0, 2), (1, 5)], ids=["predecessor", "successor", "farther", "stranger"]
)
def test_false_blame_in_a_session(blocks: Blocks, accuser: int, victim: int, code: str, names_step: bool) -> None:
    with InProcessSwarm(blocks, TWICE, announced=SLOWER, min_gain_to_move=1, compression="none") as swarm:
        swarm.first_route([swarm.hop(*hop) for hop in FIRST])
        swarm.on_message = Accuser(swarm, accuser, victim, code, names_step=names_step)
        assert_steps_go_on(blocks, swarm)
        liar = {swarm.servers[accuser].peer_id}
        is_heard = names_step or abs(accuser - victim) == 1
        assert swarm.view.health.avoided(now=0.0) == swarm.view.health.blamed(now=0.0) == (liar if is_heard else set())


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("accuser", [0, 1, 2])
@pytest.mark.parametrize("code", CODES)
def test_false_blame_in_a_batch(blocks: Blocks, code: str, accuser: int, push: bool) -> None:
    with InProcessSwarm(blocks, TWICE, announced=SLOWER, push=push, max_parallel_routes=1) as swarm:
        swarm.first_route([swarm.hop(*hop) for hop in FIRST])
        victim = swarm.servers[(accuser + 2) % 3 if accuser else 5].peer_id  # its source, where it has one

        def accuse(server: Server, kind: MessageType, header: dict[str, Any], chunks: Any) -> Any:
            if kind is not MessageType.RESULT or server is not swarm.servers[accuser]:
                return kind, header, chunks
            return MessageType.ERROR, {"code": code, "message": "no", "id": header["id"], "peer_id": victim}, ()

        swarm.on_send = accuse
        given = torch.randn(1, 80, blocks.all.embedding_dim)
        inputs = BlockInputs(hidden_states=given, batch_size=1, seq_len=80)
        output = swarm.batches(inputs, blocks.all.span)
        torch.testing.assert_close(output, blocks.all.forward(inputs))
        assert swarm.view.health.avoided(now=0.0) == {swarm.servers[accuser].peer_id}


@pytest.mark.parametrize(("victim", "is_fault"), [(1, False), (5, True)], ids=["successor", "stranger"])
def test_false_blame_while_linking(blocks: Blocks, victim: int, is_fault: bool) -> None:
    with InProcessSwarm(blocks, TWICE, announced=SLOWER, min_gain_to_move=1) as swarm:
        swarm.first_route([swarm.hop(*hop) for hop in FIRST])
        links: set[int] = set()

        def note(server: Server, message: Message) -> None:
            if message.type is MessageType.LINK:
                links.add(message.header["id"])

        def accuse(server: Server, kind: MessageType, header: dict[str, Any], chunks: Any) -> Any:
            if server is not swarm.servers[0] or header.get("id") not in links:
                return kind, header, chunks
            named = {"id": header["id"], "peer_id": swarm.servers[victim].peer_id}
            return MessageType.ERROR, {"code": PeerUnreachableError.code, "message": "no", **named}, ()

        swarm.on_message, swarm.on_send = note, accuse
        assert_steps_go_on(blocks, swarm)
        assert swarm.view.health.avoided(now=0.0) == ({swarm.servers[0].peer_id} if is_fault else set())


def test_what_a_server_passes_on_wrongly_is_no_mistake_of_the_client(blocks: Blocks) -> None:
    """Its successor understands nothing of it; that ends no text, and makes only the one at fault avoided."""
    with InProcessSwarm(blocks, TWICE, announced=SLOWER, min_gain_to_move=1) as swarm:
        swarm.first_route([swarm.hop(*hop) for hop in FIRST])

        def say(server: Server, message: Message) -> None:
            if message.type is MessageType.STEP and server is swarm.servers[1] and message.header["timings"]:
                for session in server.sessions:
                    error = RemoteProtocolError("the session has 1 rows, the step 2")
                    swarm.create_task(send_error(session.owner, error, session=session.id, id=message.header["id"]))

        swarm.on_message = say
        assert_steps_go_on(blocks, swarm)
        assert swarm.view.health.avoided(now=0.0) == set()


def test_a_server_that_never_links_its_two_parts_is_left(blocks: Blocks) -> None:
    """Its own silence isn't taken for that of the next server, which is itself."""
    with InProcessSwarm(blocks, [(0, 6), (0, 6)], connect_timeout_s=0.2, min_gain_to_move=1) as swarm:
        swarm.first_route([swarm.hop(0, 0, 3), swarm.hop(0, 3, 6)])
        links: set[int] = set()

        def note(server: Server, message: Message) -> None:
            if message.type is MessageType.LINK and server is swarm.servers[0]:
                links.add(message.header["id"])

        def withhold(server: Server, kind: MessageType, header: dict[str, Any], chunks: Any) -> Any:
            return kind, header | {"id": 1 << 60} if header.get("id") in links else header, chunks

        swarm.on_message, swarm.on_send = note, withhold
        assert_steps_go_on(blocks, swarm)
        assert swarm.view.blamed == {swarm.servers[0].peer_id}
