"""Run the steps of one session: check them, bring its cache to their position, and keep results for other sessions.

Used by `session`, which takes steps in and passes outputs on; knows neither streams nor links. `wanted_inner` computes
the size of hidden states and attention weights that a client wants to see, for steps and for sessionless requests.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import (
    CacheFullError,
    ConfigurationError,
    CorruptActivationsError,
    RemoteProtocolError,
    ServerOutOfMemoryError,
    SessionLengthExceededError,
    SessionLostError,
    SwarmError,
)
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.architecture import text_config
from swarmllm.models.boundary.activation_log import ActivationLog
from swarmllm.models.boundary.block_inputs import BlockInputs, uncut
from swarmllm.models.boundary.inner_states import MAX_ANSWER_BYTES, InnerStates, plausible
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.packing import Packer, SessionCall
from swarmllm.models.span.span_cache import RollbackUnsupportedError, SpanCache
from swarmllm.network.wire.messages import BatchHeader, OpenHeader, ReplayHeader, StepHeader
from swarmllm.server.device.device import block_errors_translated, in_dtype, memory_errors_translated
from swarmllm.server.device.device_thread import DeviceThread, SessionStep, Timed
from swarmllm.server.device.scheduler import HOUSE, Account, Priority
from swarmllm.server.sessions.kv_cache import CacheLease, SessionSize
from swarmllm.server.sessions.prefix_cache import PrefixCache, SharedPrefix

INNER_FACTOR = 2
"""Inner states are in memory twice: as they were found, and as one tensor to be sent."""

MAX_WHOLE_TOKENS = 1024
"""Most tokens of a replayed step that runs in one piece if its client wants that. Steps of other clients wait
meanwhile."""

DECODE_TOKENS = 16
"""Most positions of a step that counts as decoding: a client waits for the next token (speculation sends a few)."""

HASHED_ON_LOOP_BYTES = 4 << 20
"""Longer steps of prompts are hashed in a thread. Measured: so many bytes take 0.3 ms, as long as a way to a thread and
back. They take 20 ms on processors without instructions for AES."""


def wanted_inner(
    header: StepHeader | BatchHeader, span: Span, blocks: BlockSpan, position_bytes: int
) -> tuple[InnerStates | None, int]:
    """Return the inner states that a client wants of these blocks, and their bytes; None and 0 if it wants none.

    `position_bytes` is the size of one position's hidden states.

    Raises:
        ConfigurationError: it is more than one answer may bring.
    """
    wanted = header.inner
    if wanted is None:
        return None, 0
    num_heads = int(getattr(text_config(blocks.stack.config), "num_attention_heads", None) or 1)
    inner = InnerStates(wanted.outputs, attentions=wanted.attentions, num_heads=num_heads)
    if not inner.wants(span):
        return None, 0
    past = header.position if isinstance(header, StepHeader) else 0
    num_bytes = inner.num_bytes(span, header.batch_size, header.seq_len, past, position_bytes)
    if num_bytes > MAX_ANSWER_BYTES:
        what = "attention weights" if wanted.attentions else "hidden states"
        raise ConfigurationError(
            f"{what} of {num_bytes >> 20} MB in blocks {span} are more than the {MAX_ANSWER_BYTES >> 20} MB that a "
            "server answers at once: ask for a shorter text or fewer rows"
        )
    return inner, num_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """A step on its way through this server."""

    header: StepHeader
    num_bytes: int
    """Bytes that it counts for until it has been run."""
    inputs: BlockInputs
    pushed_by: str | None = None
    """Peer id of the previous server, if it has computed the inputs; None: the client sent them."""


class StepRunner:
    """Runs the steps of one session, one after the other, on its own cache."""

    def __init__(
        self,
        packer: Packer,
        device_thread: DeviceThread,
        header: OpenHeader,
        size: SessionSize,
        lease: CacheLease,
        *,
        adapter: BlockAdapter | None = None,
        pages: PrefixCache | None = None,
        account: Callable[[], Account] = lambda: HOUSE,
    ) -> None:
        """`lease` covers `size` for each row; `adapter` is the client's, `pages` are the ones it may share.

        `account` returns the account that the device's time counts for.
        """
        self.account = account
        self.packer, self.device_thread = packer, device_thread
        self.size, self.lease = size, lease
        self.batch_size = header.batch_size
        self.num_choices = 0
        """Number of times that the client has chosen rows anew."""
        self.pieces: list[int] = []
        """Lengths of the pieces in which the last step was computed, that of its shared pages included."""
        self.cache: SpanCache = packer.blocks.new_cache(Span(header.start, header.end), record_past=header.record_past)
        self.log = ActivationLog(packer.blocks.traits)
        """Outputs that a successor may need again; the last server of a chain keeps none."""
        self._adapter = adapter
        self._prefix = None if pages is None else SharedPrefix(pages, packer.blocks, self.span)
        self._inner_bytes = 0
        """Bytes leased for the inner states that the client wants of the current step."""

    @property
    def span(self) -> Span:
        """The blocks of this session."""
        return self.cache.span

    @property
    def keeps_outputs(self) -> bool:
        """True if there may be a next server."""
        return self.span.end < self.packer.blocks.num_blocks

    async def run(self, step: Step) -> Timed[BlockInputs]:
        """Compute the outputs of a step, with the other tensors that go to the next server.

        Raises:
            SwarmError: the step makes no sense here, or the blocks failed.
        """
        header, inputs = step.header, self._checked(step)
        if inputs.source_len > self.size.source_length:
            raise SessionLengthExceededError(
                f"{inputs.source_len} encoder_hidden_states are more than the session's {self.size.source_length}"
            )
        select = header.position > 0 and self._selects_rows(header)
        num_rows = len(header.batch_index or ()) if select else self.batch_size
        if header.position > 0 and header.batch_size != num_rows:
            raise RemoteProtocolError(f"the session has {num_rows} rows, the step {header.batch_size}")
        inner, num_inner_bytes = wanted_inner(header, self.span, self.packer.blocks, self.size.position_bytes)
        self._inner_bytes = INNER_FACTOR * num_inner_bytes
        if inner is not None or self._adapter is not None:
            inputs = replace(inputs, inner=inner, adapter=self._adapter)
        prefix = self._prefix
        if prefix is not None and (not prefix.fits(header.position, inputs, self.cache) or inner is not None):
            prefix = None  # pages have no inner states
        if header.whole:
            prefix = None
        # For the rows before and after: until the step has succeeded, the cache may have either number.
        num_rows = max(self.batch_size, header.batch_size)
        try:
            self._lease_rows(num_rows)
        except CacheFullError:
            if inner is None:
                raise
            raise CacheFullError(
                f"inner states of blocks {self.span} take {num_inner_bytes >> 20} MB, for which this server has "
                "no room: ask for a shorter text or fewer rows"
            ) from None
        if header.ones_mask:  # made only now: its size is bounded by the lease
            end = header.position + header.seq_len
            inputs = replace(inputs, attention_mask=torch.ones(header.batch_size, end, dtype=torch.int64))
        begun = prefix is not None or select or header.batch_size != self.batch_size
        self.num_choices, self.batch_size = header.num_choices, header.batch_size
        timed = await self._compute(header, inputs, select, prefix, begun=begun)
        self._lease_rows(self.batch_size)
        if self._prefix is not None:
            self._prefix.shares = prefix is not None
        return Timed(inputs.with_hidden(timed.value), timed.queue_us, timed.compute_us)

    async def share(self, outputs: BlockInputs) -> None:
        """Cache the KV pages of the last step, whose outputs these are, for prompts with the same prefix."""
        if self._prefix is None or not self._prefix.shares:
            return
        try:
            with memory_errors_translated():
                keep = partial(self._prefix.keep, self.cache, outputs.hidden_states)
                await self.device_thread.run_call(keep, Priority.PREFILL, self.account())
        except ServerOutOfMemoryError:
            self._prefix = None  # the step succeeded, but its results can't be shared

    async def go_back(self, header: ReplayHeader) -> None:
        """Bring the cache and the log to the rows and the length that the client wants, before outputs are sent again.

        Raises:
            SwarmError: the request makes no sense here.
        """
        if header.length > self.cache.position:
            raise SessionLostError(
                f"{header.length} positions are to be replayed, this cache has {self.cache.position}"
            )
        if not self.keeps_outputs:
            raise RemoteProtocolError("the last server of a chain keeps no outputs to replay")
        if self._selects_rows(header):
            num_rows = len(header.batch_index or ())
            self._lease_rows(max(self.batch_size, num_rows))
            try:
                await self.device_thread.run_call(partial(self._select_batch, header), Priority.DECODE, self.account())
            except BaseException:
                self.empty_cache()
                raise
            self.batch_size = num_rows
            self._lease_rows(num_rows)
        self.num_choices = header.num_choices
        self.log.rollback(header.length)

    def _checked(self, step: Step) -> BlockInputs:
        """Check a step, and return its inputs: it must begin at the end of this cache, or before.

        Raises:
            SwarmError: something is missing or wrong.
        """
        header = step.header
        length = min(self.cache.position, self.log.length) if self.keeps_outputs else self.cache.position
        if header.position > length:
            raise SessionLostError(f"the step starts at position {header.position}, this cache ends at {length}")
        if header.timings and header.timings[-1][0] >= self.span.start:
            raise RemoteProtocolError("a step must go through the blocks in ascending order, and never twice")
        end = header.position + header.seq_len
        if end > self.size.max_length:
            raise SessionLengthExceededError(
                f"the session has room for {self.size.max_length} tokens, this step would reach {end}"
            )
        inputs = step.inputs
        if step.pushed_by is not None:  # only the next server sees the outputs of a server in the middle
            axis = self.packer.blocks.traits.batch_axis
            if not plausible(inputs.hidden_states, axis, inputs.attention_mask):
                raise CorruptActivationsError("a server passed on NaN, infinite or absurd values", step.pushed_by)
        return inputs

    def _selects_rows(self, header: StepHeader | ReplayHeader) -> bool:
        """True if the cache still has to take the rows that the client has chosen last.

        A repair may send a choice twice; choices are counted, so that each is made once.

        Raises:
            SessionLostError: this session has missed an earlier choice.
            RemoteProtocolError: the choice makes no sense.
        """
        if self.cache.position == 0 or header.num_choices == self.num_choices:
            return False
        if header.num_choices != self.num_choices + 1 or header.batch_index is None:
            raise SessionLostError(
                f"the batch's rows were chosen {header.num_choices} times, here {self.num_choices} times"
            )
        if not header.batch_index or max(header.batch_index) >= self.batch_size:
            raise RemoteProtocolError(f"batch_index chooses rows that a batch of {self.batch_size} doesn't have")
        self._prefix = None  # the cache no longer holds the hashed positions
        return True

    def _lease_rows(self, num_rows: int) -> None:
        if self.lease.released:  # a lease taken now would never be released
            raise SessionLostError("the session has been closed meanwhile")
        self.lease.resize(self.size.row_bytes * num_rows + self._inner_bytes)

    def forget_inner(self) -> None:
        """Give back the memory of inner states: they have been sent, or won't be."""
        if self._inner_bytes and not self.lease.released:
            self._inner_bytes = 0
            self._lease_rows(self.batch_size)

    def empty_cache(self) -> None:
        """Empty the cache, because some blocks have seen a step and others have not."""
        self.cache = self.packer.blocks.new_cache(self.span, record_past=self.cache.records_past)
        self.log.rollback(0)

    async def _compute(
        self, header: StepHeader, inputs: BlockInputs, select: bool, prefix: SharedPrefix | None, *, begun: bool
    ) -> Timed[Tensor]:
        """Compute the outputs of a step: take those of shared pages, and run the blocks for the others.

        `begun`: the cache changes before blocks run.

        Raises:
            SwarmError: the blocks failed; if they had begun, the cache is empty now.
        """
        traits = self.packer.blocks.traits
        known: Timed[Tensor | None] = Timed(None, 0, 0)
        self.pieces = []
        try:
            with block_errors_translated():
                # If the thread is busy, another session may compute the first page before this one's turn.
                if prefix is not None and (await _read(prefix, header, inputs) or self.device_thread.num_calls):
                    reuse = partial(self._reuse, prefix, header)
                    known = await self.device_thread.run_call(reuse, Priority.PREFILL, self.account())
                if known.value is not None:
                    length = known.value.shape[traits.batch_axis + 1]
                    self.pieces.append(length)
                    if length == header.seq_len:
                        return Timed(known.value, known.queue_us, known.compute_us)
                    inputs = inputs.columns(length, header.seq_len, header.position, traits)
                    later = {"position": header.position + length, "seq_len": header.seq_len - length}
                    header = header.model_copy(update=later)
                work = _StepInPieces(self, header, inputs, select)
                try:
                    timed = await self.device_thread.run_step(work)
                finally:
                    begun = begun or work.has_run
                work.join_inner()
        except SwarmError:
            if begun:
                self.empty_cache()
            raise
        outputs = [timed.value] if known.value is None else [known.value, timed.value]
        value = timed.value if len(outputs) == 1 else torch.cat(outputs, dim=traits.batch_axis + 1)
        return Timed(value, timed.queue_us + known.queue_us, timed.compute_us + known.compute_us)

    # ------------------------------------------------------------------ in the device thread

    def bring_cache_to(self, header: StepHeader, select: bool) -> None:
        """Bring the cache to the step's rows and position.

        Raises:
            SessionLostError: it can't go back there.
        """
        if select:
            self._select_batch(header)
        if header.position < self.cache.position:
            try:
                self.cache.rollback(header.position)
            except RollbackUnsupportedError as error:
                raise SessionLostError(str(error)) from None
            self.log.rollback(header.position)

    def _select_batch(self, header: StepHeader | ReplayHeader) -> None:
        self.cache.select_batch(header.batch_index or ())
        self.log.select_batch(header.batch_index or ())

    def _reuse(self, prefix: SharedPrefix, header: StepHeader) -> Tensor | None:
        self.bring_cache_to(header, False)
        return prefix.reuse(self.cache)


