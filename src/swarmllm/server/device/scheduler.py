"""What the device computes next: which waiting work goes together into one forward.

A pure object over (queue, budget, now), driven by `device/device_thread`; it knows neither tensors nor
sessions, only what they ask for. Its rules, in this order:

1.  What runs alone does so in turns, of which training has `training_share` of the time even while others wait,
    and one per `patience_s`.
2.  All decode steps that are ready go together, the oldest first.
3.  What the budget leaves goes to prefill steps, the oldest first, in pieces. While other sessions decode, or did a
    moment ago, these pieces are small: whoever waits for the next token waits at most for one of them.
4.  If no prefill step got a piece (there was no room, or it can't be cut), the next forward begins with one.
5.  Training runs when nobody else waits; but between two steps of those who decode it has one turn, and then it leaves
    the device to the next step, which is due (`pause_s`).

A session's work keeps its order: only the first of it that waits can be taken. Whenever something waits, something
runs, but for the moment that a burst of messages takes (`device/burst_wait`). In a simulation of clients in lockstep on
2 and 4 servers, waiting for those who were due changed the throughput by -10 to 5 %, and waiting until half of all were
there by +20 % (8 clients) to -25 % (3 clients) on two servers, and by down to -50 % on four.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar


class Priority(IntEnum):
    """Lower runs first."""

    DECODE = 0
    """Somebody waits for the next token."""
    PREFILL = 1
    BATCH = 2
    """Forward and backward of training."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one forward may hold."""

    max_sessions: int = 64
    max_tokens: int = 1024
    """Assumed: longer forwards gain nothing per token on any CPU, and delay whoever comes next."""
    max_prefill_tokens_beside_decode: int = 8
    """Tokens of prompts beside decode steps; `measuring/throughput` measures how many are worth it."""
    decoding_s: float = 0.5
    """A session decodes as long as its last such step is no older. Assumed: a slow chain's time per token."""
    training_share: float = 0.1
    """Share of the time that training has while others wait all the time."""
    patience_s: float = 1.0
    """Longest wait for training's next turn: where turns take long, they get more than their share."""
    pause_s: float = 0.1
    """How long after a decode step the next one is waited for; whoever has stopped decoding costs training no more than
    this. Measured beside 50 ms (docs/benchmarks.md), which a token through two busy servers sometimes exceeds."""


@dataclass(eq=False, slots=True, kw_only=True)
class Work:
    """Something that waits for the device."""

    num_tokens: int
    """Tokens still to be computed; the scheduler takes off what it hands out."""
    granule: int
    """Tokens of the smallest piece, of which all pieces are multiples; `num_tokens` if it can't be cut."""
    priority: Priority
    queued_at: float
    """Seconds, on the clock of `now`."""
    session: str | None = None
    """The session whose step it is; None: it can't be packed with others."""


W = TypeVar("W", bound=Work)


