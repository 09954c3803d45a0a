"""A server's handler in this process, over socket pairs, for tests that send it what no client would: no daemon.

The blocks are real ones of a tiny model, so that what gets past the checks meets real arithmetic.
"""

import asyncio
import gc
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from tests.raw_stream import RawStream
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import PeerUnreachableError, SwarmError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.network.wire import stream as stream_module
from swarmllm.network.wire.messages import Successor
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType, hello
from swarmllm.network.wire.tensor_codec import decode_tensors, encode_tensors
from swarmllm.server.adapters import ServedAdapters
from swarmllm.server.device.device import ADAPTERS_BYTES, CacheRoom
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.device.scheduler import Budget
from swarmllm.server.device.throughput import Throughput
from swarmllm.server.peers.links import Links
from swarmllm.server.sessions.prefix_cache import PrefixCache
from swarmllm.server.settings import ServerLimits
from swarmllm.server.streams.connection import StreamHandler
from swarmllm.server.streams.input_checks import InputChecks
from swarmllm.server.streams.serving import Access, Serving, StackBlocks

FINGERPRINT = "0123456789abcdef"
HONEST = "12D3KooWGRYpkGaDx4gAX4e8D3GUdVyM6z9ejguV9e6RigTPvRch"
MALLORY = "12D3KooWCJpnhEWDwhydvDx45sX6wfumYVb1tBX8mfF7g4j1B4xo"
SERVER = "12D3KooWJFxJRUaCsPYKtBVmAWGxuUVq2WJjT2zvEP7b1Ynb4Q3s"
MAX_BATCH_TOKENS = 64
CACHE_TOKENS = 512
HIDDEN = 16
SESSION, OTHER = "a" * 32, "b" * 32
ALL, FIRST, SECOND = Span(0, 2), Span(0, 1), Span(1, 2)
"""Spans of the two blocks that the servers have."""


def load_blocks(directory: Path, span: Span) -> BlockSpan:
    return load_block_span(open_checkpoint(str(directory)), span, dtype=torch.float32, progress=False)


@cache
def packer_of(blocks: BlockSpan) -> Packer:
    """Looked at once: tests share their blocks."""
    return Packer(blocks, right_ways(blocks))


