"""The attack list of docs/security.md, as far as it is about one server's streams; it names the other tests."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
from hostile import (
    FINGERPRINT,
    HONEST,
    MALLORY,
    SERVER,
    HonestClient,
    Server,
    answer,
    ask,
    error_code,
    hang_up,
    load_blocks,
    open_header,
    result,
    send,
    serving,
    step_header,
)
from swarm_models import save_llama

from swarmllm.data_structures import ModelRecord, ServerInfo, Span
from swarmllm.errors import ServerOverloadedError, SwarmError
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.p2p.block_directory import BlockDirectory, servers_key
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.p2p.records import RecordValidator
from swarmllm.network.wire.frames import MAX_MESSAGE_BYTES, PREFIX, MessageType, encode_message
from swarmllm.network.wire.protocol import FrameStream, hello, welcome
from swarmllm.server.device.scheduler import Priority
from swarmllm.server.peers import peer_limits
from swarmllm.server.sessions import session_table
from swarmllm.server.sessions.kv_cache import MESSAGE_BYTES

SESSION, OTHER = "a" * 32, "b" * 32
ALL, FIRST, SECOND = Span(0, 2), Span(0, 1), Span(1, 2)
HIDDEN = 16


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """Two blocks of three."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("attacks") / "checkpoint"
    return load_blocks(save_llama(directory, num_blocks=3, hidden_size=HIDDEN, intermediate_size=HIDDEN), ALL)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - nobody tells of these states
            await asyncio.sleep(0.005)


def hidden_states(length: int = 1) -> torch.Tensor:
    return torch.randn(1, length, HIDDEN)


async def opened(server: Server, session: str = SESSION, span: Span = ALL, peer_id: str = MALLORY) -> FrameStream:
    stream = await server.connect(peer_id)
    assert (await ask(stream, MessageType.OPEN, open_header(session, span))).type is MessageType.RESULT
    return stream


def rss() -> int:
    gc.collect()
    memory: int = psutil.Process().memory_info().rss
    return memory


# ---------------------------------------------------------------------- sessions of others


async def test_someone_elses_session(blocks: BlockSpan) -> None:
    """Who knows a session's id but not its token can do nothing with it; of one that exists he hears what he hears of
    one that doesn't."""
    async with serving(blocks) as server:
        owner = await opened(server, peer_id=HONEST)
        thief = await server.connect(MALLORY)
        inputs = hidden_states()
        said = []
        for session in (SESSION, OTHER):
            replay = {"id": 1, "session": session, "epoch": 9, "length": 0, "replay_hops": 1}
            answers = [
                await ask(thief, MessageType.LINK, {"id": 1, "session": session, "epoch": 9, "successor": None}),
                await ask(thief, MessageType.REPLAY, replay),
                await ask(thief, MessageType.ATTACH, {"id": 1, "session": session, "token": "c" * 32}),
                await ask(thief, MessageType.STEP, step_header(session, 0, inputs), hidden_states=inputs),
            ]
            said.append([{**message.header, "session": ""} for message in answers])
        assert said[0] == said[1]
        assert {header["code"] for header in said[0]} == {"session_lost"}
        assert error_code(await ask(thief, MessageType.OPEN, open_header(SESSION, ALL))) == "remote_protocol"
        await hang_up(thief)
        await server.ended(thief)
        result(await ask(owner, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs))
        await hang_up(owner)


async def test_a_wrong_token_looks_like_a_session_that_does_not_exist(blocks: BlockSpan) -> None:
    async with serving(blocks) as server:
        owner, thief = await opened(server, peer_id=HONEST), await server.connect(MALLORY)
        messages = [
            await ask(thief, MessageType.ATTACH, {"id": 1, "session": session, "token": OTHER})
            for session in (SESSION, OTHER)
        ]
        (real, none) = [{**message.header, "session": ""} for message in messages]
        assert real == none
        await hang_up(owner)
        await hang_up(thief)


