"""A session on this server: one client's text, and this server's place in the chain of servers.

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
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from swarmllm.data_structures import Span
from swarmllm.errors import BlocksNotServedError, PeerError, PeerTimeoutError, SessionLostError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import InnerStates
from swarmllm.network.wire.compression import Outgoing, as_received, compressed
from swarmllm.network.wire.messages import ReplayHeader, ResultHeader, StepHeader, Successor, Timings
from swarmllm.network.wire.protocol import FrameStream, MessageType, send_error
from swarmllm.network.wire.tensor_codec import encode_tensors
from swarmllm.server.device.device import block_errors_translated, memory_errors_translated
from swarmllm.server.device.device_thread import Timed
from swarmllm.server.peers.links import Link, Links
from swarmllm.server.sessions.kv_cache import WaitingRoom
from swarmllm.server.sessions.step_runner import Step, StepRunner

LINK_TIMEOUT_S = 8.0
"""Seconds to dial the next server and attach to it; less than the 10 s that clients wait, so they hear which server
failed."""
REPLAY_CHUNK_TOKENS = 256
"""Tokens of one replayed step: it bounds the messages, and lets several new servers work in a pipeline."""


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

    async def send(self, header: StepHeader, outgoing: Outgoing, timings: Timings, replay_hops: int) -> None:
        """Send the outputs of a step.

        Raises:
            PeerError: the stream to the next server, or to the client, broke.
        """
        if self.link is None:
            descriptors, chunks = encode_tensors({"hidden_states": outgoing["hidden_states"]})
            result = ResultHeader(id=header.id, end=self.end, position=header.position, timings=timings)
            await self.owner.send(MessageType.RESULT, result.model_dump() | {"tensors": descriptors}, chunks)
            return
        descriptors, chunks = encode_tensors(outgoing)
        changed = {"session": self.session, "timings": timings, "replay_hops": replay_hops, "tensors": descriptors}
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
        if runner.keeps_outputs:  # as the next server receives them
            runner.log.append(header.position, outputs.with_tensors(as_received(outgoing)))
        timings = (*header.timings, (runner.span.start, timed.queue_us, timed.compute_us))
        await self._pass_on(header, outlet, outgoing, timings)
        self.passed_on = header.position + header.seq_len
        if outputs.inner is not None:
            await self.outlet.show(header, outputs.inner, runner.span)
        await runner.share(outputs)  # only now, while the next server works

    async def _pass_on(self, header: StepHeader, outlet: Outlet, outgoing: Outgoing, timings: Timings) -> None:
        if header.replay_hops == 1:  # the servers after this one still have their caches
            done = ResultHeader(id=header.id, position=header.position + header.seq_len, timings=timings)
            await self.owner.send(MessageType.RESULT, done.model_dump())
        else:
            await self._send(outlet, header, outgoing, timings, max(0, header.replay_hops - 1))

    async def _run_replay(self, header: ReplayHeader) -> None:
        """Send the kept outputs of positions [0, length) again, in chunks, to the next server."""
        await self.runner.go_back(header)
        with block_errors_translated():  # outputs that fitted one by one may not fit together
            for position, outputs in self.runner.log.replay(REPLAY_CHUNK_TOKENS):
                step = StepHeader(
                    id=header.id,
                    session=self.id,
                    epoch=header.epoch,
                    position=position,
                    batch_size=outputs.batch_size,
                    seq_len=outputs.seq_len,
                    tensors=(),
                    num_choices=self.runner.num_choices,
                    replay_hops=header.replay_hops,
                )
                outlet = self.outlet
                outgoing = await outlet.compressed(step, outputs, exactly=True)
                await self._send(outlet, step, outgoing, (), header.replay_hops)

    async def _send(
        self, outlet: Outlet, header: StepHeader, outgoing: Outgoing, timings: Timings, replay_hops: int
    ) -> None:
        try:
            await outlet.send(header, outgoing, timings, replay_hops)
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
