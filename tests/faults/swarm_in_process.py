"""A swarm in one event loop: real handlers, real client code, socket pairs in place of daemons. Hundreds fit in a test.

The servers share their blocks, which are those of one tiny checkpoint, and the thread that computes them.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from hostile import no_daemon_between, packer_of
from torch import Tensor

from swarmllm import ClientConfig
from swarmllm.client.batches.batch_runner import BatchRunner
from swarmllm.client.session.inference_session import InferenceSession
from swarmllm.client.view.event_loop import EventLoop
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import RouteHop, ServerInfo, Span
from swarmllm.errors import PeerUnreachableError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.loading import load_block_span
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType, hello
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

FINGERPRINT = "0123456789abcdef"
CLIENT = "client".ljust(46, "x")
CACHE_TOKENS = 4096
OnSend = Callable[["Server", MessageType, dict[str, Any], Any], tuple[MessageType, dict[str, Any], Any]]


def server_id(number: int) -> str:
    """The peer id of this server. It has the form of a real one."""
    return f"12D3KooWserver{chr(ord('A') + number)}".ljust(52, "x")


class Blocks:
    """The blocks of a checkpoint, loaded once for each span, and the event loop and device thread of all swarms."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._checkpoint = open_checkpoint(str(directory))
        self._loaded: dict[Span, BlockSpan] = {}
        self.num_blocks = self._checkpoint.num_blocks
        self.loop = EventLoop("swarm-in-process")
        self.device_thread: DeviceThread = self.loop.run_coroutine(self._new_device_thread())

    async def _new_device_thread(self) -> DeviceThread:
        return DeviceThread(Budget(pause_s=0.0))

    def of(self, span: Span) -> BlockSpan:
        if span not in self._loaded:
            self._loaded[span] = load_block_span(self._checkpoint, span, dtype=self.dtype, progress=False)
        return self._loaded[span]

    @property
    def all(self) -> BlockSpan:
        return self.of(Span(0, self.num_blocks))

    def close(self) -> None:
        self.loop.run_coroutine(self._close())
        self.loop.close()

    async def _close(self) -> None:
        await self.device_thread.close()
        await asyncio.get_running_loop().shutdown_default_executor()


class Server:
    """One server: what it announces, and its handler."""

    def __init__(self, swarm: "InProcessSwarm", number: int, span: Span, announced: dict[str, Any]) -> None:
        self.peer_id = server_id(number)
        blocks = swarm.blocks.of(span)
        options = {"decode_ms_per_block": 1.0, "throughput": 100.0, "cache_tokens_left": CACHE_TOKENS, **announced}
        options |= {"dtype": str(blocks.dtype).removeprefix("torch."), "replays_steps": True} | announced
        self.info = ServerInfo(peer_id=self.peer_id, start=span.start, end=span.end, traits=blocks.traits, **options)
        self.alive = self.listed = True
        self.streams: set[FrameStream] = set()
        """Both ends of all of them."""
        self._swarm = swarm
        self.links = Links(self._dial, swarm)  # type: ignore[arg-type]
        self.access = Access(None)
        self.handler = StreamHandler(self.access, self.links, fingerprint=FINGERPRINT)
        inputs = InputChecks(blocks)
        cache_bytes = (blocks.cache_sizes.bytes_per_token + inputs.hidden_bytes) * CACHE_TOKENS
        self.serving = self.access.serving = Serving(
            packer_of(blocks),
            [StackBlocks(blocks, inputs)],
            swarm.blocks.device_thread,
            CacheRoom(cache_bytes, 0, ADAPTERS_BYTES),
            limits=self.access.limits,
            settings=ServerLimits(max_batch_tokens=self.info.max_batch_tokens, compression="none"),
            offered=ServedAdapters((), None, token=None, cache_dir=None),
            throughput=Throughput(forward_tokens_per_s=1.0, decode_ms_per_block=1.0),
        )
        self.sessions = self.serving.sessions

    @property
    def span(self) -> Span:
        return self.info.span

    async def _dial(self, other: Any) -> FrameStream:
        if other.peer_id == self.peer_id and not self._swarm.dials_itself:
            raise PeerUnreachableError("dial to self attempted", other.peer_id)  # as p2pd says
        stream = await self._swarm.connect(self.peer_id, other.peer_id)
        await hello(stream, fingerprint=FINGERPRINT)
        return stream

    def die(self) -> None:
        """As a process does: all its streams break. Call it in the event loop."""
        self.alive = False
        for stream in tuple(self.streams):
            stream.abort()


