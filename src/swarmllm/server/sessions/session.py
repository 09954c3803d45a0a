"""The sessions of this server. Each is one client's text, and this server's place in the chain of servers.

A session is owned by the stream on which it was opened and lives as long as that stream. Its steps arrive in order,
from the owner or from the previous server, `step_runner` computes them, and its outputs go to the next server by a
link, or to the owner if there is no link (`Outlet`).

    event                       what happens
    STEP of a failed epoch      dropped: the client repairs, and sends it again with a newer epoch
    STEP, position ≤ length     the cache is rolled back to it, then the step runs
    STEP, position > length     SessionLostError: something is missing, the client replays
    a step fails                the owner is told; the epoch has failed
    the next server is lost     the owner is told; the epoch has failed; outputs go to the owner until LINK
    the owner's stream ends     the session ends, its lease is free again

`SessionTable` opens sessions within the byte budget, finds them by id, and hands them over when the server leaves. It
is made with the blocks that are served (`streams/serving`); connections use it.
"""

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from swarmllm.data_structures import Span
from swarmllm.errors import (
    BlocksNotServedError,
    PeerError,
    PeerTimeoutError,
    RemoteProtocolError,
    ServerOverloadedError,
    SessionLostError,
    SwarmError,
)
from swarmllm.machine_memory import return_free_memory
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.activation_log import ActivationLog
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.models.span.packing import Packer
from swarmllm.network.wire.compression import Outgoing, as_received, compressed
from swarmllm.network.wire.messages import (
    MAX_PIECES,
    OpenHeader,
    Pieces,
    ReplayHeader,
    ResultHeader,
    StepHeader,
    Successor,
)
from swarmllm.network.wire.protocol import FrameStream, MessageType, send_error
from swarmllm.network.wire.tensor_codec import encode_tensors
from swarmllm.server.device.device import block_errors_translated, memory_errors_translated
from swarmllm.server.device.device_thread import DeviceThread, Timed
from swarmllm.server.peers.links import Link, Links
from swarmllm.server.peers.peer_limits import PeerLimits
from swarmllm.server.sessions.kv_cache import CacheBudget, WaitingRoom, session_size
from swarmllm.server.sessions.prefix_cache import PrefixCache
from swarmllm.server.sessions.step_runner import Step, StepRunner

LINK_TIMEOUT_S = 8.0
"""Seconds to dial the next server and attach to it; less than the 10 s that clients wait, so they hear which server
failed."""
REPLAY_CHUNK_TOKENS = 256
"""Tokens of one replayed step: it bounds the messages, and several new servers work in a pipeline."""
MAX_SESSIONS_PER_PEER = 256
NO_SUCH_SESSION = "this server has no such session (any more)"
"""Said of every session that isn't the asker's, whether it exists or not."""
SESSIONS_PER_TIDYING = 256
"""Number of ended sessions between two returns of free memory. Freed caches of all lengths leave holes between objects
that live longer: without it, servers grew by 170 MB over 10,000 requests (docs/benchmarks.md)."""


@dataclass(frozen=True, eq=False, slots=True)
class Outlet:
    """One way for outputs: a link to the next server, or the client. A session that is linked anew gets another."""

    owner: FrameStream
    """The client's stream. It gets the outputs if there is no link: the client relays them, or has its result."""
    end: int
    """Index of the block after those of this session."""
    compression: str
    """Compression of hidden states, as in ServerConfig."""
    link: Link | None = None
    session: str = ""
    """Id of the session on the next server."""

    async def compressed(self, header: StepHeader, outputs: BlockInputs, *, exactly: bool = False) -> Outgoing:
        """Prepare the outputs of a step for sending; `exactly`: without rounding, as they were sent before."""
        if header.position:  # the next server has the encoder outputs since the first step
            outputs = outputs.without_source()
        tensors = outputs.tensors()
        if header.ones_mask:
            tensors.pop("attention_mask", None)
        stream = self.owner if self.link is None else self.link.stream
        return await compressed(tensors, stream, self.compression, exactly=exactly)

    async def send(self, header: StepHeader, outgoing: Outgoing, replay_hops: int) -> None:
        """Send the outputs of a step.

        Raises:
            PeerError: the stream to the next server, or to the client, broke.
        """
        if self.link is None:
            descriptors, chunks = encode_tensors({"hidden_states": outgoing["hidden_states"]})
            result = ResultHeader(
                id=header.id, end=self.end, position=header.position, timings=header.timings, pieces=header.pieces
            )
            await self.owner.send(MessageType.RESULT, result.model_dump() | {"tensors": descriptors}, chunks)
            return
        descriptors, chunks = encode_tensors(outgoing)
        changed = {"session": self.session, "replay_hops": replay_hops, "tensors": descriptors}
        await self.link.send(MessageType.STEP, header.model_dump() | changed, chunks)

    async def show(self, header: StepHeader, inner: InnerStates, span: Span) -> None:
        """Send the owner the inner states that it wants to see of a step.

        Raises:
            PeerError: its stream broke.
            ConfigurationError: it can't be sent.
        """
        blocks, attentions, tensors = inner.as_answer(span)
        descriptors, chunks = encode_tensors(tensors)
        shown = ResultHeader(
            id=header.id, end=self.end, position=header.position, shows=True, blocks=blocks, attentions=attentions
        )
        await self.owner.send(MessageType.RESULT, shown.model_dump() | {"tensors": descriptors}, chunks)

    def unlinked(self) -> "Outlet":
        """Return the outlet without the link: the way to the owner."""
        return replace(self, link=None, session="")

    def forget(self) -> None:
        """Send nothing more this way."""
        if self.link is not None:
            self.link.forget(self.session)


