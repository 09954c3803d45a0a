"""Serve the streams that clients and previous servers open: greet, count them, and answer their messages.

Messages are taken in the order of arrival, and answered or refused. A bad request gets one sentence as its answer, and
disturbs no other request. If a stream breaks, its own sessions end, and no others. `answer_request` answers FORWARD and
BACKWARD, the requests without a session.
"""

import asyncio
import logging
import traceback
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import (
    CorruptActivationsError,
    PeerError,
    RemoteProtocolError,
    ServerOverloadedError,
    SessionLostError,
    SwarmError,
    WeightsMismatchError,
)
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.inner_states import InnerStates, plausible
from swarmllm.network.wire.compression import Outgoing, compressed
from swarmllm.network.wire.messages import (
    SESSION_ID_LENGTH,
    AdapterHeader,
    AttachHeader,
    BatchHeader,
    LinkHeader,
    OpenHeader,
    ReplayHeader,
    ResultHeader,
    StepHeader,
    parse,
)
from swarmllm.network.wire.protocol import FrameStream, HelloHeader, Message, MessageType, send_error, welcome
from swarmllm.network.wire.stream import Intake
from swarmllm.network.wire.tensor_codec import decompressed_bytes, encode_tensors
from swarmllm.server.device.device import memory_errors_translated
from swarmllm.server.device.forward_backward import KeptForward, Turns, forward, gradients, record
from swarmllm.server.device.scheduler import Priority
from swarmllm.server.peers.links import Links
from swarmllm.server.peers.pushes import push
from swarmllm.server.sessions.kv_cache import bytes_of
from swarmllm.server.sessions.session import NO_SUCH_SESSION, Replay, Session
from swarmllm.server.sessions.step_runner import INNER_FACTOR, Step, wanted_inner
from swarmllm.server.streams.input_checks import NOTHING, off_loop
from swarmllm.server.streams.serving import Access, Serving, StackBlocks
from swarmllm.version import __version__

logger = logging.getLogger(__name__)

MAX_REQUESTS_PER_STREAM = 64
"""Requests without a session that one stream may have under way; a client keeps about two per server busy."""

OF_BLOCKS = frozenset(
    (MessageType.OPEN, MessageType.FORWARD, MessageType.BACKWARD, MessageType.ADAPTER, MessageType.PUSH)
)
"""Messages that wait while blocks are loaded again; pings are answered meanwhile."""

Reply = tuple[ResultHeader, Outgoing]


class StreamHandler:
    """Serves streams that peers open; one object for the whole server, called by `p2p/peer`."""

    def __init__(
        self,
        access: Access,
        links: Links,
        *,
        fingerprint: str,
        compression: str = "none",
        greeted: Callable[[HelloHeader, str], None] = lambda *_: None,
    ) -> None:
        """`greeted` is called with each client's greeting and peer id."""
        self.access, self.links, self.compression = access, links, compression
        self._fingerprint, self._greeted = fingerprint, greeted
        self._intake = Intake()

    @property
    def num_untaken_bytes(self) -> int:
        """Bytes that peers have sent and no stream has taken yet."""
        return self._intake.num_bytes

    async def __call__(self, stream: FrameStream) -> None:
        """Serve one stream until it ends."""
        peer_id, access = stream.peer_id, self.access
        try:
            access.limits.enter(peer_id)
        except ServerOverloadedError as error:
            await send_error(stream, error)
            return
        try:
            stream.count_in(self._intake)
            greeting = await welcome(stream, software=__version__, info=access.greeting(), accept=self._accept)
            access.limits.standing.note(peer_id, greeting.contribution)
            self._greeted(greeting, peer_id)
            stream.expect(access.large_messages_of(peer_id))
            await Connection(stream, access, self.links, self.compression).serve()
        except SwarmError as error:
            logger.debug("stream of %s ended: %s", peer_id, error)
        finally:
            access.limits.leave(peer_id)

    def _accept(self, hello: HelloHeader) -> None:
        if hello.fingerprint and hello.fingerprint != self._fingerprint:
            raise WeightsMismatchError(
                f"this server holds another checkpoint (fingerprint {self._fingerprint[:12]}) than yours "
                f"({hello.fingerprint[:12]})"
            )


