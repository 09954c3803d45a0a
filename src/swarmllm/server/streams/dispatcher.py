"""One stream to this server: every message on it is taken in the order of arrival, and answered or refused.

Called by `handler` when a stream has been greeted. A bad request is answered with one sentence and hurts nobody else; a
stream that breaks takes its own sessions with it, and nothing more.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from functools import partial

from swarmllm.errors import PeerError, RemoteProtocolError, ServerOverloadedError, SwarmError
from swarmllm.network.wire.compression import Outgoing
from swarmllm.network.wire.messages import SESSION_ID_LENGTH, AdapterHeader, ResultHeader, parse
from swarmllm.network.wire.protocol import FrameStream, Message, MessageType, send_error
from swarmllm.network.wire.tensor_codec import decompressed_bytes, encode_tensors
from swarmllm.server.device.device import memory_errors_translated
from swarmllm.server.peers.links import Links
from swarmllm.server.streams.access import Access
from swarmllm.server.streams.batch_request import run_batch
from swarmllm.server.streams.serving import Serving
from swarmllm.server.streams.session_messages import SessionMessages

MAX_REQUESTS_PER_STREAM = 64
"""Forward and backward requests of one stream that may be under way; a client keeps about two per server busy."""

OF_BLOCKS = frozenset(
    (MessageType.OPEN, MessageType.FORWARD, MessageType.BACKWARD, MessageType.ADAPTER, MessageType.PUSH)
)
"""Messages that wait for blocks which are to be loaded again; pings are answered meanwhile."""

Reply = tuple[ResultHeader, Outgoing]


class Dispatcher:
    """The requests of one stream."""

    def __init__(self, stream: FrameStream, access: Access, links: Links, compression: str) -> None:
        self._stream, self._access, self._links, self._compression = stream, access, links, compression
        self._sessions = SessionMessages(access, links, stream)
        self._num_requests = 0

    async def serve(self) -> None:
        """Return when the stream has ended."""
        self._stream.start_keepalive()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._dispatch(await self._stream.receive(), tasks)
        except* SwarmError as ended:  # the stream has: its tasks are cancelled, its sessions end
            # Python 3.11's TaskGroup leaves its error in a circle with its own frame, and so with everything that this
            # stream had open: KV caches would wait for the garbage collector, which comes late where much lives long.
            traceback.clear_frames(ended.__traceback__)
        finally:
            self._sessions.close()

    async def _dispatch(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        try:
            with memory_errors_translated():
                await self._take(message, tasks)
        except SwarmError as error:
            if self._stream.closed:
                raise
            await self._refuse(message, error)

    async def _take(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        stream = self._stream
        if message.type in OF_BLOCKS:
            await self._access.wake(stream.peer_id)
        match message.type:
            case MessageType.STEP:
                await self._sessions.step(message)
            case MessageType.OPEN:
                session = self._sessions.open(message)
                tasks.create_task(session.work(), name=f"session {session.id}")
                await self._answer(ResultHeader(id=message.header["id"]), {})
            case MessageType.REPLAY:
                self._sessions.replay(message)
            case MessageType.LINK:
                await self._start(tasks, message, self._sessions.link)
            case MessageType.ATTACH:
                await self._start(tasks, message, self._sessions.attach)
            case MessageType.FORWARD | MessageType.BACKWARD:
                serving = self._access.served_to(stream.peer_id)
                await self._start(tasks, message, partial(run_batch, serving, self._links, self._compression, stream))
            case MessageType.ADAPTER:
                serving = self._access.served_to(stream.peer_id)
                await self._start(tasks, message, partial(_take_adapter, serving, stream.peer_id))
            case MessageType.PUSH:
                self._access.served().pushes.arrived(message, stream.peer_id)
            case _:
                raise RemoteProtocolError(f"a server doesn't take {message.type.name} messages")

    async def _start(
        self, tasks: asyncio.TaskGroup, message: Message, run: Callable[[Message], Awaitable[Reply]]
    ) -> None:
        """Answer the request in a task of its own, so that the stream goes on meanwhile."""
        if self._num_requests >= MAX_REQUESTS_PER_STREAM:
            raise ServerOverloadedError(f"one stream may have {MAX_REQUESTS_PER_STREAM} requests under way")
        peer_id, payload, limits = self._stream.peer_id, len(message.payload), self._access.limits
        num_bytes = payload + decompressed_bytes(message.header.get("tensors"), payload)
        await limits.take(peer_id, num_bytes)
        self._num_requests += 1

        def ended(_: object) -> None:  # also if the task was cancelled before it began
            self._num_requests -= 1
            limits.give_back(peer_id, num_bytes)

        tasks.create_task(self._run(message, run), name=message.type.name).add_done_callback(ended)

    async def _run(self, message: Message, run: Callable[[Message], Awaitable[Reply]]) -> None:
        try:
            with memory_errors_translated():
                header, tensors = await run(message)
                await self._answer(header, tensors)
        except SwarmError as error:
            if self._stream.closed:
                raise
            await self._refuse(message, error)

    async def _answer(self, header: ResultHeader, tensors: Outgoing) -> None:
        descriptors, chunks = encode_tensors(tensors)
        await self._stream.send(MessageType.RESULT, header.model_dump() | {"tensors": descriptors}, chunks)

    async def _refuse(self, message: Message, error: SwarmError) -> None:
        request, session = message.header.get("id"), message.header.get("session")
        ids: dict[str, object] = {"id": request if isinstance(request, int) else None}
        if isinstance(session, str) and len(session) == SESSION_ID_LENGTH:
            ids["session"] = session
        if isinstance(error, PeerError) and error.peer_id is not None:
            ids["peer_id"] = error.peer_id
        await send_error(self._stream, error, **ids)


async def _take_adapter(serving: Serving, peer_id: str, message: Message) -> Reply:
    """ADAPTER: keep it for later requests of that peer."""
    header = parse(AdapterHeader, message.header, None)
    block, parts = header.patches[0].block, serving.parts.parts
    part = next((part for part in parts if block in part.blocks.span), parts[-1])  # which refuses what it lacks
    serving.adapters.put(peer_id, header.handle, part.inputs.read_adapter(header, message))
    return ResultHeader(id=header.id), {}
