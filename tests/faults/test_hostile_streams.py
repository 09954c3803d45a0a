"""Hostile clients at the door of a server: streams, greetings and bytes. Each is refused, and others are served."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hostile import (
    ALL,
    HONEST,
    MALLORY,
    SESSION,
    HonestClient,
    answer,
    ask,
    error_code,
    hang_up,
    hidden_states,
    is_paused,
    open_header,
    opened,
    request_header,
    resident_bytes,
    result,
    send,
    serving,
    step_header,
    stop_reading,
    unsent_bytes,
    until,
    write_bytes,
)
from tests.raw_stream import RawStream

from swarmllm.errors import ServerOverloadedError, SwarmError
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire.frames import MAX_MESSAGE_BYTES, PREFIX, SMALL_BYTES, encode_message
from swarmllm.network.wire.protocol import MessageType, hello, welcome
from swarmllm.server.peers import peer_limits


@pytest.fixture
def blocks(two_blocks: BlockSpan) -> BlockSpan:
    return two_blocks


class Impatient(RawStream):
    """A stream with short times."""

    def start_keepalive(self, interval_s: float = 0.05, misses: int = 3) -> None:
        super().start_keepalive(0.05, 3)


def impatient(greet: Callable[..., Any]) -> Callable[..., Any]:
    return lambda stream, **options: greet(stream, **options, timeout_s=0.1)


# ---------------------------------------------------------------------- many streams


async def test_stream_flood(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are counted from their first byte on: it is no way out never to say HELLO."""
    monkeypatch.setattr(peer_limits, "MAX_STREAMS_PER_PEER", 5)
    async with serving(blocks) as server:
        idle = [await server.connect(MALLORY, greet=False) for _ in range(3)]
        greeted = [await server.connect(MALLORY) for _ in range(2)]
        late = await server.connect(MALLORY, greet=False)
        with pytest.raises(ServerOverloadedError):
            await hello(late)
        honest = HonestClient(server)
        await honest.start()
        await honest.step()
        await hang_up(idle.pop())
        await until(lambda: server.access.limits.num_streams() == 5)
        greeted.append(await server.connect(MALLORY))
        for stream in (*idle, *greeted, late):
            await hang_up(stream)
        await honest.stop()
        await until(lambda: server.access.limits.num_streams() == 0)