class Connection:
    """The messages of one stream, and the sessions that it may use: those it has opened or is attached to."""

    def __init__(self, stream: FrameStream, access: Access, links: Links, compression: str) -> None:
        self._stream, self._access, self._links, self._compression = stream, access, links, compression
        self._num_requests = 0
        self._owned: dict[str, Session] = {}
        self._attached: dict[str, weakref.ref[Session]] = {}
        """Weak: the stream of a previous server may idle for days, and must not keep the caches of closed sessions."""

    async def serve(self) -> None:
        """Return when the stream has ended."""
        self._stream.start_keepalive()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._dispatch(await self._stream.receive(), tasks)
        except* SwarmError as ended:  # the stream has: its tasks are cancelled, its sessions end
            # Python 3.11's TaskGroup leaves its error in a circle with its own frame, and so with everything that this
            # stream had open: KV caches would wait for the garbage collector, which runs late if much lives long.
            traceback.clear_frames(ended.__traceback__)
        finally:
            for session in self._owned.values():
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
        peer_id = self._stream.peer_id
        if message.type in OF_BLOCKS:
            await self._access.wake(peer_id)
        match message.type:
            case MessageType.STEP:
                await self._take_step(message)
            case MessageType.OPEN:
                session = self._open_session(message)
                tasks.create_task(session.work(), name=f"session {session.id}")
                await self._answer(ResultHeader(id=message.header["id"]), {})
            case MessageType.REPLAY:
                self._take_replay(message)
            case MessageType.LINK:
                await self._start(tasks, message, self._link_session)
            case MessageType.ATTACH:
                await self._start(tasks, message, self._attach_to_session)
            case MessageType.FORWARD | MessageType.BACKWARD:
                serving = self._access.served_to(peer_id)
                answer = partial(answer_request, serving, self._links, self._compression, self._stream)
                await self._start(tasks, message, answer)
            case MessageType.ADAPTER:
                await self._start(tasks, message, self._take_adapter)
            case MessageType.PUSH:
                self._access.served().pushes.arrived(message, peer_id)
            case _:
                raise RemoteProtocolError(f"a server doesn't take {message.type.name} messages")

    # ------------------------------------------------------------------ sessions

    def _open_session(self, message: Message) -> Session:
        """OPEN: a new session, which this stream owns."""
        header = parse(OpenHeader, message.header, None)
        serving = self._access.served_to(self._stream.peer_id)
        if not serving.stack_of(header.start, header.end).blocks.keeps_cache:
            raise RemoteProtocolError("blocks of an encoder keep no KV cache: send requests without a session")
        adapter = serving.adapter_of(header, self._stream.peer_id)
        session = self._owned[header.session] = serving.sessions.open(header, self._stream, adapter)
        return session

    async def _take_step(self, message: Message) -> None:
        """STEP: check its tensors, and queue it at its session."""
        header = parse(StepHeader, message.header, None)
        attached = self._attached.get(header.session)
        session = self._owned_session(header.session) if attached is None else attached()
        if session is None or session.closed:
            return  # its client is gone; the previous server doesn't know yet
        num_bytes = bytes_of(header, message)
        session.take_room(num_bytes)
        try:
            checks = self._access.served().inputs
            inputs, _ = await off_loop(partial(checks.read, header, message), message)
            session.enqueue(Step(header, num_bytes, inputs, None if attached is None else self._stream.peer_id))
        except BaseException:
            session.waiting_room.forget(num_bytes)
            raise

    def _take_replay(self, message: Message) -> None:
        """REPLAY: queue it at its session."""
        header = parse(ReplayHeader, message.header, None)
        session, num_bytes = self._owned_session(header.session), bytes_of(header, message)
        session.take_room(num_bytes)
        session.enqueue(Replay(header, num_bytes))

    async def _link_session(self, message: Message) -> Reply:
        """LINK: send the session's outputs to another server from now on."""
        header = parse(LinkHeader, message.header, None)
        session = self._owned_session(header.session)
        session.epoch = max(session.epoch, header.epoch)
        await session.link_to(self._links, header.successor)
        return ResultHeader(id=header.id, position=session.passed_on), {}

    async def _attach_to_session(self, message: Message) -> Reply:
        """ATTACH: steps of the session will come on this stream."""
        header = parse(AttachHeader, message.header, None)
        session = self._access.served().sessions.attachable(header.session, header.token)
        self._attached = {key: attached for key, attached in self._attached.items() if attached() is not None}
        self._attached[header.session] = weakref.ref(session)
        self._stream.expect(self._access.large_messages_of(self._stream.peer_id, attached=True))
        return ResultHeader(id=header.id), {}

    def _owned_session(self, session_id: str) -> Session:
        """Return the session, which only the stream that opened it (and the attached previous server) may use.

        Raises:
            SessionLostError: it isn't this stream's; the error is the same if another stream has such a session.
        """
        if session_id not in self._owned:
            raise SessionLostError(NO_SUCH_SESSION)
        return self._owned[session_id]

    # ------------------------------------------------------------------ requests, answered in tasks of their own

    async def _start(
        self, tasks: asyncio.TaskGroup, message: Message, answer: Callable[[Message], Awaitable[Reply]]
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

        tasks.create_task(self._answer_with(answer, message), name=message.type.name).add_done_callback(ended)

    async def _answer_with(self, answer: Callable[[Message], Awaitable[Reply]], message: Message) -> None:
        try:
            with memory_errors_translated():
                header, tensors = await answer(message)
                await self._answer(header, tensors)
        except SwarmError as error:
            if self._stream.closed:
                raise
            await self._refuse(message, error)

    async def _take_adapter(self, message: Message) -> Reply:
        """ADAPTER: keep it for later requests of this peer."""
        serving = self._access.served_to(self._stream.peer_id)
        header = parse(AdapterHeader, message.header, None)
        block, stacks = header.patches[0].block, serving.stacks
        stack = next((stack for stack in stacks if block in stack.blocks.span), stacks[-1])  # it refuses other blocks
        serving.uploaded.put(self._stream.peer_id, header.handle, stack.inputs.read_adapter(header, message))
        return ResultHeader(id=header.id), {}

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


async def answer_request(
    serving: Serving, links: Links, compression: str, stream: FrameStream, message: Message
) -> tuple[ResultHeader, Outgoing]:
    """Answer FORWARD with outputs, and BACKWARD with gradients of the inputs.

    BACKWARD uses a kept forward, or the inputs alone. `compression` is used if the client leaves it to the server.

    Raises:
        SwarmError: one sentence for the client.
    """
    header = parse(BatchHeader, message.header, None)
    compression = compression if header.compression == "auto" else header.compression
    request = _Request(serving, links, compression, stream, message, header)
    adapter = request.checked_adapter()
    if header.source is None:
        return await request.answer(adapter, NOTHING)
    async with serving.pushes.taken(header.source, stream.peer_id) as pushed:
        serving.check_stays()
        read = partial(request.stack.inputs.read_pushed, header, request.passed_on, pushed, header.source.peer_id)
        return await request.answer(adapter, await off_loop(read, pushed.message))


@dataclass(frozen=True, eq=False, slots=True)
class _Request:
    serving: Serving
    links: Links
    compression: str
    stream: FrameStream
    message: Message
    header: BatchHeader

    @property
    def span(self) -> Span:
        """The blocks to run."""
        return Span(self.header.start, self.header.end)

    @property
    def stack(self) -> StackBlocks:
        """The server's blocks of the stack that the request names."""
        return self.serving.stack_of(self.header.start, self.header.end)

    @property
    def passed_on(self) -> str:
        """Name of the tensor that goes from server to server, in the direction of this request."""
        return "hidden_states" if self.message.type == MessageType.FORWARD else "grad_outputs"

    def checked_adapter(self) -> BlockAdapter | None:
        """Check the blocks and the size of the request, and return its adapter.

        Raises:
            SwarmError: this server doesn't have the blocks or the adapter, or the request is too large for it.
        """
        header, serving = self.header, self.serving
        stack = self.stack
        adapter = serving.adapter_of(header, self.stream.peer_id)
        num_prefix = 0 if adapter is None else adapter.num_prefix
        num_tokens = header.batch_size * (header.seq_len + num_prefix)
        if num_tokens > serving.max_batch_tokens:
            raise ServerOverloadedError(
                f"a request of {num_tokens} tokens is above this server's limit of {serving.max_batch_tokens}"
            )
        stack.inputs.check_length(header.seq_len + num_prefix)
        return adapter

    async def answer(self, adapter: BlockAdapter | None, pushed: Mapping[str, Tensor]) -> tuple[ResultHeader, Outgoing]:
        """Compute, pass tensors on to the next server if it waits for them, and return the answer for the client."""
        header, serving = self.header, self.serving
        inner, num_bytes = wanted_inner(header, self.span, self.stack.blocks, self.stack.inputs.hidden_bytes)
        if inner is None:
            return await self._computed(adapter, pushed)
        if header.keep or self.message.type != MessageType.FORWARD:
            raise RemoteProtocolError("inner states can be asked for by FORWARD without keep only")
        num_bytes *= INNER_FACTOR
        if not serving.limits.take_now(self.stream.peer_id, num_bytes):
            raise ServerOverloadedError("this client asks for too many inner states at once")
        try:
            answer, tensors = await self._computed(adapter, pushed, inner)
            blocks, attentions, shown = inner.as_answer(self.span)
            return answer.model_copy(update={"blocks": blocks, "attentions": attentions}), {**tensors, **shown}
        finally:
            serving.limits.give_back(self.stream.peer_id, num_bytes)

    async def _computed(
        self, adapter: BlockAdapter | None, pushed: Mapping[str, Tensor], inner: InnerStates | None = None
    ) -> tuple[ResultHeader, Outgoing]:
        header, serving, span = self.header, self.serving, self.span
        turns = await self._turns(adapter, pushed, inner)
        account = serving.limits.standing.account(self.stream.peer_id)
        timed = await serving.device_thread.run_in_turns(turns, Priority.SESSIONLESS, account)
        if self.message.type == MessageType.FORWARD:
            serving.device_thread.note_forward(len(span), header.batch_size * header.seq_len, timed.compute_us)
        kept, result = timed.value
        if kept is not None:
            serving.kept_forwards.put(self.stream.peer_id, header.id, kept)
        sent = None
        if header.target is not None:
            tensor = result["hidden_states"]
            sent = await push(self.links, header.target, self.passed_on, tensor, self.compression)
        if sent is not None:  # the client gets the same tensors as its target
            others = {name: tensor for name, tensor in result.items() if name != "hidden_states"}
            result = others if header.without_pushed else others | {"hidden_states": sent}
        timings = ((span.start, timed.queue_us, timed.compute_us),)
        answer = ResultHeader(id=header.id, end=span.end, timings=timings, pushed=sent is not None)
        return answer, await compressed(result, self.stream, self.compression, exactly=sent is not None)

    async def _turns(
        self, adapter: BlockAdapter | None, pushed: Mapping[str, Tensor], inner: InnerStates | None
    ) -> Turns[tuple[KeptForward | None, dict[str, Tensor]]]:
        """Return the device thread's work for this request: a forward to keep for a backward, and the answer."""
        header, message, serving, span = self.header, self.message, self.serving, self.span
        blocks, checks = self.stack.blocks, self.stack.inputs
        if header.forward is not None:
            grad_outputs = await off_loop(partial(checks.read_gradient, header, message, pushed), message)
            return _nothing_kept(
                serving.kept_forwards.take(self.stream.peer_id, header.forward).gradients(grad_outputs)
            )
        inputs, given = await off_loop(partial(checks.read, header, message, pushed), message)
        if inputs.batch_size * inputs.source_len > serving.max_batch_tokens:
            raise ServerOverloadedError(
                f"encoder outputs of {inputs.batch_size * inputs.source_len} tokens are above this server's limit of "
                f"{serving.max_batch_tokens}"
            )
        axis = blocks.traits.batch_axis
        if "hidden_states" in pushed and not plausible(inputs.hidden_states, axis, inputs.attention_mask):
            sender = None if header.source is None else header.source.peer_id
            raise CorruptActivationsError("a server passed on NaN, infinite or absurd values", sender)
        inputs = replace(inputs, adapter=adapter, inner=inner)
        if header.ones_mask:
            inputs = replace(inputs, attention_mask=torch.ones(inputs.batch_size, inputs.seq_len, dtype=torch.int64))
        short_turns = len(serving.sessions) > 0
        if message.type == MessageType.FORWARD and header.keep:
            return _kept(record(blocks, inputs, span, short_turns=short_turns))
        if message.type == MessageType.FORWARD:
            return _nothing_kept(forward(blocks, inputs, span, short_turns=short_turns))
        if given is None:
            raise RemoteProtocolError("BACKWARD needs grad_outputs")
        return _nothing_kept(gradients(blocks, inputs, span, given, short_turns=short_turns))


def _kept(turns: Turns[KeptForward]) -> Turns[tuple[KeptForward, dict[str, Tensor]]]:
    kept = yield from turns
    return kept, {"hidden_states": kept.outputs}


def _nothing_kept(turns: Turns[dict[str, Tensor]]) -> Turns[tuple[None, dict[str, Tensor]]]:
    return None, (yield from turns)
