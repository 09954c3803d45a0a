"""What peers must not say: each is refused in one sentence or ends its own stream, and others are served as before."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from pytest_asyncio import fixture as in_loop
from raw_peer import HIDDEN, RawPeer, RawPeers
from swarm_models import generate_seeded, prompt
from tests.left_tasks import no_task_left_behind
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.demo.local_swarm import LocalServer
from swarmllm.errors import PeerError
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.wire.frames import CHUNK_BYTES, FORMAT, MAGIC, PREFIX
from swarmllm.network.wire.protocol import MessageType

pytestmark = pytest.mark.asyncio(loop_scope="module")
_no_task_left_behind = in_loop(no_task_left_behind, loop_scope="module")


@pytest.fixture(scope="module")
def server(swarm: LocalSwarm) -> LocalServer:
    """It holds blocks [0, 3)."""
    return swarm.servers[0]


@pytest.fixture(scope="module")
def expected(local: PreTrainedModel) -> list[list[int]]:
    tokens: list[list[int]] = generate_seeded(local, prompt(), max_new_tokens=3).tolist()
    return tokens


@pytest.fixture(autouse=True)
def _others_are_served(model: Any, expected: list[list[int]]) -> Iterator[None]:
    with model.inference_session(max_length=32) as session:
        session.step(model.embed(prompt(1, 4)))  # open before, and in use after
        yield
        session.position = 0
        assert generate_seeded(model, prompt(), max_new_tokens=3).tolist() == expected
        assert session.num_repairs == 0, "the session must not have noticed anything"


@in_loop(scope="module", loop_scope="module")
async def all_peers(server: LocalServer) -> AsyncIterator[tuple[RawPeers, RawPeer]]:
    """One peer for all tests, and a stream of it that is silent meanwhile, in the midst of a message."""
    async with RawPeers.join(server) as peers:
        silent = await peers.open_stream(server)
        silent.stream._answer_ping = lambda message: None
        silent.stream._ping = lambda: None
        silent.write(frame(MessageType.FORWARD, b"\x80", 1000, 1000) + b"only this")
        yield peers, silent


@in_loop(loop_scope="module")
async def peers(all_peers: tuple[RawPeers, RawPeer]) -> AsyncIterator[RawPeers]:
    """Streams of that peer; what a test leaves open is ended."""
    peers, silent = all_peers
    yield peers
    for raw in peers.opened:
        if raw is not silent:
            raw.stream.abort()


@in_loop(loop_scope="module")
async def raw(peers: RawPeers, server: LocalServer) -> RawPeer:
    return await peers.open_stream(server)


async def assert_ended(raw: RawPeer) -> None:
    """The server has closed the stream; what it said before doesn't matter."""
    with pytest.raises(PeerError):
        await read_to_the_end(raw)


async def read_to_the_end(raw: RawPeer) -> None:
    while True:
        await raw.answer()


def frame(kind: int, header: bytes, part: int, total: int) -> bytes:
    return PREFIX.pack(MAGIC, FORMAT, kind, 0, len(header), part, total) + header


@pytest.mark.parametrize("greet", [True, False])
async def test_garbage(peers: RawPeers, server: LocalServer, greet: bool) -> None:
    raw = await peers.open_stream(server, greet=greet)
    raw.write(os.urandom(4096))
    await assert_ended(raw)


async def test_a_message_over_the_cap(raw: RawPeer) -> None:
    raw.write(frame(MessageType.FORWARD, b"\x80", CHUNK_BYTES, (256 << 20) + 1))
    assert await raw.error() == "remote_protocol"
    await assert_ended(raw)


async def test_errors_are_heard_by_peers_that_are_still_sending(peers: RawPeers, server: LocalServer) -> None:
    for _ in range(20):
        raw = await peers.open_stream(server)
        raw.write(frame(MessageType.FORWARD, b"\x80", CHUNK_BYTES, (256 << 20) + 1))
        while not raw.stream.closed and not raw.stream._inbox:
            await raw.stream.send(MessageType.PONG, {"n": 0})
            await asyncio.sleep(0)
        assert await raw.error() == "remote_protocol"
        raw.stream.abort()


async def test_a_header_over_the_cap(raw: RawPeer) -> None:
    raw.write(PREFIX.pack(MAGIC, FORMAT, MessageType.FORWARD, 0, 1 << 30, 0, 0))
    assert await raw.error() == "remote_protocol"
    await assert_ended(raw)


async def test_an_unknown_message_type(raw: RawPeer) -> None:
    raw.write(frame(99, b"\x80", 0, 0))
    assert await raw.error() == "remote_protocol"
    await assert_ended(raw)