async def test_the_token_gives_no_more_than_a_predecessor_needs(blocks: BlockSpan) -> None:
    """An attached peer may send steps, but can't link or replay the session."""
    async with serving(blocks) as server:
        owner, other = await opened(server, peer_id=HONEST), await server.connect(MALLORY)
        await ask(other, MessageType.ATTACH, {"id": 1, "session": SESSION, "token": SESSION[::-1]})
        link = {"id": 1, "session": SESSION, "epoch": 9, "successor": None}
        assert error_code(await ask(other, MessageType.LINK, link)) == "session_lost"
        inputs = hidden_states()
        await send(other, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs)
        assert result(await answer(owner)).shape == inputs.shape  # the owner gets what comes out
        await hang_up(owner)
        await hang_up(other)


# ---------------------------------------------------------------------- floods


async def test_session_flood(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer has so many sessions and no more, over all its streams; they are free again when it has gone."""
    monkeypatch.setattr(session_table, "MAX_SESSIONS_PER_PEER", 5)
    async with serving(blocks) as server:
        streams = [await server.connect(MALLORY) for _ in range(2)]
        codes = []
        for number in range(8):
            header = open_header(f"{number:032x}", ALL, max_length=4)
            codes.append((await ask(streams[number % 2], MessageType.OPEN, header)).header.get("code"))
        assert codes == [None] * 5 + ["overloaded"] * 3
        honest = HonestClient(server)
        await honest.start()
        await honest.step()
        await honest.stop()
        for stream in streams:
            await hang_up(stream)
            await server.ended(stream)
        await until(lambda: len(server.sessions) == 0)
        assert server.budget.leased_bytes == 0


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


async def test_request_flood_waits_with_the_peer(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is above a peer's share isn't even read until there is room."""
    batch = hidden_states(64)
    monkeypatch.setattr(peer_limits, "MAX_BYTES_PER_PEER", 3 * batch.nbytes)
    async with serving(blocks) as server:
        held: list[int] = []
        taken, room = server.access.limits, server.access.limits._bytes
        take = taken.take

        async def watched(peer_id: str, num_bytes: int) -> None:
            await take(peer_id, num_bytes)
            held.append(room[peer_id])

        monkeypatch.setattr(taken, "take", watched)
        stream = await server.connect(MALLORY)
        header = {"id": 1, "start": 0, "end": 2, "batch_size": 1, "seq_len": 64}
        for _ in range(30):
            await send(stream, MessageType.FORWARD, header, hidden_states=batch)
        for _ in range(30):
            assert result(await answer(stream)).shape == batch.shape
        assert max(held) == 3 * batch.nbytes
        await hang_up(stream)
        await server.ended(stream)
        assert not room


# ---------------------------------------------------------------------- memory


async def test_huge_message(blocks: BlockSpan) -> None:
    """A claim of 4 GB costs nothing and ends the stream; so does a header over its cap."""
    claims = [
        (MessageType.STEP, 10, 1 << 20, (1 << 32) - 1),
        (MessageType.STEP, 10, 1 << 20, MAX_MESSAGE_BYTES + 1),
        (MessageType.STEP, 1 << 31, 0, 0),
        (MessageType.PING, 1 << 20, 0, 0),
    ]
    async with serving(blocks) as server:
        before = rss()
        for kind, header_bytes, part_bytes, total_bytes in claims:
            stream = await server.connect(MALLORY)
            stream._write(PREFIX.pack(b"sL", 1, kind, 0, header_bytes, part_bytes, total_bytes))
            assert error_code(await answer(stream)) == "remote_protocol"
            await server.ended(stream)
            stream.abort()
        assert rss() < before + (16 << 20)


async def test_steps_that_wait_take_no_more_than_the_session_is_worth(blocks: BlockSpan) -> None:
    """A client that sends one large step after the other and reads no answer is refused, and memory stays bounded."""
    async with serving(blocks) as server:
        stream = await opened(server)
        (session,) = server.sessions
        proceed = threading.Event()
        busy = asyncio.create_task(server.executor.run(proceed.wait, Priority.DECODE))
        prompt = hidden_states(32)
        await send(stream, MessageType.STEP, step_header(SESSION, 0, prompt), hidden_states=prompt)
        await until(lambda: server.executor.num_calls == 2)  # the first one has its turn next
        for _ in range(5):
            await send(stream, MessageType.STEP, step_header(SESSION, 0, prompt), hidden_states=prompt)
        codes = [error_code(await answer(stream)) for _ in range(2)]
        assert codes == ["overloaded"] * 2
        waiting = 4 * (prompt.nbytes + MESSAGE_BYTES)  # the one that runs included
        assert session.waiting_room.num_bytes == server.access.limits._bytes[MALLORY] == waiting
        proceed.set()
        await busy
        for _ in range(4):
            assert result(await answer(stream)).shape == prompt.shape
        await until(lambda: session.waiting_room.num_bytes == 0)
        assert not server.access.limits._bytes
        await hang_up(stream)


async def test_errors_do_not_pile_up_for_a_peer_that_never_reads(blocks: BlockSpan) -> None:
    """Bad requests are answered no faster than the answers are read; then their sender has to wait."""
    async with serving(blocks) as server:
        stream = await server.connect(MALLORY)
        assert stream._transport is not None
        stream._transport.pause_reading()
        wrong = b"".join(encode_message(MessageType.OPEN, {"id": 1, "surprise": "x" * 100}))
        (served,) = server.ends
        flood = 100_000
        for _ in range(flood // 1000):
            stream._transport.write(wrong * 1000)
            await asyncio.sleep(0)
        await until(lambda: served._inbox.is_paused)
        assert served._transport is not None
        assert served._transport.get_write_buffer_size() < 4 << 20
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
        before = rss()
        header = {"id": 1, "x": [{}] * 30_000}
        wire = b"".join(encode_message(MessageType.STEP, header))
        served.receive = asyncio.Event().wait  # type: ignore[method-assign,assignment]  # the handler is busy
        assert stream._transport is not None
        for _ in range(100):
            stream._transport.write(wire)
        await until(lambda: served._inbox.is_paused)
        assert rss() < before + (300 << 20)
        stream.abort()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("position_ids", (100_000, 1)),
        ("position_ids", (100_000, 1, 1)),
        ("attention_mask", (1, 100_000)),
        ("attention_mask", (1, 1, 100_000, 1)),
        ("inputs_embeds", (1, 100_000, HIDDEN)),
        ("token_type_ids", (100_000, 1)),
    ],
)
async def test_tensors_that_would_be_broadcast(blocks: BlockSpan, name: str, shape: tuple[int, ...]) -> None:
    """Some hundred kilobytes that blocks would blow up to gigabytes are refused before they reach them."""
    async with serving(blocks, cache_tokens=1 << 16) as server:  # room for them to wait
        stream = await opened(server)
        extra = {name: torch.ones(shape, dtype=torch.float32 if name == "inputs_embeds" else torch.int64)}
        inputs = hidden_states()
        header = step_header(SESSION, 0, inputs, ones_mask=False)
        message = await ask(stream, MessageType.STEP, header, hidden_states=inputs, **extra)
        assert error_code(message) == "remote_protocol"
        assert name in message.header["message"]
        batch = {"id": 1, "start": 0, "end": 2, "batch_size": 1, "seq_len": 1}
        message = await ask(stream, MessageType.FORWARD, batch, hidden_states=inputs, **extra)
        assert error_code(message) == "remote_protocol"
        await hang_up(stream)


