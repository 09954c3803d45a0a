"""What servers pass on to each other for batches is taken from whom the request names, and from nobody else."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hostile import (
    HONEST,
    MALLORY,
    SERVER,
    Server,
    answer,
    ask,
    error_code,
    hang_up,
    load_blocks,
    result,
    send,
    serving,
)
from swarm_models import save_llama

from swarmllm.data_structures import Span
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire import frames
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.server.peers import peer_limits, pushes

ALL, FIRST, SECOND = Span(0, 2), Span(0, 1), Span(1, 2)
HIDDEN, LENGTH = 16, 4
TOKEN, OTHER = "a" * 32, "b" * 32
NOBODY = "12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """Two blocks of three."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("pushes") / "checkpoint"
    return load_blocks(save_llama(directory, num_blocks=3, hidden_size=HIDDEN, intermediate_size=HIDDEN), ALL)


def request(span: Span, number: int = 1, *, source: str = "", target: str = "", **fields: Any) -> dict[str, Any]:
    header = {"id": number, "start": span.start, "end": span.end, "batch_size": 1, "seq_len": LENGTH, "tensors": ()}
    if source:
        header["source"] = {"peer_id": source, "token": TOKEN}
    if target:
        header["target"] = {"peer_id": target, "token": TOKEN}
    return header | fields


def hidden_states() -> torch.Tensor:
    return torch.randn(1, LENGTH, HIDDEN)


async def push(stream: FrameStream, tensor: torch.Tensor | None, *, token: str = TOKEN) -> None:
    await send(stream, MessageType.PUSH, {"token": token}, **({} if tensor is None else {"hidden_states": tensor}))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - nobody tells of these states
            await asyncio.sleep(0.005)


async def waiting(server: Server, source: str = MALLORY, **fields: Any) -> FrameStream:
    """A client whose request waits for what `source` pushes."""
    stream = await server.connect(HONEST)
    await send(stream, MessageType.FORWARD, request(SECOND, source=source, **fields))
    await until(lambda: server.serving.pushes._waiting)
    return stream


async def assert_nothing_is_left(server: Server) -> None:
    kept = server.serving.pushes
    await until(lambda: not (server.access.limits._bytes or kept._waiting or kept._early))


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("early", [False, True])
async def test_what_is_passed_on(blocks: BlockSpan, lean: bool, early: bool) -> None:
    """The server passes on to itself; in which order the two requests come is the same."""
    inputs = hidden_states()
    async with serving(blocks) as server:
        one, other = [await server.connect(HONEST) for _ in range(2)]
        expected = result(await ask(one, MessageType.FORWARD, request(ALL), hidden_states=inputs))
        if not early:
            await send(other, MessageType.FORWARD, request(SECOND, source=SERVER))
        first = await ask(one, MessageType.FORWARD, request(FIRST, target=SERVER, lean=lean), hidden_states=inputs)
        assert first.header["pushed"]
        assert bool(first.header["tensors"]) is not lean
        if early:
            await until(lambda: server.serving.pushes._early)
            await send(other, MessageType.FORWARD, request(SECOND, source=SERVER))
        assert torch.equal(result(await answer(other)), expected)
        await assert_nothing_is_left(server)
        await hang_up(one)
        await hang_up(other)


async def test_a_stranger_pushes_nothing(blocks: BlockSpan) -> None:
    """Neither another peer who knows the secret, nor the source with another secret, nor the client itself."""
    inputs = hidden_states()
    async with serving(blocks) as server:
        client = await waiting(server, source=SERVER)
        source, stranger = await server.connect(SERVER), await server.connect(MALLORY)
        await push(stranger, 5 * inputs)
        await push(stranger, None)
        await push(source, 6 * inputs, token=OTHER)
        await push(client, 7 * inputs)
        await push(source, inputs)
        got = result(await answer(client))
        expected = result(await ask(client, MessageType.FORWARD, request(SECOND), hidden_states=inputs))
        assert torch.equal(got, expected)
        for stream in (client, source, stranger):
            await hang_up(stream)


