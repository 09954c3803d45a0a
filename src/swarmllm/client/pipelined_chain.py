"""A chain that can run ahead: steps under way before the results of those before them are known.

Speculation sends guesses so (`decoding/speculation`). The results come in the order of the steps. Rolling back costs no
message: a step that starts lower than another one ends makes the servers forget what lies behind its start, and the
client drops the results of the steps that it overtakes:

    event                                   what happens
    send, at the end of what is under way   the step follows it
    send, lower                             everything under way is stale; the step starts anew from there
    receive                                 the result of the oldest step under way, after a repair if need be
    a repair, or a move to a better route   what is under way is sent again, under the new epoch; what is stale is not
    a stale step fails                      the server drops all steps of that epoch, so the chain is repaired
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from swarmllm.client.chain import Chain
from swarmllm.client.connection import new_request_id
from swarmllm.client.pending_step import PendingStep
from swarmllm.errors import ConfigurationError, PeerError, SessionClosedError, SwarmError
from swarmllm.models.block_inputs import BlockInputs
from swarmllm.swarm.retry import Retries


@dataclass(eq=False)
class PipelinedChain(Chain):
    """`send()` and `receive()` beside `step()`, which may be used when nothing is under way."""

    _ahead: "deque[tuple[int, PendingStep]]" = field(default_factory=deque)
    """Request ids and steps under way whose results are wanted, the oldest first."""
    _stale: dict[int, PendingStep] = field(default_factory=dict)
    """Steps under way that nobody wants any more, by request id; also in `_pending`, because they may fail."""

    async def send(self, inputs: BlockInputs, position: int) -> None:
        """Send a step that starts at `position`, and don't wait for its result.

        Raises:
            SessionLengthExceededError: the session is too short for it.
            ConfigurationError: it doesn't follow what the session has seen, or what is under way.
            SessionClosedError: the session has been closed.
        """
        async with self._busy:
            self._check_room(position, inputs)
            self._take_adapter(position, inputs)
            end = self.position
            if self._ahead:
                last = self._ahead[-1][1]
                end = last.position + last.inputs.seq_len
            if position < end:
                self._drop()
                self.position = min(self.position, position)
            elif position > end:
                raise ConfigurationError(f"a step can't start at position {position}: {end} is known")
            step = self._register(inputs, position)
            if self._linked and self._hops.usable:
                try:
                    step[1].inputs = await self._hops[0].send_step(step[0], self._moment, position, inputs)
                except PeerError:
                    self._linked = False  # receive() repairs, and sends it again

    async def receive(self) -> Tensor:
        """The result of the oldest step under way: hidden states of the shape of its inputs.

        Raises:
            SwarmError: as `step()`; nothing is under way then.
        """
        async with self._busy:
            if self._closed:
                raise SessionClosedError("the session has been closed")
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
            request, _ = self._ahead.popleft()
            del self._pending[request]
            self._drop_stale(before=request)
            return output

    async def abandon(self) -> None:
        """Nobody wants the results of what is under way."""
        self._drop()

    async def _receive(self) -> Tensor:
        retries = Retries(self.view.config.max_retries, self.view.config.route_timeout_s)
        while True:
            try:
                if not self._linked or not self._hops.usable:
                    await self._repair()
                    await self._send_again()
                elif await self._move_if_better():
                    await self._send_again()
                output = await self._take_in(self._ahead[0][1])
                if self.spot_checks.due():
                    await self._verify([output])
                return output
            except SwarmError as error:
                await self._get_over(error, retries)

    def _register(self, inputs: BlockInputs, position: int) -> tuple[int, PendingStep]:
        step = new_request_id(), PendingStep(inputs, position, asyncio.get_running_loop().create_future(), self._epoch)
        self._ahead.append(step)
        self._pending[step[0]] = step[1]
        return step

    async def _send_again(self) -> None:
        """After a repair: all servers have forgotten what was under way."""
        steps, self._ahead = self._ahead, deque()
        for request, pending in steps:
            del self._pending[request]
            pending.forget()
            self._register(pending.inputs, pending.position)
        self._check_unbroken()
        for request, pending in self._ahead:
            pending.inputs = await self._hops[0].send_step(request, self._moment, pending.position, pending.inputs)

    def _begin_epoch(self) -> None:
        self._drop_stale()
        super()._begin_epoch()

    def _drop(self) -> None:
        """What is under way is stale from now on."""
        for request, pending in self._ahead:
            self._stale[request] = pending
            pending.done.add_done_callback(partial(self._stale_ended, request))
        self._ahead.clear()

    def _drop_stale(self, before: int | None = None) -> None:
        """No answer will come any more to the stale steps (older than the request `before`)."""
        for request in [request for request in self._stale if before is None or request < before]:
            self._pending.pop(request, None)
            self._stale.pop(request).forget()

    def _stale_ended(self, request: int, done: "asyncio.Future[object]") -> None:
        if self._stale.pop(request, None) is None:
            return
        self._pending.pop(request, None)
        error = None if done.cancelled() else done.exception()
        if error is None:
            return
        for pending in tuple(self._pending.values()):  # those of `send()` and `step()` alike come behind it
            pending.fail(error)

    def _hang_up(self) -> None:
        super()._hang_up()
        self._drop_stale()