async def test_no_greeting(peers: RawPeers, server: LocalServer) -> None:
    raw = await peers.open_stream(server, greet=False)
    await raw.open()
    await assert_ended(raw)


@pytest.mark.slow
async def test_a_message_that_never_ends_from_a_peer_that_answers_pings(raw: RawPeer) -> None:
    raw.write(frame(MessageType.FORWARD, b"\x80", CHUNK_BYTES, 10 * CHUNK_BYTES) + bytes(CHUNK_BYTES))
    await assert_ended(raw)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"start": 0, "end": 3, "batch_size": 1, "seq_len": -4},
        {"start": 0, "end": "3", "batch_size": 1, "seq_len": 4},
        {"start": 0, "end": 3, "batch_size": 1 << 40, "seq_len": 4},
        {"start": 0, "end": 3, "batch_size": 1, "seq_len": 4, "tensors": [["hidden_states", "float32", [1, 4], 7]]},
        {"start": 0, "end": 3, "batch_size": 1, "seq_len": 4, "tensors": [["hidden_states", "float32", [1 << 40], 0]]},
    ],
)
async def test_malformed_headers(raw: RawPeer, header: dict[str, Any]) -> None:
    raw.instead = header
    await raw.say(MessageType.FORWARD, {"hidden_states": torch.zeros(1, 4, HIDDEN)})
    assert await raw.error() == "remote_protocol"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ([1, 4, HIDDEN + 1], torch.float32),
        ([1, 5, HIDDEN], torch.float32),
        ([2, 4, HIDDEN], torch.float32),
        ([1, 4, HIDDEN], torch.int64),
        ([4, HIDDEN], torch.float32),
        ([0], torch.float32),
        ([], torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["FORWARD", "STEP"])
async def test_wrong_shapes_and_types(raw: RawPeer, kind: str, shape: list[int], dtype: torch.dtype) -> None:
    hidden = torch.zeros(shape, dtype=dtype)
    if kind == "STEP":
        session = await raw.open()
        assert (await raw.answer()).type is MessageType.RESULT
        await raw.step(session, hidden)
    else:
        await raw.say(MessageType.FORWARD, {"hidden_states": hidden}, start=0, end=3, batch_size=1, seq_len=4)
    assert await raw.error() == "remote_protocol"


async def test_wrong_gradients(raw: RawPeer) -> None:
    hidden = torch.zeros(1, 4, HIDDEN)
    header = {"start": 0, "end": 3, "batch_size": 1, "seq_len": 4}
    for tensors in ({}, {"grad_outputs": torch.zeros(1, 3, HIDDEN)}, {"grad_outputs": torch.zeros(1, 4, 3)}):
        await raw.say(MessageType.BACKWARD, {"hidden_states": hidden, **tensors}, **header)
        assert await raw.error() == "remote_protocol"


async def test_backwards_of_forwards_that_are_not_there(raw: RawPeer) -> None:
    header = {"start": 0, "end": 3, "batch_size": 1, "seq_len": 4}
    grad = {"grad_outputs": torch.zeros(1, 4, HIDDEN)}
    forward = await raw.say(MessageType.FORWARD, {"hidden_states": torch.zeros(1, 4, HIDDEN)}, **header, keep=True)
    assert (await raw.answer()).type is MessageType.RESULT
    await raw.say(MessageType.BACKWARD, {}, **header, forward=forward)
    assert await raw.error() == "remote_protocol"
    await raw.say(MessageType.BACKWARD, grad, **header, forward=forward + 1000)
    assert await raw.error() == "session_lost"
    await raw.say(MessageType.BACKWARD, grad, **header, forward=forward)
    assert (await raw.answer()).type is MessageType.RESULT
    await raw.say(MessageType.BACKWARD, grad, **header, forward=forward)
    assert await raw.error() == "session_lost"


async def test_blocks_that_are_not_here(raw: RawPeer) -> None:
    for start, end in ((0, 4), (3, 8), (2, 2), (2, 1)):
        await raw.open(start=start, end=end)
        assert await raw.error() == "blocks_not_served"
        await raw.say(MessageType.FORWARD, start=start, end=end, batch_size=1, seq_len=4)
        assert await raw.error() == "blocks_not_served"


