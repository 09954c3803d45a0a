"""Malformed messages by the hundred thousand: nothing crashes, nothing leaks, and an honest client never notices.

Valid conversations are made wrong in some places: fields, types, sizes, tensors, order, ids. Everything is drawn from a
seed, which a failure names.
"""

import asyncio
import random
from contextlib import suppress

import pytest
import torch
from fuzzed_messages import NUMBERS, Conversation, used_memory
from hostile import MALLORY, HonestClient, Server, hang_up, load_blocks, serving
from swarm_models import save_llama

from swarmllm.data_structures import Span
from swarmllm.errors import RemoteProtocolError, SwarmError
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire import stream as stream_module
from swarmllm.network.wire.frames import FrameDecoder, MessageType, encode_message
from swarmllm.network.wire.protocol import FrameStream

MEMORY_SLACK_BYTES = 48 << 20
"""Allocators don't give everything back; a leak of a hundred thousand messages would be larger."""


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    """Two blocks of three, so that sessions keep what they send on."""
    torch.set_num_threads(1)
    directory = save_llama(
        tmp_path_factory.mktemp("fuzz") / "checkpoint", num_blocks=3, hidden_size=16, intermediate_size=16
    )
    return load_blocks(directory, Span(0, 2))


@pytest.fixture(autouse=True)
def _no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """These streams are socket pairs, without a daemon that could reset them."""
    monkeypatch.setattr(stream_module, "LINGER_S", 0.0)


# ---------------------------------------------------------------------- the server's handler


async def fuzz_handler(blocks: BlockSpan, count: int, seed: int) -> None:
    """Send at least `count` messages, on as many streams as it takes."""
    async with serving(blocks) as server:
        honest = HonestClient(server)
        await honest.start()
        leased, tasks = server.budget.leased_bytes, len(asyncio.all_tasks())
        stolen = ["honest".ljust(32, "0")]
        sent, memory = 0, 0
        while sent < count:
            seed += 1
            try:
                sent += await converse(server, Conversation(seed, stolen), honest)
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            assert not server.failures, (seed, server.failures)
            if not memory and sent > count // 4:  # caches of the allocator and of torch are full by now
                memory = used_memory()
        assert used_memory() < memory + MEMORY_SLACK_BYTES
        assert [session.id for session in server.sessions] == stolen
        assert server.budget.leased_bytes == leased
        assert server.device_thread.num_calls == 0
        assert len(asyncio.all_tasks()) <= tasks + 2, "more than the link to itself and its reader"
        assert server.access.limits.num_streams() == 2
        assert len(server.links) == 1
        await honest.step()
        await honest.stop()


async def converse(server: Server, conversation: Conversation, honest: HonestClient) -> int:
    """One stream from HELLO to its end; how many messages it brought."""
    stream = await server.connect(MALLORY)
    reading = asyncio.create_task(swallow(stream))
    messages = conversation.messages()
    with suppress(SwarmError):  # the server has ended the stream
        for kind, header, payload in messages:
            await stream.send(kind, header, [payload])
        if conversation.random.random() < 0.1:
            stream._write(conversation.random.randbytes(40))
    await honest.step()
    await hang_up(stream)
    await server.ended(stream)
    await reading
    return len(messages)


async def swallow(stream: FrameStream) -> None:
    with suppress(SwarmError):
        while True:
            await stream.receive()


async def test_malformed_messages_hurt_nobody(blocks: BlockSpan) -> None:
    await fuzz_handler(blocks, 1_500, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(5))
async def test_a_hundred_thousand_malformed_messages_hurt_nobody(blocks: BlockSpan, part: int) -> None:
    """In parts, each of which leaves a slow machine at a high load time enough."""
    await fuzz_handler(blocks, 20_000, seed=1_000_000 * (part + 1))


# ---------------------------------------------------------------------- the frame decoder


def fuzz_decoder(count: int, seed: int) -> None:
    """Valid bytes with some of them changed, cut out or put in: messages or a RemoteProtocolError, nothing else."""
    generator = random.Random(seed)
    refused = 0
    for _ in range(count):
        wire = bytearray()
        for _ in range(generator.randint(1, 3)):
            kind = generator.choice([kind for kind in MessageType if kind is not MessageType.CONTINUE])
            size = (
                0 if kind in (MessageType.PING, MessageType.PONG, MessageType.ERROR) else generator.choice((0, 9, 300))
            )
            header = {"id": generator.choice(NUMBERS), "session": "x" * 32}
            wire += b"".join(encode_message(kind, header, [generator.randbytes(size)]))
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(len(wire)) if generator.random() < 0.5 else generator.randrange(18)
            match generator.randrange(4):
                case 0:
                    wire[place] ^= 1 << generator.randrange(8)
                case 1:
                    wire[place] = generator.choice((0, 1, 127, 128, 255))
                case 2:
                    del wire[place : place + generator.randint(1, 20)]
                case 3:
                    wire[place:place] = generator.randbytes(generator.randint(1, 20))
            if len(wire) < 20:
                break
        decoder = FrameDecoder(max_message_bytes=1 << 16)
        cut = generator.randint(0, len(wire))
        received = 0
        try:
            for part in (wire[:cut], wire[cut:]):
                received += sum(len(message.payload) for message in decoder.feed(part))
        except RemoteProtocolError:
            refused += 1
        assert received <= len(wire)
    assert refused > count // 4, "the changes hardly break anything"


def test_malformed_frames_are_refused() -> None:
    fuzz_decoder(5_000, seed=0)


@pytest.mark.slow
def test_a_hundred_thousand_malformed_frames_are_refused() -> None:
    fuzz_decoder(100_000, seed=1)
