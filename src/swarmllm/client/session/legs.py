"""The way of one text through all blocks: legs on servers, and legs in this process where the client has blocks itself.

Used by `session/inference_session`, whose threads run the local legs; each leg has a text, that is a past, of its own.
A server that is lost concerns its own leg alone, and what is behind it waits.

    event                          what happens
    run                            each leg computes what the one before it gave; local ones here, at once
    run a part                     only its legs, which are cut out of longer ones if need be; the others follow
    a leg fails                    the text stays where the last leg is; those ahead of it go back before they run again
    send (speculation)             local legs before the first remote one compute, and that one is sent their result
    receive                        its result goes through all legs behind it
    remember                       one leg knows its inputs; more compute what is remembered when it is needed
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from swarmllm.client.activation_noise import ActivationNoise
from swarmllm.client.local_blocks import LocalSpan
from swarmllm.client.session.chain import PipelinedChain
from swarmllm.client.session.session_text import SessionText
from swarmllm.client.view.event_loop import EventLoop
from swarmllm.data_structures import RouteHop, Span
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.span.span_cache import RollbackUnsupportedError, SpanCache
from swarmllm.network.wire.messages import Timings


class Leg(Protocol):
    """Some blocks, for one text."""

    text: SessionText

    @property
    def span(self) -> Span:
        """The blocks."""
        ...

    def run(self, inputs: BlockInputs) -> Tensor:
        """Their outputs for what follows the text's position."""
        ...

    def past(self) -> list[tuple[int, BlockInputs]]:
        """(position, inputs) of all that they have seen, in as few calls as it can be computed with."""
        ...


class RemoteLeg:
    """Blocks on servers."""

    def __init__(self, loop: EventLoop, chain: PipelinedChain) -> None:
        self.loop, self.chain, self.text = loop, chain, chain.text

    @property
    def span(self) -> Span:
        return self.chain.span

    def run(self, inputs: BlockInputs) -> Tensor:
        return _returned(self.loop.run(self.chain.step(inputs.on_host())), inputs)

    def send(self, inputs: BlockInputs, position: int) -> None:
        """Send a step, and don't wait for its result."""
        self.loop.run(self.chain.send(inputs.on_host(), position))

    def past(self) -> list[tuple[int, BlockInputs]]:
        return self.loop.run(self.chain.past())

    def pieces(self, bound: int) -> tuple["RemoteLeg", "RemoteLeg"]:
        """Two others in its place that have seen nothing yet: up to that block, and from it on."""
        chain = self.chain

        def piece(span: Span) -> RemoteLeg:
            found = PipelinedChain(chain.view, self.text.twin(), chain.spot_checks, span)
            found.on_failure, found.repairs.on_route = chain.on_failure, chain.repairs.on_route
            return RemoteLeg(self.loop, found)

        return piece(Span(self.span.start, bound)), piece(Span(bound, self.span.end))


