"""A chain of servers that hold one session's KV caches, in the client's event loop: each step goes through all of them.

Used by `session/inference_session`, its synchronous face. The parts of a chain: `session_text` knows what has been
seen, `open_route` the servers, `in_flight` what they have been asked, and `repairs` makes them ready before each step.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swarmllm.client.batches.spot_checks import SpotChecks
from swarmllm.client.session.in_flight import InFlight, PendingStep
from swarmllm.client.session.open_route import OpenRoute
from swarmllm.client.session.repairs import Repairs, chunk_tokens
from swarmllm.client.session.session_text import SessionText
from swarmllm.client.view.connection import tokens_at_once
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import RouteHop, Span
from swarmllm.errors import (
    CacheFullError,
    CorruptActivationsError,
    SessionClosedError,
    SessionTooLargeError,
    SwarmError,
)
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.messages import Timings
from swarmllm.swarm.retry import Retries

logger = logging.getLogger(__name__)


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