async def test_named_successors_are_forgotten(blocks: BlockSpan) -> None:
    """LINK lets a client name any peer; the server remembers none of those that can't be reached."""
    async with serving(blocks) as server:
        stream = await opened(server)
        for number in range(50):
            successor = {"peer_id": f"12D3{number:048d}", "session": OTHER, "token": OTHER}
            header = {"id": 1, "session": SESSION, "epoch": 0, "successor": successor}
            assert error_code(await ask(stream, MessageType.LINK, header)) == "unreachable"
        assert len(server.links) == 0
        assert not server.links._dialling
        await hang_up(stream)


# ---------------------------------------------------------------------- time


class Impatient(FrameStream):
    """A stream with short times."""

    def start_keepalive(self, interval_s: float = 0.05, misses: int = 3) -> None:
        super().start_keepalive(0.05, 3)


async def test_slow_loris(blocks: BlockSpan) -> None:
    """A message that comes byte by byte ends its stream, although every byte is a sign of life."""
    async with serving(blocks, stream_type=Impatient) as server:
        stream = await server.connect(MALLORY, stall_timeout_s=0.3)
        assert (await ask(stream, MessageType.OPEN, open_header(SESSION, ALL))).type is MessageType.RESULT
        inputs = hidden_states(8)
        (wire,) = encode_message(MessageType.STEP, step_header(SESSION, 0, inputs), [bytes(inputs.nbytes)])
        sent = 0
        with suppress(SwarmError):
            while not stream.closed:
                stream._write(wire[sent : sent + 1])
                sent += 1
                await asyncio.sleep(0.02)
        assert 0 < sent < len(wire)
        await server.ended(stream)
        await until(lambda: len(server.sessions) == 0)
        assert server.budget.leased_bytes == 0


