"""Sessions: one client's KV cache on this server, and its place in the chain of servers that a token goes through.

A session is owned by the stream on which it was opened and lives as long as that stream. Its steps arrive in order,
from the owner or from the predecessor's link, and its outputs go to the successor's link, or to the owner when there is
none. The outputs that a successor may need again are kept while the session lives (`models/activation_log`).

    event                       what happens
    STEP of a failed epoch      dropped: the client repairs, and sends it again with a newer epoch
    STEP, position ≤ length     the cache is rolled back to it, then the step runs
    STEP, position > length     SessionLostError: something is missing, the client replays
    a step fails                the owner is told; the epoch has failed
    the successor is lost       the owner is told; the epoch has failed; outputs go to the owner until LINK
    the owner's stream ends     the session ends, its lease is free again
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from swarmllm.data_structures import Span
from swarmllm.errors import (
    BlocksNotServedError,
    CorruptActivationsError,
    PeerError,
    PeerTimeoutError,
    RemoteProtocolError,
    ServerOutOfMemoryError,
    SessionLengthExceededError,
    SessionLostError,
    SwarmError,
)
from swarmllm.models.activation_checks import plausible
from swarmllm.models.activation_log import ActivationLog
from swarmllm.models.adapters import BlockAdapter
from swarmllm.models.block_inputs import BlockInputs
from swarmllm.models.block_span import BlockSpan
from swarmllm.models.packing import SessionCall
from swarmllm.models.span_cache import RollbackUnsupportedError, SpanCache
from swarmllm.network.compression import Outgoing, as_received, compressed
from swarmllm.network.messages import ReplayHeader, ResultHeader, StepHeader, Successor, Timings
from swarmllm.network.protocol import FrameStream, MessageType, send_error
from swarmllm.network.tensor_codec import encode_tensors
from swarmllm.server.device import memory_errors_translated, out_of_memory
from swarmllm.server.executor import Executor, Priority, Timed
from swarmllm.server.kv_cache import CacheLease
from swarmllm.server.links import Link, Links
from swarmllm.server.peer_limits import PeerLimits
from swarmllm.server.prefix_cache import PrefixCache
from swarmllm.server.shared_prefix import SharedPrefix
from swarmllm.server.waiting_room import BESIDE_BYTES, INPUTS_FACTOR, WaitingRoom

LINK_TIMEOUT_S = 8.0
"""To dial a successor and attach to it; below the 10 s that clients wait, so that they hear who was to blame."""
REPLAY_CHUNK_TOKENS = 256
"""Tokens of one replayed step: bounds the messages, and lets several new servers work in a pipeline."""
DECODE_TOKENS = 16
"""Steps of at most so many positions count as decoding: somebody waits for the next token (speculation sends a few)."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step on its way through this server."""

    header: StepHeader
    num_bytes: int
    """That it counts for until it has been run."""
    inputs: BlockInputs
    pushed_by: str | None = None
    """The predecessor that computed the inputs; None: the client sent them."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A wish for what was sent before, in the order of the steps."""

    header: ReplayHeader
    num_bytes: int


@dataclass(eq=False, slots=True)
class _Target:
    """Where outputs go: to the session of that id over a link, or (None) to the owner."""

    link: Link | None = None
    session: str = ""


