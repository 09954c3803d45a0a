"""Malformed messages by the hundred thousand: nothing crashes, nothing leaks, and an honest client never notices.

Valid conversations are made wrong in some places: fields, types, sizes, tensors, order, ids. Everything is drawn from a
seed, which a failure names.
"""

import asyncio
import gc
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
from hostile import MALLORY, SERVER, HonestClient, Server, hang_up, load_blocks, open_header, serving, step_header
from swarm_models import save_llama
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import RemoteProtocolError, SwarmError
from swarmllm.models.block_inputs import TENSOR_NAMES
from swarmllm.models.block_span import BlockSpan
from swarmllm.network import stream as stream_module
from swarmllm.network.compression import pack
from swarmllm.network.frames import FrameDecoder, MessageType, encode_message
from swarmllm.network.protocol import FrameStream
from swarmllm.network.tensor_codec import DTYPES, encode_tensors

Sent = tuple[MessageType, dict[str, Any], bytes]

NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 64, 255, 1 << 16, (1 << 24) - 1, 1 << 24, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)
ODD_VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(-number for number in NUMBERS[1:-1]),
    *(
        None,
        True,
        False,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "x" * 32,
        "\x00" * 32,
        "ü" * 32,
        "x" * 20_000,
        b"",
        b"\xff" * 32,
    ),
    *([], [0], [-1], [1 << 40] * 3, [[]], {}, {"a": {}}, [["hidden_states", "float32", [1, 1], 4]] * 40),
)
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


# ---------------------------------------------------------------------- what is sent


