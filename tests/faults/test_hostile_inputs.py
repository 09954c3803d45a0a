"""What a client may have wait, how large, and what its tensors may index: refused before it costs anybody anything."""

import asyncio
import threading
from typing import Any

import pytest
import torch
from hostile import (
    HONEST,
    MALLORY,
    HonestClient,
    Server,
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
from tests.numerics.tiny_models import save_tiny
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import ServerOutOfMemoryError
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire.compression import THREAD_BYTES, compress
from swarmllm.network.wire.frames import SMALL_BYTES
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType
from swarmllm.server.device.scheduler import Priority
from swarmllm.server.peers import peer_limits
from swarmllm.server.sessions import session_table
from swarmllm.server.streams.input_checks import InputChecks

SESSION, OTHER = "a" * 32, "b" * 32
SPAN = Span(0, 2)
POSITIONS = 256
"""Of the tiny models."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BlockSpan]:
    torch.set_num_threads(1)
    found: dict[str, BlockSpan] = {}
    for kind in ("llama", "gpt2", "opt", "gptj", "xglm"):
        directory = tmp_path_factory.mktemp(kind)
        save_tiny(kind, directory)
        found[kind] = load_blocks(directory, SPAN)
    return found


@pytest.fixture
def blocks(models: dict[str, BlockSpan]) -> BlockSpan:
    return models["llama"]


async def opened(server: Server, session: str = SESSION, peer_id: str = MALLORY, **fields: Any) -> FrameStream:
    stream = await server.connect(peer_id)
    message = await ask(stream, MessageType.OPEN, open_header(session, SPAN, **fields))
    assert message.type is MessageType.RESULT, message.header
    return stream


def hidden_states(blocks: BlockSpan, length: int) -> Tensor:
    return torch.randn(1, length, blocks.embedding_dim)


async def step(stream: FrameStream, position: int, inputs: Tensor, **extra: Any) -> Message:
    header = step_header(
        SESSION, position, inputs, ones_mask="attention_mask" not in extra, epoch=extra.pop("epoch", 0)
    )
    return await ask(stream, MessageType.STEP, header, hidden_states=inputs, **extra)


def batch_header(inputs: Tensor) -> dict[str, Any]:
    return {"id": 1, "start": 0, "end": 2, "batch_size": inputs.shape[0], "seq_len": inputs.shape[1]}


# ---------------------------------------------------------------------- what is looked up


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
        batch = await ask(stream, MessageType.FORWARD, batch_header(prompt), hidden_states=prompt, attention_mask=mask)
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
            header = batch_header(inputs)
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
                await ask(stream, MessageType.FORWARD, batch_header(inputs), hidden_states=inputs, input_ids=ids),
            ):
                assert error_code(refused) == "remote_protocol"
                assert f"input_ids must lie in [0, {highest + 1})" in refused.header["message"]
        result(await step(stream, 0, inputs, input_ids=torch.tensor([[0, highest]])))
        await hang_up(stream)


async def test_positions_that_nothing_looks_up_are_free(blocks: BlockSpan) -> None:
    """Rotary models go on beyond the length that they were made for, as they do without a swarm."""
    async with serving(blocks, cache_tokens=2 * POSITIONS) as server:
        stream = await opened(server, max_length=POSITIONS + 10)
        inputs = hidden_states(blocks, POSITIONS + 10)
        mask = torch.ones(1, POSITIONS + 10, dtype=torch.int64)
        positions = torch.arange(len(inputs[0]))[None] + 1000
        result(await step(stream, 0, inputs, attention_mask=mask, position_ids=positions))
        await hang_up(stream)


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


# ---------------------------------------------------------------------- what waits


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
        assert not server.access.limits._bytes
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
        assert server.access.limits._bytes[MALLORY] > 8 * 2048
        proceed.set()
        await busy
        await stream.receive()
        await hang_up(stream)
        await server.ended(stream)
        assert server.budget.leased_bytes == 0
        assert not server.access.limits._bytes


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
        assert not server.access.limits._bytes


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


async def test_strangers_send_nothing_large(blocks: BlockSpan) -> None:
    """Whom an allow-list leaves out may not even have a large message read, but for what servers pass on."""
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


async def test_large_before_the_greeting(blocks: BlockSpan) -> None:
    async with serving(blocks) as server:
        stream = await server.connect(MALLORY, greet=False)
        await send(stream, MessageType.STEP, {"id": 1}, hidden_states=torch.zeros(SMALL_BYTES))
        assert error_code(await stream.receive()) == "remote_protocol"
        await server.ended(stream)
        stream.abort()


# ---------------------------------------------------------------------- what is leased


async def test_a_session_that_can_not_be_made_leases_nothing(
    blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: Any, **__: Any) -> Any:
        raise MemoryError

    async with serving(blocks) as server:
        with monkeypatch.context() as patch:
            patch.setattr(session_table, "Session", lacks)
            stream = await server.connect(MALLORY)
            refused = await ask(stream, MessageType.OPEN, open_header(SESSION, SPAN))
            assert error_code(refused) == ServerOutOfMemoryError.code
        assert server.budget.leased_bytes == 0
        assert (await ask(stream, MessageType.OPEN, open_header(SESSION, SPAN))).type is MessageType.RESULT
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


async def test_a_step_that_comes_when_the_last_one_is_answered_is_let_in(
    blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are kept after the answer, which an honest client doesn't wait for, whatever type it sends."""
    async with serving(blocks) as server:
        stream = await opened(server, max_length=30)
        (session,) = server.sessions
        answered = asyncio.Event()
        pass_on = session._pass_on

        async def slowly(*arguments: Any) -> None:
            await pass_on(*arguments)
            await answered.wait()

        monkeypatch.setattr(session, "_pass_on", slowly)
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
