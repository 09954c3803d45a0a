"""A chain of servers that hold one session's KV caches, in the client's event loop: opens it, steps it, repairs it.

Used by `client/inference_session`, its synchronous face. How a repair works:

1. Hops whose stream broke, or who lost the session, are replaced: a new route for exactly their blocks, new sessions.
2. Every hop is linked to its successor anew, under a new epoch: what is still under way from before is dropped.
3. The new hops' caches are rebuilt by replaying inputs: the hop before them has kept what it sent; if the first hop is
   new, the client has. The others keep their caches.
4. The steps that were not answered are sent again; a hop that had run one already rolls its cache back to its start.

A move to a better route goes the same way from 2. on, except that the new sessions are opened before the old ones end.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from swarmllm.client.connection import Answer, Connection, attended, new_request_id
from swarmllm.client.hop import Hop, Moment, Terms
from swarmllm.client.open_route import OpenRoute
from swarmllm.client.pending_step import PendingStep, plausible_outputs
from swarmllm.client.spot_checks import SpotChecks
from swarmllm.client.swarm_view import SwarmView
from swarmllm.data_structures import BlockTraits, RouteHop, Span
from swarmllm.errors import (
    CacheFullError,
    ConfigurationError,
    CorruptActivationsError,
    MissingBlocksError,
    PeerError,
    PeerTimeoutError,
    RemoteProtocolError,
    SessionClosedError,
    SessionLengthExceededError,
    SwarmError,
)
from swarmllm.models.activation_log import ActivationLog
from swarmllm.models.adapters import BlockAdapter
from swarmllm.models.block_inputs import BlockInputs
from swarmllm.network.messages import MAX_POSITION, Timings
from swarmllm.swarm.retry import Retries
from swarmllm.swarm.route_costs import RouteCosts

logger = logging.getLogger(__name__)

MIN_TOKENS_LEFT = 64
"""That a move to a better route may count on. Assumed: the end of an answer of some sentences."""


@dataclass(eq=False)
class Chain:
    """The asynchronous core of a session. `position` counts what all blocks have seen and the client has got back."""

    view: SwarmView
    traits: BlockTraits
    spot_checks: SpotChecks
    max_length: int
    grows: bool = False
    """Whether a text that reaches `max_length` gets a longer session; otherwise it is refused."""
    guessed: bool = False
    """Whether `max_length` is more than anybody has asked for: where servers have no room for it, less will do."""
    position: int = 0
    record_past: bool = False
    timings: Timings = ()
    """Of the last step: per server its first block, µs in the queue, µs of computing."""
    num_repairs: int = 0
    num_moves: int = 0
    on_failure: Callable[[SwarmError], None] | None = None
    """Told, in the event loop, of every failure that is going to be repaired or raised."""
    on_route: Callable[[list[RouteHop], float], None] | None = None
    """Told, in the event loop, of the route when it has been opened or repaired, and how many seconds that took."""
    _hops: OpenRoute = field(init=False)
    _log: ActivationLog = field(init=False)
    _pending: dict[int, PendingStep] = field(default_factory=dict)
    _epoch: int = 0
    _began_with: int = 0
    """The id before all requests of this epoch."""
    _linked: bool = False
    """Whether the hops are usable and linked, as far as we know."""
    _needed_length: int = 0
    """By what was to be computed so far."""
    _broken: SwarmError | None = None
    """What has failed in this epoch, also while nothing was under way: no server would answer a step of it any more."""
    _rows: int = 0
    _batch_index: tuple[int, ...] | None = None
    _batch_size: int = 1
    _adapter: BlockAdapter | None = None
    """What the servers' sessions were opened with."""
    _closed: bool = False
    _news: int = 0
    """The view's news when we last asked it for a better route."""
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    _stepping: "asyncio.Task[object] | None" = None

    def __post_init__(self) -> None:
        self._log = ActivationLog(self.traits)
        self._hops = OpenRoute(self.view, self._span)

    @property
    def route(self) -> list[RouteHop]:
        return [hop.route_hop for hop in self._hops]

    @property
    def _moment(self) -> Moment:
        return Moment(self._epoch, self._rows, self._batch_index)

    @property
    def _span(self) -> Span:
        return Span(0, self.view.num_blocks)

    # ------------------------------------------------------------------ operations

    def select_batch(self, indices: Sequence[int]) -> None:
        """Take these rows of the batch before the next step. Servers learn of it with that step."""
        chosen = tuple(indices)
        if self._batch_index is None:
            self._rows += 1
            self._batch_index = chosen
        else:
            self._batch_index = tuple(self._batch_index[index] for index in chosen)
        self._log.select_batch(chosen)

    async def step(self, inputs: BlockInputs) -> Tensor:
        """Run all blocks on `inputs`, which follow `position`; returns hidden states of the same shape.

        Raises:
            SessionLengthExceededError: the session is too short for them; nothing has changed.
            SessionClosedError: it has been closed.
            SwarmError: the chain could not be repaired within the retries; the session stays usable from `position` on.
        """
        async with self._busy:
            self._check_room(self.position, inputs)
            self._take_adapter(self.position, inputs)
            rows = self._log.batch_size
            if self.position and inputs.batch_size != rows:
                raise ConfigurationError(f"the session has {rows} rows, these inputs {inputs.batch_size}")
            if not self.position and inputs.batch_size != self._batch_size:
                self._hang_up()  # another text, of other rows than the servers keep room for
                self._linked = False
            self._stepping = asyncio.current_task()
            try:
                return await self._run(inputs)
            finally:
                self._stepping = None

    def _take_adapter(self, position: int, inputs: BlockInputs) -> None:
        """A session has one adapter from its begin on: what is cached was computed with it."""
        known, given = self._adapter, inputs.adapter
        if (known and known.version) == (given and given.version):
            return
        if position:
            raise ConfigurationError(
                "the adapter has changed since the session began: set its position to 0, or open another one"
            )
        self._hang_up()
        self._linked, self._adapter = False, given

    def _check_room(self, position: int, inputs: BlockInputs) -> None:
        if self._closed:
            raise SessionClosedError("the session has been closed")
        wanted = position + inputs.seq_len
        if self.grows and self.max_length < wanted <= MAX_POSITION:
            # Twice as long each time: replaying what is known costs less in all than computing it once.
            self.max_length, self.guessed = min(MAX_POSITION, max(wanted, 2 * self.max_length)), True
            self._hang_up()
            self._linked = False
        if wanted > self.max_length:
            raise SessionLengthExceededError(
                f"{position} + {inputs.seq_len} tokens are more than the session's max_length of "
                f"{self.max_length}: open it with a larger max_length"
            )
        self._needed_length = wanted

    async def _run(self, inputs: BlockInputs) -> Tensor:
        self._batch_size = inputs.batch_size
        chunks = list(self._chunks(inputs))
        outputs: list[Tensor] = []
        retries = Retries(self.view.config.max_retries, self.view.config.route_timeout_s)
        while len(outputs) < len(chunks):
            try:
                if not self._linked or not self._hops.usable:
                    await self._repair()
                else:
                    await self._move_if_better()
                await self._send_steps(chunks[len(outputs) :], outputs)
                if len(outputs) == len(chunks) and self.spot_checks.due():
                    await self._verify(outputs)
            except SwarmError as error:
                await self._get_over(error, retries)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=self.traits.batch_axis + 1)

    async def _get_over(self, error: SwarmError, retries: Retries) -> None:
        """Wait until another try makes sense.

        Raises:
            SwarmError: none does.
        """
        self._linked = False
        if isinstance(error, CacheFullError) and self.guessed and self.max_length > self._needed_length:
            self.max_length = self._needed_length + (self.max_length - self._needed_length) // 4
            return
        self.view.report(error)
        if self.on_failure is not None:
            self.on_failure(error)
        reason = self.view.what_is_wrong(error, self._span)
        is_missing = isinstance(error, MissingBlocksError)  # the look for a route has waited for them
        delay_s = None if is_missing else retries.next_delay_s(reason, asyncio.get_running_loop().time())
        if delay_s is None:
            self._hang_up()  # whoever keeps the exception keeps this session: servers need not
            raise reason from error
        logger.info("repairing the route after: %s", error)
        await asyncio.sleep(delay_s)

    async def _verify(self, outputs: list[Tensor]) -> None:
        """Spot check of the last step; what was wrong is taken back, to be run again."""
        whole = next(self._log.replay(self.position * self._log.batch_size))[1]
        try:
            await self.spot_checks.check_session(self.route, whole, outputs[-1])
        except CorruptActivationsError:
            is_tainted = False
            for hop in self._hops:  # whoever comes behind one that is wrong has computed on it since who knows when
                is_tainted = is_tainted or hop.lost or hop.peer_id in self.view.blamed
                hop.lost = is_tainted
            self.position -= sum(output.shape[self.traits.batch_axis + 1] for output in outputs)
            outputs.clear()
            raise

    def remember(self, inputs: BlockInputs) -> None:
        """All blocks have seen `inputs` elsewhere: the first repair, which opens the chain, replays them."""
        self._log.append(self.position, inputs)
        self.position += inputs.seq_len
        self._adapter = inputs.adapter

    async def past(self) -> BlockInputs | None:
        """What all blocks have seen, as one call's inputs."""
        async with self._busy:
            self._log.rollback(self.position)
            whole = next(self._log.replay(max(1, self.position * self._log.batch_size)), None)
            return None if whole is None else replace(whole[1], adapter=self._adapter)

    async def close(self) -> None:
        """Free the session on all servers: they do it when the streams end. A step under way is cancelled."""
        self._closed = True
        if self._stepping is not None:
            self._stepping.cancel()
        async with self._busy:
            self._hang_up()

    def _hang_up(self) -> None:
        """Leave all servers. A further step would open the chain anew and replay what the client has kept."""
        self._hops.close()

    # ------------------------------------------------------------------ steps

    def _chunks(self, inputs: BlockInputs) -> Iterator[BlockInputs]:
        """A long prompt in pieces, so that several servers work on it at once."""
        size = max(1, self.view.config.prefill_chunk_tokens // inputs.batch_size)
        if not self.traits.chunked_prefill or inputs.seq_len <= size:
            yield inputs
            return
        num_chunks = -(-inputs.seq_len // size)
        size = -(-inputs.seq_len // num_chunks)  # all about equally long
        for start in range(0, inputs.seq_len, size):
            yield inputs.columns(start, min(start + size, inputs.seq_len), self.position, self.traits)

    async def _send_steps(self, chunks: Sequence[BlockInputs], outputs: list[Tensor]) -> None:
        """Send all chunks at once, then take in their results in order."""
        loop = asyncio.get_running_loop()
        steps: list[tuple[int, PendingStep]] = []
        position = self.position
        try:
            for chunk in chunks:
                pending = PendingStep(chunk, position, loop.create_future(), self._epoch)
                request = new_request_id()
                self._pending[request] = pending
                steps.append((request, pending))
                self._check_unbroken()
                pending.inputs = await self._hops[0].send_step(request, self._moment, pending.position, chunk)
                position += chunk.seq_len
            for _, pending in steps:
                outputs.append(await self._take_in(pending))
        finally:
            for request, pending in steps:
                del self._pending[request]
                pending.forget()

    async def _take_in(self, pending: PendingStep) -> Tensor:
        """Wait for the result of the next step, and note that all blocks have seen its positions."""
        answer = await self._answered(pending)
        output = self._result(answer, pending.inputs)
        self._log.append(pending.position, pending.inputs)
        self.position = pending.position + pending.inputs.seq_len
        self._hops.step_went_well()
        self.timings = answer.header.timings
        self._batch_index = None
        return output

    async def _answered(self, pending: PendingStep) -> Answer:
        timeout_s = self.view.config.step_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                with attended(hop.connection for hop in self._hops):
                    return await pending.done
        except TimeoutError as error:
            if isinstance(error, SwarmError):
                raise
            stalled = await self._find_stalled(pending)
            stalled.lost = True
            raise PeerTimeoutError(
                f"the server {stalled} did not finish a step within {timeout_s:g} s", stalled.peer_id
            ) from None

    async def _find_stalled(self, pending: PendingStep) -> Hop:
        """The first hop that has not got past the step, although everybody answers pings.

        Asked by LINK, whose answer says how far a cache goes; the repair links everything anew anyway.
        """
        self._epoch += 1
        self._linked = False
        end = pending.length or pending.position + pending.inputs.seq_len

        async def position_of(hop: Hop) -> int:
            try:
                return await hop.link(None, self._epoch)
            except PeerError:
                return -1

        positions = await asyncio.gather(*(position_of(hop) for hop in self._hops))
        behind = (hop for hop, position in zip(self._hops, positions, strict=True) if position < end)
        return next(behind, self._hops[-1])  # if all got past it, the last one doesn't send its results

    def _result(self, answer: Answer, inputs: BlockInputs) -> Tensor:
        try:
            return plausible_outputs(answer, inputs, self.traits)
        except PeerError:
            self._hops.lose(answer.peer_id)
            raise

    # ------------------------------------------------------------------ answers, called by the connections

    def _on_answer(self, connection: Connection, answer: Answer | SwarmError, request: int | None) -> None:
        hop = self._hops.hop_of(connection)
        if hop is None:
            return
        if isinstance(answer, SwarmError):
            self._on_error(hop, answer, request)
            return
        pending = None if request is None else self._pending.get(request)
        if pending is None or pending.done.done() or pending.epoch != self._epoch:
            return
        try:
            if hop is (pending.replay_end or self._hops[-1]):
                pending.finish(hop, answer)
            else:
                self._relay(hop, answer, pending)
        except PeerError as error:
            self._hops.lose(hop.peer_id)
            pending.fail(error)

    def _relay(self, hop: Hop, answer: Answer, pending: PendingStep) -> None:
        """Carry a result to the next server, because its predecessor can't.

        Raises:
            PeerError: it isn't the result of this step, or of a part of this replay.
        """
        position, inputs = pending.after(hop, answer, self.traits)
        index, last = self._hops.index(hop) + 1, pending.replay_end
        replay_hops = 0 if last is None else self._hops.index(last) - index + 1
        if last is not None and replay_hops < 1:
            raise RemoteProtocolError(f"{hop} answered a replay for the servers before it", hop.peer_id)
        sending = self._hops[index].send_step(
            answer.header.id, self._moment, position, inputs, replay_hops=replay_hops, exactly=True
        )
        self.view.loop.spawn(sending, name=f"relay from {hop}").add_done_callback(pending.task_ended)

    def _check_unbroken(self) -> None:
        """To be called when what waits for an answer is registered: from then on it is told itself."""
        if self._broken is not None:
            raise self._broken

    def _on_error(self, hop: Hop, error: SwarmError, request: int | None) -> None:
        if self._is_stale(hop, error, request):
            return
        error = self._hops.judged(hop, error)
        self._broken = error
        if isinstance(error, PeerError) and error.peer_id == hop.peer_id and hop.connection.error is None:
            hop.lost = True
        pending = self._pending.get(request) if request is not None else None
        self._linked = False
        if not self._busy.locked():  # between two steps nobody else would take note of it
            self.view.report(error)
        of_all = pending is None or pending.done.done()  # its server drops whatever comes behind it
        for waiting in tuple(self._pending.values()) if of_all or pending is None else (pending,):
            waiting.fail(error)

    def _is_stale(self, hop: Hop, error: SwarmError, request: int | None) -> bool:
        """Whether the error is about a request of an earlier epoch, or a successor that was replaced meanwhile."""
        if request is not None:
            return request not in self._pending and request < self._began_with
        if not isinstance(error, PeerError) or not error.is_hearsay:
            return False
        return not self._hops.is_neighbour(hop, error.peer_id)

    # ------------------------------------------------------------------ repair

    async def _repair(self) -> None:
        """Make the chain complete, linked, and its caches filled up to `position`."""
        began_at = asyncio.get_running_loop().time()
        self._begin_epoch()
        if self._hops:
            self.num_repairs += 1
            self.view.counts["repairs"] += 1
        await self._hops.look_after_accused(self.view.config.connect_timeout_s)
        await self._hops.complete(self._terms, self._epoch, self._costs())
        await self._rejoin(began_at)

    def _begin_epoch(self) -> None:
        """What is still under way from before is dropped by the servers."""
        self._epoch += 1
        self._began_with, self._broken = new_request_id(), None

    async def _rejoin(self, began_at: float) -> None:
        """Link the hops, and fill the caches of the new ones."""
        await self._hops.link(self._epoch)
        if self.position:
            for before, run in list(self._hops.new_runs()):
                await self._replay(before, run)
        for hop in self._hops:
            hop.new = False
        self._linked = True
        if self.on_route is not None:
            self.on_route(self.route, asyncio.get_running_loop().time() - began_at)

    @property
    def _terms(self) -> Terms:
        return Terms(self._on_answer, self._batch_size, self.max_length, self.record_past, self._adapter)

    def _costs(self) -> RouteCosts:
        return self.view.costs(
            context_tokens=self.position,
            batch_size=self._batch_size,
            cache_tokens=self._batch_size * self.max_length,
        )

    # ------------------------------------------------------------------ moves

    async def _move_if_better(self) -> bool:
        """Between two steps: take a clearly better route if there is one by now; whether it was taken."""
        news = self.view.news
        if news == self._news or not self.position:
            return False
        self._news = news
        # Nobody knows how much will be generated; on average, a stream that has run for some time is half over.
        tokens_left = min(self.max_length - self.position, max(MIN_TOKENS_LEFT, self.position))
        target = self.view.better_route(self.route, self._costs(), tokens_left)
        return target is not None and await self._move(target)

    async def _move(self, route: Sequence[RouteHop]) -> bool:
        """Whether the route could be taken; only then the old one is left and the new caches are filled.

        Raises:
            SwarmError: the old route is left, but the new one must be repaired.
        """
        began_at = asyncio.get_running_loop().time()
        if not await self._hops.exchange(route, self._terms, self._epoch + 1):
            return False
        self._begin_epoch()
        self._linked = False
        self.num_moves += 1
        self.view.counts["moves"] += 1
        await self._rejoin(began_at)
        return True

    async def _replay(self, before: Hop | None, run: Sequence[Hop]) -> None:
        """Fill the caches of `run` with what once passed the boundary before it."""
        logger.info("replaying %d tokens to rebuild %s", self.position, ", ".join(str(hop) for hop in run))
        self._log.rollback(self.position)
        request = new_request_id()
        whole = next(self._log.replay(self.position * self._log.batch_size))[1]
        done = asyncio.get_running_loop().create_future()
        pending = PendingStep(whole, 0, done, self._epoch, run[-1], self.position)
        self._pending[request] = pending
        try:
            self._check_unbroken()
            if before is None:
                for position, inputs in self._log.replay(self.view.config.prefill_chunk_tokens):
                    await run[0].send_step(request, self._moment, position, inputs, replay_hops=len(run), exactly=True)
            else:
                await before.send_replay(request, self._moment, self.position, len(run))
            await self._answered(pending)
        finally:
            del self._pending[request]
            pending.forget()