class LocalLeg:
    """Blocks of this process, and their KV cache, which is rebuilt from the text where it can't be rolled back."""

    def __init__(self, blocks: LocalSpan, text: SessionText) -> None:
        self.text = text
        self._blocks = blocks
        self._cache: SpanCache | None = None

    @property
    def span(self) -> Span:
        return self._blocks.span

    def past(self) -> list[tuple[int, BlockInputs]]:
        return self.text.past()

    def run(self, inputs: BlockInputs) -> Tensor:
        text = self.text
        text.admit(text.position, inputs)
        cache = self._ready_cache()
        self._cache = None  # who fails in the middle leaves a cache that nobody can trust
        output = self._blocks.forward(inputs, cache=cache)
        self._cache = cache
        text.append(text.position, inputs)
        return output

    def _ready_cache(self) -> SpanCache:
        """A cache with today's rows that ends at the text's position."""
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
    """All legs of one text, at least one of them remote; those are given the hidden states with `noise`."""

    def __init__(self, legs: Sequence[Leg], noise: ActivationNoise) -> None:
        self._legs, self._noise = list(legs), noise
        self._first_remote = next(index for index, leg in enumerate(legs) if isinstance(leg, RemoteLeg))
        self.chains = [leg.chain for leg in legs if isinstance(leg, RemoteLeg)]
        """Those in use; the list itself stays the same."""
        self._remembered: list[tuple[BlockInputs, Span | None]] = []
        """What is yet to be computed, by these blocks or by all."""
        self._sent: deque[tuple[int, BlockInputs]] = deque()
        """(position, inputs) of the first remote leg's steps under way, where others come behind it."""

    @property
    def texts(self) -> list[SessionText]:
        """The texts of all legs; they differ in what was put in and in little else."""
        return [leg.text for leg in self._legs]

    @property
    def position(self) -> int:
        """Positions that all blocks have seen."""
        last = self._legs[-1]
        remembered = (one for one, part in self._remembered if part is None or part.end == last.span.end)
        return last.text.position + sum(inputs.seq_len for inputs in remembered)

    @position.setter
    def position(self, value: int) -> None:
        """Set it lower to forget what is behind."""
        if value == 0:
            self._remembered.clear()
        elif value < self.position:
            self._catch_up()
        for leg in self._legs:
            _go_back(leg, value)

    def run(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        """Hidden states after the last block, or after a part that will be followed by the others."""
        self._catch_up()
        return self._run(self._of(part), inputs, self._legs[-1].text.position)

    def _of(self, part: Span | None) -> list[Leg]:
        """The legs of these blocks. One that has others, too, is cut, and what it has seen is computed once more."""
        for bound in () if part is None else (part.start, part.end):
            for index, leg in enumerate(self._legs):
                if isinstance(leg, RemoteLeg) and leg.span.start < bound < leg.span.end:
                    pieces = leg.pieces(bound)
                    for position, inputs in leg.past():
                        self._run(pieces, inputs, position, was_sent=True)
                    self._legs[index : index + 1] = pieces
                    self.chains[:] = [one.chain for one in self._legs if isinstance(one, RemoteLeg)]
                    leg.loop.call_soon(leg.chain.close())
                    break
        return [leg for leg in self._legs if part is None or leg.span in part]

    def send(self, inputs: BlockInputs, position: int) -> None:
        """Send a step, which at a lower position than before replaces what is under way."""
        self._catch_up()
        if self._sent and position < self._sent[-1][0] + self._sent[-1][1].seq_len:
            self._sent.clear()
        before, first = self._legs[: self._first_remote], self._remote
        if before:
            inputs = inputs.with_hidden(self._run(before, inputs, position))
        first.send(self._noise(inputs), position)
        self._sent.append((position, inputs))

    def receive(self) -> Tensor:
        """The result of the oldest step under way."""
        try:
            hidden = self._remote.loop.run(self._remote.chain.receive())
        except BaseException:  # the chain has nothing under way then
            self._sent.clear()
            raise
        position, inputs = self._sent.popleft()
        try:
            inputs = inputs.with_hidden(_returned(hidden, inputs))
            return self._run(self._legs[self._first_remote + 1 :], inputs, position)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Give up the results of what is under way."""
        self._sent.clear()
        self._remote.loop.run(self._remote.chain.abandon())

    def remember(self, inputs: BlockInputs, part: Span | None = None) -> None:
        """All blocks have seen `inputs` elsewhere, or this part of them has, and the others will follow."""
        legs = self._of(part)
        if len(self._legs) > 1:  # nobody knows what came out of one leg, and went into the next one
            self._remembered.append((inputs, part))
        else:
            _append(legs[0], self._noise(inputs))

    def follow(self, other: "Legs") -> None:
        """Have seen what the other text has, whose legs are of the same blocks as these but for cuts."""
        other._catch_up()
        for leg in other._legs:
            _go_back(leg, other.position)
            (own,) = self._of(leg.span)
            own.text.record_past, own.text.room.guessed = leg.text.record_past, leg.text.room.guessed
            for _, inputs in leg.past():
                _append(own, inputs)

    def select_batch(self, indices: Sequence[int]) -> None:
        """Take these rows before the next step."""
        self._catch_up()
        for leg in self._legs:
            leg.text.select_batch(indices)

    @property
    def route(self) -> list[RouteHop]:
        """The servers in use; empty before the first step."""
        return [hop for chain in self.chains for hop in chain.route]

    @property
    def timings(self) -> Timings:
        """Times of the last step, per server."""
        return tuple(time for chain in self.chains for time in chain.timings)

    def watch(
        self, on_failure: Callable[[SwarmError], None], on_route: Callable[[list[RouteHop], float], None]
    ) -> None:
        """Tell of failures and of routes; see `InferenceSession.watch`."""
        for chain in self.chains:
            chain.on_failure = on_failure
            chain.repairs.on_route = lambda _, took_s: on_route(self.route, took_s)

    @property
    def _remote(self) -> RemoteLeg:
        first = self._legs[self._first_remote]
        assert isinstance(first, RemoteLeg)
        return first

    def _catch_up(self) -> None:
        """Compute what was only remembered."""
        while self._remembered:
            inputs, part = self._remembered[0]
            self._run(self._of(part), inputs, self._legs[-1].text.position)
            del self._remembered[0]

    def _run(self, legs: Sequence[Leg], inputs: BlockInputs, position: int, *, was_sent: bool = False) -> Tensor:
        """The outputs of these legs, from `position` on; `was_sent`: the first of them got these inputs before."""
        for leg in legs:
            if isinstance(leg, RemoteLeg) and not (was_sent and leg is legs[0]):
                inputs = self._noise(inputs)
            _go_back(leg, position)
            if leg.text.position != position:
                raise ConfigurationError(f"a step can't start at position {position}: {leg.text.position} is known")
            inputs = inputs.with_hidden(leg.run(inputs))
        return inputs.hidden_states


def _returned(hidden: Tensor, inputs: BlockInputs) -> Tensor:
    """What servers have computed from these inputs, where the inputs are."""
    device = inputs.hidden_states.device
    if inputs.inner is not None:
        inputs.inner.move(device)
    return hidden.to(device, non_blocking=True)


def _append(leg: Leg, inputs: BlockInputs) -> None:
    """Note what its blocks have seen; they will compute it when they go on."""
    inputs = inputs.on_host() if isinstance(leg, RemoteLeg) else inputs
    leg.text.append(leg.text.position, inputs)
    leg.text.adapter = inputs.adapter
    leg.text.source_length = max(leg.text.source_length, inputs.source_len)


def _go_back(leg: Leg, position: int) -> None:
    leg.text.position = min(leg.text.position, position)
