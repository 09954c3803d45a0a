"""Hostile clients with sessionless requests: forwards, backwards, adapters, and what servers push to each other."""

import asyncio
from typing import Any

import pytest
import torch
from hostile import (
    ALL,
    FIRST,
    HIDDEN,
    HONEST,
    MALLORY,
    OTHER,
    SECOND,
    SERVER,
    SESSION,
    Server,
    answer,
    ask,
    dials,
    error_code,
    hang_up,
    held_bytes,
    hidden_states,
    num_awaited,
    num_early,
    open_header,
    opened,
    request_header,
    result,
    send,
    serving,
    step_header,
    until,
)

from swarmllm.data_structures import Span
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire import frames
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.network.wire.tensor_codec import encode_tensors
from swarmllm.server.peers import peer_limits, pushes

LENGTH = 4
TOKEN = SESSION
NOBODY = "12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"


@pytest.fixture
def blocks(two_blocks: BlockSpan) -> BlockSpan:
    return two_blocks


def request(span: Span, number: int = 1, *, source: str = "", target: str = "", **fields: Any) -> dict[str, Any]:
    header = {"id": number, "start": span.start, "end": span.end, "batch_size": 1, "seq_len": LENGTH, "tensors": ()}
    if source:
        header["source"] = {"peer_id": source, "token": TOKEN}
    if target:
        header["target"] = {"peer_id": target, "token": TOKEN}
    return header | fields


async def push(stream: FrameStream, tensor: torch.Tensor | None, *, token: str = TOKEN) -> None:
    await send(stream, MessageType.PUSH, {"token": token}, **({} if tensor is None else {"hidden_states": tensor}))


async def waiting(server: Server, source: str = MALLORY, **fields: Any) -> FrameStream:
    """A client whose request waits for what `source` pushes."""
    stream = await server.connect(HONEST)
    await send(stream, MessageType.FORWARD, request(SECOND, source=source, **fields))
    await until(lambda: num_awaited(server))
    return stream


async def assert_nothing_is_left(server: Server) -> None:
    await until(lambda: not (held_bytes(server) or num_awaited(server) or num_early(server)))


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("early", [False, True])
async def test_what_is_passed_on(blocks: BlockSpan, lean: bool, early: bool) -> None:
    """The server passes on to itself; in which order the two requests come is the same."""
    inputs = hidden_states(blocks, LENGTH)
    async with serving(blocks) as server:
        one, other = [await server.connect(HONEST) for _ in range(2)]
        expected = result(await ask(one, MessageType.FORWARD, request(ALL), hidden_states=inputs))
        if not early:
            await send(other, MessageType.FORWARD, request(SECOND, source=SERVER))
        first = await ask(one, MessageType.FORWARD, request(FIRST, target=SERVER, lean=lean), hidden_states=inputs)
        assert first.header["pushed"]
        assert bool(first.header["tensors"]) is not lean
        if early:
            await until(lambda: num_early(server))
            await send(other, MessageType.FORWARD, request(SECOND, source=SERVER))
        assert torch.equal(result(await answer(other)), expected)
        await assert_nothing_is_left(server)
        await hang_up(one)
        await hang_up(other)


async def test_a_stranger_pushes_nothing(blocks: BlockSpan) -> None:
    """Neither another peer who knows the secret, nor the source with another secret, nor the client itself."""
    inputs = hidden_states(blocks, LENGTH)
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
async def test_wrong_tensors_are_the_fault_of_the_server_that_pushed_them(
    blocks: BlockSpan, tensors: dict[str, torch.Tensor]
) -> None:
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
        await push(mallory, hidden_states(blocks, LENGTH))
        header = request(SECOND, source=MALLORY)
        assert error_code(
            await ask(client, MessageType.FORWARD, header, hidden_states=hidden_states(blocks, LENGTH))
        ) == ("remote_protocol")
        await send(client, MessageType.FORWARD, header)
        await until(lambda: num_awaited(server))
        assert error_code(await ask(client, MessageType.FORWARD, header | {"id": 2})) == "remote_protocol"
        await push(mallory, hidden_states(blocks, LENGTH))
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
            await push(mallory, hidden_states(blocks, LENGTH), token=f"{number:032x}")
        assert [error_code(await answer(mallory)) for _ in range(3)] == ["overloaded"] * 3
        await push(other, hidden_states(blocks, LENGTH))
        await until(lambda: num_early(server) == 6)
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
    inputs = hidden_states(blocks, LENGTH)
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
            message: Message = await ask(
                client, MessageType.FORWARD, header, hidden_states=hidden_states(blocks, LENGTH)
            )
            assert result(message).shape == (1, LENGTH, HIDDEN)
            assert not message.header["pushed"]
        assert not dials(server)
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
        await send(
            client, MessageType.FORWARD, request(FIRST, target=SERVER), hidden_states=hidden_states(blocks, LENGTH)
        )
        link = await begun.get()
        await hang_up(client)
        await server.ended(client)
        link.resume_writing()
        await until(lambda: num_early(server) == 1)
        assert len(server.links) == 1
        server.serving.pushes.clear()


