"""A session as users hold it: synchronous, closed when its `with` block ends or it is garbage-collected.

with model.inference_session(max_length=2048) as session:
    hidden = session.step(model.embed(ids))      # [batch, seq, hidden], after the last block
    session.position = 5                         # forget everything from position 5 on
    model.generate(ids)                          # continues on this session

`block_inputs` checks the inputs that users give to a session or to `remote_blocks`, before anything is sent.
"""

import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Self

import torch
from torch import Tensor

from swarmllm.client.batches.spot_checks import SpotChecks
from swarmllm.client.local_blocks import NONE_HERE, LocalBlocks
from swarmllm.client.session.chain import Chain, noise_for
from swarmllm.client.session.legs import Leg, Legs, LocalLeg, copy_past
from swarmllm.client.session.session_text import SessionText, TextRoom
from swarmllm.client.view.event_loop import EventLoop
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.data_structures import BlockTraits, RouteHop, Span
from swarmllm.errors import ConfigurationError, SessionClosedError, SwarmError
from swarmllm.models.boundary.block_inputs import BlockInputs, check_mask, check_positions
from swarmllm.network.wire.messages import MAX_BATCH, MAX_POSITION, Timings

DEFAULT_MAX_LENGTH = 2048

_entered: ContextVar[tuple["InferenceSession", ...]] = ContextVar("swarmllm_sessions", default=())
"""Sessions of all models whose `with` block this thread or task is in, the innermost last. `generate()` finds its
session here, because it has no argument for it."""


def entered_session(view: SwarmView) -> "InferenceSession | None":
    """The innermost session of that model whose `with` block this thread or task is in; None if there is none."""
    return next((session for session in reversed(_entered.get()) if session.belongs_to(view)), None)


class TextSoFar(NamedTuple):
    """What `generate()` has fed to a session."""

    ids: Tensor
    """`[batch, seq]`."""
    mask: Tensor
    """Of 0 and 1, `[batch, seq]`: the tokens that others see."""
    beside: object
    """Whatever else the states of a text depend on."""


