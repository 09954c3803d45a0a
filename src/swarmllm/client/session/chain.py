"""A chain of servers that hold one session's KV caches, in the client's event loop: each step goes through all of them.

Used by `session/inference_session`, its synchronous face. `session_text` knows what the servers have seen, `open_route`
the servers, and `in_flight` what they have been asked.

Before each step, `Repairs` makes the servers ready:

1. Hops whose stream broke, or who lost the session, are replaced: a new route for exactly their blocks, new sessions.
2. Every hop is linked to its successor anew, under a new epoch: what is still in flight from before is dropped.
3. The new hops' caches are rebuilt by replaying inputs: the hop before them has kept what it sent; if the first hop is
   new, the client has. The others keep their caches.
4. The steps that were not answered are sent again; a hop that had run one already rolls its cache back to its start.

A move to a better route goes the same way from 2. on, except that the new sessions are opened before the old ones end.

Speculation sends steps before the results of earlier ones are known (`speculation/sampling_loop`). Rolling back costs
no message: a step that starts lower than another one ends makes the servers forget what lies behind its start.

    event                                   what happens
    send, at the end of what is under way   the step follows it
    send, lower                             everything under way is stale; the step starts anew from there
    receive                                 the result of the oldest step under way, after a repair if need be
    a repair, or a move to a better route   what is under way is sent again, under the new epoch; what is stale is not
    a stale step fails                      the server drops all steps of that epoch, so the chain is repaired
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarmllm.client.batches.spot_checks import SpotChecks
from swarmllm.client.session.hop import Hop, SessionSettings
from swarmllm.client.session.in_flight import InFlight, PendingStep
from swarmllm.client.session.open_route import OpenRoute
from swarmllm.client.session.session_text import SessionText
from swarmllm.client.view.connection import tokens_at_once
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import ClientConfig
from swarmllm.data_structures import RouteHop, Span
from swarmllm.errors import (
    CacheFullError,
    ConfigurationError,
    CorruptActivationsError,
    PeerError,
    SessionClosedError,
    SessionTooLargeError,
    SwarmError,
)
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.messages import Timings
from swarmllm.swarm.retry import Retries
from swarmllm.swarm.route_costs import RouteCosts

logger = logging.getLogger(__name__)


MIN_TOKENS_LEFT = 64
"""Tokens that a move to a better route may count on. Assumed: the end of an answer of some sentences."""
CHUNK_S = 0.25
"""Longest time of a prompt's chunk on one server, unless it has no more than `prefill_chunk_tokens`. Assumed: over slow
links, which the announced throughput knows of, short chunks fill a pipeline of servers better."""

TOO_SMALL_S = 1e4
"""Servers without room for the session are avoided as if it were for so long: longer than any ban."""


class Repairs:
    """Makes a chain's servers ready for the next step."""

    def __init__(self, view: SwarmView, text: SessionText, hops: OpenRoute, in_flight: InFlight) -> None:
        self._view, self._text, self._hops, self._in_flight = view, text, hops, in_flight
        self.num_repairs = 0
        self.num_moves = 0
        self.on_route: Callable[[list[RouteHop], float], None] | None = None
        """Told, in the event loop, of the route when it has been opened or repaired, and how many seconds that took."""
        self._news = 0
        """The view's news when we last asked it for a better route."""

    async def make_ready(self) -> bool:
        """Repair what is broken, or take a clearly better route, between two steps; whether anything was changed.

        Raises:
            SwarmError: that failed; another try may succeed.
        """
        if not self._in_flight.is_linked or not self._hops.usable:
            await self._repair()
            return True
        return await self._move_if_better()

    async def _repair(self) -> None:
        """Make the chain complete, linked, and its caches filled up to the text's position."""
        began_at = asyncio.get_running_loop().time()
        if self._hops:
            self.num_repairs += 1
            self._view.counts["repairs"] += 1
        await self._hops.look_after_accused(self._view.config.connect_timeout_s)
        self._in_flight.begin_epoch()  # after the look, which may find that a stream has broken
        await self._hops.complete(self._settings, self._in_flight.epoch, self._costs())
        await self._rejoin(began_at)

    async def _move_if_better(self) -> bool:
        news = self._view.look_ups.news
        if news == self._news or not self._text.position:
            return False
        self._news = news
        # Nobody knows how much will be generated; on average, a stream that has run for some time is half over.
        tokens_left = min(self._text.room.max_length - self._text.position, max(MIN_TOKENS_LEFT, self._text.position))
        target = self._view.routes.better(self._hops.route, self._costs(), tokens_left)
        return target is not None and await self._move(target)

    async def _move(self, route: Sequence[RouteHop]) -> bool:
        """Whether the route could be taken; only then the old one is left and the new caches are filled.

        Raises:
            SwarmError: the old route is left, but the new one must be repaired.
        """
        began_at = asyncio.get_running_loop().time()
        if not await self._hops.exchange(route, self._settings, self._in_flight.epoch + 1):
            return False
        self._in_flight.begin_epoch()
        self._in_flight.is_linked = False
        self.num_moves += 1
        self._view.counts["moves"] += 1
        await self._rejoin(began_at)
        return True

    async def _rejoin(self, began_at: float) -> None:
        """Link the hops, and fill the caches of the new ones."""
        await self._hops.link(self._in_flight.epoch)
        if self._text.position:
            for before, run in list(self._hops.new_runs()):
                await self._replay(before, run)
        for hop in self._hops:
            hop.new = False
        self._in_flight.is_linked = True
        if self.on_route is not None:
            self.on_route(self._hops.route, asyncio.get_running_loop().time() - began_at)

    async def _replay(self, before: Hop | None, run: Sequence[Hop]) -> None:
        """Fill the caches of `run` with what once passed the boundary before it."""
        text, in_flight = self._text, self._in_flight
        logger.info("replaying %d tokens to rebuild %s", text.position, ", ".join(str(hop) for hop in run))
        *earlier, (position, inputs) = text.past()
        step = in_flight.add(inputs, position, run[-1], earlier)
        try:
            if before is None:
                for position, inputs in text.replay(chunk_tokens([hop.route_hop for hop in run], self._view.config)):
                    await run[0].send_step(
                        step.request, in_flight.state, position, inputs, replay_hops=len(run), exactly=True
                    )
            else:
                await before.send_replay(step.request, in_flight.state, text.position, len(run))
            await in_flight.answered(step)
        finally:
            in_flight.remove(step)

    @property
    def _settings(self) -> SessionSettings:
        text = self._text
        return SessionSettings(
            self._in_flight.on_answer,
            text.batch_size,
            text.room.max_length,
            text.record_past,
            text.adapter,
            text.source_length,
        )

    def _costs(self) -> RouteCosts:
        text = self._text
        costs = self._view.routes.costs(
            context_tokens=text.position,
            batch_size=text.batch_size,
            cache_tokens=text.batch_size * text.room.max_length,
            inner_states=text.shows,
        )
        return replace(costs, avoided_s=dict.fromkeys(text.room.too_small, TOO_SMALL_S))


