"""What the device is asked to compute: calls that run on their own, and steps of sessions, which run together.

Made by `executor` for whoever waits, run by `device_thread`.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from swarmllm.models.span.packing import Packer, SessionCall
from swarmllm.server.device.fairness import Account
from swarmllm.server.device.scheduler import Priority, Work

T = TypeVar("T")

UNFINISHED = object()
"""What a turn gives that isn't the last one."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A call's value and where its time went."""

    value: T
    queue_us: int
    compute_us: int


class SessionStep(Protocol):
    """One step of one session, which may be packed with those of others."""

    session: str
    priority: Priority
    account: Account
    num_tokens: int
    granule: int
    """Tokens of its smallest piece; `num_tokens` if it can't be cut."""
    num_blocks: int
    context_tokens: int
    """Tokens in its session's cache before it, in all rows together."""

    @property
    def packer(self) -> Packer:
        """Runs it, together with those of others on the same blocks."""
        ...

    def take(self, num_tokens: int) -> SessionCall:
        """The next piece, ready to run. Called in the device thread; what it raises fails this step alone."""


@dataclass(eq=False, slots=True)
class Call(Work):
    """What the scheduler sees of a call or step, and what the device thread has to know in addition."""

    future: "asyncio.Future[Timed[object]]"
    run: Callable[[], object] | None = None
    """What runs on its own; None: `step` is computed with others."""
    step: SessionStep | None = None
    outputs: list[Tensor] = field(default_factory=list)
    started_at: float = 0.0
    compute_s: float = 0.0

    def settle(self, outcome: object) -> None:
        """Tell whoever waits for it; called in the event loop."""
        if self.future.done():  # cancelled
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            queue_us = int((self.started_at - self.queued_at) * 1e6)
            self.future.set_result(Timed(outcome, queue_us, int(self.compute_s * 1e6)))


Piece = tuple[Call, int]
"""Some tokens of a call."""


def outcomes_of(pieces: Sequence[Piece]) -> list[object]:
    """What each piece gives: outputs or an exception. One that runs on its own comes alone."""
    call = pieces[0][0].run
    return _forward(pieces) if call is None else [outcome_of(call)]


def _forward(pieces: Sequence[Piece]) -> list[object]:
    """One forward for each span of blocks, which is mostly one."""
    outcomes: list[object] = [None] * len(pieces)
    calls: dict[Packer, list[tuple[int, SessionCall]]] = {}
    for idx, (waiting, num_tokens) in enumerate(pieces):
        step = cast(SessionStep, waiting.step)
        call = outcome_of(partial(step.take, num_tokens))
        if isinstance(call, SessionCall):
            calls.setdefault(step.packer, []).append((idx, call))
        else:
            outcomes[idx] = call
    for packer, group in calls.items():
        results = outcome_of(partial(packer.run, [call for _, call in group]))
        for place, (idx, _) in enumerate(group):
            outcomes[idx] = results[place] if isinstance(results, list) else results
    return outcomes


def outcome_of(call: Callable[[], object]) -> object:
    """The value of `call()`, or what it raises."""
    try:
        return call()
    except StopIteration as error:  # no future takes it
        return RuntimeError(described(error))
    except BaseException as error:  # noqa: BLE001 - whoever awaits the call gets it, whatever it is
        return error


def described(error: BaseException) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {error}"


def next_turn(turns: Generator[None, None, object]) -> object:
    """Run work until it lets others pass: its value, or `UNFINISHED`."""
    try:
        next(turns)
    except StopIteration as end:
        return end.value
    return UNFINISHED


def joined(step: SessionStep, outputs: list[Tensor]) -> Tensor:
    """The outputs of a whole step, from those of its pieces."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=step.packer.blocks.traits.batch_axis + 1)
