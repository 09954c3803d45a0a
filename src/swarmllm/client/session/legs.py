"""The way of a text if the client has some blocks itself, or if users' hooks cut the model into pieces.

A leg is a `Chain` of servers or a `LocalLeg`. Each has a text, that is a past, of its own: when a server is lost, only
its leg is repaired, while the legs behind it wait. `InferenceSession` makes a `Legs` where one chain isn't enough, and
calls it in the user's threads, which also compute the local legs.

    event                   what happens
    run_step                each leg computes on the outputs of the leg before it
    run_step of a part      only legs of these blocks run; longer ones are cut for that. The others follow later
    a leg fails             the text stays where the last leg is; legs ahead of it go back before they run again
    send (speculation)      local legs before the first chain compute; that chain is sent their output
    receive                 the result of the first chain goes through all legs behind it
    remember                the inputs are kept; the legs compute them before the next step
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from swarmllm.client.local_blocks import LocalSpan
from swarmllm.client.session.chain import Chain
from swarmllm.client.session.session_text import SessionText, owned
from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.span_cache import RollbackUnsupportedError, SpanCache


class Leg(Protocol):
    """Neighbouring blocks, for one text."""

    text: SessionText

    @property
    def span(self) -> Span:
        """The blocks."""
        ...

    @property
    def position(self) -> int:
        """Positions that they have seen."""
        ...

    @position.setter
    def position(self, value: int) -> None:
        """Forget the positions from this one on, if there are any."""
        ...

    def run_step(self, inputs: BlockInputs, *, has_noise: bool = False) -> Tensor:
        """The outputs for `inputs` behind the text's position. `has_noise`: noise was added to them before."""
        ...

    def remember(self, inputs: BlockInputs, *, has_noise: bool = False) -> None:
        """Note that the blocks have seen `inputs` elsewhere, behind the text's position."""
        ...

    def past(self) -> list[tuple[int, BlockInputs]]:
        """(position, inputs) of all that they have seen, in as few calls as possible."""
        ...


class LocalLeg:
    """Blocks of this process, and their KV cache. Where it can't be rolled back, it is computed from the text again."""

    def __init__(self, blocks: LocalSpan, text: SessionText) -> None:
        self.text = text
        self._blocks = blocks
        self._cache: SpanCache | None = None

    @property
    def span(self) -> Span:
        return self._blocks.span

    @property
    def position(self) -> int:
        return self.text.position

    @position.setter
    def position(self, value: int) -> None:
        self.text.position = min(self.text.position, value)

    def past(self) -> list[tuple[int, BlockInputs]]:
        return self.text.past()

    def remember(self, inputs: BlockInputs, *, has_noise: bool = False) -> None:
        self.text.remember(inputs)

    def run_step(self, inputs: BlockInputs, *, has_noise: bool = False) -> Tensor:
        text = self.text
        text.admit(text.position, inputs)
        cache = self._ready_cache()
        self._cache = None  # after an error in the middle nobody knows what it holds
        output = self._blocks.forward(inputs, cache=cache)
        self._cache = cache
        text.append(text.position, owned(inputs))
        return output

    def _ready_cache(self) -> SpanCache:
        """A cache with the batch's rows of now that ends at the text's position."""
        text, cache = self.text, self._cache
        selection, text.selection = text.selection, None
        if cache is not None and cache.records_past == text.record_past and text.goes_back_alike(text.position):
            try:
                if selection is not None and cache.position:
                    cache.select_batch(selection)
                cache.rollback(text.position)
                return cache
            except RollbackUnsupportedError:
                pass
        cache = self._blocks.new_cache(record_past=text.record_past)
        for _, past in text.past():
            self._blocks.forward(past, cache=cache)
        return cache


