"""Hostile clients with sessions on a server, and what their steps may look up, hold and wait for."""

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from hostile import (
    ALL,
    HIDDEN,
    HONEST,
    MALLORY,
    OTHER,
    SERVER,
    SESSION,
    HonestClient,
    answer,
    ask,
    dials,
    error_code,
    hang_up,
    held_bytes,
    hidden_states,
    load_blocks,
    open_header,
    opened,
    request_header,
    result,
    send,
    serving,
    step_header,
    until,
)
from tests.numerics.tiny_models import save_tiny
from torch import Tensor

from swarmllm.errors import ServerOutOfMemoryError
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire.compression import THREAD_BYTES, compress
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.server.device.scheduler import Priority
from swarmllm.server.peers import peer_limits
from swarmllm.server.sessions import session as session_module
from swarmllm.server.sessions.kv_cache import MESSAGE_BYTES
from swarmllm.server.streams.input_checks import InputChecks


@pytest.fixture
def blocks(two_blocks: BlockSpan) -> BlockSpan:
    return two_blocks


# ---------------------------------------------------------------------- sessions of others


async def test_someone_elses_session(blocks: BlockSpan) -> None:
    """A peer with a session's id and without its token can do nothing. The answers don't tell whether it exists."""
    async with serving(blocks) as server:
        owner = await opened(server, peer_id=HONEST)
        thief = await server.connect(MALLORY)
        inputs = hidden_states(blocks)
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


async def test_the_token_gives_no_more_than_a_predecessor_needs(blocks: BlockSpan) -> None:
    """An attached peer may send steps, but can't link or replay the session."""
    async with serving(blocks) as server:
        owner, other = await opened(server, peer_id=HONEST), await server.connect(MALLORY)
        await ask(other, MessageType.ATTACH, {"id": 1, "session": SESSION, "token": SESSION[::-1]})
        link = {"id": 1, "session": SESSION, "epoch": 9, "successor": None}
        assert error_code(await ask(other, MessageType.LINK, link)) == "session_lost"
        inputs = hidden_states(blocks)
        await send(other, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs)
        assert result(await answer(owner)).shape == inputs.shape  # the owner gets what comes out
        await hang_up(owner)
        await hang_up(other)


# ---------------------------------------------------------------------- how many and how long


