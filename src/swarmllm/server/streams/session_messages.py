"""OPEN, STEP, REPLAY, LINK and ATTACH: what one stream says to sessions. Called by `dispatcher`."""

import weakref
from functools import partial

from swarmllm.errors import RemoteProtocolError, SessionLostError
from swarmllm.network.wire.compression import Outgoing
from swarmllm.network.wire.messages import (
    AttachHeader,
    LinkHeader,
    OpenHeader,
    ReplayHeader,
    ResultHeader,
    StepHeader,
    parse,
)
from swarmllm.network.wire.protocol import FrameStream, Message
from swarmllm.server.peers.links import Links
from swarmllm.server.sessions.kv_cache import bytes_of
from swarmllm.server.sessions.session import Replay, Session
from swarmllm.server.sessions.session_table import NO_SUCH_SESSION
from swarmllm.server.sessions.step_runner import Step
from swarmllm.server.streams.access import Access
from swarmllm.server.streams.input_checks import off_loop


class SessionMessages:
    """The sessions that one stream may use: those that it has opened, and those to which it is attached."""

    def __init__(self, access: Access, links: Links, stream: FrameStream) -> None:
        self._access, self._links, self._stream = access, links, stream
        self._owned: dict[str, Session] = {}
        self._attached: dict[str, weakref.ref[Session]] = {}
        """Owners keep them: a predecessor's link may idle for days, and must not hold the caches of closed ones."""

    def open(self, message: Message) -> Session:
        """OPEN: a new session, whose owner this stream is."""
        header = parse(OpenHeader, message.header, None)
        serving = self._access.served_to(self._stream.peer_id)
        serving.check_span(header.start, header.end)
        if not serving.parts.of(header.start, header.end).blocks.keeps_cache:
            raise RemoteProtocolError("these are blocks of an encoder, which keep no KV cache: send whole batches")
        adapter = serving.adapter_of(header, self._stream.peer_id)
        session = self._owned[header.session] = serving.sessions.open(header, self._stream, adapter)
        return session

    async def step(self, message: Message) -> None:
        """STEP: queue it at its session."""
        header = parse(StepHeader, message.header, None)
        attached = self._attached.get(header.session)
        session = self._owned_session(header.session) if attached is None else attached()
        if session is None or session.closed:
            return  # its client is gone; the predecessor doesn't know yet
        num_bytes = bytes_of(header, message)
        session.take_room(num_bytes)
        try:
            inputs, _ = await off_loop(
                partial(self._access.served().parts.parts[-1].inputs.read, header, message), message
            )
            session.enqueue(Step(header, num_bytes, inputs, None if attached is None else self._stream.peer_id))
        except BaseException:
            session.waiting_room.forget(num_bytes)
            raise

    def replay(self, message: Message) -> None:
        """REPLAY: queue it at its session."""
        header = parse(ReplayHeader, message.header, None)
        session, num_bytes = self._owned_session(header.session), bytes_of(header, message)
        session.take_room(num_bytes)
        session.enqueue(Replay(header, num_bytes))

    async def link(self, message: Message) -> tuple[ResultHeader, Outgoing]:
        """LINK: the session's outputs go somewhere else from now on."""
        header = parse(LinkHeader, message.header, None)
        session = self._owned_session(header.session)
        session.epoch = max(session.epoch, header.epoch)
        await session.link_to(self._links, header.successor)
        return ResultHeader(id=header.id, position=session.passed_on), {}

    async def attach(self, message: Message) -> tuple[ResultHeader, Outgoing]:
        """ATTACH: steps of the session will come on this stream."""
        header = parse(AttachHeader, message.header, None)
        session = self._access.served().sessions.attachable(header.session, header.token)
        self._attached = {key: attached for key, attached in self._attached.items() if attached() is not None}
        self._attached[header.session] = weakref.ref(session)
        self._stream.expect(self._access.large_messages_of(self._stream.peer_id, attached=True))
        return ResultHeader(id=header.id), {}

    def close(self) -> None:
        """End the sessions that this stream has opened."""
        for session in self._owned.values():
            session.close()

    def _owned_session(self, session_id: str) -> Session:
        """The session, which only the stream that opened it may use (and its attached predecessor).

        Raises:
            SessionLostError: it isn't this stream's; nobody is told whether it is another one's.
        """
        if session_id not in self._owned:
            raise SessionLostError(NO_SUCH_SESSION)
        return self._owned[session_id]