@dataclass(eq=False)
class Session:
    """One session on this server; the module's table says how it behaves."""

    id: str
    token: str
    owner: FrameStream
    blocks: BlockSpan
    span: Span
    executor: Executor
    lease: CacheLease
    row_bytes: int
    """Of cache, and of inputs that wait or outputs that are kept, for each row of the batch."""
    hidden_bytes_per_token: int
    batch_size: int
    max_length: int
    epoch: int
    keeps_outputs: bool
    record_past: bool
    on_close: Callable[["Session"], None]
    adapter: BlockAdapter | None = None
    """The client's, which all steps run with."""
    limits: PeerLimits = field(default_factory=PeerLimits)
    """What the owner may have on this server."""
    pages: PrefixCache | None = None
    """Of prompts that this session may share with others; None: it shares nothing."""
    compression: str = "none"
    """Of what this session sends, as in ServerConfig."""
    failed_epoch: int = field(init=False, default=-1)
    closed: bool = field(init=False, default=False)
    passed_on: int = field(init=False, default=0)
    """The position up to which outputs have been sent; tells a client which server of a chain is stuck."""
    cache: SpanCache = field(init=False)
    _log: ActivationLog = field(init=False)
    _inbox: "asyncio.Queue[Step | Replay | PeerError]" = field(init=False, default_factory=asyncio.Queue)
    _waiting: WaitingRoom = field(init=False)
    _target: _Target = field(init=False, default_factory=_Target)
    rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.cache = self.blocks.new_cache(self.span, record_past=self.record_past)
        self._log = ActivationLog(self.blocks.traits)
        self._waiting = WaitingRoom(self.lease.budget, self.limits, self.owner.peer_id)
        self._prefix = None if self.pages is None else SharedPrefix(self.pages, self.blocks, self.span)

    # ------------------------------------------------------------------ asked for by streams

    def take_room(self, num_bytes: int) -> None:
        """Count a message before it is decoded; `give_room_back` if it isn't enqueued after all.

        Raises:
            ServerOverloadedError, CacheFullError: too much is waiting.
        """
        of_position = self.hidden_bytes_per_token + BESIDE_BYTES
        self._waiting.enter(num_bytes, INPUTS_FACTOR * of_position * self.max_length * self.batch_size)

    def give_room_back(self, num_bytes: int) -> None:
        """The message won't be enqueued."""
        self._waiting.leave(num_bytes)

    def enqueue(self, item: Step | Replay) -> None:
        """Queue a step or a replay, for which there is room, in the order of arrival."""
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
        target = _Target(session=successor.session)
        try:
            async with asyncio.timeout(LINK_TIMEOUT_S):
                target.link = await links.get(successor)
                # Only the link keeps the callback, until `unlink`: in the target it would make a circle with this
                # session, whose caches would then wait for the garbage collector.
                await target.link.attach(successor, partial(self._target_lost, target))
        except TimeoutError as error:
            if isinstance(error, SwarmError):
                raise
            raise PeerTimeoutError(
                f"the successor did not answer within {LINK_TIMEOUT_S:g} s", successor.peer_id
            ) from None
        if epoch < self.epoch or self.closed:
            target.link.forget(successor.session)
            raise SessionLostError("the client has asked for another successor meanwhile")
        self._target = target

    def unlink(self) -> None:
        """Send outputs to the owner from now on."""
        if self._target.link is not None:
            self._target.link.forget(self._target.session)
        self._target = _Target()

    def close(self) -> None:
        """Give everything back; harmless when done twice."""
        if not self.closed:
            self.closed = True
            self.unlink()
            self._waiting.close()
            self.lease.release()
            self.on_close(self)

    def dismiss(self) -> None:
        """Tell the owner to continue on another server."""
        self._inbox.put_nowait(BlocksNotServedError("this server is leaving these blocks; take another route"))

    # ------------------------------------------------------------------ the worker

    async def work(self) -> None:
        """Handle what is queued, one after the other, until cancelled or the owner's stream breaks."""
        while True:
            item = await self._inbox.get()
            if isinstance(item, PeerError):
                await send_error(self.owner, item, session=self.id, peer_id=item.peer_id)
                continue
            self._waiting.begin(item.num_bytes)
            try:
                await self._run(item)
            finally:
                self._waiting.end()

    async def _run(self, item: Step | Replay) -> None:
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
        header = step.header
        end = header.position + header.seq_len
        length = min(self.cache.position, self._log.length) if self.keeps_outputs else self.cache.position
        if header.position > length:
            raise SessionLostError(f"the step starts at position {header.position}, this cache ends at {length}")
        if header.timings and header.timings[-1][0] >= self.span.start:
            raise RemoteProtocolError("a step goes from server to server upwards through the blocks, never in circles")
        if end > self.max_length:
            raise SessionLengthExceededError(
                f"the session has room for {self.max_length} tokens, this step would reach {end}"
            )
        inputs = replace(step.inputs, adapter=self.adapter)
        if step.pushed_by is not None:  # nobody but its successor sees what a server in the middle computes
            axis = self.blocks.traits.batch_axis
            if not plausible(inputs.hidden_states, axis, inputs.attention_mask):
                raise CorruptActivationsError("a server passed on NaN, infinite or absurd values", step.pushed_by)
        select = header.position > 0 and self._selects_rows(header)
        num_rows = len(header.batch_index or ()) if select else self.batch_size
        if header.position > 0 and header.batch_size != num_rows:
            raise RemoteProtocolError(f"the session has {num_rows} rows, the step {header.batch_size}")
        prefix = self._prefix
        if prefix is not None and not prefix.fits(header.position, inputs, self.cache):
            prefix = None
        # For the rows before and after: until the step has gone well, the cache may be of either.
        self._resize_lease(max(self.batch_size, header.batch_size))
        if header.ones_mask:  # made only now: its size is bounded by the lease
            inputs = replace(inputs, attention_mask=torch.ones(header.batch_size, end, dtype=torch.int64))
        begun = prefix is not None or select or header.batch_size != self.batch_size
        self.rows, self.batch_size = header.rows, header.batch_size
        timed = await self._compute(header, inputs, select, prefix, begun=begun)
        self._resize_lease(self.batch_size)
        outputs, target = inputs.with_hidden(timed.value), self._target
        outgoing = await self._outgoing(target, header, outputs)
        if self.keeps_outputs:  # as the successor sees them
            self._log.append(header.position, outputs.with_tensors(as_received(outgoing)))
        await self._pass_on(header, target, outgoing, timed)
        self.passed_on = end
        if prefix is not None:  # only now: the next server has something to do meanwhile
            try:
                with memory_errors_translated():
                    await self.executor.run(partial(prefix.keep, self.cache, timed.value), Priority.PREFILL)
            except ServerOutOfMemoryError:
                self._prefix = None  # the step went well, only nobody can share what it computed

    async def _compute(
        self, header: StepHeader, inputs: BlockInputs, select: bool, prefix: SharedPrefix | None, *, begun: bool
    ) -> Timed[torch.Tensor]:
        """The outputs of a step: those that are known already, and those of the rest, for which blocks have to run.

        `begun`: the cache changes before blocks run.

        Raises:
            SwarmError: the blocks failed; if they had begun, the cache is empty now.
        """
        axis = self.blocks.traits.batch_axis + 1
        reused: torch.Tensor | None = None
        queue_us = compute_us = 0
        try:
            with translated_errors():
                if prefix is not None:
                    found = await self.executor.run(partial(self._reuse, prefix, header, inputs), Priority.PREFILL)
                    reused, queue_us, compute_us = found.value, found.queue_us, found.compute_us
                if reused is not None:
                    known = reused.shape[axis]
                    if known == header.seq_len:
                        return Timed(reused, queue_us, compute_us)
                    inputs = inputs.columns(known, header.seq_len, header.position, self.blocks.traits)
                    later = {"position": header.position + known, "seq_len": header.seq_len - known}
                    header = header.model_copy(update=later)
                work = _Computation(self, header, inputs, select)
                try:
                    timed = await self.executor.step(work)
                finally:
                    begun = begun or work.begun
        except SwarmError:
            if begun:
                self._empty_cache()
            raise
        value = timed.value if reused is None else torch.cat([reused, timed.value], dim=axis)
        return Timed(value, timed.queue_us + queue_us, timed.compute_us + compute_us)

    def _reuse(self, prefix: SharedPrefix, header: StepHeader, inputs: BlockInputs) -> torch.Tensor | None:
        self._bring_cache_to(header, False)
        return prefix.reuse(self.cache, header.position, inputs)

    def _empty_cache(self) -> None:
        """Some blocks have seen a step and some have not: nothing of the cache can be trusted any more."""
        self.cache = self.blocks.new_cache(self.span, record_past=self.record_past)
        self._log.rollback(0)

    def _selects_rows(self, header: StepHeader | ReplayHeader) -> bool:
        """Whether the cache still has to take the rows that the client has chosen last.

        A repair may send a choice twice; choices are counted, so that each is made once.

        Raises:
            SessionLostError: this session has missed an earlier choice.
            RemoteProtocolError: the choice makes no sense.
        """
        if self.cache.position == 0 or header.rows == self.rows:
            return False
        if header.rows != self.rows + 1 or header.batch_index is None:
            raise SessionLostError(f"the batch's rows were chosen {header.rows} times, here {self.rows} times")
        if not header.batch_index or max(header.batch_index) >= self.batch_size:
            raise RemoteProtocolError(f"batch_index chooses rows that a batch of {self.batch_size} doesn't have")
        self._prefix = None  # what the cache holds is no longer what was hashed
        return True

    def _resize_lease(self, batch_size: int) -> None:
        if self.closed:  # what is leased now would be so for ever
            raise SessionLostError("the session has been closed meanwhile")
        self.lease.resize(self.row_bytes * batch_size)

    def _bring_cache_to(self, header: StepHeader, select: bool) -> None:
        """In the device thread: give the cache the step's rows and position."""
        if select:
            self._select_batch(header)
        if header.position < self.cache.position:
            try:
                self.cache.rollback(header.position)
            except RollbackUnsupportedError as error:
                raise SessionLostError(str(error)) from None
            self._log.rollback(header.position)

    def _select_batch(self, header: StepHeader | ReplayHeader) -> None:
        self.cache.select_batch(header.batch_index or ())
        self._log.select_batch(header.batch_index or ())

    async def _outgoing(
        self, target: _Target, header: StepHeader, outputs: BlockInputs, *, exactly: bool = False
    ) -> Outgoing:
        """What a step sends; `exactly`: as these outputs are, because they have been sent before."""
        tensors = outputs.tensors()
        if header.ones_mask:
            tensors.pop("attention_mask", None)
        stream = self.owner if target.link is None else target.link.stream
        return await compressed(tensors, stream, self.compression, exactly=exactly)

    async def _pass_on(
        self, header: StepHeader, target: _Target, outgoing: Outgoing, timed: Timed[torch.Tensor]
    ) -> None:
        timings = (*header.timings, (self.span.start, timed.queue_us, timed.compute_us))
        if header.replay_hops == 1:  # the servers behind this one still have their caches
            done = ResultHeader(id=header.id, position=header.position + header.seq_len, timings=timings)
            await self.owner.send(MessageType.RESULT, done.model_dump())
        else:
            await self._send(header, target, outgoing, timings, max(0, header.replay_hops - 1))

    async def _send(
        self, header: StepHeader, target: _Target, outgoing: Outgoing, timings: Timings, replay_hops: int
    ) -> None:
        """To the successor, or, when there is none, to the owner, who relays or has what he wants."""
        if target.link is None:
            descriptors, chunks = encode_tensors({"hidden_states": outgoing["hidden_states"]})
            result = ResultHeader(id=header.id, end=self.span.end, position=header.position, timings=timings)
            await self.owner.send(MessageType.RESULT, result.model_dump() | {"tensors": descriptors}, chunks)
            return
        descriptors, chunks = encode_tensors(outgoing)
        fields = header.model_dump() | {
            "session": target.session,
            "timings": timings,
            "replay_hops": replay_hops,
            "tensors": descriptors,
        }
        try:
            await target.link.send(MessageType.STEP, fields, chunks)
        except PeerError as error:
            self._target_lost(target, error)

    async def _run_replay(self, header: ReplayHeader) -> None:
        """Send the kept outputs for positions [0, length) again, in chunks, to the successor."""
        if header.length > self.cache.position:
            raise SessionLostError(
                f"{header.length} positions are to be replayed, this cache has {self.cache.position}"
            )
        if not self.keeps_outputs:
            raise RemoteProtocolError("the last server of a chain keeps no outputs to replay")
        if self._selects_rows(header):
            num_rows = len(header.batch_index or ())
            self._resize_lease(max(self.batch_size, num_rows))
            try:
                await self.executor.run(partial(self._select_batch, header), Priority.DECODE)
            except BaseException:
                self._empty_cache()
                raise
            self.batch_size = num_rows
            self._resize_lease(num_rows)
        self.rows = header.rows
        self._log.rollback(header.length)
        with translated_errors():  # steps that went well one by one may not fit together
            for position, outputs in self._log.replay(REPLAY_CHUNK_TOKENS):
                step = StepHeader(
                    id=header.id,
                    session=self.id,
                    epoch=header.epoch,
                    position=position,
                    batch_size=outputs.batch_size,
                    seq_len=outputs.seq_len,
                    tensors=(),
                    rows=self.rows,
                    replay_hops=header.replay_hops,
                )
                target = self._target
                outgoing = await self._outgoing(target, step, outputs, exactly=True)
                await self._send(step, target, outgoing, (), header.replay_hops)

    def _target_lost(self, target: _Target, error: PeerError) -> None:
        if target is not self._target:
            return
        self.unlink()
        self.failed_epoch = max(self.failed_epoch, self.epoch)
        self._inbox.put_nowait(error)


