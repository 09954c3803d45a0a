"""Steps and replays of a chain that are in flight: which answer belongs to which, what is relayed, what has failed.

Part of `session/chain`. The connections call `on_answer` in the client's event loop; whoever sends a step waits for it
in `answered`. What fails is told to everybody who waits, and to whoever comes later in the same epoch: a server drops
all steps of an epoch in which one has failed.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from swarmllm.client.session.hop import ChainState, Hop
from swarmllm.client.session.open_route import OpenRoute
from swarmllm.client.session.pending_step import PendingStep, plausible_outputs
from swarmllm.client.session.session_text import SessionText
from swarmllm.client.view.connection import Connection, Result, attended, new_request_id
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.errors import PeerError, PeerTimeoutError, RemoteProtocolError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.messages import Timings


class InFlight:
    """The requests that one chain waits for. `busy` is held by whoever takes note of failures himself."""

    def __init__(self, view: SwarmView, text: SessionText, hops: OpenRoute, busy: asyncio.Lock) -> None:
        self._view, self._text, self._hops, self._busy = view, text, hops, busy
        self.epoch = 0
        """Counts how often the servers were linked; they drop what is in flight from earlier."""
        self.is_linked = False
        """Whether the servers are usable and linked, as far as we know."""
        self._began_with = 0
        """The id before all requests of this epoch."""
        self._failure: SwarmError | None = None
        """The failure of this epoch, also if it came while nothing was in flight."""
        self._steps: dict[int, PendingStep] = {}
        self._abandoned: set[int] = set()
        """Steps that nobody waits for any more, and whose failure still breaks the others."""

    @property
    def state(self) -> ChainState:
        """The chain as requests describe it now."""
        return ChainState(self.epoch, self._text.num_selections, self._text.selection)

    def __len__(self) -> int:
        return len(self._steps)

    def begin_epoch(self) -> None:
        """Begin anew: the servers drop what is in flight from before."""
        self.forget_abandoned()
        self.epoch += 1
        self._began_with, self._failure = new_request_id(), None

    # ------------------------------------------------------------------ sending and waiting

    def add(
        self,
        inputs: BlockInputs,
        position: int,
        replay_end: Hop | None = None,
        earlier: Sequence[tuple[int, BlockInputs]] = (),
    ) -> PendingStep:
        """A step (or, with an end, a replay) to be sent now, and removed by the caller when it is over.

        It has failed already if something else has failed before in this epoch.
        """
        done = asyncio.get_running_loop().create_future()
        step = PendingStep(new_request_id(), inputs, position, done, self.epoch, replay_end, earlier)
        self._steps[step.request] = step
        if self._failure is not None:
            step.fail(self._failure)
        return step

    def remove(self, step: PendingStep) -> None:
        """Forget the step: nobody waits for it any more, and no answer to it matters."""
        self._steps.pop(step.request, None)
        self._abandoned.discard(step.request)
        step.forget()

    async def send(self, step: PendingStep) -> None:
        """Send the step to the first server, unless it has failed already.

        Raises:
            PeerError: the connection is broken.
        """
        if not step.done.done():
            inner = step.inputs.inner
            step.to_show = {hop for hop in self._hops if inner is not None and inner.wants(hop.span)}
            step.inputs = await self._hops[0].send_step(step.request, self.state, step.position, step.inputs)

    async def outputs(self, step: PendingStep) -> tuple[Tensor, Timings]:
        """The hidden states that the step has ended with, and what each server took for it. Raises as `answered`."""
        answer = await self.answered(step)
        try:
            return plausible_outputs(answer, step.inputs, self._text.traits), answer.header.timings
        except PeerError:
            self._hops.lose(answer.peer_id)
            raise

    async def answered(self, step: PendingStep) -> Result:
        """Wait for the last server's answer.

        Raises:
            SwarmError: what has failed; PeerTimeoutError if it took too long.
        """
        timeout_s = self._view.config.step_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                with attended(hop.connection for hop in self._hops):
                    return await step.done
        except TimeoutError as error:
            if isinstance(error, SwarmError):
                raise
            stalled = await self._find_stalled(step)
            stalled.lost = True
            raise PeerTimeoutError(
                f"the server {stalled} did not finish a step within {timeout_s:g} s", stalled.peer_id
            ) from None

    async def _find_stalled(self, step: PendingStep) -> Hop:
        """The first hop that has not got past the step, although everybody answers pings.

        Asked by LINK, whose answer says how far a cache goes; the repair links everything anew anyway.
        """
        self.epoch += 1
        self.is_linked = False
        if step.result is not None:
            return next(iter(step.to_show))

        async def position_of(hop: Hop) -> int:
            try:
                return await hop.link(None, self.epoch)
            except PeerError:
                return -1

        positions = await asyncio.gather(*(position_of(hop) for hop in self._hops))
        behind = (hop for hop, position in zip(self._hops, positions, strict=True) if position < step.end)
        return next(behind, self._hops[-1])  # if all got past it, the last one doesn't send its results

    def abandon(self, step: PendingStep) -> None:
        """Give up the step's result; the step stays in flight, because all behind it fail with it."""
        self._abandoned.add(step.request)
        step.done.add_done_callback(partial(self._abandoned_ended, step))

    def forget_abandoned(self, before: int | None = None) -> None:
        """No answer will come any more to abandoned steps (older than the request `before`)."""
        for request in [request for request in self._abandoned if before is None or request < before]:
            self.remove(self._steps[request])

    def _abandoned_ended(self, step: PendingStep, done: "asyncio.Future[Result]") -> None:
        if step.request not in self._abandoned:
            return
        self.remove(step)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            for other in tuple(self._steps.values()):  # those of `send()` and `step()` alike come behind it
                other.fail(error)

    # ------------------------------------------------------------------ answers, called by the connections

    def on_answer(self, connection: Connection, answer: Result | SwarmError, request: int | None) -> None:
        """Take a server's answer: the end of a step, outputs to be relayed, or a failure."""
        hop = self._hops.hop_of(connection)
        if hop is None:
            return
        if isinstance(answer, SwarmError):
            self._on_error(hop, answer, request)
            return
        step = None if request is None else self._steps.get(request)
        if step is None or step.done.done() or step.epoch != self.epoch:
            return
        try:
            if answer.header.shows:
                step.show(hop, answer, self._text.traits)
            elif hop is (step.replay_end or self._hops[-1]):
                step.finish(hop, answer)
            else:
                self._relay(hop, answer, step)
        except PeerError as error:
            self._hops.lose(hop.peer_id)
            step.fail(error)

    def _relay(self, hop: Hop, answer: Result, step: PendingStep) -> None:
        """Carry a result to the next server, because its predecessor can't.

        Raises:
            PeerError: it isn't the result of this step, or of a part of this replay.
        """
        position, inputs = step.after(hop, answer, self._text.traits)
        index, last = self._hops.index(hop) + 1, step.replay_end
        replay_hops = 0 if last is None else self._hops.index(last) - index + 1
        if last is not None and replay_hops < 1:
            raise RemoteProtocolError(f"{hop} answered a replay for the servers before it", hop.peer_id)
        sending = self._hops[index].send_step(
            answer.header.id, self.state, position, inputs, replay_hops=replay_hops, exactly=True
        )
        self._view.loop.spawn(sending, name=f"relay from {hop}").add_done_callback(step.task_ended)

    def _on_error(self, hop: Hop, error: SwarmError, request: int | None) -> None:
        if self._is_stale(hop, error, request):
            return
        error = self._hops.judged(hop, error)
        self._failure, self.is_linked = error, False
        if isinstance(error, PeerError) and error.peer_id == hop.peer_id and hop.connection.error is None:
            hop.lost = True
        if not self._busy.locked():  # between two steps nobody else would take note of it
            self._view.report(error)
        step = self._steps.get(request) if request is not None else None
        of_all = step is None or step.done.done()  # its server drops whatever comes behind it
        for waiting in tuple(self._steps.values()) if of_all or step is None else (step,):
            waiting.fail(error)

    def _is_stale(self, hop: Hop, error: SwarmError, request: int | None) -> bool:
        """Whether the error is about a request of an earlier epoch, or a successor that was replaced meanwhile."""
        if request is not None:
            return request not in self._steps and request < self._began_with
        if not isinstance(error, PeerError) or not error.is_hearsay:
            return False
        return not self._hops.is_neighbour(hop, error.peer_id)
