"""One stream to this server: every request on it is checked, dispatched and answered here.

Called by `network/peer` for each stream that a client or a predecessor opens. A bad request is answered with one
sentence and hurts nobody else; a stream that breaks takes its own sessions with it, and nothing more.
"""

import asyncio
import logging
import traceback
import weakref
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from swarmllm import __version__
from swarmllm.data_structures import ServedBlocks, Span
from swarmllm.errors import (
    BlocksNotServedError,
    CorruptActivationsError,
    PeerError,
    RemoteProtocolError,
    ServerOverloadedError,
    SessionLostError,
    SwarmError,
    WeightsMismatchError,
)
from swarmllm.models.activation_checks import plausible
from swarmllm.models.adapters import BlockAdapter
from swarmllm.models.block_span import BlockSpan
from swarmllm.network.compression import THREAD_BYTES, Outgoing, compressed
from swarmllm.network.intake import Intake
from swarmllm.network.messages import (
    SESSION_ID_LENGTH,
    AdapterHeader,
    AttachHeader,
    BatchHeader,
    CloseHeader,
    LinkHeader,
    OpenHeader,
    ReplayHeader,
    ResultHeader,
    StepHeader,
    parse,
)
from swarmllm.network.protocol import FrameStream, HelloHeader, Message, MessageType, send_error, welcome
from swarmllm.network.tensor_codec import encode_tensors, unpacked_bytes
from swarmllm.server.adapters import AdapterStore
from swarmllm.server.batches import Batch, KeptBatches, Turns, forward, gradients, record
from swarmllm.server.device import memory_errors_translated
from swarmllm.server.executor import Executor, Priority
from swarmllm.server.input_checks import InputChecks
from swarmllm.server.links import Links
from swarmllm.server.peer_limits import PeerLimits
from swarmllm.server.pushes import Pushes, push
from swarmllm.server.served_adapters import ServedAdapters
from swarmllm.server.session_table import NO_SUCH_SESSION, SessionTable
from swarmllm.server.sessions import Replay, Session, Step
from swarmllm.server.waiting_room import bytes_of

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_REQUESTS_PER_STREAM = 64
"""Forward and backward requests of one stream that may be under way; a client keeps about two per server busy."""
OF_SERVERS = frozenset((MessageType.PUSH, MessageType.PROBE))
"""Types of messages that may be large from anybody: who pushes what for which client shows only when it has come."""
OF_PREDECESSORS = OF_SERVERS | {MessageType.STEP}
"""From those who have shown the token of a session."""
OF_CLIENTS = OF_PREDECESSORS | {MessageType.FORWARD, MessageType.BACKWARD, MessageType.ADAPTER}
"""From those whom this server is there for."""