@dataclass(frozen=True, slots=True)
class Replay:
    """A request to send outputs again; it waits for its turn among the steps."""

    header: ReplayHeader
    num_bytes: int


@dataclass(eq=False)
class Session:
    """One session on this server; the module's table lists its rules."""

    id: str
    token: str
    runner: StepRunner
    waiting_room: WaitingRoom
    epoch: int
    outlet: Outlet
    """The way of outputs: to the owner until there is a link."""
    on_close: Callable[["Session"], None]
    failed_epoch: int = field(init=False, default=-1)
    closed: bool = field(init=False, default=False)
    passed_on: int = field(init=False, default=0)
    """Outputs have been sent up to this position; it tells a client which server of a chain is stuck."""
    _inbox: "asyncio.Queue[Step | Replay | PeerError]" = field(init=False, default_factory=asyncio.Queue)

    @property
    def owner(self) -> FrameStream:
        """The stream on which the session was opened."""
        return self.outlet.owner

    # ------------------------------------------------------------------ called by connections

    def take_room(self, num_bytes: int) -> None:
        """Count a message before it is decoded. If it isn't enqueued after all, call the waiting room's `forget`.

        Raises:
            ServerOverloadedError, CacheFullError: too much is waiting.
        """
        self.waiting_room.enter(num_bytes, self.runner.size.row_waiting_bytes * self.runner.batch_size)

    def enqueue(self, item: Step | Replay) -> None:
        """Queue a step or a replay that was counted, in the order of arrival."""
        self._inbox.put_nowait(item)

    async def link_to(self, links: Links, successor: Successor | None) -> None:
        """Send outputs to `successor` from now on, or to the owner if it is None.

        Raises:
            SwarmError: the successor can't be reached or refuses; outputs go to the owner then.
        """
        self.unlink()
        if successor is None:
            return
        epoch = self.epoch
        try:
            async with asyncio.timeout(LINK_TIMEOUT_S):
                link = await links.get(successor)
                outlet = replace(self.outlet, link=link, session=successor.session)
                # Only the link keeps the callback, until `unlink`. In the outlet it would make a circle with this
                # session, whose caches would then wait for the garbage collector.
                await link.attach(successor, partial(self._successor_lost, outlet))
        except TimeoutError as error:
            if isinstance(error, SwarmError):
                raise
            raise PeerTimeoutError(
                f"the next server did not answer within {LINK_TIMEOUT_S:g} s", successor.peer_id
            ) from None
        if epoch < self.epoch or self.closed:
            outlet.forget()
            raise SessionLostError("the client has named another next server meanwhile")
        self.outlet = outlet

    def unlink(self) -> None:
        """Send outputs to the owner from now on."""
        self.outlet.forget()
        self.outlet = self.outlet.unlinked()

    def close(self) -> None:
        """Give everything back; harmless if done twice."""
        if not self.closed:
            self.closed = True
            self.unlink()
            self.waiting_room.close()
            self.runner.lease.release()
            self.runner.device_thread.forget(self.id)
            self.on_close(self)

    def dismiss(self) -> None:
        """Tell the owner to continue on another server."""
        self._inbox.put_nowait(BlocksNotServedError("this server is leaving these blocks; take another route"))

    # ------------------------------------------------------------------ the worker

    async def work(self) -> None:
        """Handle queued messages one after the other, until cancelled or the owner's stream breaks."""
        while True:
            item = await self._inbox.get()
            if isinstance(item, PeerError):
                await send_error(self.owner, item, session=self.id, peer_id=item.peer_id)
                if self.closed:
                    self.runner.empty_cache()  # its memory is leased to other sessions already
                    return
                continue
            self.waiting_room.begin(item.num_bytes)
            try:
                await self._handle(item)
            finally:
                self.waiting_room.end()

    async def _handle(self, item: Step | Replay) -> None:
        header = item.header
        if header.epoch < self.epoch or header.epoch <= self.failed_epoch:
            return
        self.epoch = header.epoch
        try:
            with memory_errors_translated():
                await (self._run_step(item) if isinstance(item, Step) else self._run_replay(item.header))
        except SwarmError as error:
            if self.owner.closed:
                raise
            self.failed_epoch = max(self.failed_epoch, header.epoch)
            at_fault = error.peer_id if isinstance(error, PeerError) else None
            await send_error(self.owner, error, id=header.id, session=self.id, peer_id=at_fault)

    async def _run_step(self, step: Step) -> None:
        header, runner = step.header, self.runner
        try:
            timed = await runner.run(step)
            await self._run_on(header, timed)
        finally:
            runner.forget_inner()

    async def _run_on(self, header: StepHeader, timed: Timed[BlockInputs]) -> None:
        """Pass the outputs of a step on, and show its client the inner states that it wants to see."""
        runner, outputs, outlet = self.runner, timed.value, self.outlet
        outgoing = await outlet.compressed(header, outputs)
        timings = (*header.timings, (runner.span.start, timed.queue_us, timed.compute_us))
        noted = header.model_copy(update={"timings": timings, "pieces": _with_pieces(header.pieces, runner)})
        try:
            await self._pass_on(noted, outlet, outgoing)
        finally:  # only now, while the next server works; also if sending fails, as a repair replays it
            if runner.keeps_outputs:  # as the next server receives them
                runner.log.append(header.position, outputs.with_tensors(as_received(outgoing)))
        self.passed_on = header.position + header.seq_len
        if outputs.inner is not None:
            await self.outlet.show(header, outputs.inner, runner.span)
        await runner.share(outputs)

    async def _pass_on(self, header: StepHeader, outlet: Outlet, outgoing: Outgoing) -> None:
        if header.replay_hops == 1:  # the servers after this one still have their caches
            done = ResultHeader(id=header.id, position=header.position + header.seq_len, timings=header.timings)
            await self.owner.send(MessageType.RESULT, done.model_dump())
        else:
            await self._send(outlet, header, outgoing, max(0, header.replay_hops - 1))

    async def _run_replay(self, header: ReplayHeader) -> None:
        """Send the kept outputs of positions [0, length) again, in chunks or in their steps, to the next server."""
        await self.runner.go_back(header)
        with block_errors_translated():  # outputs that fitted one by one may not fit together
            for position, outputs in _replayed(self.runner.log, header):
                step = StepHeader(
                    id=header.id,
                    session=self.id,
                    epoch=header.epoch,
                    position=position,
                    batch_size=outputs.batch_size,
                    seq_len=outputs.seq_len,
                    tensors=(),
                    num_choices=self.runner.num_choices,
                    ones_mask=outputs.has_ones_mask(position),
                    replay_hops=header.replay_hops,
                    whole=header.steps is not None,
                )
                outlet = self.outlet
                outgoing = await outlet.compressed(step, outputs, exactly=True)
                await self._send(outlet, step, outgoing, header.replay_hops)

    async def _send(self, outlet: Outlet, header: StepHeader, outgoing: Outgoing, replay_hops: int) -> None:
        try:
            await outlet.send(header, outgoing, replay_hops)
        except PeerError as error:
            if outlet.link is None:
                raise
            self._successor_lost(outlet, error)

    def _successor_lost(self, outlet: Outlet, error: PeerError) -> None:
        if outlet is not self.outlet:
            return
        self.unlink()
        self.failed_epoch = max(self.failed_epoch, self.epoch)
        self._inbox.put_nowait(error)


