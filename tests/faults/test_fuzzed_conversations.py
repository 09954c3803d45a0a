"""Conversations of hostile clients with a server, by the hundred thousand messages, drawn from a seed.

Each game has some streams of some peers; one peer calls itself by the server's own id. They greet rightly, wrongly or
not at all; share sessions, adapters and tokens. Their messages have wrong fields, tensors and ids, and are cut off,
changed in their bytes, repeated, or sent in pieces. Some peers never read. After each game nothing may be left of it,
no mistake may be logged, and an honest session goes on rightly. `test_fuzzed_answers` has hostile servers.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from random import Random

import pytest
import torch
from fuzzed_messages import NUMBERS, ODD_VALUES, Conversation, used_memory, wire
from hostile import (
    FINGERPRINT,
    MALLORY,
    SERVER,
    HonestClient,
    Server,
    hang_up,
    held_bytes,
    num_awaited,
    serving,
    step_header,
    stop_reading,
    write_bytes,
)
from mistakes import logged_mistakes

from swarmllm.errors import RemoteProtocolError, SwarmError
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.network.wire import stream as stream_module
from swarmllm.network.wire.frames import (
    CONTROL_TYPES,
    FORMAT,
    MAGIC,
    OPTIONAL,
    PREFIX,
    FrameDecoder,
    MessageType,
    encode_message,
)
from swarmllm.network.wire.protocol import FrameStream, hello
from swarmllm.network.wire.tensor_codec import encode_tensors

EVE = "12D3KooWEveEveEveEveEveEveEveEveEveEveEveEveEveEveEv"
CALLERS = (MALLORY, MALLORY, EVE, SERVER)
HONEST_SESSION = "honest".ljust(32, "0")
HELLO = {"min_version": 1, "max_version": 1, "software": "", "fingerprint": FINGERPRINT, "encodings": ["int8"]}
GAMES_PER_STEP = 4
"""Games for each step of the honest client: a step costs as much as a game."""
MEMORY_SLACK_BYTES = 48 << 20
"""Allocators don't give everything back; a leak of a hundred thousand messages would be larger."""


@pytest.fixture
def blocks(two_blocks: BlockSpan) -> BlockSpan:
    return two_blocks


@pytest.fixture(autouse=True)
def mistakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(stream_module, "LINGER_S", 0.0)  # these streams are socket pairs, that nobody resets
    with logged_mistakes() as mistakes:
        yield mistakes


class Caller:
    """One stream to the server, on which bytes are written."""

    def __init__(self, stream: FrameStream, random: Random) -> None:
        self.stream = stream
        self.waiting = bytearray()
        """Bytes that it is going to write."""
        self._random = random
        self._reading: asyncio.Task[None] | None = None

    async def greet(self) -> int:
        """The messages that it took."""
        match self._random.randrange(10):
            case 0:
                return 0
            case 1:
                header = dict(HELLO)
                header[self._random.choice([*HELLO, "more"])] = self._random.choice(ODD_VALUES)
                self.waiting += wire(MessageType.HELLO, header)
            case 2:  # what follows doesn't wait for the answer
                self.waiting += wire(MessageType.HELLO, HELLO)
            case _:
                await hello(self.stream, fingerprint=FINGERPRINT)
        return 1

    def listen(self) -> None:
        """Or not."""
        if self._random.random() < 0.1:
            if not self.stream.closed:
                stop_reading(self.stream)
        else:
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with suppress(SwarmError):
            while True:
                await self.stream.receive()

    def say(self, kind: MessageType, header: dict[str, object], payload: bytes) -> None:
        """Have it written, in one of many ways."""
        random, flags = self._random, 0
        data = wire(kind, header, payload)
        match random.randrange(60):
            case 0 | 1 if len(payload) > 1:
                data = in_frames(kind, header, payload, random)
            case 2:
                data = data[: random.randrange(len(data))]
            case 3:
                data = bytearray(data)
                data[random.randrange(min(len(data), 40))] ^= 1 << random.randrange(8)
            case 4:
                data *= random.choice((2, 2, 3, 20))
            case 5:
                data += wire(MessageType.PING, {"n": random.choice(ODD_VALUES)})
            case 6:
                data += wire(random.choice((MessageType.ERROR, MessageType.PONG)), {"n": random.choice(ODD_VALUES)})
            case 7:
                unknown = PREFIX.pack(MAGIC, FORMAT, 200, random.choice((OPTIONAL, flags)), 1, 3, 3) + b"\x80abc"
                data += unknown
        self.waiting += data

    def write_some(self) -> None:
        size = len(self.waiting) if self._random.random() < 0.7 else self._random.randint(1, len(self.waiting))
        with suppress(SwarmError):  # the server has ended the stream
            write_bytes(self.stream, bytes(self.waiting[:size]))
        del self.waiting[:size]

    async def leave(self, server: Server) -> None:
        if self._random.random() < 0.5:
            self.stream.abort()
        else:
            await hang_up(self.stream)
        await server.ended(self.stream)
        if self._reading is not None:
            await self._reading