async def test_wrong_positions(raw: RawPeer) -> None:
    session = await raw.open(max_length=8)
    await raw.answer()
    await raw.step(session, position=1)
    assert await raw.error() == "session_lost"
    await raw.step(session, position=0, epoch=1)
    assert (await raw.answer()).type is MessageType.RESULT
    await raw.step(session, position=5, epoch=1)
    assert await raw.error() == "session_lost"
    await raw.step(session, torch.zeros(1, 9, HIDDEN), position=0, seq_len=9, epoch=2)
    assert await raw.error() == "length_exceeded"
    await raw.step(session, position=2, epoch=3)
    assert (await raw.answer()).type is MessageType.RESULT


async def test_a_mask_that_would_fill_the_memory(raw: RawPeer) -> None:
    session = await raw.open(max_length=8)
    await raw.answer()
    await raw.step(session, position=1 << 24, ones_mask=True)
    assert await raw.error() in ("session_lost", "length_exceeded")
    await raw.say(MessageType.FORWARD, start=0, end=3, batch_size=1 << 16, seq_len=1 << 24, ones_mask=True)
    assert await raw.error() == "overloaded"


async def test_a_session_larger_than_the_cache(raw: RawPeer) -> None:
    await raw.open(max_length=1 << 24, batch_size=1 << 16)
    assert await raw.error() == "session_too_large"
    session = await raw.open(max_length=32)
    await raw.answer()
    hidden = torch.zeros(1 << 12, 4, HIDDEN)
    await raw.step(session, hidden, batch_size=1 << 12)
    assert await raw.error() == "session_too_large"


def prefix(shape: list[int], **fields: Any) -> list[dict[str, Any]]:
    """Patches of all three blocks, which have 2 heads of keys and values of 16 numbers."""
    return [{"block": block, "path": "", "kind": "prefix", "shapes": [shape] * 2} | fields for block in range(3)]


@pytest.mark.parametrize(
    "patches",
    [
        prefix([2, 4]),
        prefix([3, 4, 16]),
        prefix([2, 4, 17]),
        prefix([2, 0, 16]),
        prefix([2, 1025, 16]),
        prefix([2, 1 << 24, 16]),
        prefix([2, 4, 16, 1]),
        prefix([2, 4, 16], path="self_attn"),
        prefix([2, 4, 16], block=3),
        prefix([2, 4, 16], block=0),
        prefix([2, 4, 16], shapes=[]),
        prefix([2, 4, 16], shapes=[[2, 4, 16]]),
        prefix([2, 4, 16], shapes=[[2, 4, 16], [2, 5, 16]]),
        prefix([2, 5, 16])[:1] + prefix([2, 4, 16])[1:],
        prefix([2, 4, 16]),  # but for as many values
    ],
    ids=str,
)
async def test_wrong_prefixes(raw: RawPeer, patches: list[dict[str, Any]]) -> None:
    for values in (torch.zeros(7), torch.full((768,), torch.nan), torch.zeros(768, dtype=torch.int64)):
        await raw.say(MessageType.ADAPTER, {"values": values}, handle=1, patches=patches)
        assert await raw.error() == "remote_protocol"
    await raw.open(adapter=1)
    assert await raw.error() == "blocks_not_served", "it has not been kept"


async def test_a_prefix_counts_with_every_row(raw: RawPeer) -> None:
    values = {"values": torch.zeros(3 * 2 * 2 * 1000 * 16)}
    await raw.say(MessageType.ADAPTER, values, handle=1, patches=prefix([2, 1000, 16]))
    assert (await raw.answer()).type is MessageType.RESULT
    batch = {"start": 0, "end": 3, "batch_size": 64, "seq_len": 4}
    hidden = {"hidden_states": torch.zeros(64, 4, HIDDEN)}
    await raw.say(MessageType.FORWARD, hidden, **batch, adapter=1)
    assert await raw.error() == "overloaded"
    await raw.open(batch_size=256, adapter=1)
    assert await raw.error() == "session_too_large"
    for adapter in (None, 1):
        await raw.open(batch_size=8 if adapter else 256, adapter=adapter)
        assert (await raw.answer()).type is MessageType.RESULT
    await raw.say(MessageType.ADAPTER, {"values": torch.zeros(256)}, handle=2, patches=prefix([2, 4, 16])[:1])
    assert (await raw.answer()).type is MessageType.RESULT
    one = {"start": 0, "end": 3, "batch_size": 1, "seq_len": 4}
    await raw.say(MessageType.FORWARD, {"hidden_states": torch.zeros(1, 4, HIDDEN)}, **one, adapter=2)
    assert await raw.error() == "configuration", "a block lacks it"


