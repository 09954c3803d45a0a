"""A step or a replay of a chain that is under way, and which answers of servers can belong to it.

Used by `client/chain`. Servers are not trusted: what they answer is checked here before anything is done with it.
"""

import asyncio
from dataclasses import dataclass

from torch import Tensor

from swarmllm.client.connection import Answer
from swarmllm.client.hop import Hop
from swarmllm.data_structures import BlockTraits
from swarmllm.errors import RemoteProtocolError
from swarmllm.models.activation_checks import checked
from swarmllm.models.block_inputs import BlockInputs


@dataclass(eq=False)
class PendingStep:
    """Made in the event loop; whoever has made it waits for `done`, and forgets it."""

    inputs: BlockInputs
    """Of the first block; once they are sent, as its server sees them. What travels beside the hidden states is taken
    from here when the client relays."""
    position: int
    done: "asyncio.Future[Answer]"
    epoch: int
    """In which it was sent; answers are not mixed with those of the next one."""
    replay_end: Hop | None = None
    """For a replay: the last hop whose cache it rebuilds."""
    length: int = 0
    """For a replay: it is complete when this position is reached."""

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for it, unless something else has been told already."""
        if not self.done.done():
            self.done.set_exception(error)

    def task_ended(self, task: "asyncio.Task[object]") -> None:
        """What a task for this step has raised is the step's."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def forget(self) -> None:
        """Nobody waits for it any more, and that is no mistake."""
        if not self.done.cancel() and not self.done.cancelled():
            self.done.exception()

    def finish(self, hop: Hop, answer: Answer) -> None:
        """Take the answer of the last hop of the step, or of the replay, of which it may be a part.

        Raises:
            RemoteProtocolError: it is about something else.
        """
        header = answer.header
        if self.replay_end is None:
            _check(hop, answer, header.position == self.position)
            self.done.set_result(answer)
            return
        _check(hop, answer, not header.tensors and header.position <= self.length)
        if header.position == self.length:
            self.done.set_result(answer)

    def after(self, hop: Hop, answer: Answer, traits: BlockTraits) -> tuple[int, BlockInputs]:
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
            _check(hop, answer, 0 < count <= self.length - position)
            inputs = inputs.columns(position, position + count, 0, traits)
        plausible_outputs(answer, inputs, traits)
        # The very numbers that came, in their dtype: the next server shall see what this one has kept.
        return position, inputs if hidden is None else inputs.with_hidden(hidden)


def plausible_outputs(answer: Answer, inputs: BlockInputs, traits: BlockTraits) -> Tensor:
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


def _check(hop: Hop, answer: Answer, fits: bool) -> None:
    header = answer.header
    if not fits or (header.tensors and header.end != hop.span.end):
        raise RemoteProtocolError(
            f"{hop} answered something that was not asked: position {header.position}, block {header.end}", hop.peer_id
        )