async def _read(prefix: SharedPrefix, header: StepHeader, inputs: BlockInputs) -> bool:
    read = partial(prefix.read, header.position, inputs)
    num_bytes = sum(tensor.nbytes for tensor in inputs.tensors().values())
    return read() if num_bytes <= HASHED_ON_LOOP_BYTES else await asyncio.to_thread(read)


class _StepInPieces(SessionStep):
    """One step, which the device thread runs whole or in pieces; its outputs are those of all pieces together."""

    def __init__(self, runner: StepRunner, header: StepHeader, inputs: BlockInputs, select: bool) -> None:
        priority = Priority.DECODE if header.seq_len <= DECODE_TOKENS else Priority.PREFILL
        num_tokens = header.seq_len * header.batch_size
        can_be_cut = priority is Priority.PREFILL and not (inputs.inner and inputs.inner.attentions)
        # Clients cut prompts whose first piece must be longer than the others.
        can_be_cut = can_be_cut and not (header.whole and num_tokens <= MAX_WHOLE_TOKENS)
        can_be_cut = can_be_cut and uncut(inputs, header.position, runner.packer.blocks.traits) == 1
        super().__init__(
            session=header.session,
            account=runner.account(),
            priority=priority,
            num_tokens=num_tokens,
            granule=header.batch_size if can_be_cut else num_tokens,
            packer=runner.packer,
            num_blocks=len(runner.span),
            context_tokens=header.position * header.batch_size,
            num_rows=header.batch_size,
        )
        self.has_run = False
        """True when blocks may have seen some of it."""
        self._runner, self._header, self._inputs, self._select = runner, header, inputs, select
        self._num_columns = 0  # taken so far
        self._inner: list[InnerStates | None] = []  # of the pieces

    def take(self, num_tokens: int) -> SessionCall:
        """Return the next piece.

        Raises:
            SessionLostError: the cache can't be rolled back to the step's position.
        """
        runner, header, blocks = self._runner, self._header, self.packer.blocks
        if not self._num_columns:
            runner.bring_cache_to(header, self._select)
        self.has_run = True
        inputs, start = self._inputs, self._num_columns
        self._num_columns += num_tokens // header.batch_size
        runner.pieces.append(self._num_columns - start)
        if num_tokens < header.seq_len * header.batch_size:
            inputs = inputs.columns(start, self._num_columns, header.position, blocks.traits)
        self._inner.append(inputs.inner)
        return SessionCall(in_dtype(inputs, blocks), runner.span, runner.cache)

    def join_inner(self) -> None:
        """Join the inner states of all pieces."""
        if self._inputs.inner is not None:
            self._inputs.inner.join(self._inner, self.packer.blocks.traits.batch_axis + 1)