async def test_request_flood_waits_with_the_peer(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests above a peer's share aren't even read until there is room."""
    batch = hidden_states(blocks, 64)
    monkeypatch.setattr(peer_limits, "MAX_BYTES_PER_PEER", 3 * batch.nbytes)
    async with serving(blocks) as server:
        held: list[int] = []
        taken = server.access.limits
        take = taken.take

        async def watched(peer_id: str, num_bytes: int) -> None:
            await take(peer_id, num_bytes)
            held.append(held_bytes(server, peer_id))

        monkeypatch.setattr(taken, "take", watched)
        stream = await server.connect(MALLORY)
        header = request_header(batch)
        for _ in range(30):
            await send(stream, MessageType.FORWARD, header, hidden_states=batch)
        for _ in range(30):
            assert result(await answer(stream)).shape == batch.shape
        assert max(held) == 3 * batch.nbytes
        await hang_up(stream)
        await server.ended(stream)
        assert not held_bytes(server)


# ---------------------------------------------------------------------- headers, shapes and values


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"start": 0, "end": 2, "batch_size": 1, "seq_len": -4},
        {"start": 0, "end": "2", "batch_size": 1, "seq_len": 4},
        {"start": 0, "end": 2, "batch_size": 1 << 40, "seq_len": 4},
        {"start": 0, "end": 2, "batch_size": 1, "seq_len": 4, "tensors": [["hidden_states", "float32", [1, 4], 7]]},
        {"start": 0, "end": 2, "batch_size": 1, "seq_len": 4, "tensors": [["hidden_states", "float32", [1 << 40], 0]]},
    ],
)
async def test_malformed_headers(blocks: BlockSpan, header: dict[str, Any]) -> None:
    async with serving(blocks) as server:
        client = await server.connect(MALLORY)
        descriptors, chunks = encode_tensors({"hidden_states": hidden_states(blocks, 4)})
        await client.send(MessageType.FORWARD, {"id": 1, "tensors": descriptors} | header, chunks)
        assert error_code(await answer(client)) == "remote_protocol"
        await hang_up(client)


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
async def test_wrong_shapes_and_types(blocks: BlockSpan, shape: list[int], dtype: torch.dtype) -> None:
    """Hidden states and gradients, without a session and within one."""
    right, wrong = hidden_states(blocks, 4), torch.zeros(shape, dtype=dtype)
    async with serving(blocks) as server:
        client = await opened(server)
        header = request_header(right)
        refused = [
            await ask(client, MessageType.FORWARD, header, hidden_states=wrong),
            await ask(client, MessageType.BACKWARD, header, hidden_states=right, grad_outputs=wrong),
            await ask(client, MessageType.BACKWARD, header, hidden_states=right),
            await ask(client, MessageType.STEP, step_header(SESSION, 0, right), hidden_states=wrong),
        ]
        assert {error_code(message) for message in refused} == {"remote_protocol"}
        await hang_up(client)


async def test_a_backward_needs_a_forward_that_was_kept(blocks: BlockSpan) -> None:
    """Each kept forward is good for one backward."""
    inputs = hidden_states(blocks, 4)
    header, gradients = request_header(inputs), {"grad_outputs": torch.zeros_like(inputs)}
    async with serving(blocks) as server:
        client = await server.connect(MALLORY)
        result(await ask(client, MessageType.FORWARD, header | {"keep": True}, hidden_states=inputs))
        assert (
            error_code(await ask(client, MessageType.BACKWARD, header | {"id": 2, "forward": 1})) == "remote_protocol"
        )
        codes = []
        for number, forward in enumerate((1001, 1, 1), start=3):
            message = await ask(client, MessageType.BACKWARD, header | {"id": number, "forward": forward}, **gradients)
            codes.append(message.header.get("code"))
        assert codes == ["session_lost", None, "session_lost"]
        await hang_up(client)


@pytest.mark.parametrize(("start", "end"), [(0, 3), (2, 8), (1, 1), (2, 1)])
async def test_blocks_that_are_not_served(blocks: BlockSpan, start: int, end: int) -> None:
    async with serving(blocks) as server:
        client = await server.connect(MALLORY)
        inputs = hidden_states(blocks, 4)
        header = request_header(inputs) | {"start": start, "end": end}
        asked = [
            await ask(client, MessageType.FORWARD, header, hidden_states=inputs),
            await ask(client, MessageType.OPEN, open_header(SESSION, ALL, start=start, end=end)),
        ]
        assert [error_code(message) for message in asked] == ["blocks_not_served"] * 2
        await hang_up(client)


async def test_sizes_that_would_fill_the_memory(blocks: BlockSpan) -> None:
    """Masks are made from a number in the header, and sessions lease what it says."""
    async with serving(blocks) as server:
        client = await opened(server)
        inputs = hidden_states(blocks, 4)
        step = step_header(SESSION, 1 << 24, inputs)
        assert error_code(await ask(client, MessageType.STEP, step, hidden_states=inputs)) == "session_lost"
        many = request_header(inputs) | {"batch_size": 1 << 16, "seq_len": 1 << 24, "ones_mask": True, "tensors": ()}
        assert error_code(await ask(client, MessageType.FORWARD, many)) == "overloaded"
        large = open_header(OTHER, ALL, max_length=1 << 24, batch_size=1 << 16)
        assert error_code(await ask(client, MessageType.OPEN, large)) == "session_too_large"
        rows = torch.zeros(1 << 12, 4, HIDDEN)
        step = step_header(SESSION, 0, rows, epoch=1)
        assert error_code(await ask(client, MessageType.STEP, step, hidden_states=rows)) == "session_too_large"
        await hang_up(client)


# ---------------------------------------------------------------------- adapters


def prefix(shape: list[int], **fields: Any) -> list[dict[str, Any]]:
    """Patches of both blocks, which have 2 heads of keys and values of 4 numbers."""
    return [{"block": block, "path": "", "kind": "prefix", "shapes": [shape] * 2} | fields for block in range(2)]


@pytest.mark.parametrize(
    "patches",
    [
        prefix([2, 0, 4]),
        prefix([2, 1 << 24, 4]),
        prefix([2, 4, 4], shapes=[]),
        prefix([2, 4, 4], shapes=[[2, 4, 4], [2, 5, 4]]),
        prefix([2, 5, 4])[:1] + prefix([2, 4, 4])[1:],
        prefix([2, 4, 4]),  # with another number of values
    ],
    ids=str,
)
async def test_wrong_prefixes(blocks: BlockSpan, patches: list[dict[str, Any]]) -> None:
    """`test_prefix_tuning` has other patches that don't fit; this is what a server says of them."""
    right = 2 * 2 * 2 * 4 * 4
    async with serving(blocks) as server:
        client = await server.connect(MALLORY)
        for values in (torch.zeros(7), torch.full((right,), torch.nan), torch.zeros(right, dtype=torch.int64)):
            message = await ask(client, MessageType.ADAPTER, {"id": 1, "handle": 1, "patches": patches}, values=values)
            assert error_code(message) == "remote_protocol"
        message = await ask(client, MessageType.OPEN, open_header(SESSION, ALL, adapter=1))
        assert error_code(message) == "blocks_not_served", "it has not been kept"
        await hang_up(client)


async def test_a_prefix_counts_with_every_row(blocks: BlockSpan) -> None:
    async with serving(blocks, cache_tokens=1 << 14, max_batch_tokens=1 << 11) as server:
        client = await server.connect(MALLORY)
        values = torch.zeros(2 * 2 * 2 * 1000 * 4)
        adapter = {"id": 1, "handle": 1, "patches": prefix([2, 1000, 4])}
        assert (await ask(client, MessageType.ADAPTER, adapter, values=values)).type is MessageType.RESULT
        rows = torch.zeros(64, 4, HIDDEN)
        for fields, code in (({}, None), ({"adapter": 1}, "overloaded")):
            message = await ask(client, MessageType.FORWARD, request_header(rows) | fields, hidden_states=rows)
            assert message.header.get("code") == code
        for number, (adapter_idx, code) in enumerate(((1, "session_too_large"), (None, None))):
            header = open_header(f"{number:032x}", ALL, batch_size=64, adapter=adapter_idx)
            assert (await ask(client, MessageType.OPEN, header)).header.get("code") == code
        half = {"id": 1, "handle": 2, "patches": prefix([2, 4, 4])[:1]}
        assert (await ask(client, MessageType.ADAPTER, half, values=torch.zeros(64))).type is MessageType.RESULT
        one = hidden_states(blocks, 4)
        message = await ask(client, MessageType.FORWARD, request_header(one) | {"adapter": 2}, hidden_states=one)
        assert error_code(message) == "configuration", "a block lacks it"
        await hang_up(client)