@pytest.mark.parametrize(
    "tensors",
    [
        {"hidden_states": torch.zeros(1, LENGTH + 1, HIDDEN)},
        {"hidden_states": torch.zeros(100_000, LENGTH, HIDDEN)},
        {"hidden_states": torch.zeros(1, LENGTH, HIDDEN, dtype=torch.int64)},
        {"grad_outputs": torch.zeros(1, LENGTH, HIDDEN)},
        {"hidden_states": torch.zeros(1, LENGTH, HIDDEN), "input_ids": torch.zeros(1, LENGTH, dtype=torch.int64)},
        {"hidden_states": torch.full((1, LENGTH, HIDDEN), torch.nan)},
    ],
)
async def test_wrong_tensors_are_the_fault_of_who_pushed(blocks: BlockSpan, tensors: dict[str, torch.Tensor]) -> None:
    async with serving(blocks) as server:
        client, mallory = await waiting(server), await server.connect(MALLORY)
        await send(mallory, MessageType.PUSH, {"token": TOKEN}, **tensors)
        message = await answer(client)
        assert error_code(message) == "corrupt_activations"
        assert message.header["peer_id"] == MALLORY
        await assert_nothing_is_left(server)
        await hang_up(client)
        await hang_up(mallory)


async def test_descriptors_that_lie(blocks: BlockSpan) -> None:
    async with serving(blocks) as server:
        client, mallory = await waiting(server), await server.connect(MALLORY)
        descriptor = ("hidden_states", "float32", (1, LENGTH, HIDDEN), 7)
        await mallory.send(MessageType.PUSH, {"token": TOKEN, "tensors": (descriptor,)})
        assert error_code(await answer(client)) == "corrupt_activations"
        assert error_code(await ask(mallory, MessageType.PUSH, {"token": "short"})) == "remote_protocol"
        await hang_up(client)
        await hang_up(mallory)


async def test_tensors_do_not_come_twice(blocks: BlockSpan) -> None:
    """Once with the request and once pushed; and two requests can't wait for the same."""
    async with serving(blocks) as server:
        mallory, client = await server.connect(MALLORY), await server.connect(HONEST)
        await push(mallory, hidden_states())
        header = request(SECOND, source=MALLORY)
        assert error_code(await ask(client, MessageType.FORWARD, header, hidden_states=hidden_states())) == (
            "remote_protocol"
        )
        await send(client, MessageType.FORWARD, header)
        await until(lambda: server.serving.pushes._waiting)
        assert error_code(await ask(client, MessageType.FORWARD, header | {"id": 2})) == "remote_protocol"
        await push(mallory, hidden_states())
        result(await answer(client))
        await hang_up(client)
        await hang_up(mallory)


