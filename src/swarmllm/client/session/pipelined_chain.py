"""A chain that can run ahead: steps under way before the results of those before them are known.

Speculation sends guesses in this way (`speculation/sampling_loop`). The results come in the order of the steps. Rolling
back costs no message: a step that starts lower than another one ends makes the servers forget what lies behind its
start, and the client drops the results of the steps that it overtakes:

    event                                   what happens
    send, at the end of what is under way   the step follows it
    send, lower                             everything under way is stale; the step starts anew from there
    receive                                 the result of the oldest step under way, after a repair if need be
    a repair, or a move to a better route   what is under way is sent again, under the new epoch; what is stale is not
    a stale step fails                      the server drops all steps of that epoch, so the chain is repaired
"""

import asyncio
from collections import deque

from torch import Tensor

from swarmllm.client.batches.spot_checks import SpotChecks
from swarmllm.client.session.chain import Chain
from swarmllm.client.session.in_flight import PendingStep
from swarmllm.client.session.session_text import SessionText
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError, PeerError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs


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