def in_frames(kind: MessageType, header: dict[str, object], payload: bytes, random: Random) -> bytes:
    """A message of several frames; now and then others come between, or one of the frames is wrong."""
    first = wire(kind, header)
    cuts = sorted({0, len(payload), *(random.randrange(len(payload)) for _ in range(3))})
    data = b""
    for number, (start, end) in enumerate(pairwise(cuts)):
        total = len(payload) + (random.random() < 0.05)
        if number == 0:
            packed = first[PREFIX.size :]
            data += PREFIX.pack(MAGIC, FORMAT, kind, 0, len(packed), end, total) + packed
        else:
            data += PREFIX.pack(MAGIC, FORMAT, MessageType.CONTINUE, 0, 0, end - start, total)
        data += payload[start:end]
        if random.random() < 0.3:
            between = random.choice((MessageType.PING, MessageType.PING, MessageType.PONG, MessageType.LINK))
            data += wire(between, {"n": number})
    return data


def theft(random: Random, hidden_size: int) -> tuple[bytes, bytes]:
    """Requests that only the owner and the predecessor of a session may make, after a wrong token."""
    about: dict[str, object] = {"id": 1, "session": HONEST_SESSION}
    attach = wire(MessageType.ATTACH, about | {"token": random.choice((HONEST_SESSION, "0" * 32))})
    match random.randrange(3):
        case 0 | 1:
            hidden = torch.ones(1, 1, hidden_size)
            descriptors, chunks = encode_tensors({"hidden_states": hidden})
            header = step_header(HONEST_SESSION, 0, hidden) | {"tensors": descriptors}
            return attach, wire(MessageType.STEP, header, b"".join(chunks))
        case _:
            return attach, wire(MessageType.LINK, about | {"epoch": 1 << 24, "successor": None})


async def play(server: Server, seed: int) -> int:
    """Some streams from their greetings to their ends; how many messages they brought."""
    conversation, random = Conversation(seed, [HONEST_SESSION]), Random(seed)
    callers = [Caller(await server.connect(who, greet=False), random) for who in random.choices(CALLERS, k=4)]
    count = 0
    for caller in callers:
        count += await caller.greet()
        caller.listen()
    if random.random() < 0.3:
        thief = random.choice(callers)
        for part in theft(random, server.blocks.embedding_dim):
            thief.waiting += part
            while thief.waiting:
                thief.write_some()
            for _ in range(20):  # turns of the event loop, for the server to answer in: what comes before is refused
                await asyncio.sleep(0)
    messages = conversation.messages()
    if random.random() < 0.3:
        messages += Conversation(seed, [HONEST_SESSION]).messages()  # all of it once more
    owners = {session: random.choice(callers) for session in conversation.sessions}
    for kind, header, payload in messages:
        session = header.get("session")
        owner = owners.get(session) if isinstance(session, str) else None
        caller = owner if owner is not None and random.random() < 0.85 else random.choice(callers)
        caller.say(kind, header, payload)
    leaving = random.choice(callers)
    while waiting := [caller for caller in callers if caller.waiting]:
        random.choice(waiting).write_some()
        if random.random() < 0.5:
            await asyncio.sleep(0)
        if random.random() < 0.02:
            leaving.stream.abort()
    for caller in callers:
        await caller.leave(server)
    return count + len(messages)


async def check_nothing_left(server: Server, leased: int) -> None:
    """Nothing is left of any game."""
    limits = server.access.limits
    async with asyncio.timeout(120):
        # The streams are the honest client's, and the link of the server to itself.
        while (  # noqa: ASYNC110
            held_bytes(server)
            or server.handler.num_untaken_bytes
            or limits.num_streams() > 2
            or server.device_thread.num_calls
        ):
            await asyncio.sleep(0.001)
    assert [session.id for session in server.sessions] == [HONEST_SESSION]
    assert server.budget.leased_bytes == leased
    assert not num_awaited(server)


async def fuzz(blocks: BlockSpan, count: int, seed: int, mistakes: list[str]) -> None:
    """At least that many messages, in as many games as it takes."""
    memory, sent, game = 0, 0, 0
    async with serving(blocks) as server:
        honest = HonestClient(server)
        await honest.start()
        leased, tasks = server.budget.leased_bytes, len(asyncio.all_tasks())
        while sent < count:
            game += 1
            try:
                sent += await play(server, seed + game)
                await check_nothing_left(server, leased)
                if game % GAMES_PER_STEP == 0:
                    await honest.step()
                assert not server.failures
                assert not mistakes
            except BaseException as error:
                error.add_note(f"seed {seed + game}")
                raise
            if not memory and sent > count // 4:  # caches of the allocator and of torch are full by now
                memory = used_memory()
        await honest.step()
        assert used_memory() < memory + MEMORY_SLACK_BYTES
        assert len(asyncio.all_tasks()) <= tasks + 2, "more than the link to itself and its reader"
        await honest.stop()
    assert not mistakes


async def test_hostile_conversations_hurt_nobody(blocks: BlockSpan, mistakes: list[str]) -> None:
    await fuzz(blocks, 2_000, 0, mistakes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_hundred_thousand_messages_of_hostile_conversations_hurt_nobody(
    blocks: BlockSpan, mistakes: list[str]
) -> None:
    await fuzz(blocks, 100_000, 1_000_000, mistakes)


# ---------------------------------------------------------------------- the frame decoder


def fuzz_decoder(count: int, seed: int) -> None:
    """Valid bytes with some of them changed, cut out or put in: messages or a RemoteProtocolError, nothing else."""
    generator = Random(seed)
    refused = 0
    for _ in range(count):
        wire = bytearray()
        for _ in range(generator.randint(1, 3)):
            kind = generator.choice([kind for kind in MessageType if kind is not MessageType.CONTINUE])
            size = 0 if kind in CONTROL_TYPES else generator.choice((0, 9, 300))
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