async def test_flood_of_what_nobody_waits_for(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of one peer are kept, for some time; others have their own share."""
    monkeypatch.setattr(pushes, "MAX_EARLY_PER_PEER", 5)
    monkeypatch.setattr(pushes, "EARLY_S", 0.5)
    async with serving(blocks) as server:
        mallory, other = await server.connect(MALLORY), await server.connect(SERVER)
        for number in range(8):
            await push(mallory, hidden_states(), token=f"{number:032x}")
        assert [error_code(await answer(mallory)) for _ in range(3)] == ["overloaded"] * 3
        await push(other, hidden_states())
        await until(lambda: (SERVER, TOKEN) in server.serving.pushes._early)
        await assert_nothing_is_left(server)
        await hang_up(mallory)
        await hang_up(other)


async def test_bytes_that_nobody_waits_for(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.zeros(100, LENGTH, HIDDEN)
    room = 2 * (large.nbytes + pushes.EARLY_OVERHEAD_BYTES)
    monkeypatch.setattr(pushes, "MAX_EARLY_BYTES_PER_PEER", room)
    monkeypatch.setattr(pushes, "MAX_EARLY_BYTES", room)
    async with serving(blocks) as server:
        mallory, accomplice = await server.connect(MALLORY), await server.connect(NOBODY)
        for number in range(3):
            await push(mallory, large, token=f"{number:032x}")
        assert error_code(await answer(mallory)) == "overloaded"
        await push(accomplice, large)
        assert error_code(await answer(accomplice)) == "overloaded"
        server.serving.pushes.clear()
        await hang_up(mallory)
        await hang_up(accomplice)


async def test_what_is_pushed_counts_as_the_clients(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = hidden_states()
    async with serving(blocks) as server:
        client, source = await waiting(server), await server.connect(MALLORY)
        monkeypatch.setattr(peer_limits, "MAX_BYTES_PER_PEER", 3 * inputs.nbytes)
        await server.access.limits.take(HONEST, 3 * inputs.nbytes)
        await push(source, inputs)
        assert error_code(await answer(client)) == "session_lost"
        server.access.limits.give_back(HONEST, 3 * inputs.nbytes)
        await assert_nothing_is_left(server)
        await hang_up(client)
        await hang_up(source)


async def test_a_client_that_waits_no_more(blocks: BlockSpan) -> None:
    async with serving(blocks) as server:
        client = await waiting(server)
        await push(client, None)
        assert error_code(await answer(client)) == "session_lost"
        await push(client, None, token=OTHER)  # overtakes its request
        header = request(SECOND, source=MALLORY) | {"source": {"peer_id": MALLORY, "token": OTHER}}
        assert error_code(await ask(client, MessageType.FORWARD, header)) == "session_lost"
        await hang_up(client)
        gone = await waiting(server)
        await hang_up(gone)
        await server.ended(gone)
        await assert_nothing_is_left(server)


async def test_a_request_does_not_wait_for_ever(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "WAIT_S", 0.05)
    async with serving(blocks) as server:
        client = await server.connect(HONEST)
        assert error_code(await ask(client, MessageType.FORWARD, request(SECOND, source=MALLORY))) == "session_lost"
        await hang_up(client)


async def test_nobody_waits_on_a_server_that_leaves(blocks: BlockSpan) -> None:
    async with serving(blocks) as server:
        client = await waiting(server)
        await server.access.retire(1.0)
        assert error_code(await answer(client)) == "blocks_not_served"
        await hang_up(client)


async def test_targets_that_do_not_exist(blocks: BlockSpan) -> None:
    """The client gets what couldn't be passed on, and the server remembers none of them."""
    async with serving(blocks) as server:
        client = await server.connect(HONEST)
        for number in range(20):
            header = request(FIRST, target=f"12D3{number:048d}", lean=True)
            message: Message = await ask(client, MessageType.FORWARD, header, hidden_states=hidden_states())
            assert result(message).shape == (1, LENGTH, HIDDEN)
            assert not message.header["pushed"]
        assert len(server.links) == 0
        assert not server.links._dialling
        await hang_up(client)


async def test_a_client_that_leaves_in_the_midst_of_a_push(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link, which others use as well, stays whole: the message goes on to its end."""
    begun: asyncio.Queue[FrameStream] = asyncio.Queue()
    whole = FrameStream.send

    async def slowly(self: FrameStream, kind: MessageType, *args: Any, **options: Any) -> None:
        if kind is MessageType.PUSH:
            self.pause_writing()
            begun.put_nowait(self)
        await whole(self, kind, *args, **options)

    async with serving(blocks) as server:
        monkeypatch.setattr(frames, "CHUNK_BYTES", 64)
        monkeypatch.setattr(FrameStream, "send", slowly)
        client = await server.connect(HONEST)
        await send(client, MessageType.FORWARD, request(FIRST, target=SERVER), hidden_states=hidden_states())
        link = await begun.get()
        await hang_up(client)
        await server.ended(client)
        link.resume_writing()
        await until(lambda: (SERVER, TOKEN) in server.serving.pushes._early)
        assert len(server.links) == 1
        server.serving.pushes.clear()