class InferenceSession:
    """KV caches of one batch on all servers of a route; implements `CacheSession` of `models/shell/remote_cache`."""

    def __init__(
        self,
        view: SwarmView,
        traits: BlockTraits,
        spot_checks: SpotChecks | None,
        *,
        max_length: int | None = None,
        batch_size: int = 1,
        grows: bool = False,
        local: LocalBlocks = NONE_HERE,
        span: Span | None = None,
    ) -> None:
        """`span`: the blocks of the session; default: all."""
        guessed = grows and max_length is None
        max_length = DEFAULT_MAX_LENGTH if max_length is None else operator.index(max_length)
        batch_size = operator.index(batch_size)
        view.loop.check_open()
        _check_size(max_length, batch_size)
        self.batch_size = batch_size
        self.history: TextSoFar | None = None
        """The text that the session has seen, if `generate()` fed it; else None."""
        self.step_s = 0.0
        """Seconds that the last step took."""
        self._view, self._traits, self._spot_checks, self._local = view, traits, spot_checks, local
        self._span = span or Span(0, view.num_blocks)
        noise = noise_for(view.config, traits)
        self._legs: list[Leg] = []
        for part, here in local.parts(self._span):
            text = SessionText(traits, TextRoom(max_length, grows, guessed))
            leg = Chain(view, text, spot_checks, part, noise) if here is None else LocalLeg(here, text)
            self._legs.append(leg)
        only, *others = self._legs
        self._way: Chain | Legs = only if isinstance(only, Chain) and not others else Legs(self._legs)
        self._generating = threading.Lock()
        # The readers of connections keep chains alive, but not the session: a forgotten session is closed.
        self._close = weakref.finalize(self, _close_chains, view.loop, self._legs)
        self._close.atexit = False

    def step(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Run all blocks on hidden states that follow `position`; returns hidden states of the same shape.

        Args:
            hidden_states: `[batch, seq, hidden]`, as `model.embed` gives them.
            attention_mask: `[batch, position + seq]` of 0 and 1, if the batch is padded.

        Raises:
            ConfigurationError: the inputs don't fit the model.
            SessionLengthExceededError: `max_length` would be passed.
            SwarmError: the blocks can't be reached any more; see the class.
        """
        inputs = block_inputs(
            self._traits,
            self._view.hidden_size,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            past=self.position,
        )
        if position_ids is None:
            check_position(hidden_states, self.position)
        self.history = None
        return self.run_step(inputs)

    def run_step(self, inputs: BlockInputs, part: Span | None = None) -> Tensor:
        """Run all blocks on `inputs`, or only those of `part`; the blocks behind these follow in a later call."""
        self._check_open()
        began_at = time.perf_counter()
        output = self._way.run_step(inputs) if part is None else self._as_legs().run_step(inputs, part)
        self.step_s = time.perf_counter() - began_at
        return output

    def send(self, inputs: BlockInputs, position: int) -> None:
        """Send a step and don't wait for its result. At a lower position than before, it replaces steps under way."""
        self._check_open()
        self._way.send(inputs, position)

    def receive(self) -> Tensor:
        """Wait for the result of the oldest step under way.

        Raises:
            SwarmError: as `step()`; nothing is under way then.
        """
        self._check_open()
        return self._way.receive()

    def abandon(self) -> None:
        """Drop the results of all steps under way."""
        if self._close.alive:
            self._way.abandon()

    def remember(self, inputs: BlockInputs, part: Span | None = None) -> None:
        """Note that all blocks, or those of `part`, have seen `inputs` elsewhere.

        Servers compute them when the session goes on.
        """
        if part is None:
            self._way.remember(inputs)
        else:
            self._as_legs().remember(inputs, part)

    def fork(self) -> "InferenceSession":
        """Another session with the same past, which servers compute again when it is continued."""
        self._check_open()
        room = self._text.room
        twin = InferenceSession(
            self._view,
            self._traits,
            self._spot_checks,
            max_length=room.max_length,
            batch_size=self.batch_size,
            grows=room.grows,
            local=self._local,
            span=self._span,
        )
        if isinstance(self._way, Legs):
            twin._as_legs().follow(self._way)
        else:
            copy_past(self._way, twin._legs[0], self.position)
        return twin

    def _as_legs(self) -> Legs:
        """The blocks in pieces, so that some of them can run without the others."""
        if not isinstance(self._way, Legs):
            self._way = Legs(self._legs)
        return self._way

    @property
    def chains(self) -> list[Chain]:
        """The chains of servers: one, unless this client has blocks itself or hooks cut the model."""
        return _chains_of(self._legs)

    @property
    def _text(self) -> SessionText:
        """The text of the first leg. The texts of other legs have other inputs, and the same settings."""
        return self._legs[0].text

    def _check_open(self) -> None:
        if not self._close.alive:
            raise SessionClosedError("the session has been closed")

    @property
    def max_length(self) -> int:
        """Positions that the servers keep room for."""
        return min(leg.text.room.max_length for leg in self._legs)

    @property
    def position(self) -> int:
        """Positions that all blocks have seen. Set it lower to forget the ones behind."""
        return self._way.position

    @position.setter
    def position(self, value: int) -> None:
        value = operator.index(value)
        if not 0 <= value <= self.position:
            raise ConfigurationError(
                f"position can only be set back, from {self.position} to 0 or more, not to {value}"
            )
        self._way.position = value

    def rewind_to(self, text: TextSoFar) -> None:
        """Keep the positions that agree with this text, and roll the others back.

        `generate()` continues from there, so at least one token is left to compute. Inputs of `step()` have no ids:
        they count as the beginning of the text. Nothing is kept if a prompt of this length would compute the
        positions in another way (`BlockTraits.arithmetic`).
        """
        length, known = text.ids.shape[1], self.history
        same = min(self.position, length - 1)
        if text.ids.shape[0] != self.batch_size or (known is not None and known.beside != text.beside):
            same = 0
        elif known is None and not bool(text.mask[:, :same].all()):
            same = 0  # `step()` has seen all positions
        elif known is not None:
            same = min(same, known.ids.shape[1])
            other_ids = known.ids[:, :same].to(text.ids.device) != text.ids[:, :same]
            other_mask = known.mask[:, :same].to(text.ids.device) != text.mask[:, :same]
            differs = (other_ids | other_mask).any(0)
            same = int(differs.nonzero()[0]) if bool(differs.any()) else same
        # Positions of a shorter text may be computed in another way. Kept, they would change the text.
        self.position = same if self._text.was_computed_as(length, same) else 0

    def begins(self, ids: Tensor) -> bool:
        """True if these `[batch, seq]` begin with the whole prompt of the `generate()` that goes on."""
        known = None if self.history is None else self.history.ids.to(ids.device)
        return known is not None and torch.equal(ids[:, : known.shape[1]], known)

    def select_batch(self, indices: Sequence[int]) -> None:
        """Make the batch consist of these rows of it, in this order, from the next step on; rows may repeat."""
        if isinstance(self._way, Legs):
            self._way.catch_up()
        for leg in self._legs:
            leg.text.select_batch(indices)

    def record_past(self) -> None:
        """Keep what rollbacks need, also in caches that forget early. Call it before the first step."""
        for leg in self._legs:
            leg.text.record_past = True

    @property
    def records_past(self) -> bool:
        """True if every rollback is possible, also where caches forget early."""
        return self._text.record_past

    @property
    def route(self) -> list[RouteHop]:
        """The servers in use and the blocks that each runs; empty before the first step."""
        return _route_of(self._legs)

    @property
    def timings(self) -> Timings:
        """Times of the last step, per server: first block, microseconds in its queue, microseconds of computing."""
        return tuple(time for chain in self.chains for time in chain.timings)

    @property
    def num_under_way(self) -> int:
        """Steps that were sent to servers, and whose results nobody has taken yet."""
        return sum(chain.num_under_way for chain in self.chains)

    @property
    def num_repairs(self) -> int:
        """Number of repairs of chains of servers."""
        return sum(chain.num_repairs for chain in self.chains)

    def watch(
        self, *, on_failure: Callable[[SwarmError], None], on_route: Callable[[list[RouteHop], float], None]
    ) -> None:
        """Call `on_failure` at each failure, `on_route` when a route was opened or repaired, with the seconds it took.

        Both are called in the client's event loop, which waits for them.
        """
        legs = self._legs  # without a reference to the session, which could not be forgotten then
        for chain in self.chains:
            chain.on_failure = on_failure
            chain.on_route = lambda _, took_s: on_route(_route_of(legs), took_s)

    def close(self) -> None:
        """Free the caches on all servers; harmless when done twice."""
        self._close()

    @contextmanager
    def for_one_text(self) -> Iterator[None]:
        """A lock around `generate()`: two texts at once would roll each other back.

        Raises:
            ConfigurationError: another call is in here.
        """
        if not self._generating.acquire(blocking=False):
            raise ConfigurationError(
                "this session is generating another text now: open an inference_session() for each text"
            )
        try:
            yield
        finally:
            self._generating.release()

    @property
    def is_generating(self) -> bool:
        """True if a `generate()` goes on in this session."""
        return self._generating.locked()

    def belongs_to(self, view: SwarmView) -> bool:
        """True if it is a session of that model."""
        return self._view is view

    def __enter__(self) -> Self:
        self._check_open()
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _entered.set(tuple(session for session in _entered.get() if session is not self))
        self.close()


def _check_size(max_length: int, batch_size: int) -> None:
    if not (1 <= max_length <= MAX_POSITION and 1 <= batch_size <= MAX_BATCH):
        raise ConfigurationError(
            f"max_length must be 1 to {MAX_POSITION} and batch_size 1 to {MAX_BATCH}, not {max_length} and {batch_size}"
        )


def _chains_of(legs: Sequence[Leg]) -> list[Chain]:
    return [leg for leg in legs if isinstance(leg, Chain)]


def _route_of(legs: Sequence[Leg]) -> list[RouteHop]:
    return [hop for chain in _chains_of(legs) for hop in chain.route]


def _close_chains(loop: EventLoop, legs: Sequence[Leg]) -> None:
    for chain in _chains_of(legs):
        loop.call_soon(chain.close())


def note_position(hidden_states: Tensor, position: int) -> None:
    """Note the position that these hidden states were embedded for. At another position they are wrong."""
    hidden_states.swarm_position = position  # type: ignore[attr-defined]


def check_position(hidden_states: Tensor, position: int) -> None:
    """Raise ConfigurationError if these hidden states were embedded for another position."""
    embedded_at = getattr(hidden_states, "swarm_position", position)
    if embedded_at != position:
        raise ConfigurationError(
            f"these hidden states were embedded for position {embedded_at}, but the session stands at {position}: call "
            "embed() within the session's with block, in the same thread or task, or give it position_ids"
        )


def block_inputs(
    traits: BlockTraits,
    hidden_size: int | None,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    past: int = 0,
) -> BlockInputs:
    """Make the inputs of the blocks, without tensors that these blocks don't need.

    Args:
        hidden_size: the model's, if it is known.
        past: positions before those of the hidden states.

    Raises:
        ConfigurationError: something has the wrong shape, or is missing.
    """
    _check_shape(traits, hidden_size, hidden_states)
    axis, shape = traits.batch_axis, hidden_states.shape
    extra = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    for name in traits.extra_inputs:
        if extra[name] is None:
            raise ConfigurationError(f"the blocks of this model also need {name}: pass {name}=…")
    if attention_mask is not None:
        check_mask(attention_mask, shape[axis], shape[axis + 1], past)
    if position_ids is not None:
        check_positions(position_ids, shape[axis], shape[axis + 1])
    return BlockInputs(
        hidden_states=hidden_states,
        batch_size=shape[axis],
        seq_len=shape[axis + 1],
        attention_mask=attention_mask,
        position_ids=position_ids,
        input_ids=input_ids if "input_ids" in traits.extra_inputs else None,
        inputs_embeds=inputs_embeds if "inputs_embeds" in traits.extra_inputs else None,
    )


def _check_shape(traits: BlockTraits, hidden_size: int | None, hidden_states: Tensor) -> None:
    shape = list(hidden_states.shape)
    if hidden_states.ndim < traits.batch_axis + 3:
        raise ConfigurationError(f"hidden_states must be [batch, seq, hidden], as from model.embed(), not {shape}")
    if hidden_size is not None and shape[-1] != hidden_size:
        raise ConfigurationError(
            f"hidden_states of this model are {hidden_size} wide, as from model.embed(), not {shape[-1]}"
        )
    if 0 in shape:
        raise ConfigurationError(f"hidden_states are empty: {shape}")