async def test_idle_streams_cost_nobody_anything(blocks: BlockSpan) -> None:
    """Streams that say nothing at all are closed; those that only answer pings stay, and are no burden."""
    async with serving(blocks, stream_type=Impatient) as server:
        honest = HonestClient(server)
        await honest.start()
        silent = [await server.connect(MALLORY) for _ in range(20)]
        for stream in silent:
            assert stream._transport is not None
            stream._transport.pause_reading()  # so that no ping is answered
        await honest.step()
        for stream in silent:
            await server.ended(stream)
            stream.abort()
        alive = [await server.connect(MALLORY) for _ in range(20)]
        await honest.step()
        await honest.stop()
        for stream in alive:
            await hang_up(stream)


async def test_no_greeting(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever doesn't say HELLO is left after a while."""
    monkeypatch.setattr("swarmllm.server.streams.connection.welcome", impatient(welcome))
    async with serving(blocks) as server:
        stream = await server.connect(MALLORY, greet=False)
        await server.ended(stream)
        assert server.access.limits.num_streams() == 0


def impatient(greet: Callable[..., Any]) -> Callable[..., Any]:
    return lambda stream, **options: greet(stream, **options, timeout_s=0.1)


# ---------------------------------------------------------------------- steps


async def test_wrong_positions(blocks: BlockSpan) -> None:
    """Behind the end: lost; beyond the lease: too long; both leave the session as it was."""
    async with serving(blocks) as server:
        stream = await opened(server)
        for position, length, code in (
            (1, 1, "session_lost"),
            (0, 33, "length_exceeded"),
            (1 << 24, 1, "session_lost"),
        ):
            inputs = hidden_states(length)
            header = step_header(SESSION, position, inputs, epoch=position + length, ones_mask=False)
            assert error_code(await ask(stream, MessageType.STEP, header, hidden_states=inputs)) == code
        inputs = hidden_states(4)
        header = step_header(SESSION, 0, inputs, epoch=1 << 25)
        first = result(await ask(stream, MessageType.STEP, header, hidden_states=inputs))
        # A replay of less than the cache, then a step after what was replayed no longer: a hole in what is kept.
        replay = {"id": 1, "session": SESSION, "epoch": 1 << 25, "length": 2, "replay_hops": 1}
        assert result(await ask(stream, MessageType.REPLAY, replay)).shape == first[:, :2].shape
        one = hidden_states(1)
        header = step_header(SESSION, 4, one, epoch=1 << 25)
        assert error_code(await ask(stream, MessageType.STEP, header, hidden_states=one)) == "session_lost"
        await hang_up(stream)


async def test_a_chain_in_a_circle(blocks: BlockSpan) -> None:
    """Two sessions linked to each other would pass one step around for ever, for the price of one."""
    async with serving(blocks) as server:
        stream = await opened(server)
        assert (await ask(stream, MessageType.OPEN, open_header(OTHER, ALL))).type is MessageType.RESULT
        for session, successor in ((SESSION, OTHER), (OTHER, SESSION)):
            target = {"peer_id": SERVER, "session": successor, "token": successor[::-1]}
            link = {"id": 1, "session": session, "epoch": 0, "successor": target}
            assert (await ask(stream, MessageType.LINK, link)).type is MessageType.RESULT
        inputs = hidden_states()
        refused = await ask(stream, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs)
        assert error_code(refused) == "remote_protocol"
        assert "circles" in refused.header["message"]
        assert server.executor.num_calls == 0
        await hang_up(stream)


async def test_nan_from_a_predecessor_is_its_own_fault(blocks: BlockSpan) -> None:
    """What a server in the middle passes on is checked by its successor, who names it to the client."""
    async with serving(blocks) as server:
        owner, predecessor = await opened(server, peer_id=HONEST), await server.connect(MALLORY)
        await ask(predecessor, MessageType.ATTACH, {"id": 1, "session": SESSION, "token": SESSION[::-1]})
        inputs = hidden_states() * float("nan")
        await send(predecessor, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs)
        message = await answer(owner)
        assert error_code(message) == "corrupt_activations"
        assert message.header["peer_id"] == MALLORY
        await hang_up(owner)
        await hang_up(predecessor)


# ---------------------------------------------------------------------- records of the DHT (see also test_peer)


class Replayer(RecordValidator):
    """Stores a record with its owner's own signature, recorded earlier."""

    def __init__(self, recorded: bytes) -> None:
        super().__init__()
        self._recorded = recorded

    def validate(self, record: Any) -> bool:
        return True

    def sign_value(self, record: Any) -> bytes:
        return self._recorded


async def test_replayed_record() -> None:
    """What a peer said earlier, with its own signature, replaces neither what it said later nor that it has left."""
    key, model = servers_key(FINGERPRINT), ModelRecord(name="tiny", fingerprint=FINGERPRINT, num_blocks=2)
    async with await Peer.create() as first:
        victim = await Peer.create(initial_peers=first.join_maddrs)
        mallory = await Peer.create(initial_peers=first.join_maddrs)
        async with victim, mallory:
            said, reader = BlockDirectory(victim), BlockDirectory(first)
            earlier = ServerInfo(peer_id=victim.peer_id, addrs=victim.addrs, start=0, end=1)
            await said.announce(model, earlier)
            assert await reader.servers(FINGERPRINT) == (earlier,)
            assert first._dht is not None
            assert mallory._dht is not None
            storage, node = first._dht._node.protocol.storage, mallory._dht._node
            recorded = storage.get(type(node.node_id).generate(key)).value.get(victim.peer_id)

            async def replay(ttl_s: float) -> None:
                node.protocol.record_validator = Replayer(recorded.value)
                await node.store(key, "", recorded.expiration_time + ttl_s, subkey=victim.peer_id)

            later = earlier.model_copy(update={"end": 2})
            await said.announce(model, later)
            await replay(0)
            assert await reader.servers(FINGERPRINT) == (later,)
            await replay(300)  # the signature covers the time as well
            assert await reader.servers(FINGERPRINT) == (later,)
            await said.withdraw(model)
            await replay(0)
            assert await reader.servers(FINGERPRINT) == ()


# ---------------------------------------------------------------------- who may use the server


async def test_allowed_clients(blocks: BlockSpan) -> None:
    """Others may open no session and run no batch; a predecessor is let in by the token, not by the list."""
    async with serving(blocks, allowed_clients=[HONEST]) as server:
        stranger = await server.connect(MALLORY)
        inputs = hidden_states()
        batch = {"id": 1, "start": 0, "end": 2, "batch_size": 1, "seq_len": 1}
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


async def test_nothing_is_kept_of_a_session_that_has_ended(blocks: BlockSpan) -> None:
    """Its cache and the hidden states that were kept for replays are gone with its stream."""
    async with serving(blocks) as server:
        stream = await opened(server)
        inputs = hidden_states(8)
        result(await ask(stream, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs))
        (session,) = server.sessions
        kept = [weakref.ref(session), weakref.ref(session.runner.cache), weakref.ref(session.runner.log)]
        assert session.runner.log.num_bytes
        del session
        await hang_up(stream)
        await server.ended(stream)
        await until(lambda: gc.collect() >= 0 and [reference() for reference in kept] == [None] * 3)