class Scheduler(Generic[W]):
    """The queue and its policy."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        """May be replaced between two calls."""
        self._waiting: dict[W, None] = {}  # in the order of arrival
        self._decoded_at: OrderedDict[str, float] = OrderedDict()  # the longest ago first
        self._prefill_is_owed = False
        self._stepped_at = self._trained_at = float("-inf")
        self._trains = False
        self._turn_s = 0.02
        """How long training's last turn took; before the first one a guess."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: W) -> None:
        """Queue work."""
        self._waiting[work] = None

    def discard(self, work: W) -> None:
        """Forget work that nobody wants any more; harmless when it has been taken already."""
        self._waiting.pop(work, None)

    def decoding(self, now: float) -> tuple[int, int]:
        """Sessions whose decode steps wait, and all that decode: they, and those that did a moment ago."""
        self._forget_who_stopped(now)
        waiting = {work.session for work in self._waiting if work.priority is Priority.DECODE}
        return len(waiting), len(waiting) + sum(session not in waiting for session in self._decoded_at)

    def pause_s(self, now: float) -> float:
        """Seconds for which training should leave the device to decode steps that are due; 0 = not at all."""
        if self._trained_at < self._stepped_at or any(work.priority is not Priority.BATCH for work in self._waiting):
            return 0.0
        return max(0.0, self._stepped_at + self.budget.pause_s - now)

    def next(self, now: float) -> list[tuple[W, int]]:
        """What to compute next, together, and how many tokens of each; work that can't be packed comes alone.

        Empty only if nothing waits.
        """
        alone, decodes, prefills = self._ready()
        if alone is not None and self._may_run(alone, now, others_wait=bool(decodes or prefills)):
            if alone.priority is Priority.BATCH:
                self._trained_at, self._trains = now, True
            pieces = [(alone, alone.granule)]
        else:
            pieces = self._pack(decodes, prefills, now)
        for work, num_tokens in pieces:
            work.num_tokens -= num_tokens
            if not work.num_tokens:
                del self._waiting[work]
        return pieces

    def ran(self, now: float) -> None:
        """Note that what `next` gave has been computed."""
        if self._trains:
            self._turn_s, self._trains = now - self._trained_at, False

    def _ready(self) -> tuple[W | None, list[W], list[W]]:
        """The most urgent work that runs alone, and what sessions want next: decode steps, prefill steps."""
        alone: W | None = None
        decodes: list[W] = []
        prefills: list[W] = []
        seen: set[str] = set()
        for work in self._waiting:
            if work.session is None:
                if alone is None or work.priority < alone.priority:
                    alone = work
            elif work.session not in seen:
                seen.add(work.session)
                (decodes if work.priority is Priority.DECODE else prefills).append(work)
        return alone, decodes, prefills

    def _may_run(self, alone: W, now: float, *, others_wait: bool) -> bool:
        if alone.priority is not Priority.BATCH or not others_wait:
            return True
        wait_s = min(self._turn_s / self.budget.training_share, self.budget.patience_s)
        return now - max(self._trained_at, alone.queued_at) >= wait_s

    def _pack(self, decodes: list[W], prefills: list[W], now: float) -> list[tuple[W, int]]:
        forward: _Forward[W] = _Forward(self.budget)
        prefilled = 0
        if self._prefill_is_owed and prefills:
            owed = prefills.pop(0)
            prefilled = forward.add(owed, self._prefill_room(owed, decodes, now))
        for work in decodes:
            if forward.add(work, work.num_tokens) and work.session is not None:
                self._decoded_at[work.session] = self._stepped_at = now
                self._decoded_at.move_to_end(work.session)
        for work in prefills:
            prefilled += forward.add(work, self._prefill_room(work, decodes, now) - prefilled)
        self._prefill_is_owed = bool(prefills) and not prefilled
        return forward.pieces

    def _prefill_room(self, work: W, decodes: list[W], now: float) -> int:
        """Tokens that this forward may spend on prefill, as far as `work` is concerned."""
        self._forget_who_stopped(now)
        others_decode = bool(decodes) or any(session != work.session for session in self._decoded_at)
        return self.budget.max_prefill_tokens_beside_decode if others_decode else self.budget.max_tokens

    def _forget_who_stopped(self, now: float) -> None:
        """Forget each session once, whenever it is: however many have been here, they cost nothing now."""
        while self._decoded_at and next(iter(self._decoded_at.values())) < now - self.budget.decoding_s:
            self._decoded_at.popitem(last=False)


class _Forward(Generic[W]):
    """One forward while it is being filled."""

    def __init__(self, budget: Budget) -> None:
        self.pieces: list[tuple[W, int]] = []
        self._max_sessions = budget.max_sessions
        self._room = budget.max_tokens

    def add(self, work: W, num_tokens: int) -> int:
        """Add up to this many tokens of `work`; returns how many. The first one gets at least its smallest piece."""
        if len(self.pieces) == self._max_sessions:
            return 0
        num_tokens = min(num_tokens, self._room, work.num_tokens)
        num_tokens -= num_tokens % work.granule
        if not self.pieces:
            num_tokens = max(num_tokens, work.granule)
        if num_tokens > 0:
            self.pieces.append((work, num_tokens))
            self._room -= num_tokens
        return max(0, num_tokens)