def _with_pieces(pieces: Pieces, runner: StepRunner) -> Pieces:
    """Add the pieces in which a step was computed here, if it wasn't computed as a whole."""
    lengths = tuple(runner.pieces)
    num_told = sum(len(others) for _, _, others in pieces)
    if len(lengths) < 2 or num_told + len(lengths) > MAX_PIECES:
        return pieces
    return (*pieces, (runner.span.start, runner.span.end, lengths))


def _replayed(log: ActivationLog, header: ReplayHeader) -> Iterable[tuple[int, BlockInputs]]:
    """(position, outputs) of what a REPLAY asks for."""
    if header.steps is None:
        return log.replay(REPLAY_CHUNK_TOKENS)
    start, end = header.steps
    return log.steps(header.cuts, start=start, end=end)


class SessionTable:
    """All sessions on one span of blocks; a server that moves makes a new one."""

    def __init__(
        self,
        packer: Packer,
        hidden_bytes_per_token: int,
        device_thread: DeviceThread,
        budget: CacheBudget,
        pages: PrefixCache | None = None,
        *,
        compression: str = "none",
        limits: PeerLimits | None = None,
        max_sessions: int | None = None,
    ) -> None:
        self.limits = limits or PeerLimits()
        """The same limits as those of the connections."""
        self.budget = budget
        self.pages = pages
        self._max_sessions = max_sessions
        self._hidden_bytes_per_token = hidden_bytes_per_token
        self._packer = packer
        self._compression = compression
        self._device_thread = device_thread
        self._sessions: dict[str, Session] = {}
        self._num_ended = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def open(self, header: OpenHeader, owner: FrameStream, adapter: BlockAdapter | None = None) -> Session:
        """Open a session, and lease its cache.

        Raises:
            CacheFullError, ServerOverloadedError: no room.
            SessionLengthExceededError: the model has no positions for any text.
            RemoteProtocolError: the id is taken.
        """
        blocks = self._packer.blocks
        self._require_welcome(header, owner)
        size = session_size(blocks, header, self._hidden_bytes_per_token, 0 if adapter is None else adapter.num_prefix)
        account = partial(self.limits.standing.account, owner.peer_id)
        num_bytes = size.row_bytes * header.batch_size
        if account().comes_first:
            self._dismiss_for(num_bytes)
        if self._max_sessions is not None and len(self) >= self._max_sessions:
            raise ServerOverloadedError(
                f"this server takes {self._max_sessions} session{'s' * (self._max_sessions > 1)} at a time"
            )
        lease = self.budget.lease(num_bytes)
        try:
            runner = StepRunner(
                self._packer,
                self._device_thread,
                header,
                size,
                lease,
                adapter=adapter,
                pages=self.pages,
                account=account,
            )
            compression = self._compression if header.compression == "auto" else header.compression
            session = Session(
                id=header.session,
                token=header.token,
                runner=runner,
                waiting_room=WaitingRoom(self.budget, self.limits, owner.peer_id),
                epoch=header.epoch,
                outlet=Outlet(owner, header.end, compression),
                on_close=self._forget,
            )
        except BaseException:  # out of memory, above all
            lease.release()
            raise
        self._sessions[header.session] = session
        self._empty.clear()
        return session

    def _require_welcome(self, header: OpenHeader, owner: FrameStream) -> None:
        if header.session in self._sessions:
            raise RemoteProtocolError("a session with this id is open already")
        if sum(s.owner.peer_id == owner.peer_id for s in self) >= MAX_SESSIONS_PER_PEER:
            raise ServerOverloadedError(f"one client may have {MAX_SESSIONS_PER_PEER} sessions open")

    def get(self, session_id: str) -> Session:
        """Return the session of this id.

        Raises:
            SessionLostError: there is none.
        """
        try:
            return self._sessions[session_id]
        except KeyError:
            raise SessionLostError(NO_SUCH_SESSION) from None

    def attachable(self, session_id: str, token: str) -> Session:
        """Return the session to which a previous server wants to attach.

        Raises:
            SessionLostError: there is none, or the token is wrong; the error is the same.
        """
        session = self._sessions.get(session_id)
        if session is None or not hmac.compare_digest(session.token.encode(), token.encode()):
            raise SessionLostError(NO_SUCH_SESSION)
        return session

    def _dismiss_for(self, num_bytes: int) -> None:
        """Send sessions of other clients to other servers, if that makes room for a client that comes first."""
        others = [session for session in self if not session.runner.account().comes_first]
        leased = Counter[str]()
        for session in others:
            leased[session.owner.peer_id] += session.runner.lease.num_bytes
        if num_bytes > self.budget.left_bytes + leased.total():
            return
        # The newest session of the client with the largest leases: it has the least to compute again elsewhere.
        while others and (num_bytes > self.budget.left_bytes or len(self) == self._max_sessions):
            session = max(reversed(others), key=lambda one: leased[one.owner.peer_id])
            others.remove(session)
            leased[session.owner.peer_id] -= session.runner.lease.num_bytes
            session.dismiss()
            session.close()

    def make_room(self) -> None:
        """Drop shared prompts and offer less; called in the device thread when memory has run out."""
        self.budget.shrink()
        if self.pages is not None:
            self.pages.clear()
        return_free_memory()

    def _forget(self, session: Session) -> None:
        del self._sessions[session.id]
        self._num_ended += 1
        if self._num_ended % SESSIONS_PER_TIDYING == 0:
            asyncio.get_running_loop().run_in_executor(None, return_free_memory)
        if not self._sessions:
            self._empty.set()

    async def hand_over(self, timeout_s: float) -> None:
        """Tell every client to take another route, and wait until all have gone; clients that don't go lose the
        session.

        A client whose next step is refused would find another server as well; being told spares it the failed step.
        """
        for session in self:
            session.dismiss()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            for session in self:
                session.close()
                session.owner.abort()  # its client has been told