async def test_stream_flood_of_many_peers(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peer ids cost nothing, so there is a limit for all of them together."""
    monkeypatch.setattr(peer_limits, "MAX_STREAMS", 5)
    async with serving(blocks) as server:
        streams = [await server.connect(f"12D3{number:048d}") for number in range(5)]
        late = await server.connect(MALLORY, greet=False)
        with pytest.raises(ServerOverloadedError):
            await hello(late)
        for stream in (*streams, late):
            await hang_up(stream)


async def test_idle_streams_cost_nobody_anything(blocks: BlockSpan) -> None:
    """Streams that say nothing at all are closed; those that only answer pings stay, and are no burden."""
    async with serving(blocks, stream_type=Impatient) as server:
        honest = HonestClient(server)
        await honest.start()
        silent = [await server.connect(MALLORY) for _ in range(20)]
        for stream in silent:
            stop_reading(stream)  # so that no ping is answered
        await honest.step()
        for stream in silent:
            await server.ended(stream)
            stream.abort()
        alive = [await server.connect(MALLORY) for _ in range(20)]
        await honest.step()
        await honest.stop()
        for stream in alive:
            await hang_up(stream)


# ---------------------------------------------------------------------- greeting


async def test_no_greeting(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever doesn't say HELLO is left after a while."""
    monkeypatch.setattr("swarmllm.server.streams.connection.welcome", impatient(welcome))
    async with serving(blocks) as server:
        stream = await server.connect(MALLORY, greet=False)
        await server.ended(stream)
        assert server.access.limits.num_streams() == 0


async def test_large_before_the_greeting(blocks: BlockSpan) -> None:
    async with serving(blocks) as server:
        stream = await server.connect(MALLORY, greet=False)
        await send(stream, MessageType.STEP, {"id": 1}, hidden_states=torch.zeros(SMALL_BYTES))
        assert error_code(await stream.receive()) == "remote_protocol"
        await server.ended(stream)
        stream.abort()


async def test_strangers_send_nothing_large(blocks: BlockSpan) -> None:
    """A client that isn't on the allow-list can send large messages only where servers push outputs to each other."""
    async with serving(blocks, allowed_clients=[HONEST]) as server:
        for kind, refused in (
            (MessageType.STEP, True),
            (MessageType.FORWARD, True),
            (MessageType.ADAPTER, True),
            (MessageType.PUSH, False),
        ):
            stream = await server.connect(MALLORY)
            await send(stream, kind, {"id": 1}, hidden_states=torch.zeros(SMALL_BYTES))
            message = await stream.receive()
            assert error_code(message) == "remote_protocol"
            assert ("cap" in message.header["message"]) == refused
            await hang_up(stream)
        owner = await opened(server, peer_id=HONEST, max_length=100)
        predecessor = await server.connect(MALLORY)
        attach = {"id": 1, "session": SESSION, "token": SESSION[::-1]}
        assert (await ask(predecessor, MessageType.ATTACH, attach)).type is MessageType.RESULT
        inputs = hidden_states(blocks, 100)
        await send(predecessor, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs)
        assert result(await owner.receive()).shape == inputs.shape
        await hang_up(owner)
        await hang_up(predecessor)


async def test_allowed_clients(blocks: BlockSpan) -> None:
    """Others may open no session and run no batch; a predecessor is let in by the token, not by the list."""
    async with serving(blocks, allowed_clients=[HONEST]) as server:
        stranger = await server.connect(MALLORY)
        inputs = hidden_states(blocks)
        batch = request_header(inputs)
        refused = [
            await ask(stranger, MessageType.OPEN, open_header(SESSION, ALL)),
            await ask(stranger, MessageType.FORWARD, batch, hidden_states=inputs),
            await ask(stranger, MessageType.BACKWARD, batch, hidden_states=inputs, grad_outputs=inputs),
        ]
        assert [error_code(message) for message in refused] == ["blocks_not_served"] * 3
        assert "--allowed_clients" in refused[0].header["message"]
        owner = await opened(server, peer_id=HONEST)
        await ask(stranger, MessageType.ATTACH, {"id": 1, "session": SESSION, "token": SESSION[::-1]})
        await send(stranger, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs)
        assert result(await answer(owner)).shape == inputs.shape
        await hang_up(owner)
        await hang_up(stranger)


# ---------------------------------------------------------------------- bytes


async def test_huge_message(blocks: BlockSpan) -> None:
    """A claim of 4 GB costs nothing and ends the stream; so does a header over its cap."""
    claims = [
        (MessageType.STEP, 10, 1 << 20, (1 << 32) - 1),
        (MessageType.STEP, 10, 1 << 20, MAX_MESSAGE_BYTES + 1),
        (MessageType.STEP, 1 << 31, 0, 0),
        (MessageType.PING, 1 << 20, 0, 0),
        (99, 1, 0, 0),  # no type of ours
    ]
    async with serving(blocks) as server:
        before = resident_bytes()
        for kind, header_bytes, part_bytes, total_bytes in claims:
            stream = await server.connect(MALLORY)
            write_bytes(stream, PREFIX.pack(b"sL", 1, kind, 0, header_bytes, part_bytes, total_bytes))
            assert error_code(await answer(stream)) == "remote_protocol"
            await server.ended(stream)
            stream.abort()
        assert resident_bytes() < before + (16 << 20)


@pytest.mark.parametrize("greet", [True, False])
async def test_garbage(blocks: BlockSpan, greet: bool) -> None:
    async with serving(blocks) as server:
        stream = await server.connect(MALLORY, greet=greet)
        write_bytes(stream, bytes(range(256)) * 16)
        await server.ended(stream)
        stream.abort()


async def test_slow_loris(blocks: BlockSpan) -> None:
    """A message that comes byte by byte ends its stream, although every byte is a sign of life."""
    async with serving(blocks, stream_type=Impatient) as server:
        stream = await server.connect(MALLORY, stall_timeout_s=0.3)
        assert (await ask(stream, MessageType.OPEN, open_header(SESSION, ALL))).type is MessageType.RESULT
        inputs = hidden_states(blocks, 8)
        (wire,) = encode_message(MessageType.STEP, step_header(SESSION, 0, inputs), [bytes(inputs.nbytes)])
        sent = 0
        with suppress(SwarmError):
            while not stream.closed:
                write_bytes(stream, wire[sent : sent + 1])
                sent += 1
                await asyncio.sleep(0.02)
        assert 0 < sent < len(wire)
        await server.ended(stream)
        await until(lambda: len(server.sessions) == 0)
        assert server.budget.leased_bytes == 0


async def test_errors_do_not_pile_up_for_a_peer_that_never_reads(blocks: BlockSpan) -> None:
    """Bad requests are answered no faster than the answers are read; then their sender has to wait."""
    async with serving(blocks) as server:
        stream = await server.connect(MALLORY)
        stop_reading(stream)
        wrong = b"".join(encode_message(MessageType.OPEN, {"id": 1, "surprise": "x" * 100}))
        (served,) = server.ends
        flood = 100_000
        for _ in range(flood // 1000):
            write_bytes(stream, wrong * 1000)
            await asyncio.sleep(0)
        await until(lambda: is_paused(served))
        assert unsent_bytes(served) < 4 << 20
        honest = HonestClient(server)
        await honest.start()
        await honest.step()
        await honest.stop()
        stream.abort()
        await server.ended(stream)


async def test_headers_that_unpack_into_much_count_as_much(blocks: BlockSpan) -> None:
    """Some ten thousand empty maps are two megabytes of dicts: a few of them pause the reading."""
    async with serving(blocks) as server:
        stream = await opened(server)
        (served,) = server.ends
        before = resident_bytes()
        header = {"id": 1, "x": [{}] * 30_000}
        wire = b"".join(encode_message(MessageType.STEP, header))
        served.receive = asyncio.Event().wait  # type: ignore[method-assign,assignment]  # the handler is busy
        for _ in range(100):
            write_bytes(stream, wire)
        await until(lambda: is_paused(served))
        assert resident_bytes() < before + (300 << 20)
        stream.abort()