def chunk_tokens(route: Sequence[RouteHop], config: ClientConfig) -> int:
    """Tokens of one step of a prompt: more than the setting where a device needs more to be busy with computing."""
    worth_asking_for = max(hop.server.batch_tokens for hop in route)
    in_time = int(CHUNK_S * min(hop.server.throughput for hop in route))
    return max(config.prefill_chunk_tokens, min(worth_asking_for, in_time, config.max_batch_tokens))


class Chain:
    """The asynchronous core of a session."""

    def __init__(self, view: SwarmView, text: SessionText, spot_checks: SpotChecks, span: Span) -> None:
        self.view, self.text, self.spot_checks = view, text, spot_checks
        self.timings: Timings = ()
        """Times of the last step, per server: first block, µs in its queue, µs of computing."""
        self.on_failure: Callable[[SwarmError], None] | None = None
        """Told, in the event loop, of every failure that is going to be repaired or raised."""
        self.span = span
        self._busy = asyncio.Lock()
        self._hops = OpenRoute(view, self.span)
        self._in_flight = InFlight(view, text, self._hops, self._busy)
        self.repairs = Repairs(view, text, self._hops, self._in_flight)
        self._closed = False
        self._stepping: asyncio.Task[object] | None = None

    @property
    def route(self) -> list[RouteHop]:
        return self._hops.route

    async def step(self, inputs: BlockInputs) -> Tensor:
        """Run the chain's blocks on `inputs`, which follow the text's position; returns hidden states of that shape.

        Raises:
            SessionLengthExceededError: the session is too short for them; nothing has changed.
            ConfigurationError: they don't fit what the session has seen; nothing has changed.
            SessionClosedError: it has been closed.
            SwarmError: the chain could not be repaired within the retries; the session stays usable as it was before.
        """
        async with self._busy:
            self._admit(self.text.position, inputs)
            self._stepping = asyncio.current_task()
            try:
                return await self._run(inputs)
            finally:
                self._stepping = None

    async def past(self) -> list[tuple[int, BlockInputs]]:
        """(position, inputs) of all that the blocks have seen, in as few calls as it can be computed with."""
        async with self._busy:
            return self.text.past()

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
        self._in_flight.is_linked = False
        self._in_flight.forget_abandoned()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the session has been closed")

    def _admit(self, position: int, inputs: BlockInputs) -> None:
        self._check_open()
        if not self.text.admit(position, inputs):
            self._hang_up()

    async def _run(self, inputs: BlockInputs) -> Tensor:
        self.text.shows = inputs.inner is not None
        chunks: list[BlockInputs] = []
        outputs: list[Tensor] = []
        retries = self.view.retries()
        while not chunks or len(outputs) < len(chunks):
            try:
                if inputs.inner is not None:
                    self._hops.leave_out_old(inputs.inner)
                await self.repairs.make_ready()
                chunks = chunks or self._chunks(inputs)  # by the servers of the first route
                await self._send_steps(chunks[len(outputs) :], outputs)
                if len(outputs) == len(chunks) and self.spot_checks.due():
                    await self._verify(outputs)
            except SwarmError as error:
                await self._get_over(error, retries)
        if inputs.inner is not None:
            inputs.inner.join([chunk.inner for chunk in chunks], self.text.traits.batch_axis + 1)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=self.text.traits.batch_axis + 1)

    def _chunks(self, inputs: BlockInputs) -> list[BlockInputs]:
        num_tokens, inner = chunk_tokens(self._hops.route, self.view.config), inputs.inner
        if inner is None:
            return list(self.text.chunks(inputs, num_tokens))
        if inner.attentions:  # a row of weights has as many columns as the text positions
            return [inputs]
        return list(self.text.chunks(inputs, min(num_tokens, tokens_at_once(inner, inputs, self.span))))

    async def _send_steps(self, chunks: Sequence[BlockInputs], outputs: list[Tensor]) -> None:
        """Send all chunks at once, then take in their results in order."""
        steps: list[PendingStep] = []
        position = self.text.position
        try:
            for chunk in chunks:
                steps.append(self._in_flight.add(chunk, position))
                await self._in_flight.send(steps[-1])
                position += chunk.seq_len
            for step in steps:
                output = await self._take_in(step)
                outputs.append(output)  # kept, even if the next one fails
        finally:
            for step in steps:
                self._in_flight.remove(step)

    async def _take_in(self, step: PendingStep) -> Tensor:
        """Wait for the result of the next step, and note that all blocks have seen its positions."""
        output, self.timings = await self._in_flight.outputs(step)
        self.text.append(step.position, step.inputs)
        self.text.selection = None
        self._hops.step_went_well()
        return output

    async def _get_over(self, error: SwarmError, retries: Retries) -> None:
        """Wait until another try makes sense.

        Raises:
            SwarmError: none does.
        """
        self._in_flight.is_linked = False
        if isinstance(error, CacheFullError) and self.text.room.ask_for_less():
            return
        if isinstance(error, SessionTooLargeError) and error.peer_id is not None:
            self.text.room.too_small.add(error.peer_id)
        self.view.report(error)
        if self.on_failure is not None:
            self.on_failure(error)
        logger.info("the route needs a repair: %s", error)
        try:
            await self.view.wait_after(error, retries, self.span)
        except SwarmError:
            self._hang_up()  # whoever keeps the exception keeps this session: servers need not
            raise
        if error.said_by is not None:
            self._hops.lose(error.said_by)

    async def _verify(self, outputs: list[Tensor]) -> None:
        """Spot check of the last step; what was wrong is taken back, to be run again."""
        (_, inputs), *others = self.text.past()
        if others:  # no single forward call computes what steps with contrary masks have computed
            return
        try:
            await self.spot_checks.check_session(self.route, inputs, outputs[-1])
        except CorruptActivationsError:
            is_tainted = False
            for hop in self._hops:  # whoever comes behind one that is wrong has computed on it since who knows when
                is_tainted = is_tainted or hop.lost or hop.peer_id in self.view.blamed
                hop.lost = is_tainted
            self.text.position -= sum(output.shape[self.text.traits.batch_axis + 1] for output in outputs)
            outputs.clear()
            raise