class Server:
    """One server's handler and all that it needs."""

    def __init__(
        self,
        blocks: BlockSpan,
        tasks: asyncio.TaskGroup,
        *,
        cache_tokens: int = CACHE_TOKENS,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        allowed_clients: Sequence[str] | None = None,
        stream_type: type[RawStream] = RawStream,
        pages: PrefixCache | None = None,
    ) -> None:
        self.blocks = blocks
        self._stream_type = stream_type
        self.device_thread = DeviceThread(Budget(pause_s=0.0))  # thousands of batches between steps would take minutes
        self.links = Links(self._dial, tasks)
        self.access = Access(allowed_clients)
        self.handler = StreamHandler(self.access, self.links, fingerprint=FINGERPRINT)
        inputs = InputChecks(blocks)
        cache_bytes = (blocks.cache_sizes.bytes_per_token + inputs.hidden_bytes) * cache_tokens
        self.packer = packer_of(blocks)
        self.serving = self.access.serving = Serving(
            self.packer,
            [StackBlocks(blocks, inputs)],
            self.device_thread,
            CacheRoom(cache_bytes, 0, ADAPTERS_BYTES),
            limits=self.access.limits,
            settings=ServerLimits(max_batch_tokens=max_batch_tokens, compression="none"),
            offered=ServedAdapters((), None, token=None, cache_dir=None),
            throughput=Throughput(forward_tokens_per_s=1.0, decode_ms_per_block=1.0),
        )
        self.sessions = self.serving.sessions
        self.sessions.pages, self.budget = pages, self.sessions.budget
        self.ends: set[RawStream] = set()
        """The handler's ends of the streams."""
        self._streams: dict[FrameStream, asyncio.Task[None]] = {}
        self.failures: list[BaseException] = []
        """Exceptions that handlers have raised: none may get that far."""

    async def _dial(self, successor: Successor) -> FrameStream:
        if successor.peer_id != SERVER:
            raise PeerUnreachableError("there is nobody else here", successor.peer_id)
        return await self.connect(SERVER)

    async def connect(self, peer_id: str, *, greet: bool = True, **options: Any) -> FrameStream:
        """The client's end of a new stream, on which this server sees `peer_id`."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        served = self._stream_type(peer_id, **options)
        try:
            await loop.create_connection(lambda: served, sock=theirs)
            _, stream = await loop.create_connection(lambda: FrameStream(SERVER), sock=ours)
        except BaseException:  # whoever dialled has left
            served.abort()
            ours.close()
            theirs.close()
            raise
        task = self._streams[stream] = loop.create_task(self._serve(served))
        task.add_done_callback(lambda _: self._streams.pop(stream))
        if greet:
            try:
                await hello(stream, fingerprint=FINGERPRINT)
            except BaseException:
                stream.abort()
                raise
        return stream

    async def _serve(self, stream: RawStream) -> None:
        self.ends.add(stream)
        try:
            await self.handler(stream)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test reports it
            self.failures.append(error)
        finally:
            self.ends.discard(stream)
            stream.abort()
            await stream.gone

    async def ended(self, stream: FrameStream) -> None:
        """Return when the handler has done with this stream, whose client's end is given."""
        async with asyncio.timeout(120):
            while stream in self._streams:
                await asyncio.wait([self._streams[stream]])

    async def close(self) -> None:
        await self.links.close()
        tasks = tuple(self._streams.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.device_thread.close()
        await asyncio.get_running_loop().shutdown_default_executor()  # its thread waited for the device thread


@contextmanager
def no_daemon_between() -> Iterator[None]:
    """Streams hang up almost at once: half a second is for the daemon, which drops last words, and here is none."""
    for_daemons, stream_module.LINGER_S = stream_module.LINGER_S, min(stream_module.LINGER_S, 0.01)
    try:
        yield
    finally:
        stream_module.LINGER_S = for_daemons


@asynccontextmanager
async def serving(blocks: BlockSpan, **options: Any) -> AsyncIterator[Server]:
    with no_daemon_between():
        async with _serving(blocks, **options) as server:
            yield server


@asynccontextmanager
async def _serving(blocks: BlockSpan, **options: Any) -> AsyncIterator[Server]:
    async with asyncio.TaskGroup() as tasks:
        server = Server(blocks, tasks, **options)
        try:
            yield server
        finally:
            await server.close()
    assert not server.failures, server.failures


def step_header(session: str, position: int, hidden: Tensor, **fields: Any) -> dict[str, Any]:
    return {
        "id": 1,
        "session": session,
        "epoch": 0,
        "position": position,
        "batch_size": hidden.shape[0],
        "seq_len": hidden.shape[1],
        "tensors": (),
        "ones_mask": True,
        **fields,
    }


def open_header(session: str, span: Span, **fields: Any) -> dict[str, Any]:
    defaults = {"batch_size": 1, "max_length": 32, "token": session[::-1]}
    return {"id": 1, "session": session, "start": span.start, "end": span.end, **defaults, **fields}


async def send(stream: FrameStream, kind: MessageType, header: dict[str, Any], **tensors: Tensor) -> None:
    descriptors, chunks = encode_tensors(tensors)
    await stream.send(kind, header | ({"tensors": descriptors} if tensors else {}), chunks)


async def ask(stream: FrameStream, kind: MessageType, header: dict[str, Any], **tensors: Tensor) -> Message:
    """The next message that comes after this request: a RESULT or an ERROR."""
    await send(stream, kind, header, **tensors)
    return await answer(stream)


async def answer(stream: FrameStream) -> Message:
    async with asyncio.timeout(120):
        return await stream.receive()


def result(message: Message) -> Tensor:
    assert message.type is MessageType.RESULT, message.header
    return decode_tensors(message.header["tensors"], message.payload, max_bytes=1 << 28)["hidden_states"]


def error_code(message: Message) -> str:
    assert message.type is MessageType.ERROR, message
    code: str = message.header["code"]
    return code


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - nobody tells of these states
            await asyncio.sleep(0.005)


async def opened(server: Server, session: str = SESSION, peer_id: str = MALLORY, **fields: Any) -> FrameStream:
    """A stream with a session on all blocks."""
    stream = await server.connect(peer_id)
    message = await ask(stream, MessageType.OPEN, open_header(session, ALL, **fields))
    assert message.type is MessageType.RESULT, message.header
    return stream


def hidden_states(blocks: BlockSpan, length: int = 1) -> Tensor:
    return torch.randn(1, length, blocks.embedding_dim)


def request_header(inputs: Tensor, span: Span = ALL, **fields: Any) -> dict[str, Any]:
    """The header of a sessionless request."""
    shape = {"batch_size": inputs.shape[0], "seq_len": inputs.shape[1]}
    return {"id": 1, "start": span.start, "end": span.end, **shape, **fields}


def resident_bytes() -> int:
    gc.collect()
    memory: int = psutil.Process().memory_info().rss
    return memory


# Where tests look behind what a client or a server shows: nowhere else.


def write_bytes(stream: FrameStream, data: bytes) -> None:
    """Send what no client would."""
    stream._write(data)


def stop_reading(stream: FrameStream) -> None:
    """From now on nothing that comes is read, nor pings answered."""
    assert stream._transport is not None
    stream._transport.pause_reading()


def is_paused(stream: RawStream) -> bool:
    """True if so much waits that this end reads no more."""
    return not stream.transport.is_reading()


def unsent_bytes(stream: RawStream) -> int:
    return stream.transport.get_write_buffer_size()


def held_bytes(server: Server, peer_id: str | None = None) -> int:
    """Bytes that the server holds for this peer, or for all."""
    return server.access.limits.num_bytes(peer_id)


def num_awaited(server: Server) -> int:
    """Requests that wait for what another server pushes."""
    return server.serving.pushes.num_waiting


def num_early(server: Server) -> int:
    """Pushes that came before their request."""
    return server.serving.pushes.num_early


def dials(server: Server) -> bool:
    """True if the server has links, or is dialling for one."""
    return bool(len(server.links) + server.links.num_dialling)


async def hang_up(stream: FrameStream) -> None:
    with suppress(SwarmError):
        await stream.close()


class HonestClient:
    """A session that goes on whatever else happens on the server; each step is compared with a forward pass."""

    LENGTH = 24

    def __init__(self, server: Server) -> None:
        self._server = server
        self._seen: list[Tensor] = []
        self._session = "honest".ljust(32, "0")

    async def start(self) -> None:
        self._stream = await self._server.connect(HONEST)
        header = open_header(self._session, self._server.blocks.span, token=secrets.token_hex(16))
        assert (await ask(self._stream, MessageType.OPEN, header)).type is MessageType.RESULT

    async def step(self) -> None:
        """One token; after `LENGTH` of them the cache is rolled back to the start."""
        if len(self._seen) == self.LENGTH:
            self._seen.clear()
        hidden = torch.randn(1, 1, self._server.blocks.embedding_dim)
        header = step_header(self._session, len(self._seen), hidden)
        output = result(await ask(self._stream, MessageType.STEP, header, hidden_states=hidden))
        self._seen.append(hidden)
        whole = torch.cat(self._seen, dim=1)
        header = {"id": 2, "start": 0, "end": self._server.blocks.span.end, "batch_size": 1, "seq_len": whole.shape[1]}
        expected = result(
            await ask(self._stream, MessageType.FORWARD, header | {"ones_mask": True}, hidden_states=whole)
        )
        torch.testing.assert_close(output[:, -1], expected[:, -1], rtol=1e-3, atol=1e-4)

    async def stop(self) -> None:
        await hang_up(self._stream)