class Legs:
    """All legs of one text; at least one is a chain."""

    def __init__(self, legs: list[Leg]) -> None:
        """`legs` is changed in place when a leg is cut."""
        self.legs = legs
        self._remembered: list[tuple[BlockInputs, Span | None]] = []
        """Inputs that these blocks, or all (None), have seen elsewhere and their legs have not."""
        self._sent: deque[tuple[int, BlockInputs]] = deque()
        """(position, inputs) of steps under way in the first chain; the legs behind it need them."""

    @property
    def position(self) -> int:
        """Positions that all blocks have seen."""
        last = self.legs[-1]
        remembered = (one for one, part in self._remembered if part is None or part.end == last.span.end)
        return last.position + sum(inputs.seq_len for inputs in remembered)

    @position.setter
    def position(self, value: int) -> None:
        """Forget the positions from this one on."""
        if value == 0:
            self._remembered.clear()
        elif value < self.position:
            self.catch_up()
        for leg in self.legs:
            leg.position = value

    def run_step(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        """Hidden states after the last block, or after the blocks of `part`; the blocks behind those follow later."""
        self.catch_up()
        return self._run(self._of(part), inputs, self.legs[-1].position)

    def send(self, inputs: BlockInputs, position: int) -> None:
        """Send a step, which at a lower position than before replaces what is under way."""
        self.catch_up()
        replaces = bool(self._sent) and position < self._sent[-1][0] + self._sent[-1][1].seq_len
        first, index = self._first_chain
        if index:
            inputs = inputs.with_hidden(self._run(self.legs[:index], inputs, position))
        first.send(inputs, position)  # if the chain refuses it, what is under way goes on
        if replaces:
            self._sent.clear()
        self._sent.append((position, inputs))

    def receive(self) -> Tensor:
        """The result of the oldest step under way."""
        first, index = self._first_chain
        try:
            hidden = first.receive()
        except BaseException:  # the chain has nothing under way then
            self._sent.clear()
            raise
        position, inputs = self._sent.popleft()
        try:
            return self._run(self.legs[index + 1 :], inputs.with_hidden(hidden), position)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Drop the results of all steps under way."""
        self._sent.clear()
        self._first_chain[0].abandon()

    def remember(self, inputs: BlockInputs, part: Span | None = None) -> None:
        """Note that all blocks, or those of `part`, have seen `inputs` elsewhere; the blocks behind those follow later.

        The legs compute them before the next step, because the outputs of each leg are unknown here.
        """
        self._remembered.append((inputs, part))

    def follow(self, other: "Legs") -> None:
        """Take over the past of another text of the same blocks, whose legs may be cut at other blocks."""
        other.catch_up()
        for leg in other.legs:
            (own,) = self._of(leg.span)
            copy_past(leg, own, other.position)

    def catch_up(self) -> None:
        """Compute what was only remembered."""
        while self._remembered:
            inputs, part = self._remembered[0]
            self._run(self._of(part), inputs, self.legs[-1].position)
            del self._remembered[0]

    @property
    def _first_chain(self) -> tuple[Chain, int]:
        return next((leg, index) for index, leg in enumerate(self.legs) if isinstance(leg, Chain))

    def _of(self, part: Span | None) -> list[Leg]:
        """The legs of these blocks (None: of all). A chain of more blocks is cut, and the pieces compute its past."""
        for bound in () if part is None else (part.start, part.end):
            for index, leg in enumerate(self.legs):
                if isinstance(leg, Chain) and leg.span.start < bound < leg.span.end:
                    pieces = pieces_of(leg, bound)
                    for position, inputs in leg.past():
                        self._run(pieces, inputs, position, has_noise=True)
                    self.legs[index : index + 1] = pieces
                    leg.view.loop.call_soon(leg.close())
                    break
        return [leg for leg in self.legs if part is None or leg.span in part]

    def _run(self, legs: Sequence[Leg], inputs: BlockInputs, position: int, *, has_noise: bool = False) -> Tensor:
        """The outputs of these legs from `position` on; `has_noise`: the inputs of the first one have their noise."""
        for leg in legs:
            leg.position = position
            if leg.position != position:
                raise ConfigurationError(f"a step can't start at position {position}: {leg.position} is known")
            inputs = inputs.with_hidden(leg.run_step(inputs, has_noise=has_noise and leg is legs[0]))
        return inputs.hidden_states


def pieces_of(chain: Chain, bound: int) -> list[Chain]:
    """Two chains in place of one, which have seen nothing yet: up to block `bound`, and from it on."""

    def piece(span: Span) -> Chain:
        found = Chain(chain.view, chain.text.twin(), chain.spot_checks, span, chain.noise)
        found.on_failure, found.on_route = chain.on_failure, chain.on_route
        return found

    return [piece(Span(chain.span.start, bound)), piece(Span(bound, chain.span.end))]


def copy_past(leg: Leg, to: Leg, position: int) -> None:
    """Have `to`, which is of the same blocks, take over what `leg` has seen before `position`."""
    leg.position = position
    to.text.record_past, to.text.room.guessed = leg.text.record_past, leg.text.room.guessed
    for _, inputs in leg.past():
        to.remember(inputs, has_noise=True)
