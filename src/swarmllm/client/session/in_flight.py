"""Requests to a chain that wait for an answer: steps and replays.

Used by `session/chain`, which adds a step, sends it, and waits in `answered`. Connections call `on_answer` in the
client's event loop. Answers are matched with their steps and checked here: servers are not trusted.

A failure fails all steps that wait, and all later ones of the same chain version: once a step has failed, servers
drop all others of its version.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from swarmllm.client.session.open_route import ChainState, Hop, OpenRoute
from swarmllm.client.session.session_text import SessionText
from swarmllm.client.view.connection import Connection, Result, attended, new_request_id, take_inner
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import PeerError, PeerTimeoutError, RemoteProtocolError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.boundary.inner_states import checked


@dataclass(eq=False)
class PendingStep:
    """A step under way, or a replay."""

    request: int
    """Its id in messages."""
    inputs: BlockInputs
    """Inputs of the first block. Of a step that was sent: copies of the inputs as its server decodes them, unless
    `copying` makes the copies. A client that relays takes all but the hidden states from here."""
    position: int
    """The position of the first of them."""
    done: "asyncio.Future[Result]"
    """The answer of the last server, or what has failed."""
    chain_version: int
    """The chain version in which it was sent; answers in a later one are ignored."""
    replay_end: Hop | None = None
    """The last hop whose cache a replay rebuilds; None for a step."""
    earlier: Sequence[tuple[int, BlockInputs]] = ()
    """(position, inputs) of earlier calls of the same replay. They may end behind the beginning of the next one."""
    to_show: set[Hop] = field(default_factory=set)
    """Servers that haven't answered the inner states wanted of them yet."""
    result: Result | None = None
    """The last server's answer."""
    copying: "asyncio.Task[BlockInputs] | None" = None
    """Makes `owned` inputs of a long step in a thread, while servers compute."""

    @property
    def end(self) -> int:
        """The position behind its inputs."""
        return self.position + self.inputs.seq_len

    def fail(self, error: BaseException) -> None:
        """End it with this error, unless it has ended already."""
        if not self.done.done():
            self.done.set_exception(error)

    def task_ended(self, task: "asyncio.Task[object]") -> None:
        """Fail with the error that a task for this step has raised, if any."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def forget(self) -> None:
        """Stop waiting for it; asyncio doesn't complain about its error then."""
        if not self.done.cancel() and not self.done.cancelled():
            self.done.exception()

    def finish(self, hop: Hop, answer: Result) -> None:
        """Take an answer of the last hop. A replay may be answered in several.

        Raises:
            RemoteProtocolError: it is about something else.
        """
        header = answer.header
        if self.replay_end is None:
            _check(hop, answer, header.position == self.position)
            self.result = answer
            self._finish_if_complete()
            return
        last = max((self.end, *(position + inputs.seq_len for position, inputs in self.earlier)))
        _check(hop, answer, not header.tensors and header.position <= last)
        if header.position == self.end:
            self.done.set_result(answer)

    def show(self, hop: Hop, answer: Result, traits: BlockTraits) -> None:
        """Take the inner states that a server has answered.

        Raises:
            RemoteProtocolError: it wasn't asked for them, or they can't be read.
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
        """The position and inputs for the server behind `hop`, which has answered its outputs to this client.

        Raises:
            RemoteProtocolError: they don't belong to this step or replay.
            CorruptActivationsError: they can't be outputs of its blocks.
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
        # Values and dtype as they came: the next server must see exactly what this one has kept.
        return position, inputs if hidden is None else inputs.with_hidden(hidden)


