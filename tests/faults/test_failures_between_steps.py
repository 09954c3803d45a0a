"""Failures while nothing is under way: no server answers steps of a chain version that has failed, so none may be sent.

In process. Where that goes wrong, the client waits for as long as a step may take, and then blames somebody.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from swarm_in_process import CLIENT, Blocks, InProcessSwarm, Reference, Server

from swarmllm.client.session import chain
from swarmllm.client.session.in_flight import InFlight
from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.client.session.open_route import Hop, OpenRoute
from swarmllm.errors import PeerTimeoutError, ServerOutOfMemoryError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire import liveness
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.server.sessions.prefix_cache import PrefixCache, SharedPrefix
from swarmllm.server.sessions.step_runner import StepRunner

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


def last_server(swarm: InProcessSwarm, session: InferenceSession) -> Server:
    return swarm.server(session.route[-1].server.peer_id)


def test_a_step_behind_one_that_fails_and_that_nobody_wants(
    blocks: Blocks, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess was wrong, so its step is stale; the server drops with it what comes behind, and says so once."""
    run, arrived, failed = StepRunner.run, [], []

    async def run_out_of_memory(runner: StepRunner, step: Any) -> Any:
        if step.header.seq_len == len(guess[0]) and not failed:
            while len(arrived) < 3:  # noqa: ASYNC110 - until the next step waits behind this one
                await asyncio.sleep(0.01)
            failed.append(step)
            raise ServerOutOfMemoryError("no room", None)
        return await run(runner, step)

    def on_message(server: Any, message: Message) -> None:
        if server is swarm.servers[0] and message.type is MessageType.STEP:
            arrived.append(message)

    swarm.on_message = on_message
    monkeypatch.setattr(StepRunner, "run", run_out_of_memory)
    reference = Reference(blocks.all)
    text, guess, right = (torch.randn(1, length, blocks.all.embedding_dim) for length in (5, 3, 2))
    with swarm.session() as session:
        assert torch.allclose(session.step(text), reference.step(text), atol=1e-4)
        session.send(BlockInputs(hidden_states=guess, batch_size=1, seq_len=3), position=5)
        session.abandon()
        assert torch.allclose(session.step(right), reference.step(right), atol=1e-4)
    assert failed
    assert swarm.view.counts[PeerTimeoutError.code] == 0


def test_no_memory_for_a_step_that_is_sent_ahead(
    blocks: Blocks, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has been told, and sends something else; what was under way before it stays under way."""
    reference = Reference(blocks.all)
    text, first, lost, second = (torch.randn(1, length, blocks.all.embedding_dim) for length in (5, 2, 4, 3))

    def no_memory(inputs: BlockInputs) -> BlockInputs:
        raise MemoryError("no room for a copy")

    with swarm.session() as session:
        assert torch.allclose(session.step(text), reference.step(text), atol=1e-4)
        session.send(BlockInputs(hidden_states=first, batch_size=1, seq_len=2), position=5)
        with monkeypatch.context() as patches:
            patches.setattr(chain, "owned", no_memory)
            with pytest.raises(MemoryError):
                session.send(BlockInputs(hidden_states=lost, batch_size=1, seq_len=4), position=7)
        session.send(BlockInputs(hidden_states=second, batch_size=1, seq_len=3), position=7)
        for given in (first, second):
            assert torch.allclose(session.receive(), reference.step(given), atol=1e-4)
        assert session.position == 10
    assert swarm.view.counts[PeerTimeoutError.code] == 0


def test_a_server_that_dies_while_others_are_linked(
    blocks: Blocks, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, on_answer, told = Hop.link, InFlight.on_answer, asyncio.Event()

    def noted(in_flight: InFlight, connection: Any, answer: Any, request: int | None) -> None:
        on_answer(in_flight, connection, answer, request)
        if isinstance(answer, SwarmError):
            told.set()

    async def link_slowly(hop: Hop, successor: Hop | None, epoch: int) -> int:
        position = await link(hop, successor, epoch)
        if hop.span.start == 0 and not told.is_set():
            last_server(swarm, session).die()
            await told.wait()  # its predecessor or its own stream has told
        return position

    monkeypatch.setattr(Hop, "link", link_slowly)
    monkeypatch.setattr(InFlight, "on_answer", noted)
    with swarm.session(max_length=64) as session:
        assert_steps(blocks, swarm, session, 5, 1)


def test_a_server_that_is_lost_while_its_predecessor_dials_it(
    blocks: Blocks, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predecessor answers pings, and would wait for as long as a dial may take."""
    connect, never = swarm.connect, asyncio.Event()

    async def connect_first(caller: str, called: str) -> Any:
        if caller != CLIENT and not swarm.view.counts and called == last_server(swarm, session).peer_id:
            last_server(swarm, session).die()
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
        last_server(swarm, session).die()
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
    """A transport of which nothing arrives from some time on."""

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self.loses = False
        self._wrapped = transport

    def write(self, data: bytes) -> None:
        if not self.loses:
            self._wrapped.write(data)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class LossyStream(FrameStream):
    """A stream over one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.lossy = Lossy(transport)
        super().connection_made(self.lossy)  # type: ignore[arg-type]


def test_a_link_that_carries_nothing_one_way_is_left(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the client hears both servers, and the one that passes on hears the other."""
    start_keepalive = FrameStream.start_keepalive
    monkeypatch.setattr(FrameStream, "start_keepalive", lambda stream: start_keepalive(stream, interval_s=1000))
    monkeypatch.setattr(liveness, "ATTENDED_INTERVAL_S", 0.02)
    monkeypatch.setattr(liveness, "LEAST_SILENCE_S", 0.2)
    end = blocks.num_blocks
    with InProcessSwarm(blocks, [(0, 3), (3, end)], step_timeout_s=STEP_TIMEOUT_S) as swarm:
        new_ends, links = swarm.new_ends, []

        def lossy_between_servers(server: Server, caller: str) -> tuple[FrameStream, FrameStream]:
            served, stream = new_ends(server, caller)
            if caller != CLIENT:
                links.append(stream := LossyStream(server.peer_id))
            return served, stream

        monkeypatch.setattr(swarm, "new_ends", lossy_between_servers)

        async def lose() -> None:
            (link,) = links
            while link.liveness.round_trip_s is None:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
            link.lossy.loses = True

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