class InProcessSwarm:
    """Some servers and one client; also what the client takes for its daemon and for the DHT."""

    def __init__(
        self,
        blocks: Blocks,
        spans: Sequence[tuple[int, int]],
        *,
        announced: Sequence[dict[str, Any]] = (),
        dials_itself: bool = True,
        **config: Any,
    ) -> None:
        self.blocks = blocks
        self.dials_itself = dials_itself
        self.peer_id = CLIENT
        self.on_message: Callable[[Server, Message], object] = lambda server, message: None
        """Called when a server takes a message, before it does anything with it."""
        self.on_send: OnSend = lambda server, kind, header, chunks: (kind, header, chunks)
        """Called when a server sends a message; it sends what this returns."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._config = ClientConfig(**config)
        self.servers: list[Server] = []
        self.ghosts: list[ServerInfo] = []
        """Records without a server."""
        self._spans = spans
        self._announced = announced or [{}] * len(spans)
        self._no_daemon = no_daemon_between()

    def __enter__(self) -> Self:
        self._no_daemon.__enter__()
        self.blocks.loop.run_coroutine(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.blocks.loop.run_coroutine(self._stop())
        self._no_daemon.__exit__(kind, error, trace)

    async def _start(self) -> None:
        for span, announced in zip(self._spans, self._announced, strict=True):
            self.servers.append(Server(self, len(self.servers), Span(*span), announced))
        self.view = await self.new_view()
        traits = await self.view.traits()
        self.batches = BatchRunner(self.view, traits)
        self.traits = traits

    def join(self, span: tuple[int, int], **announced: Any) -> Server:
        """One more server. Call it in the event loop."""
        self.servers.append(Server(self, len(self.servers), Span(*span), announced))
        return self.servers[-1]

    async def new_view(self) -> SwarmView:
        view = SwarmView(
            self._config, self.blocks.loop, name="model", fingerprint=FINGERPRINT, num_blocks=self.blocks.num_blocks
        )
        self.blocks.loop.on_close.remove(view.look_ups.close)
        view.own_traits = self.blocks.all.traits
        view.look_ups._peer, view.look_ups._directory = self, _Directory(self)  # type: ignore[assignment]
        return view

    async def _stop(self) -> None:
        self.batches.close()
        for server in self.servers:
            server.die()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def session(self, **options: Any) -> InferenceSession:
        return InferenceSession(self.view, self.traits, self.batches.spot_checks, **options)

    def kill(self, server: Server) -> None:
        async def die() -> None:
            server.die()

        self.blocks.loop.run_coroutine(die())

    def server(self, peer_id: str) -> Server:
        return next(server for server in self.servers if server.peer_id == peer_id)

    def covers(self, servers: Sequence[Server]) -> bool:
        return {block for server in servers for block in server.span} == set(range(self.blocks.num_blocks))

    def hop(self, server: int, start: int, end: int) -> RouteHop:
        return RouteHop(self.servers[server].info, Span(start, end))

    def first_route(self, route: Sequence[RouteHop]) -> None:
        """Have the client find this route first, and the best route later."""
        found = self.view.routes.find

        async def find_route(*_: Any) -> list[RouteHop]:
            self.view.routes.find = found  # type: ignore[method-assign]
            return list(route)

        self.view.routes.find = find_route  # type: ignore[method-assign]

    # ------------------------------------------------------------------ as a TaskGroup, a daemon and the DHT

    def create_task(self, coroutine: Any, name: str | None = None) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def open_stream(self, peer_id: str, *_: Any, **__: Any) -> FrameStream:
        return await self.connect(CLIENT, peer_id)

    is_alone = False

    def is_neighbour(self, peer_id: str) -> bool:
        return False

    async def connect(self, caller: str, called: str) -> FrameStream:
        """The caller's end of a new stream."""
        server = next((server for server in self.servers if server.peer_id == called and server.alive), None)
        if server is None:
            raise PeerUnreachableError("connection refused", called)
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        served, stream = self.new_ends(server, caller)
        try:
            await loop.create_connection(lambda: served, sock=theirs)
            await loop.create_connection(lambda: stream, sock=ours)
        except BaseException:  # whoever dialled has given up
            ours.close()
            theirs.close()
            raise
        ends = [(served, server), (stream, server)]
        if caller != CLIENT:
            ends += [(served, self.server(caller)), (stream, self.server(caller))]
        for end, owner in ends:
            owner.streams.add(end)
            end.gone.add_done_callback(lambda _, end=end, owner=owner: owner.streams.discard(end))
        self.create_task(self._serve(server, served))
        return stream

    def new_ends(self, server: Server, caller: str) -> tuple[FrameStream, FrameStream]:
        """The server's and the caller's end of a stream that isn't connected yet."""
        return _ServedStream(self, server, caller), FrameStream(server.peer_id)

    async def _serve(self, server: Server, stream: FrameStream) -> None:
        try:
            await server.handler(stream)
        finally:
            stream.abort()
            await stream.gone


class _ServedStream(FrameStream):
    """A server's end of a stream that was opened to it."""

    def __init__(self, swarm: InProcessSwarm, server: Server, caller: str) -> None:
        super().__init__(caller)
        self._swarm, self._server = swarm, server

    async def receive(self) -> Message:
        message = await super().receive()
        self._swarm.on_message(self._server, message)
        return message

    async def send(self, kind: Any, header: Any, payload_chunks: Any = (), **options: Any) -> None:
        kind, header, payload_chunks = self._swarm.on_send(self._server, kind, dict(header), payload_chunks)
        await super().send(kind, header, payload_chunks, **options)


class _Directory:
    """The DHT: it remembers the dead."""

    def __init__(self, swarm: InProcessSwarm) -> None:
        self._swarm = swarm

    async def servers(self, fingerprint: str) -> list[ServerInfo]:
        return [*self._swarm.ghosts, *(server.info for server in self._swarm.servers if server.listed)]

    async def models(self) -> dict[str, Any]:
        return {}


class Reference:
    """The outputs of a session's steps where all blocks are in one place."""

    def __init__(self, blocks: BlockSpan) -> None:
        self._blocks = blocks
        self._cache = blocks.new_cache(blocks.span)

    def step(self, hidden_states: Tensor, batch_index: Sequence[int] | None = None) -> Tensor:
        if batch_index is not None:
            self._cache.select_batch(batch_index)
        batch_size, seq_len, _ = hidden_states.shape
        inputs = BlockInputs(hidden_states=hidden_states, batch_size=batch_size, seq_len=seq_len)
        return self._blocks.forward(inputs, self._blocks.span, self._cache).clone()