class _Computation:
    """One step as `executor` runs it, whole or in pieces; the outputs of all pieces are those of the step."""

    def __init__(self, owner: Session, header: StepHeader, inputs: BlockInputs, select: bool) -> None:
        self.session = owner.id
        self.blocks = owner.blocks
        self.priority = Priority.DECODE if header.seq_len <= DECODE_TOKENS else Priority.PREFILL
        self.num_tokens = header.seq_len * header.batch_size
        can_be_cut = self.priority is Priority.PREFILL and self.blocks.traits.chunked_prefill
        self.granule = header.batch_size if can_be_cut else self.num_tokens
        self.begun = False
        """Whether blocks may have seen some of it."""
        self._owner, self._header, self._inputs, self._select = owner, header, inputs, select
        self._num_columns = 0  # taken so far

    def take(self, num_tokens: int) -> SessionCall:
        """The next piece. Raises SessionLostError: the cache can't be rolled back to where the step begins."""
        owner, header = self._owner, self._header
        if not self._num_columns:
            owner._bring_cache_to(header, self._select)
        self.begun = True
        inputs, start = self._inputs, self._num_columns
        self._num_columns += num_tokens // header.batch_size
        if num_tokens < self.num_tokens:
            inputs = inputs.columns(start, self._num_columns, header.position, self.blocks.traits)
        return SessionCall(on_device(inputs, self.blocks), owner.span, owner.cache)


def on_device(inputs: BlockInputs, blocks: BlockSpan) -> BlockInputs:
    """The inputs as the blocks need them."""
    hidden = inputs.hidden_states
    if hidden.device == blocks.device and hidden.dtype == blocks.dtype and inputs.inputs_embeds is None:
        return inputs  # the usual case on a CPU
    return inputs.to(blocks.device, blocks.dtype)


class translated_errors:  # noqa: N801 - reads as a statement: with translated_errors()
    """What blocks raise on inputs that they can't run on is the sender's fault; lack of memory is nobody's."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SwarmError) or not isinstance(error, Exception):
            return
        if lacking := out_of_memory(error):
            raise lacking from error
        reason = str(error).strip().split("\n")[0][:300]
        raise RemoteProtocolError(f"the blocks can't run on these inputs: {type(error).__name__}: {reason}") from error
