"""Failures while nothing is under way: no server answers steps of a chain version that has failed, so none may be sent.

In process. Where that goes wrong, the client waits for as long as a step may take, and then blames somebody.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from swarm_in_process import CLIENT, Blocks, InProcessSwarm, Reference

from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.client.session.open_route import Hop, OpenRoute
from swarmllm.errors import PeerTimeoutError, ServerOutOfMemoryError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire import liveness
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.server.sessions.prefix_cache import PrefixCache, SharedPrefix
from swarmllm.server.sessions.session import Session

STEP_TIMEOUT_S = 60.0


@pytest.fixture
def swarm(blocks: Blocks) -> Iterator[InProcessSwarm]:
    """Its last blocks are on two servers."""
    end = blocks.num_blocks
    with InProcessSwarm(blocks, [(0, 1), (1, 2), (2, end), (2, end)], step_timeout_s=STEP_TIMEOUT_S) as swarm:
        yield swarm


def assert_steps(blocks: Blocks, swarm: InProcessSwarm, session: InferenceSession, *lengths: int) -> None:
    """They are right, and nobody was waited for in vain."""
    reference = Reference(blocks.all)
    for length in lengths:
        given = torch.randn(1, length, blocks.all.embedding_dim)
        assert torch.allclose(session.step(given), reference.step(given), atol=1e-4)
    assert swarm.view.counts[PeerTimeoutError.code] == 0


def last_server(swarm: InProcessSwarm, hops: Any) -> Any:
    return swarm.server(hops[-1].peer_id)


def test_a_step_behind_one_that_fails_and_that_nobody_wants(
    blocks: Blocks, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess was wrong, so its step is stale; the server drops with it what comes behind, and says so once."""
    run_step, arrived, failed = Session._run_step, [], []

    async def run_out_of_memory(server_session: Session, step: Any) -> None:
        if step.header.seq_len == len(guess[0]) and not failed:
            while len(arrived) < 3:  # noqa: ASYNC110 - until the next step waits behind this one
                await asyncio.sleep(0.01)
            failed.append(step)
            raise ServerOutOfMemoryError("no room", None)
        await run_step(server_session, step)

    def on_message(server: Any, message: Message) -> None:
        if server is swarm.servers[0] and message.type is MessageType.STEP:
            arrived.append(message)

    swarm.on_message = on_message
    monkeypatch.setattr(Session, "_run_step", run_out_of_memory)
    reference = Reference(blocks.all)
    text, guess, right = (torch.randn(1, length, blocks.all.embedding_dim) for length in (5, 3, 2))
    with swarm.session() as session:
        assert torch.allclose(session.step(text), reference.step(text), atol=1e-4)
        session.send(BlockInputs(hidden_states=guess, batch_size=1, seq_len=3), position=5)
        session.abandon()
        assert torch.allclose(session.step(right), reference.step(right), atol=1e-4)
    assert failed
    assert swarm.view.counts[PeerTimeoutError.code] == 0


def test_a_server_that_dies_while_others_are_linked(
    blocks: Blocks, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, died = Hop.link, asyncio.Event()

    async def link_slowly(hop: Hop, successor: Hop | None, epoch: int) -> int:
        position = await link(hop, successor, epoch)
        if hop.span.start == 0 and not died.is_set():
            died.set()
            chain = session.chains[0]
            while chain._in_flight._failure is None:
                last_server(swarm, chain._hops).die()
                await asyncio.sleep(0.01)  # until its predecessor or its own stream has told
        return position

    monkeypatch.setattr(Hop, "link", link_slowly)
    with swarm.session(max_length=64) as session:
        assert_steps(blocks, swarm, session, 5, 1)


def test_a_server_that_is_lost_while_its_predecessor_dials_it(
    blocks: Blocks, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predecessor answers pings, and would wait for as long as a dial may take."""
    connect, never = swarm.connect, asyncio.Event()

    async def connect_first(caller: str, called: str) -> Any:
        chain = session.chains[0]
        if caller != CLIENT and not swarm.view.counts and called == chain._hops[-1].peer_id:
            last_server(swarm, chain._hops).die()
            await never.wait()
        return await connect(caller, called)

    monkeypatch.setattr(swarm, "connect", connect_first)
    with swarm.session(max_length=64) as session:
        assert_steps(blocks, swarm, session, 5, 1)
        assert swarm.view.counts.total()


def test_a_server_that_dies_during_a_move_that_fails(
    blocks: Blocks, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exchange(hops: OpenRoute, *_: Any) -> bool:
        last_server(swarm, hops).die()
        while hops.usable:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        return False

    with swarm.session(max_length=64) as session:
        given = torch.randn(1, 5, blocks.all.embedding_dim)
        reference = Reference(blocks.all)
        assert torch.allclose(session.step(given), reference.step(given), atol=1e-4)
        monkeypatch.setattr(OpenRoute, "exchange", exchange)
        monkeypatch.setattr(swarm.view.routes, "better", lambda *_: session.route)
        swarm.view.look_ups.news += 1
        given = torch.randn(1, 1, blocks.all.embedding_dim)
        assert torch.allclose(session.step(given), reference.step(given), atol=1e-4)
    assert swarm.view.counts[PeerTimeoutError.code] == 0


def test_memory_that_runs_out_behind_an_answer(
    blocks: Blocks, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of a prompt are kept after its outputs were sent; that nobody can share them is all that happens."""
    for server in swarm.servers:
        server.sessions.pages = PrefixCache(1 << 30)
    keep, lacks = SharedPrefix.keep, [0]

    def keep_nothing(prefix: SharedPrefix, *args: Any) -> None:
        lacks[0] += 1
        if lacks[0] == 1:
            torch.empty(1 << 48)
        keep(prefix, *args)

    monkeypatch.setattr(SharedPrefix, "keep", keep_nothing)
    with swarm.session(max_length=256) as session:
        assert_steps(blocks, swarm, session, 100, 1, 1)
        assert session.num_repairs == 0
    assert lacks[0] >= 1


class Lossy:
    """A transport of which nothing arrives."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def test_a_link_that_carries_nothing_one_way_is_left(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the client hears both servers, and the one that passes on hears the other."""
    start_keepalive = FrameStream.start_keepalive
    monkeypatch.setattr(FrameStream, "start_keepalive", lambda stream: start_keepalive(stream, interval_s=1000))
    monkeypatch.setattr(liveness, "ATTENDED_INTERVAL_S", 0.02)
    monkeypatch.setattr(liveness, "LEAST_SILENCE_S", 0.2)
    end = blocks.num_blocks
    with InProcessSwarm(blocks, [(0, 3), (3, end)], step_timeout_s=STEP_TIMEOUT_S) as swarm:
        first, second = swarm.servers

        async def lose() -> None:
            link = first.links._links[second.peer_id].stream
            while link.liveness.round_trip_s is None:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
            link._transport = Lossy(link._transport)  # type: ignore[assignment]

        reference = Reference(blocks.all)
        with swarm.session(max_length=64) as session:
            for length in (5, 1, 1):
                given = torch.randn(1, length, blocks.all.embedding_dim)
                assert torch.allclose(session.step(given), reference.step(given), atol=1e-4)
                if length == 5:
                    blocks.loop.run_coroutine(lose())
        assert swarm.view.counts["accusations"] == 1
        assert swarm.view.counts[PeerTimeoutError.code] == 0
        assert not swarm.view.blamed