class StreamHandler:
    """Serves streams; one object for the whole server."""

    def __init__(
        self,
        *,
        fingerprint: str,
        executor: Executor,
        links: Links,
        max_batch_tokens: int,
        allowed_clients: Collection[str] | None,
        served_adapters: ServedAdapters,
        compression: str = "none",
    ) -> None:
        self.links = links
        self._fingerprint = fingerprint
        self._executor = executor
        self._max_batch_tokens = max_batch_tokens
        self._allowed_clients = allowed_clients
        self._compression = compression
        self.limits = PeerLimits()
        self._intake = Intake()
        self._blocks: BlockSpan | None = None
        self._inputs: InputChecks | None = None
        self._sessions: SessionTable | None = None
        self.adapters = AdapterStore()
        self._served_adapters = served_adapters
        self.batches = KeptBatches(max_batch_tokens)
        self.pushes = Pushes(self.limits)
        self._takes_clients = False
        self.loading: Span | None = None
        """Blocks that this server is about to serve."""

    def serve(self, blocks: BlockSpan, sessions: SessionTable) -> None:
        """From now on, these blocks are served."""
        self._blocks, self._inputs, self._sessions = blocks, InputChecks(blocks), sessions
        sessions.limits = self.limits
        self.adapters = AdapterStore()
        self._executor.on_out_of_memory = sessions.make_room
        self._takes_clients = True

    async def retire(self, timeout_s: float) -> None:
        """Take nothing new, hand the sessions over, and let the blocks go when everything that runs has ended."""
        self._takes_clients = False
        self.pushes.clear()
        if self._sessions is not None:
            await self._sessions.hand_over(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._executor.wait_until_idle()
        except TimeoutError:
            logger.warning("left %d calls unfinished after %.0f s", self._executor.num_calls, timeout_s)
        self.batches.clear()
        self._executor.on_out_of_memory = None  # nor its pages of prompts
        self._blocks = self._inputs = self._sessions = None

    async def __call__(self, stream: FrameStream) -> None:
        """Serve one stream until it ends."""
        peer_id = stream.peer_id
        try:
            self.limits.enter(peer_id)
        except ServerOverloadedError as error:
            await send_error(stream, error)
            return
        try:
            stream.count_in(self._intake)
            await welcome(stream, software=__version__, info=self._info(), accept=self._accept)
            stream.expect(OF_CLIENTS if self.is_allowed(peer_id) else OF_SERVERS)
            await _Stream(self, stream).serve()
        except SwarmError as error:
            logger.debug("stream of %s ended: %s", peer_id, error)
        finally:
            self.limits.leave(peer_id)

    def _accept(self, hello: HelloHeader) -> None:
        if hello.fingerprint and hello.fingerprint != self._fingerprint:
            raise WeightsMismatchError(
                f"this server holds another checkpoint (fingerprint {self._fingerprint[:12]}) than yours "
                f"({hello.fingerprint[:12]})"
            )

    def _info(self) -> dict[str, object]:
        """What this server says of itself in its greeting: `ServedBlocks`, or nothing if it serves none."""
        blocks = self._blocks
        span = self.loading if blocks is None else blocks.span
        if span is None:
            return {}
        traits = None if blocks is None else blocks.traits
        return ServedBlocks(start=span.start, end=span.end, traits=traits).model_dump()

    # ------------------------------------------------------------------ used by streams

    @property
    def blocks(self) -> BlockSpan:
        """Raises: BlocksNotServedError: none at the moment."""
        if self._blocks is None:
            raise BlocksNotServedError("this server serves no blocks at the moment")
        return self._blocks

    @property
    def sessions(self) -> SessionTable:
        """Raises: BlocksNotServedError: none at the moment."""
        if self._sessions is None:
            raise BlocksNotServedError("this server serves no blocks at the moment")
        return self._sessions

    def check_client(self, peer_id: str) -> None:
        """Raises: BlocksNotServedError: this server takes nothing new from this client."""
        if not self.is_allowed(peer_id):
            raise BlocksNotServedError("this server doesn't serve you: ask its owner to add you to --allowed_clients")
        if not self._takes_clients:
            raise BlocksNotServedError("this server is leaving these blocks; take another route")

    def is_allowed(self, peer_id: str) -> bool:
        """Whether this server is there for that client; other servers may pass on what such a client has asked for."""
        return self._allowed_clients is None or peer_id in self._allowed_clients

    def check_span(self, start: int, end: int) -> Span:
        """The span asked for, which this server holds.

        Raises:
            BlocksNotServedError: it doesn't.
        """
        blocks = self.blocks
        if start >= end or Span(start, end) not in blocks.span:
            raise BlocksNotServedError(f"this server holds blocks {blocks.span}, not [{start}, {end})")
        for cut in {start, end} & set(blocks.traits.forbidden_cuts):
            raise BlocksNotServedError(f"a route can't be cut at block {cut} of this model")
        return Span(start, end)

    @property
    def inputs(self) -> InputChecks:
        """Raises: BlocksNotServedError: no blocks at the moment."""
        if self._inputs is None:
            raise BlocksNotServedError("this server serves no blocks at the moment")
        return self._inputs

    def adapter_of(self, header: OpenHeader | BatchHeader, peer_id: str) -> BlockAdapter | None:
        """The adapter that a request of that peer names: one that it has sent, or one that this server offers.

        Raises:
            BlocksNotServedError: it isn't here.
        """
        if header.served_adapter is None:
            return self.adapters.get(peer_id, header.adapter)
        if header.adapter is not None:
            raise RemoteProtocolError("a request runs with an adapter of its own or with one of the server's, not both")
        return self._served_adapters.get(header.served_adapter)

    async def take_adapter(self, message: Message, *, peer_id: str) -> tuple[ResultHeader, Outgoing]:
        """ADAPTER: keep it for later requests of that peer.

        Raises:
            SwarmError: it doesn't fit these blocks, or takes too much room.
        """
        header = parse(AdapterHeader, message.header, None)
        self.adapters.put(peer_id, header.handle, self.inputs.read_adapter(header, message))
        return ResultHeader(id=header.id), {}

    async def run_batch(self, message: Message, *, stream: FrameStream) -> tuple[ResultHeader, Outgoing]:
        """FORWARD: the outputs. BACKWARD: the gradients of the inputs, from a kept forward or from the inputs alone.

        Raises:
            SwarmError: as one sentence for the client.
        """
        header = parse(BatchHeader, message.header, None)
        span = self.check_span(header.start, header.end)
        adapter = self.adapter_of(header, stream.peer_id)
        num_prefix = 0 if adapter is None else adapter.num_prefix
        num_tokens = header.batch_size * (header.seq_len + num_prefix)
        if num_tokens > self._max_batch_tokens:
            raise ServerOverloadedError(
                f"a batch of {num_tokens} tokens is above this server's limit of {self._max_batch_tokens}"
            )
        self.inputs.check_length(header.seq_len + num_prefix)
        if header.source is None:
            return await self._run_batch(header, message, span, stream, {})
        async with self.pushes.taken(header.source, stream.peer_id) as pushed:
            self.check_client(stream.peer_id)
            span = self.check_span(header.start, header.end)  # other blocks may be served by now
            name = "hidden_states" if message.type == MessageType.FORWARD else "grad_outputs"
            read = partial(self.inputs.read_pushed, header, name, pushed, header.source.peer_id)
            tensors = await _off_loop(read, pushed.message)
            return await self._run_batch(header, message, span, stream, tensors)

    async def _run_batch(
        self, header: BatchHeader, message: Message, span: Span, stream: FrameStream, pushed: dict[str, Tensor]
    ) -> tuple[ResultHeader, Outgoing]:
        batches, peer_id, target = self.batches, stream.peer_id, header.target
        turns = await self._turns(header, message, span, peer_id, pushed)
        timed = await self._executor.run_in_turns(turns, Priority.BATCH)
        result = timed.value
        if isinstance(result, Batch):
            batches.put(peer_id, header.id, result)
            result = {"hidden_states": result.outputs}
        compression = self._compression if header.compression == "auto" else header.compression
        sent = None
        if target is not None:
            name = "hidden_states" if message.type == MessageType.FORWARD else "grad_outputs"
            sent = await push(self.links, target, name, result["hidden_states"], compression)
        if sent is not None:  # the client shall have what its target has
            others = {name: tensor for name, tensor in result.items() if name != "hidden_states"}
            result = others if header.lean else others | {"hidden_states": sent}
        timings = ((span.start, timed.queue_us, timed.compute_us),)
        answer = ResultHeader(id=header.id, end=span.end, timings=timings, pushed=sent is not None)
        return answer, await compressed(result, stream, compression, exactly=sent is not None)

    async def _turns(
        self, header: BatchHeader, message: Message, span: Span, peer_id: str, pushed: dict[str, Tensor]
    ) -> Turns[Batch | dict[str, Tensor]]:
        """What the device thread is to do for that request."""
        blocks, checks = self.blocks, self.inputs
        if header.forward is not None:
            grad_outputs = await _off_loop(partial(checks.read_gradient, header, message, pushed), message)
            return self.batches.take(peer_id, header.forward).gradients(grad_outputs)
        inputs, given = await _off_loop(partial(checks.read, header, message, pushed), message)
        axis = blocks.traits.batch_axis
        if "hidden_states" in pushed and not plausible(inputs.hidden_states, axis, inputs.attention_mask):
            source = None if header.source is None else header.source.peer_id
            raise CorruptActivationsError("a server passed on NaN, infinite or absurd values", source)
        inputs = replace(inputs, adapter=self.adapter_of(header, peer_id))
        if header.ones_mask:
            inputs = replace(inputs, attention_mask=torch.ones(inputs.batch_size, inputs.seq_len, dtype=torch.int64))
        short_turns = len(self.sessions) > 0
        if message.type == MessageType.FORWARD:
            return (record if header.keep else forward)(blocks, inputs, span, short_turns=short_turns)
        if given is None:
            raise RemoteProtocolError("BACKWARD needs grad_outputs")
        return gradients(blocks, inputs, span, given, short_turns=short_turns)


async def _off_loop(read: Callable[[], T], message: Message) -> T:
    """What `read` makes of the message's tensors; in a thread if unpacking them would keep the event loop too long."""
    num_bytes = unpacked_bytes(message.header.get("tensors"), len(message.payload))
    return read() if num_bytes < THREAD_BYTES else await asyncio.to_thread(read)


class _Stream:
    """What one stream has open."""

    def __init__(self, handler: StreamHandler, stream: FrameStream) -> None:
        self._handler = handler
        self._stream = stream
        self._owned: dict[str, tuple[Session, asyncio.Task[None]]] = {}
        self._attached: dict[str, weakref.ref[Session]] = {}
        """Owners keep them: a predecessor's link may idle for days, and must not hold the caches of closed ones."""
        self._num_requests = 0

    async def serve(self) -> None:
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
            for session, _ in self._owned.values():
                session.close()

    async def _dispatch(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        try:
            with memory_errors_translated():
                await self._take(message, tasks)
        except SwarmError as error:
            if self._stream.closed:
                raise
            await self._refuse(message, error)

    async def _take(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        match message.type:
            case MessageType.STEP:
                await self._step(message)
            case MessageType.OPEN:
                await self._open(message, tasks)
            case MessageType.REPLAY:
                replay = parse(ReplayHeader, message.header, None)
                session, num_bytes = self._owned_session(replay.session), bytes_of(replay, message)
                session.take_room(num_bytes)
                session.enqueue(Replay(replay, num_bytes))
            case MessageType.CLOSE:
                self._close(parse(CloseHeader, message.header, None).session)
            case MessageType.LINK:
                await self._start(tasks, message, self._link)
            case MessageType.ATTACH:
                await self._start(tasks, message, self._attach)
            case MessageType.FORWARD | MessageType.BACKWARD:
                self._handler.check_client(self._stream.peer_id)
                run = partial(self._handler.run_batch, stream=self._stream)
                await self._start(tasks, message, run)
            case MessageType.ADAPTER:
                self._handler.check_client(self._stream.peer_id)
                take = partial(self._handler.take_adapter, peer_id=self._stream.peer_id)
                await self._start(tasks, message, take)
            case MessageType.PUSH:
                self._handler.pushes.arrived(message, self._stream.peer_id)
            case MessageType.PROBE:
                pass  # it has arrived, and that is all that its sender wants to know
            case _:
                raise RemoteProtocolError(f"a server doesn't take {message.type.name} messages")

    async def _step(self, message: Message) -> None:
        header = parse(StepHeader, message.header, None)
        attached = self._attached.get(header.session)
        session = self._owned_session(header.session) if attached is None else attached()
        if session is None or session.closed:
            return  # its client is gone; the predecessor doesn't know yet
        num_bytes = bytes_of(header, message)
        session.take_room(num_bytes)
        try:
            inputs, _ = await _off_loop(partial(self._handler.inputs.read, header, message), message)
            session.enqueue(Step(header, num_bytes, inputs, None if attached is None else self._stream.peer_id))
        except BaseException:
            session.give_room_back(num_bytes)
            raise

    async def _open(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        header = parse(OpenHeader, message.header, None)
        self._handler.check_client(self._stream.peer_id)
        self._handler.check_span(header.start, header.end)
        adapter = self._handler.adapter_of(header, self._stream.peer_id)
        session = self._handler.sessions.open(header, self._stream, adapter)
        self._owned[session.id] = session, tasks.create_task(session.work(), name=f"session {session.id}")
        await self._answer(ResultHeader(id=header.id), {})

    async def _link(self, message: Message) -> tuple[ResultHeader, Outgoing]:
        header = parse(LinkHeader, message.header, None)
        session = self._owned_session(header.session)
        session.epoch = max(session.epoch, header.epoch)
        await session.link_to(self._handler.links, header.successor)
        return ResultHeader(id=header.id, position=session.passed_on), {}

    async def _attach(self, message: Message) -> tuple[ResultHeader, Outgoing]:
        header = parse(AttachHeader, message.header, None)
        session = self._handler.sessions.attachable(header.session, header.token)
        self._attached = {key: attached for key, attached in self._attached.items() if attached() is not None}
        self._attached[header.session] = weakref.ref(session)
        self._stream.expect(OF_CLIENTS if self._handler.is_allowed(self._stream.peer_id) else OF_PREDECESSORS)
        return ResultHeader(id=header.id), {}

    def _close(self, session_id: str) -> None:
        session, worker = self._owned.pop(session_id, (None, None))
        if session is not None and worker is not None:
            worker.cancel()
            session.close()

    def _owned_session(self, session_id: str) -> Session:
        """Only the stream that opened a session, and its attached predecessor, may use it.

        Raises:
            SessionLostError: it isn't this stream's; nobody is told whether it is another one's.
        """
        if session_id not in self._owned:
            raise SessionLostError(NO_SUCH_SESSION)
        return self._owned[session_id][0]

    async def _start(
        self,
        tasks: asyncio.TaskGroup,
        message: Message,
        run: Callable[[Message], Awaitable[tuple[ResultHeader, Outgoing]]],
    ) -> None:
        """Answer the request in a task of its own, so that the stream goes on meanwhile."""
        if self._num_requests >= MAX_REQUESTS_PER_STREAM:
            raise ServerOverloadedError(f"one stream may have {MAX_REQUESTS_PER_STREAM} requests under way")
        peer_id, payload = self._stream.peer_id, len(message.payload)
        num_bytes = payload + unpacked_bytes(message.header.get("tensors"), payload)
        await self._handler.limits.take(peer_id, num_bytes)
        self._num_requests += 1

        def ended(_: object) -> None:  # also if the task was cancelled before it began
            self._num_requests -= 1
            self._handler.limits.give_back(peer_id, num_bytes)

        tasks.create_task(self._run(message, run), name=message.type.name).add_done_callback(ended)

    async def _run(self, message: Message, run: Callable[[Message], Awaitable[tuple[ResultHeader, Outgoing]]]) -> None:
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