def plausible_outputs(answer: Result, inputs: BlockInputs, traits: BlockTraits) -> Tensor:
    """The hidden states that a server has answered, in the dtype of its inputs.

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
    """The requests of one chain. While `busy` is locked, the chain itself reports failures."""

    def __init__(self, view: SwarmView, text: SessionText, hops: OpenRoute, busy: asyncio.Lock) -> None:
        self._view, self._text, self._hops, self._busy = view, text, hops, busy
        self.chain_version = 0
        """Counts how often the servers were linked; `epoch` in messages. They drop steps of earlier versions."""
        self.is_linked = False
        """True if the servers are usable and linked, as far as this client knows."""
        self._began_with = 0
        """The id before all requests of this chain version."""
        self._failure: SwarmError | None = None
        """The failure of this chain version, even if no step was under way."""
        self._steps: dict[int, PendingStep] = {}
        self._abandoned: set[int] = set()
        """Steps whose results are not wanted any more, but whose failure still fails the others."""

    @property
    def state(self) -> ChainState:
        """The state of the chain for requests that are sent now."""
        return ChainState(self.chain_version, self._text.num_selections, self._text.selection)

    def __len__(self) -> int:
        return len(self._steps)

    def begin_version(self) -> None:
        """Begin a new chain version: the servers drop the steps of earlier ones."""
        self.forget_abandoned()
        self.chain_version += 1
        self._began_with, self._failure = new_request_id(), None

    # ------------------------------------------------------------------ steps under way

    def add(
        self,
        inputs: BlockInputs,
        position: int,
        replay_end: Hop | None = None,
        earlier: Sequence[tuple[int, BlockInputs]] = (),
    ) -> PendingStep:
        """A step (with `replay_end`: a replay) that the caller sends, and removes when it is over.

        It has failed already if another one has failed before in this chain version.
        """
        done = asyncio.get_running_loop().create_future()
        step = PendingStep(new_request_id(), inputs, position, done, self.chain_version, replay_end, earlier)
        self._steps[step.request] = step
        if self._failure is not None:
            step.fail(self._failure)
        return step

    def remove(self, step: PendingStep) -> None:
        """Forget the step, and ignore answers to it."""
        self._steps.pop(step.request, None)
        self._abandoned.discard(step.request)
        step.forget()

    async def answered(self, step: PendingStep) -> Result:
        """Wait for the last server's answer.

        Raises:
            SwarmError: a server has failed; PeerTimeoutError if it took too long.
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
        """The first hop that hasn't passed the step on, although all hops answer pings.

        The answers to LINK say how far each cache goes. That LINK does no harm, as the repair links all servers again.
        """
        self.chain_version += 1
        self.is_linked = False
        if step.result is not None:
            return next(iter(step.to_show))

        async def position_of(hop: Hop) -> int:
            try:
                return await hop.link(None, self.chain_version)
            except PeerError:
                return -1

        positions = await asyncio.gather(*(position_of(hop) for hop in self._hops))
        behind = (hop for hop, position in zip(self._hops, positions, strict=True) if position < step.end)
        return next(behind, self._hops[-1])  # if all have passed it on, the last one doesn't send its results

    def abandon(self, step: PendingStep) -> None:
        """Drop the step's result. The step stays in flight, because all steps behind it fail with it."""
        self._abandoned.add(step.request)
        step.done.add_done_callback(partial(self._abandoned_ended, step))

    def forget_abandoned(self, before: int | None = None) -> None:
        """Remove abandoned steps, or only those older than request `before`: no answer to them will come."""
        for request in [request for request in self._abandoned if before is None or request < before]:
            self.remove(self._steps[request])

    def _abandoned_ended(self, step: PendingStep, done: "asyncio.Future[Result]") -> None:
        if step.request not in self._abandoned:
            return
        self.remove(step)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            for other in tuple(self._steps.values()):  # those before it, if any, are sent again with the others
                other.fail(error)

    # ------------------------------------------------------------------ answers, called by the connections

    def on_answer(self, connection: Connection, answer: Result | SwarmError, request: int | None) -> None:
        """Take a server's answer: the result of a step, outputs to relay, or a failure."""
        hop = self._hops.hop_of(connection)
        if hop is None:
            return
        if isinstance(answer, SwarmError):
            self._on_error(hop, answer, request)
            return
        step = None if request is None else self._steps.get(request)
        if step is None or step.done.done() or step.chain_version != self.chain_version:
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
        """Send outputs on to the next server, because their own server can't.

        Raises:
            PeerError: they don't belong to this step or replay.
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
        if not self._busy.locked():  # between two steps the chain would not notice
            self._view.report(error)
        step = self._steps.get(request) if request is not None else None
        of_all = step is None or step.done.done()  # its server drops all steps behind it
        for waiting in tuple(self._steps.values()) if of_all or step is None else (step,):
            waiting.fail(error)

    def _is_stale(self, hop: Hop, error: SwarmError, request: int | None) -> bool:
        """True if the error is about a request of an earlier version, or about a replaced neighbour."""
        if request is not None:
            return request not in self._steps and request < self._began_with
        if not isinstance(error, PeerError) or not error.is_hearsay:
            return False
        return not self._hops.is_neighbour(hop, error.peer_id)