async def test_rows_that_do_not_exist(raw: RawPeer) -> None:
    session = await raw.open()
    await raw.answer()
    await raw.step(session)
    await raw.answer()
    await raw.step(session, position=4, rows=1, batch_index=[7])
    assert await raw.error() == "remote_protocol"
    await raw.step(session, position=4, rows=5, batch_index=[0], epoch=1)
    assert await raw.error() == "session_lost"


async def test_somebody_elses_session(peers: RawPeers, server: LocalServer, raw: RawPeer) -> None:
    session = await raw.open()
    await raw.answer()
    thief = await peers.open_stream(server)
    await thief.step(session)
    assert await thief.error() == "session_lost"
    await thief.say(MessageType.LINK, session=session, epoch=9)
    assert await thief.error() == "session_lost"
    await thief.say(MessageType.REPLAY, session=session, epoch=9, length=1, replay_hops=1)
    assert await thief.error() == "session_lost"
    await thief.say(MessageType.ATTACH, session=session, token="0" * 32)
    assert await thief.error() == "session_lost"
    await thief.open(session=session)
    assert await thief.error() == "remote_protocol"

    await raw.step(session)
    assert (await raw.answer()).type is MessageType.RESULT


async def test_a_session_that_never_was(raw: RawPeer) -> None:
    for kind, fields in (
        (MessageType.STEP, {"position": 0, "batch_size": 1, "seq_len": 4}),
        (MessageType.LINK, {}),
        (MessageType.REPLAY, {"length": 1, "replay_hops": 1}),
    ):
        tensors = {"hidden_states": torch.zeros(1, 4, HIDDEN)} if kind is MessageType.STEP else {}
        await raw.say(kind, tensors, session="0" * 32, epoch=0, **fields)
        assert await raw.error() == "session_lost"


async def test_a_successor_that_does_not_exist(raw: RawPeer) -> None:
    session = await raw.open()
    await raw.answer()
    nobody = {
        "peer_id": "12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU",
        "addrs": ["/ip4/127.0.0.1/tcp/1"],
        "session": "0" * 32,
        "token": "0" * 32,
    }
    await raw.say(MessageType.LINK, session=session, epoch=0, successor=nobody)
    assert await raw.error() == "unreachable"
    await raw.step(session)
    assert (await raw.answer()).type is MessageType.RESULT  # without a successor, outputs come back


async def test_port_scan(raw: RawPeer, server: LocalServer) -> None:
    """A server looks at no address that a client names, and says the same of open ports, closed ones and names."""
    session = await raw.open()
    await raw.answer()
    said = set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        for number, addr in enumerate(
            (f"/ip4/127.0.0.1/tcp/{port}", f"/dns4/localhost/tcp/{port}", "/ip4/127.0.0.1/tcp/1")
        ):
            nobody = {"peer_id": Identity.generate().peer_id, "addrs": [addr], "token": "0" * 32}
            await raw.say(MessageType.LINK, session=session, epoch=number, successor=nobody | {"session": "0" * 32})
            message = await raw.answer()
            assert message.header.pop("peer_id") == nobody["peer_id"]
            said.add((message.header["code"], message.header["message"]))
            batch = {"start": 0, "end": 3, "batch_size": 1, "seq_len": 4}
            await raw.say(MessageType.FORWARD, {"hidden_states": torch.zeros(1, 4, HIDDEN)}, target=nobody, **batch)
            assert (await raw.answer()).header["pushed"] is False
        assert len(said) == 1
        assert {code for code, _ in said} == {"unreachable"}
        # One that is a server is dialled where it says that it is: this one, itself, which refuses for another reason.
        known = {"peer_id": server.peer_id, "addrs": [f"/ip4/127.0.0.1/tcp/{port}"], "token": "0" * 32}
        await raw.say(MessageType.LINK, session=session, epoch=9, successor=known | {"session": "0" * 32})
        assert await raw.error() == "session_lost"
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_too_many_requests_at_once(raw: RawPeer) -> None:
    codes = []
    header = {"start": 0, "end": 3, "batch_size": 1, "seq_len": 512}
    for _ in range(200):
        await raw.say(MessageType.FORWARD, {"hidden_states": torch.zeros(1, 512, HIDDEN)}, **header)
    for _ in range(200):
        message = await raw.answer()
        codes.append(message.header["code"] if message.type is MessageType.ERROR else None)
    assert set(codes) <= {None, "overloaded"}
    assert None in codes


async def test_a_stream_that_falls_silent_in_the_midst_of_a_message(all_peers: tuple[RawPeers, RawPeer]) -> None:
    """While the tests above ran."""
    _, silent = all_peers
    await assert_ended(silent)