class Conversation:
    """What a client could say on one stream, and what may be wrong with it."""

    def __init__(self, seed: int, stolen: list[str]) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.sessions = [f"{self.random.getrandbits(128):032x}" for _ in range(2)]
        self.stolen = stolen
        """Sessions of other clients."""

    def messages(self) -> list[Sent]:
        """About twenty messages, most of them wrong somewhere."""
        valid = self._valid()
        if self.random.random() < 0.3:
            self.random.shuffle(valid)
        elif self.random.random() < 0.3:
            valid = self.random.choices(valid, k=len(valid))
        wrong = 0.7 if self.random.random() < 0.7 else 0.15  # sometimes far into a session before it goes wrong
        return [self._encode(*(self._wrong(*one) if self._chance(one[0], wrong) else one)) for one in valid]

    def _chance(self, kind: MessageType, wrong: float) -> bool:
        """Sessions are opened rightly most of the time, since most of the others need one."""
        return self.random.random() < wrong * (0.1 if kind is MessageType.OPEN else 1)

    def _valid(self) -> list[tuple[MessageType, dict[str, Any], dict[str, Tensor]]]:
        first, second = self.sessions
        batch = self.random.choice((1, 1, 2, 3))
        prompt, token = self._floats(batch, self.random.randint(2, 9), 16), self._floats(batch, 1, 16)
        length = prompt.shape[1]
        rows = [self.random.randrange(batch) for _ in range(batch)]
        successor = {"peer_id": SERVER, "session": second, "token": second[::-1]}
        link = (MessageType.LINK, {"id": 7, "session": first, "epoch": 0, "successor": successor}, {})
        unlink = (MessageType.LINK, {"id": 8, "session": first, "epoch": 1, "successor": None}, {})
        forward = {"id": 9, "start": 0, "end": 2, "batch_size": batch, "seq_len": length}
        mask = torch.ones(batch, length, dtype=torch.int64)
        replay = {"id": 10, "session": first, "epoch": 1, "length": length, "replay_hops": 1, "rows": 1}
        prefill = step_header(first, 0, prompt)
        return [
            (MessageType.OPEN, open_header(first, Span(0, 1), batch_size=batch), {}),
            (MessageType.OPEN, open_header(second, Span(1, 2), batch_size=batch), {}),
            *([link] if self.random.random() < 0.5 else []),
            (MessageType.STEP, prefill, {"hidden_states": prompt}),
            (MessageType.STEP, step_header(first, length, token), {"hidden_states": token}),
            (
                MessageType.STEP,
                step_header(first, length + 1, token, rows=1, batch_index=rows),
                {"hidden_states": token},
            ),
            (MessageType.STEP, step_header(second, 0, prompt), {"hidden_states": prompt, "attention_mask": mask}),
            *([unlink] if self.random.random() < 0.5 else []),
            (MessageType.REPLAY, replay, {}),
            (MessageType.STEP, step_header(first, length, token, epoch=1, rows=1), {"hidden_states": token}),
            (MessageType.FORWARD, forward, {"hidden_states": prompt, "attention_mask": mask}),
            (MessageType.BACKWARD, forward, {"hidden_states": prompt, "grad_outputs": prompt}),
            (
                MessageType.FORWARD,
                forward | {"id": 12, "end": 1, "target": {"peer_id": SERVER, "token": first}},
                {"hidden_states": prompt},
            ),
            (MessageType.FORWARD, forward | {"id": 13, "start": 1, "source": {"peer_id": SERVER, "token": first}}, {}),
            (MessageType.PUSH, {"token": first}, {"hidden_states": prompt}),
            (MessageType.ATTACH, {"id": 11, "session": second, "token": second[::-1]}, {}),
            (MessageType.STEP, step_header(second, length, token), {"hidden_states": token}),
            (MessageType.CLOSE, {"session": self.random.choice(self.sessions)}, {}),
            (MessageType.STEP, step_header(first, 0, prompt, epoch=2, rows=1), {"hidden_states": prompt}),
        ]

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _wrong(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            change: Callable[..., Any] = self.random.choice(
                (
                    self._field,
                    self._field,
                    self._small_number,
                    self._id,
                    self._kind,
                    self._tensor,
                    self._tensor,
                    self._beside,
                )
            )
            kind, header, tensors = change(kind, dict(header), dict(tensors))
        return kind, header, tensors

    def _field(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        name = self.random.choice([*header, "tensors", "timings", "batch_index", "surprise"])
        if self.random.random() < 0.15:
            header.pop(name, None)
        else:
            header[name] = self.random.choice(ODD_VALUES)
        return kind, header, tensors

    def _small_number(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        """Still of the right type, and near the right value."""
        names = [name for name, value in header.items() if type(value) is int]
        if names:
            name = self.random.choice([*names, "replay_hops", "rows"])
            header[name] = max(0, (header[name] if name in names else 0) + self.random.randint(-3, 3))
        if self.random.random() < 0.3:
            header["batch_index"] = [self.random.randrange(5) for _ in range(self.random.randrange(5))]
        return kind, header, tensors

    def _id(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        header["session"] = self.random.choice([*self.sessions, *self.stolen])
        if self.random.random() < 0.3:
            header["token"] = self.random.choice([*self.sessions, *self.stolen])
        if self.random.random() < 0.3:
            peer_id = self.random.choice((SERVER, MALLORY, "1" * 50))
            session = self.random.choice([*self.sessions, *self.stolen])
            header["successor"] = {"peer_id": peer_id, "session": session, "token": session[::-1]}
        return kind, header, tensors

    def _kind(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        ends_the_stream = (MessageType.PING, MessageType.PONG, MessageType.ERROR) if tensors else ()
        kinds = [kind for kind in MessageType if kind is not MessageType.CONTINUE and kind not in ends_the_stream]
        return self.random.choice(kinds), header, tensors

    def _tensor(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        if not tensors:
            return self._field(kind, header, tensors)
        name = self.random.choice(list(tensors))
        tensor = tensors[name]
        match self.random.randrange(8):
            case 0:
                tensor = tensor.to(self.random.choice(list(DTYPES.values())))
            case 1:
                tensor = tensor.float() * self.random.choice((float("nan"), float("inf"), 1e30, -0.0))
            case 2:
                tensor = tensor.unsqueeze(self.random.randint(0, tensor.ndim))
            case 3:
                tensor = tensor.flatten() if self.random.random() < 0.5 else tensor.flatten()[:0]
            case 4:
                axis = self.random.randrange(tensor.ndim) if tensor.ndim else 0
                tensor = torch.cat([tensor, tensor], dim=axis) if tensor.ndim else tensor
            case 5:
                del tensors[name]
                return kind, header, tensors
            case 6:
                del tensors[name]
                name = self.random.choice(("hidden_state", *TENSOR_NAMES, "grad_outputs", "x" * 100, ""))
            case 7 if tensor.ndim:
                axis = self.random.randrange(tensor.ndim)
                tensor = tensor.narrow(axis, 0, self.random.randint(0, min(1, tensor.shape[axis])))
        tensors[name] = tensor
        return kind, header, tensors

    def _beside(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        """One more tensor, of a name that blocks take, that fits nothing."""
        shape = [self.random.choice((0, 1, 1, 2, 3, 5, 16, 40)) for _ in range(self.random.randint(0, 4))]
        dtype = self.random.choice(list(DTYPES.values()))
        tensors[self.random.choice(TENSOR_NAMES[1:])] = (self._floats(*shape) * 100).to(dtype)
        header["ones_mask"] = self.random.random() < 0.5
        return kind, header, tensors

    def _encode(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Sent:
        packed = {name: pack(tensor) for name, tensor in tensors.items() if self.random.random() < 0.3}
        descriptors, chunks = encode_tensors({name: packed.get(name) or tensor for name, tensor in tensors.items()})
        payload = b"".join(chunks)
        if packed and self.random.random() < 0.1:
            payload = self.random.randbytes(len(payload))
        if header.get("tensors") == () or (tensors and "tensors" not in header):
            header = header | {"tensors": descriptors}
        match self.random.randrange(40):
            case 0:
                payload = payload[: self.random.randint(0, len(payload))]
            case 1:
                payload += bytes(self.random.randint(1, 40))
            case 2 if descriptors:
                broken: list[Any] = [list(descriptor) for descriptor in descriptors]
                self.random.choice(broken)[self.random.randrange(4)] = self.random.choice(ODD_VALUES)
                header = header | {"tensors": broken}
        return kind, header, payload


@pytest.fixture(autouse=True)
def _no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """These streams are socket pairs, without a daemon that could reset them."""
    monkeypatch.setattr(stream_module, "LINGER_S", 0.0)


# ---------------------------------------------------------------------- the server's handler


async def fuzz_handler(blocks: BlockSpan, count: int, seed: int) -> None:
    """Send at least `count` messages, on as many streams as it takes."""
    process = psutil.Process()
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
                gc.collect()
                memory = process.memory_info().rss
        gc.collect()
        assert process.memory_info().rss < memory + MEMORY_SLACK_BYTES
        assert [session.id for session in server.sessions] == stolen
        assert server.budget.leased_bytes == leased
        assert server.executor.num_calls == 0
        assert len(asyncio.all_tasks()) <= tasks + 2, "more than the link to itself and its reader"
        assert server.handler.limits.num_streams() == 2
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
    await fuzz_handler(blocks, 5_000, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_hundred_thousand_malformed_messages_hurt_nobody(blocks: BlockSpan) -> None:
    await fuzz_handler(blocks, 100_000, seed=1_000_000)


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
