"""Servers in this process that reach each other over socket pairs: all of their code but the daemon and the DHT.

Streams, greetings, checks, sessions, links, the prefix cache and the device threads are the real ones. Tests open
streams to them as clients and say what they want, one request at a time.
"""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packing import Packer
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.network.wire.frames import Message
from swarmllm.network.wire.messages import Successor
from swarmllm.network.wire.protocol import MessageType, hello, raise_error
from swarmllm.network.wire.stream import FrameStream
from swarmllm.network.wire.tensor_codec import decode_tensors, encode_tensors
from swarmllm.server.adapters import ServedAdapters
from swarmllm.server.device.device import ADAPTERS_BYTES, CacheRoom
from swarmllm.server.device.device_thread import DeviceThread
from swarmllm.server.device.scheduler import Budget
from swarmllm.server.device.throughput import Throughput
from swarmllm.server.peers.links import Links
from swarmllm.server.settings import ServerLimits
from swarmllm.server.streams.connection import StreamHandler
from swarmllm.server.streams.input_checks import InputChecks
from swarmllm.server.streams.serving import Access, Serving, StackBlocks

CLIENT = "client".ljust(46, "c")


class InProcessServer:
    """One server, known by its peer id."""

    def __init__(self, swarm: "InProcessServers", blocks: BlockSpan, peer_id: str) -> None:
        self.peer_id = peer_id
        self.device_thread = DeviceThread(
            Budget(decoding_s=0.0), name=peer_id
        )  # no small pieces beside those that have ended
        self.links = Links(lambda target: swarm.dial(target.peer_id, caller=peer_id), swarm.tasks)
        access = Access(None)
        self.handler = StreamHandler(access, self.links, fingerprint="")
        self.packer = Packer(blocks, right_ways(blocks))
        self.serving = access.serving = Serving(
            self.packer,
            [StackBlocks(blocks, InputChecks(blocks))],
            self.device_thread,
            CacheRoom(1 << 34, 1 << 30, ADAPTERS_BYTES),
            limits=access.limits,
            settings=ServerLimits(max_batch_tokens=1 << 20, compression="none"),
            offered=ServedAdapters([], None, token=None, cache_dir=None),  # type: ignore[arg-type]
            throughput=Throughput(forward_tokens_per_s=1.0, decode_ms_per_block=1.0),
        )
        self.table = self.serving.sessions
        self.budget, self.pages = self.table.budget, self.table.pages


class InProcessServers:
    """All of them, and the streams between them and to them."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks
        self.servers: dict[str, InProcessServer] = {}
        self._streams: list[FrameStream] = []
        self.links: list[FrameStream] = []
        """Streams that servers have opened to each other."""
        self._ids = itertools.count(1)

    def add(self, blocks: BlockSpan) -> InProcessServer:
        """A new server of these blocks, which no other has: one thread alone may run a `BlockSpan`."""
        if any(server.packer.blocks is blocks for server in self.servers.values()):
            raise ValueError("each server has a device thread, so load the blocks once for each")
        server = InProcessServer(self, blocks, f"server{len(self.servers)}".ljust(46, "s"))
        self.servers[server.peer_id] = server
        return server

    async def dial(self, peer_id: str, *, caller: str = CLIENT) -> FrameStream:
        """A stream to that server, greeted."""
        near, far = socket.socketpair()
        stream, served = await _end(near, peer_id), await _end(far, caller)
        self._streams += [stream, served]
        if caller != CLIENT:
            self.links.append(stream)
        self.tasks.create_task(self.servers[peer_id].handler(served))
        await hello(stream)
        return stream

    def other_end(self, stream: FrameStream) -> FrameStream:
        """Where what is sent into this stream comes out."""
        return self._streams[self._streams.index(stream) ^ 1]

    async def ask(
        self,
        stream: FrameStream,
        kind: MessageType,
        header: dict[str, Any],
        tensors: dict[str, Tensor] | None = None,
        *,
        answered_by: FrameStream | None = None,
    ) -> Message:
        """Send a request and return its answer; raises the error that it is."""
        descriptors, chunks = encode_tensors(tensors or {})
        await stream.send(kind, {"id": next(self._ids), "tensors": descriptors} | header, chunks)
        answer = await _first_message({stream, answered_by or stream})
        if answer.type is MessageType.ERROR:
            raise_error(answer.header, stream.peer_id)
        return answer

    async def open_session(
        self, stream: FrameStream, span: Span, *, batch_size: int = 1, max_length: int = 2048
    ) -> str:
        """The name of a new session, which is its token as well."""
        name = f"{next(self._ids):032x}"
        header = {"session": name, "token": name, "start": span.start, "end": span.end}
        await self.ask(stream, MessageType.OPEN, header | {"batch_size": batch_size, "max_length": max_length})
        return name

    async def link(self, stream: FrameStream, session: str, successor: FrameStream, name: str) -> None:
        """Send what `session` computes to the session of that name at the server of `successor`."""
        to = Successor(peer_id=successor.peer_id, session=name, token=name)
        await self.ask(stream, MessageType.LINK, {"session": session, "epoch": 0, "successor": to.model_dump()})

    async def step(
        self,
        stream: FrameStream,
        session: str,
        position: int,
        inputs: BlockInputs,
        *,
        answered_by: FrameStream | None = None,
        **header: Any,
    ) -> Tensor:
        """Outputs of a step that begins at `position`."""
        header |= {"session": session, "epoch": 0, "position": position}
        header |= {"batch_size": inputs.batch_size, "seq_len": inputs.seq_len}
        answer = await self.ask(stream, MessageType.STEP, header, inputs.tensors(), answered_by=answered_by)
        payload = answer.payload
        return decode_tensors(answer.header["tensors"], payload, max_bytes=len(payload))["hidden_states"]

    async def close(self) -> None:
        """End all streams, and with them what serves them."""
        for stream in self._streams:
            stream.abort()
        await asyncio.gather(*(stream.gone for stream in self._streams))
        for server in self.servers.values():
            await server.device_thread.close()
        await asyncio.get_running_loop().shutdown_default_executor()


@asynccontextmanager
async def in_process_servers(*blocks: BlockSpan) -> AsyncIterator[InProcessServers]:
    """Servers of these blocks, in this order in `servers`."""
    async with asyncio.TaskGroup() as tasks:
        swarm = InProcessServers(tasks)
        for span in blocks:
            swarm.add(span)
        try:
            yield swarm
        finally:
            await swarm.close()


async def _end(sock: socket.socket, peer_id: str) -> FrameStream:
    _, stream = await asyncio.get_running_loop().create_connection(lambda: FrameStream(peer_id), sock=sock)
    return stream


async def _first_message(streams: set[FrameStream]) -> Message:
    """The message that comes first on any of them."""
    receiving = [asyncio.ensure_future(stream.receive()) for stream in streams]
    done, others = await asyncio.wait(receiving, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    return done.pop().result()
