"""Sessions that share a link to the next server, and what is left of them."""

import asyncio
import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from in_process_server import InProcessServers, in_process_servers
from tiny_models import save_tiny

from swarmllm.data_structures import Span
from swarmllm.errors import ServerOutOfMemoryError, SessionLostError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import PackedForward
from swarmllm.network.wire.frames import SMALL_BYTES
from swarmllm.network.wire.messages import Successor
from swarmllm.network.wire.protocol import MessageType
from swarmllm.server.peers.links import Link
from swarmllm.server.sessions.session import Outlet, Session

ID = "0" * 32


class TakesAll:
    """A link, and the links among which it is found."""

    def __init__(self) -> None:
        self.listeners: dict[str, Any] = {}

    async def get(self, successor: Successor) -> "TakesAll":
        return self

    async def attach(self, successor: Successor, on_lost: Any) -> None:
        self.listeners[successor.session] = on_lost

    def forget(self, session: str) -> None:
        del self.listeners[session]


async def test_it_is_freed_without_the_garbage_collector() -> None:
    outlet = Outlet(MagicMock(), 4, "none")
    given = {field.name: MagicMock() for field in dataclasses.fields(Session) if field.init}
    session = Session(**{**given, "epoch": 0, "outlet": outlet, "on_close": lambda session: None})
    link: Any = TakesAll()
    await session.link_to(link, Successor(peer_id="p" * 46, session=ID, token=ID))
    assert ID in link.listeners
    found = weakref.ref(session)
    gc.disable()
    try:
        session.close()
        del session
        assert found() is None
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[BlockSpan]:
    """The same blocks for each of two servers, which compute at the same time."""
    directory = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return [load_block_span(open_checkpoint(str(directory)), Span(0, 2), progress=False) for _ in range(2)]


@pytest.fixture(scope="module")
def blocks(spans: list[BlockSpan]) -> BlockSpan:
    return spans[0]


def inputs(blocks: BlockSpan, batch_size: int, seq_len: int) -> BlockInputs:
    hidden = torch.randn(batch_size, seq_len, blocks.embedding_dim, generator=torch.Generator().manual_seed(0))
    return BlockInputs(hidden_states=hidden, batch_size=batch_size, seq_len=seq_len)


class Client:
    """One with a session through both servers."""

    def __init__(self, swarm: InProcessServers) -> None:
        self.swarm = swarm

    async def open(self, batch_size: int) -> None:
        self.streams = [await self.swarm.dial(peer_id) for peer_id in self.swarm.servers]
        self.names = [
            await self.swarm.open_session(stream, Span(block, block + 1), batch_size=batch_size)
            for block, stream in enumerate(self.streams)
        ]
        await self.swarm.link(self.streams[0], self.names[0], self.streams[1], self.names[1])

    async def step(self, position: int, step: BlockInputs) -> torch.Tensor:
        first, second = self.streams
        return await self.swarm.step(first, self.names[0], position, step, answered_by=second, ones_mask=True)


async def test_a_client_that_leaves_in_the_midst_of_a_step_disturbs_nobody_else(
    spans: list[BlockSpan], blocks: BlockSpan
) -> None:
    expected = blocks.forward(inputs(blocks, 1, 5))
    async with in_process_servers(*spans) as swarm:
        first, _ = swarm.servers.values()
        staying, leaving = Client(swarm), Client(swarm)
        await staying.open(1)
        await leaving.open(9)
        (link,) = swarm.links
        link.pause_writing()  # until told, as when the next server doesn't read
        send, begun = link.send, asyncio.Event()

        async def noted(*message: Any, **options: Any) -> Any:
            begun.set()
            return await send(*message, **options)

        link.send = noted  # type: ignore[method-assign]
        long = asyncio.create_task(leaving.step(0, inputs(blocks, 9, 1000)))
        async with asyncio.timeout(60):
            await begun.wait()
        short = asyncio.create_task(staying.step(0, inputs(blocks, 1, 5)))
        leaving.streams[0].abort()
        async with asyncio.timeout(60):
            while len(first.table) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # its worker has heard of it, too
        link.resume_writing()
        torch.testing.assert_close(await short, expected)
        long.cancel()
        assert swarm.links == [link]


async def test_a_successor_that_sends_much_loses_its_link(spans: list[BlockSpan], blocks: BlockSpan) -> None:
    async with in_process_servers(*spans) as swarm:
        client = Client(swarm)
        await client.open(1)
        (link,) = swarm.links
        served = swarm.other_end(link)
        await served.send(MessageType.RESULT, {"id": 1}, [bytes(SMALL_BYTES + 1)])
        with pytest.raises(SwarmError) as caught:
            await client.step(0, inputs(blocks, 1, 5))
        assert caught.value.retriable
        assert link.closed


async def test_a_link_that_is_closed_here_can_be_survived(spans: list[BlockSpan], blocks: BlockSpan) -> None:
    async with in_process_servers(*spans) as swarm:
        client = Client(swarm)
        await client.open(1)
        (link,) = swarm.links
        link.abort()
        with pytest.raises(SessionLostError, match="link to the next server was closed") as caught:
            await client.step(0, inputs(blocks, 1, 5))
        assert caught.value.retriable
        assert not caught.value.blames_peer
        with pytest.raises(SessionLostError):
            await Link(link).send(MessageType.STEP, {})


async def test_the_next_server_lets_go_of_a_closed_session_while_the_link_idles(
    spans: list[BlockSpan], blocks: BlockSpan
) -> None:
    async with in_process_servers(*spans) as swarm:
        client = Client(swarm)
        await client.open(1)
        await client.step(0, inputs(blocks, 1, 100))
        found = [
            weakref.ref(kept)
            for server, name in zip(swarm.servers.values(), client.names, strict=True)
            for kept in (server.table.get(name), server.table.get(name).runner.cache)
        ]
        gc.disable()
        try:
            for stream in client.streams:
                stream.abort()
            async with asyncio.timeout(60):
                while any(kept() is not None for kept in found):  # noqa: ASYNC110 - nobody is told of it
                    await asyncio.sleep(0)
        finally:
            gc.enable()
        assert not swarm.links[0].closed


async def test_a_server_without_memory_says_so_offers_less_and_goes_on(
    spans: list[BlockSpan], blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = inputs(blocks, 1, 100)
    expected = blocks.forward(prompt)
    async with in_process_servers(*spans) as swarm:
        _, second = swarm.servers.values()
        client = Client(swarm)
        await client.open(1)
        await client.step(0, prompt)
        async with asyncio.timeout(60):
            while not len(second.pages):  # noqa: ASYNC110 - after the answer
                await asyncio.sleep(0)

        def lacking(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                if threading.current_thread().name == second.peer_id:
                    torch.empty(1 << 48)
                return method(*args, **options)

            return run

        with monkeypatch.context() as patch:
            patch.setattr(BlockSpan, "forward", lacking(BlockSpan.forward))
            patch.setattr(PackedForward, "run_packed", lacking(PackedForward.run_packed))
            with pytest.raises(ServerOutOfMemoryError) as caught:
                await client.step(100, inputs(blocks, 1, 1))
        assert caught.value.retriable
        assert not caught.value.blames_peer
        assert len(second.pages) == 0
        assert second.budget.offered_bytes < second.budget.capacity_bytes

        again = Client(swarm)
        await again.open(1)
        torch.testing.assert_close(await again.step(0, prompt), expected)
