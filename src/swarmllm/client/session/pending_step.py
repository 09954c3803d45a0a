"""A step or a replay of a chain that is under way, and which answers of servers can belong to it.

Used by `session/in_flight`. Servers are not trusted: what they answer is checked here before anything is done with it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from swarmllm.client.session.hop import Hop
from swarmllm.client.view.connection import Result, take_inner
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import RemoteProtocolError
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