async def test_session_flood(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer has so many sessions and no more, over all its streams; they are free again when it has gone."""
    monkeypatch.setattr(session_module, "MAX_SESSIONS_PER_PEER", 5)
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


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gptj"])
async def test_texts_longer_than_the_table(models: dict[str, BlockSpan], kind: str) -> None:
    """A session leases no more than its model has positions for, and a step or batch beyond them is refused."""
    async with serving(models[kind], cache_tokens=2 * POSITIONS) as server:
        stream = await opened(server, max_length=1 << 20)
        (session,) = server.sessions
        assert session.runner.size.max_length == POSITIONS
        long = hidden_states(models[kind], POSITIONS + 1)
        assert error_code(await step(stream, 0, long)) == "length_exceeded"
        result(await step(stream, 0, long[:, :POSITIONS], epoch=1))
        assert error_code(await step(stream, POSITIONS, long[:, :1], epoch=1)) == "length_exceeded"
        await hang_up(stream)


async def test_wrong_positions(blocks: BlockSpan) -> None:
    """Behind the end: lost; beyond the lease: too long; both leave the session as it was."""
    async with serving(blocks) as server:
        stream = await opened(server)
        for position, length, code in (
            (1, 1, "session_lost"),
            (0, 33, "length_exceeded"),
            (1 << 24, 1, "session_lost"),
        ):
            inputs = hidden_states(blocks, length)
            header = step_header(SESSION, position, inputs, epoch=position + length, ones_mask=False)
            assert error_code(await ask(stream, MessageType.STEP, header, hidden_states=inputs)) == code
        inputs = hidden_states(blocks, 4)
        header = step_header(SESSION, 0, inputs, epoch=1 << 25)
        first = result(await ask(stream, MessageType.STEP, header, hidden_states=inputs))
        # A replay of less than the cache, then a step after what was replayed no longer: a hole in what is kept.
        replay = {"id": 1, "session": SESSION, "epoch": 1 << 25, "length": 2, "replay_hops": 1}
        assert result(await ask(stream, MessageType.REPLAY, replay)).shape == first[:, :2].shape
        one = hidden_states(blocks, 1)
        header = step_header(SESSION, 4, one, epoch=1 << 25)
        assert error_code(await ask(stream, MessageType.STEP, header, hidden_states=one)) == "session_lost"
        await hang_up(stream)


# ---------------------------------------------------------------------- tensors of steps

POSITIONS = 256
"""Positions of the tiny models."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BlockSpan]:
    torch.set_num_threads(1)
    found: dict[str, BlockSpan] = {}
    for kind in ("llama", "gpt2", "opt", "gptj", "xglm"):
        directory = tmp_path_factory.mktemp(kind)
        save_tiny(kind, directory)
        found[kind] = load_blocks(directory, ALL)
    return found


async def step(stream: FrameStream, position: int, inputs: Tensor, **extra: Any) -> Message:
    header = step_header(
        SESSION, position, inputs, ones_mask="attention_mask" not in extra, epoch=extra.pop("epoch", 0)
    )
    return await ask(stream, MessageType.STEP, header, hidden_states=inputs, **extra)


@pytest.mark.parametrize("shape", [(1, 17), (1, 18), (1, 19), (1, 21), (1, 1, 17, 18), (1, 1, 17, 19), (1, 1, 1, 20)])
async def test_narrow_mask(blocks: BlockSpan, shape: tuple[int, ...]) -> None:
    """A prompt's step can't be cut where its mask has another width than the text: so much would run at once."""
    async with serving(blocks) as server:
        stream = await opened(server)
        prompt = hidden_states(blocks, 17)
        result(await step(stream, 0, prompt[:, :3]))
        mask = torch.ones(shape, dtype=torch.int64)
        refused = await step(stream, 3, prompt, attention_mask=mask)
        assert error_code(refused) == "remote_protocol"
        assert "attention_mask" in refused.header["message"]
        batch = await ask(
            stream, MessageType.FORWARD, request_header(prompt), hidden_states=prompt, attention_mask=mask
        )
        assert (batch.type is MessageType.ERROR) == (shape != (1, 17))
        result(await step(stream, 3, prompt, attention_mask=torch.ones(1, 20, dtype=torch.int64)))
        await hang_up(stream)


@pytest.mark.parametrize("value", [-1, 2, 1 << 40])
async def test_masks_that_are_added_up(models: dict[str, BlockSpan], value: int) -> None:
    """OPT counts positions by its mask: a mask of twos goes beyond its table within half of it."""
    async with serving(models["opt"]) as server:
        stream = await opened(server)
        inputs = hidden_states(models["opt"], 5)
        for dtype in (torch.int64, torch.float64):
            mask = torch.ones(1, 5, dtype=dtype)
            mask[0, 2] = value
            assert error_code(await step(stream, 0, inputs, attention_mask=mask)) == "remote_protocol"
        for dtype in (torch.int64, torch.float32, torch.bool):
            mask = torch.tensor([[0, 1, 1, 1, 1]], dtype=dtype)
            result(await step(stream, 0, inputs, attention_mask=mask))
        await hang_up(stream)


@pytest.mark.parametrize(
    ("kind", "lowest", "highest"),
    [("gpt2", 0, POSITIONS - 1), ("opt", -2, POSITIONS - 1), ("gptj", 0, POSITIONS - 1), ("xglm", -2, POSITIONS - 1)],
)
async def test_index_out_of_table(models: dict[str, BlockSpan], kind: str, lowest: int, highest: int) -> None:
    """Positions that the model's table doesn't have are refused, before a GPU would stop for everybody."""
    async with serving(models[kind]) as server:
        stream = await opened(server)
        inputs = hidden_states(models[kind], 2)
        mask = torch.ones(1, 2, dtype=torch.int64)
        for position in (lowest - 1, highest + 1, 1 << 40, -(1 << 40)):
            positions = torch.tensor([[0, position]])
            extra = {"attention_mask": mask, "position_ids": positions}
            refused = await step(stream, 0, inputs, **extra)
            assert error_code(refused) == "remote_protocol"
            assert f"position_ids must lie in [{lowest}, {highest + 1})" in refused.header["message"]
            header = request_header(inputs)
            refused = await ask(stream, MessageType.FORWARD, header, hidden_states=inputs, **extra)
            assert "position_ids" in refused.header["message"]
        for position in (lowest, highest):
            positions = torch.tensor([[0, position]])
            result(await step(stream, 0, inputs, attention_mask=mask, position_ids=positions))
        for token_type in (-1, 128, 1 << 40):
            types = torch.tensor([[0, token_type]])
            refused = await step(stream, 0, inputs, attention_mask=mask, token_type_ids=types)
            assert "token_type_ids must lie in [0, 128)" in refused.header["message"]
        await hang_up(stream)


async def test_ids_outside_the_vocabulary(blocks: BlockSpan) -> None:
    """They are indices, too, for blocks that look something up by them."""
    async with serving(blocks) as server:
        stream = await opened(server)
        inputs = hidden_states(blocks, 2)
        highest = blocks.vocab_size - 1
        for wrong in (-1, highest + 1, 1 << 40):
            ids = torch.tensor([[0, wrong]])
            for refused in (
                await step(stream, 0, inputs, input_ids=ids),
                await ask(stream, MessageType.FORWARD, request_header(inputs), hidden_states=inputs, input_ids=ids),
            ):
                assert error_code(refused) == "remote_protocol"
                assert f"input_ids must lie in [0, {highest + 1})" in refused.header["message"]
        result(await step(stream, 0, inputs, input_ids=torch.tensor([[0, highest]])))
        await hang_up(stream)


async def test_positions_that_nothing_looks_up_are_free(models: dict[str, BlockSpan]) -> None:
    """Rotary models go on beyond the length that they were made for, as they do without a swarm."""
    blocks = models["llama"]
    async with serving(blocks, cache_tokens=2 * POSITIONS) as server:
        stream = await opened(server, max_length=POSITIONS + 10)
        inputs = hidden_states(blocks, POSITIONS + 10)
        mask = torch.ones(1, POSITIONS + 10, dtype=torch.int64)
        positions = torch.arange(len(inputs[0]))[None] + 1000
        result(await step(stream, 0, inputs, attention_mask=mask, position_ids=positions))
        await hang_up(stream)


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
        inputs = hidden_states(blocks)
        header = step_header(SESSION, 0, inputs, ones_mask=False)
        message = await ask(stream, MessageType.STEP, header, hidden_states=inputs, **extra)
        assert error_code(message) == "remote_protocol"
        assert name in message.header["message"]
        batch = request_header(inputs)
        message = await ask(stream, MessageType.FORWARD, batch, hidden_states=inputs, **extra)
        assert error_code(message) == "remote_protocol"
        await hang_up(stream)


# ---------------------------------------------------------------------- steps that wait


@pytest.mark.parametrize("name", ["surprise", "attention_mask"])
async def test_queued_steps(blocks: BlockSpan, name: str) -> None:
    """The first step of a session that leases next to nothing: its bytes are leased, or it is refused."""
    async with serving(blocks) as server:
        stream = await opened(server, max_length=1)
        leased = server.budget.leased_bytes
        inputs = hidden_states(blocks, 1)
        ballast = torch.ones(1, server.budget.capacity_bytes // 8, 1, 1, dtype=torch.int64)
        message = await step(stream, 0, inputs, **{name: ballast})
        assert error_code(message) == "cache_full"
        assert server.budget.leased_bytes == leased
        assert not held_bytes(server)
        # What there is room for may wait, and counts as long as it does.
        proceed = threading.Event()
        busy = asyncio.create_task(server.device_thread.run_call(proceed.wait, Priority.DECODE))
        small = {name: torch.ones(1, 2048, 1, 1, dtype=torch.int64)}
        header = step_header(SESSION, 0, inputs, ones_mask=name == "surprise")
        await send(stream, MessageType.STEP, header, hidden_states=inputs, **small)
        async with asyncio.timeout(120):
            while server.device_thread.num_calls < 2:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)
        assert server.budget.leased_bytes > leased + 8 * 2048 - 1024
        assert held_bytes(server, MALLORY) > 8 * 2048
        proceed.set()
        await busy
        await stream.receive()
        await hang_up(stream)
        await server.ended(stream)
        assert server.budget.leased_bytes == 0
        assert not held_bytes(server)


async def test_queued_steps_are_the_peers_share(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions of one peer together have no more waiting than the peer may; another peer isn't concerned."""
    inputs = hidden_states(blocks, 16)
    monkeypatch.setattr(peer_limits, "MAX_BYTES_PER_PEER", 3 * inputs.nbytes)
    async with serving(blocks) as server:
        proceed = threading.Event()
        busy = asyncio.create_task(server.device_thread.run_call(proceed.wait, Priority.DECODE))
        streams = [await opened(server, f"{number:032x}") for number in range(4)]
        for number, stream in enumerate(streams):
            await send(stream, MessageType.STEP, step_header(f"{number:032x}", 0, inputs), hidden_states=inputs)
        refused = await streams[-1].receive()
        assert error_code(refused) == "overloaded"
        honest = HonestClient(server)
        await honest.start()
        proceed.set()
        await busy
        await honest.step()
        await honest.stop()
        for stream in streams:
            await hang_up(stream)
            await server.ended(stream)
        assert server.budget.leased_bytes == 0
        assert not held_bytes(server)


async def test_steps_that_wait_take_no_more_than_the_session_is_worth(blocks: BlockSpan) -> None:
    """A client that sends one large step after the other and reads no answer is refused, and memory stays bounded."""
    async with serving(blocks) as server:
        stream = await opened(server)
        (session,) = server.sessions
        proceed = threading.Event()
        busy = asyncio.create_task(server.device_thread.run_call(proceed.wait, Priority.DECODE))
        prompt = hidden_states(blocks, 32)
        await send(stream, MessageType.STEP, step_header(SESSION, 0, prompt), hidden_states=prompt)
        await until(lambda: server.device_thread.num_calls == 2)  # the first one has its turn next
        for _ in range(5):
            await send(stream, MessageType.STEP, step_header(SESSION, 0, prompt), hidden_states=prompt)
        codes = [error_code(await answer(stream)) for _ in range(2)]
        assert codes == ["overloaded"] * 2
        waiting = 4 * (prompt.nbytes + MESSAGE_BYTES)  # the one that runs included
        assert session.waiting_room.num_bytes == held_bytes(server, MALLORY) == waiting
        proceed.set()
        await busy
        for _ in range(4):
            assert result(await answer(stream)).shape == prompt.shape
        await until(lambda: session.waiting_room.num_bytes == 0)
        assert not held_bytes(server)
        await hang_up(stream)


async def test_compressed_tensors_are_decompressed_off_the_loop(
    blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large prompt, and what comes behind it on its stream waits for it."""
    threads: list[str] = []
    read = InputChecks.read

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(*arguments)

    monkeypatch.setattr(InputChecks, "read", watched)
    length = THREAD_BYTES // (4 * blocks.embedding_dim)
    async with serving(blocks, cache_tokens=2 * length) as server:
        stream = await opened(server, max_length=length + 1)
        large, small = hidden_states(blocks, length), hidden_states(blocks, 1)
        for position, tensor in ((0, compress(large)), (length, small)):
            header = step_header(SESSION, position, large if position == 0 else small)
            await send(stream, MessageType.STEP, header, hidden_states=tensor)
        assert result(await stream.receive()).shape == large.shape
        assert result(await stream.receive()).shape == small.shape
        assert [name == threading.main_thread().name for name in threads] == [False, True]
        await hang_up(stream)


async def test_a_step_that_comes_when_the_last_one_is_answered_is_let_in(
    blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are kept after the answer, which an honest client doesn't wait for, whatever type it sends."""
    async with serving(blocks) as server:
        stream = await opened(server, max_length=30)
        (session,) = server.sessions
        answered = asyncio.Event()
        say = session.owner.send

        async def slowly(*arguments: Any) -> None:
            await say(*arguments)
            await answered.wait()

        monkeypatch.setattr(session.owner, "send", slowly)
        inputs = hidden_states(blocks, 30).double()  # twice as wide as the server's
        result(await step(stream, 0, inputs))
        for _ in range(2):  # one more waits than has been answered
            await send(stream, MessageType.STEP, step_header(SESSION, 0, inputs[:, :15]), hidden_states=inputs[:, :15])
        await stream.ping()  # by then they have come
        await stream.ping()
        answered.set()
        for _ in range(2):
            assert result(await stream.receive()).shape == (1, 15, blocks.embedding_dim)
        await hang_up(stream)


# ---------------------------------------------------------------------- memory


async def test_a_session_that_can_not_be_made_leases_nothing(
    blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: Any, **__: Any) -> Any:
        raise MemoryError

    async with serving(blocks) as server:
        with monkeypatch.context() as patch:
            patch.setattr(session_module, "Session", lacks)
            stream = await server.connect(MALLORY)
            refused = await ask(stream, MessageType.OPEN, open_header(SESSION, ALL))
            assert error_code(refused) == ServerOutOfMemoryError.code
        assert server.budget.leased_bytes == 0
        assert (await ask(stream, MessageType.OPEN, open_header(SESSION, ALL))).type is MessageType.RESULT
        await hang_up(stream)


@pytest.mark.parametrize("fails", ["select", "ones", "predecessor"])
async def test_rows_are_as_many_as_are_leased(blocks: BlockSpan, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that would have changed the rows and failed leaves a cache of its old rows with the old lease, or none."""
    async with serving(blocks) as server:
        stream = await opened(server, batch_size=8, max_length=20)
        (session,) = server.sessions
        eight, one = torch.randn(8, 17, blocks.embedding_dim), hidden_states(blocks, 17)
        result(await step(stream, 0, eight))
        whole = server.budget.leased_bytes

        def lacks(*_: Any, **__: Any) -> Any:
            raise MemoryError

        with monkeypatch.context() as patch:
            if fails == "select":
                patch.setattr(type(session.runner.cache), "select_batch", lacks)
                header = step_header(SESSION, 17, one[:, :1], rows=1, batch_index=[3])
                message = await ask(stream, MessageType.STEP, header, hidden_states=one[:, :1])
            elif fails == "ones":
                patch.setattr(torch, "ones", lacks)
                message = await step(stream, 0, one)
            else:
                predecessor = await server.connect(HONEST)
                await ask(predecessor, MessageType.ATTACH, {"id": 1, "session": SESSION, "token": SESSION[::-1]})
                header = step_header(SESSION, 0, one)
                await send(predecessor, MessageType.STEP, header, hidden_states=one * float("nan"))
                message = await stream.receive()
                await hang_up(predecessor)
        assert message.type is MessageType.ERROR
        assert server.budget.leased_bytes == whole
        if session.runner.cache.position:
            rows = next(tensor.shape[0] for _, tensor in session.runner.cache._tensors())
            assert rows == session.runner.batch_size == 8
            result(await step(stream, 17, eight[:, :1], epoch=1))
        else:
            assert fails == "select"
            result(await step(stream, 0, one, epoch=1))
        await hang_up(stream)


async def test_nothing_is_kept_of_a_session_that_has_ended(blocks: BlockSpan) -> None:
    """Its cache and the hidden states that were kept for replays are gone with its stream."""
    async with serving(blocks) as server:
        stream = await opened(server)
        inputs = hidden_states(blocks, 8)
        result(await ask(stream, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs))
        (session,) = server.sessions
        kept = [weakref.ref(session), weakref.ref(session.runner.cache), weakref.ref(session.runner.log)]
        assert session.runner.log.num_bytes
        del session
        await hang_up(stream)
        await server.ended(stream)
        await until(lambda: gc.collect() >= 0 and [reference() for reference in kept] == [None] * 3)


# ---------------------------------------------------------------------- links


async def test_named_successors_are_forgotten(blocks: BlockSpan) -> None:
    """LINK lets a client name any peer; the server remembers none of those that can't be reached."""
    async with serving(blocks) as server:
        stream = await opened(server)
        for number in range(50):
            successor = {"peer_id": f"12D3{number:048d}", "session": OTHER, "token": OTHER}
            header = {"id": 1, "session": SESSION, "epoch": 0, "successor": successor}
            assert error_code(await ask(stream, MessageType.LINK, header)) == "unreachable"
        assert not dials(server)
        await hang_up(stream)


async def test_rows_that_do_not_exist(blocks: BlockSpan) -> None:
    async with serving(blocks) as server:
        stream = await opened(server)
        inputs = hidden_states(blocks, 4)
        result(await step(stream, 0, inputs))
        for epoch, fields, code in (
            (0, {"rows": 1, "batch_index": [7]}, "remote_protocol"),
            (1, {"rows": 5, "batch_index": [0]}, "session_lost"),
        ):
            header = step_header(SESSION, 4, inputs, epoch=epoch, **fields)
            assert error_code(await ask(stream, MessageType.STEP, header, hidden_states=inputs)) == code
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
        inputs = hidden_states(blocks)
        refused = await ask(stream, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs)
        assert error_code(refused) == "remote_protocol"
        assert "ascending order" in refused.header["message"]
        assert server.device_thread.num_calls == 0
        await hang_up(stream)


async def test_nan_from_a_predecessor_is_its_own_fault(blocks: BlockSpan) -> None:
    """A server's outputs are checked by its successor, which names it to the client."""
    async with serving(blocks) as server:
        owner, predecessor = await opened(server, peer_id=HONEST), await server.connect(MALLORY)
        await ask(predecessor, MessageType.ATTACH, {"id": 1, "session": SESSION, "token": SESSION[::-1]})
        inputs = hidden_states(blocks) * float("nan")
        await send(predecessor, MessageType.STEP, step_header(SESSION, 0, inputs), hidden_states=inputs)
        message = await answer(owner)
        assert error_code(message) == "corrupt_activations"
        assert message.header["peer_id"] == MALLORY
        await hang_up(owner)
        await hang_up(predecessor)