class PipelinedChain(Chain):
    """`send()` and `receive()` beside `step()`, which may be used when nothing is under way."""

    def __init__(self, view: SwarmView, text: SessionText, spot_checks: SpotChecks, span: Span) -> None:
        super().__init__(view, text, spot_checks, span)
        self._ahead: deque[PendingStep] = deque()
        """Steps under way whose results are wanted, the oldest first."""

    async def send(self, inputs: BlockInputs, position: int) -> None:
        """Send a step that starts at `position`, and don't wait for its result.

        Raises:
            SessionLengthExceededError: the session is too short for it.
            ConfigurationError: it doesn't follow what the session has seen, or what is under way.
            SessionClosedError: the session has been closed.
        """
        async with self._busy:
            self._admit(position, inputs)
            end = self.text.position
            if self._ahead:
                last = self._ahead[-1]
                end = last.position + last.inputs.seq_len
            if position < end:
                self._drop()
                self.text.position = min(self.text.position, position)
            elif position > end:
                raise ConfigurationError(f"a step can't start at position {position}: {end} is known")
            step = self._in_flight.add(inputs, position)
            self._ahead.append(step)
            if self._in_flight.is_linked and self._hops.usable:
                try:
                    await self._in_flight.send(step)
                except PeerError:
                    self._in_flight.is_linked = False  # receive() repairs, and sends it again

    async def receive(self) -> Tensor:
        """The result of the oldest step under way: hidden states of the shape of its inputs.

        Raises:
            SwarmError: as `step()`; nothing is under way then.
        """
        async with self._busy:
            self._check_open()
            if not self._ahead:
                raise ConfigurationError("receive() needs a step that has been sent")
            self._stepping = asyncio.current_task()
            try:
                output = await self._receive()
            except BaseException:
                self._drop()
                raise
            finally:
                self._stepping = None
            step = self._ahead.popleft()
            self._in_flight.remove(step)
            self._in_flight.forget_abandoned(before=step.request)
            return output

    async def abandon(self) -> None:
        """Give up the results of what is under way."""
        self._drop()

    async def _receive(self) -> Tensor:
        retries = self.view.retries()
        while True:
            try:
                if await self.repairs.make_ready():
                    await self._send_again()
                output = await self._take_in(self._ahead[0])
                if self.spot_checks.due():
                    await self._verify([output])
                return output
            except SwarmError as error:
                await self._get_over(error, retries)

    async def _send_again(self) -> None:
        """After a repair: all servers have forgotten what was under way."""
        steps, self._ahead = self._ahead, deque()
        for step in steps:
            self._in_flight.remove(step)
            self._ahead.append(self._in_flight.add(step.inputs, step.position))
        for step in self._ahead:
            await self._in_flight.send(step)

    def _drop(self) -> None:
        """Abandon what is under way."""
        for step in self._ahead:
            self._in_flight.abandon(step)
        self._ahead.clear()
