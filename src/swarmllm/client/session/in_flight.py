"""Steps and replays of a chain that are in flight: which answer belongs to which, what is relayed, what has failed.

Part of `session/chain`. The connections call `on_answer` in the client's event loop; whoever sends a step waits for it
in `answered`. What fails is told to everybody who waits, and to whoever comes later in the same epoch: a server drops
all steps of an epoch in which one has failed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from swarmllm.client.session.hop import ChainState, Hop
from swarmllm.client.session.open_route import OpenRoute
from swarmllm.client.session.session_text import SessionText
from swarmllm.client.view.connection import Connection, Result, attended, new_request_id, take_inner
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import PeerError, PeerTimeoutError, RemoteProtocolError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import checked


@dataclass(eq=False)
class PendingStep:
    """Made in the event loop by `session/in_flight`; whoever asked for it waits for `done`."""

    request: int
    """The id by which servers know it."""
    inputs: BlockInputs
    """Inputs of the first block; once they are sent, as its server sees them. When the client relays, it takes from
    here what travels beside the hidden states."""
    position: int
    """Where they begin."""
    done: "asyncio.Future[Result]"
    epoch: int
    """The epoch in which it was sent; answers are not mixed with those of the next one."""
    replay_end: Hop | None = None
    """The last hop whose cache a replay rebuilds; None: it is a step."""
    earlier: Sequence[tuple[int, BlockInputs]] = ()
    """(position, inputs) of what a replay brings before them, if it takes more than one call."""
    to_show: set[Hop] = field(default_factory=set)
    """Servers that haven't yet shown what is wanted of the inside of their blocks."""
    result: Result | None = None
    """The last server's answer."""

    @property
    def end(self) -> int:
        """The position at which it is complete."""
        return self.position + self.inputs.seq_len

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for it, unless something else has been told already."""
        if not self.done.done():
            self.done.set_exception(error)

    def task_ended(self, task: "asyncio.Task[object]") -> None:
        """Let the step fail with what a task for it has raised."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def forget(self) -> None:
        """Stop waiting for it; an error that nobody has seen is no mistake then."""
        if not self.done.cancel() and not self.done.cancelled():
            self.done.exception()

    def finish(self, hop: Hop, answer: Result) -> None:
        """Take the answer of the last hop of the step, or of the replay, of which it may be a part.

        Raises:
            RemoteProtocolError: it is about something else.
        """
        header = answer.header
        if self.replay_end is None:
            _check(hop, answer, header.position == self.position)
            self.result = answer
            self._finish_if_complete()
            return
        _check(hop, answer, not header.tensors and header.position <= self.end)
        if header.position == self.end:
            self.done.set_result(answer)

    def show(self, hop: Hop, answer: Result, traits: BlockTraits) -> None:
        """Take what a server shows of the inside of its blocks.

        Raises:
            RemoteProtocolError: it wasn't asked, or can't be read.
            CorruptActivationsError: it can't be right.
        """
        _check(hop, answer, self.replay_end is None and hop in self.to_show and answer.header.position == self.position)
        take_inner(answer, hop.span, self.inputs, traits, self.position)
        self.to_show.discard(hop)
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self.result is not None and not self.to_show:
            self.done.set_result(self.result)

    def after(self, hop: Hop, answer: Result, traits: BlockTraits) -> tuple[int, BlockInputs]:
        """The position and inputs of the server behind `hop`, which answered its outputs.

        Raises:
            RemoteProtocolError: they are not about this step, or no part of this replay.
            CorruptActivationsError: they can't be its outputs.
        """
        hidden, position, inputs = answer.tensors().get("hidden_states"), answer.header.position, self.inputs
        if self.replay_end is None:
            _check(hop, answer, position == self.position)
        else:
            axis = traits.batch_axis + 1
            count = hidden.shape[axis] if hidden is not None and hidden.ndim > axis else 0
            calls = (*self.earlier, (self.position, self.inputs))
            start, inputs = [call for call in calls if call[0] <= position][-1]
            _check(hop, answer, 0 < count <= start + inputs.seq_len - position)
            inputs = inputs.columns(position - start, position - start + count, start, traits)
        plausible_outputs(answer, inputs, traits)
        # The very numbers that came, in their dtype: the next server shall see what this one has kept.
        return position, inputs if hidden is None else inputs.with_hidden(hidden)


def plausible_outputs(answer: Result, inputs: BlockInputs, traits: BlockTraits) -> Tensor:
    """The hidden states that a server has answered, in the dtype of those that it was given.

    Raises:
        RemoteProtocolError: they can't be read.
        CorruptActivationsError: they can't be right.
    """
    return checked(
        answer.tensors().get("hidden_states"),
        inputs.hidden_states,
        peer_id=answer.peer_id,
        batch_axis=traits.batch_axis,
        attention_mask=inputs.attention_mask,
    )


def _check(hop: Hop, answer: Result, fits: bool) -> None:
    header = answer.header
    if not fits or (header.tensors and header.end != hop.span.end):
        raise RemoteProtocolError(
            f"{hop} answered something that was not asked: position {header.position}, block {header.end}", hop.peer_id
        )


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

    # ------------------------------------------------------------------ steps under way

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
