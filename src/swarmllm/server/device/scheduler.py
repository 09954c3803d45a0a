"""What the device computes next: which waiting work goes together into one forward.

A pure object over (queue, budget, now), driven by `device/device_thread`; it knows neither tensors nor
sessions, only what they ask for. Its rules, in this order:

0.  Whoever comes first (`Account.comes_first`) is taken before the others, whatever they want (`precedence`). What the
    others cost those who come first, in waiting, is at most `others_share` of the time; as long as it is less, they run
    when the device is free. Beside decode steps of those who come first ride as many others as cost next to nothing.
1.  What runs alone does so in turns, of which training has `training_share` of the time even while others wait,
    and one per `patience_s`.
2.  Decode steps that are ready go together: all, if one client alone decodes; of several, one of each, and then in
    turns until the forward takes twice as long as one step alone. So the many sessions of one make nobody else wait.
3.  What the budget leaves goes to prefill steps, in pieces. While other sessions decode, or did a
    moment ago, these pieces are small: whoever waits for the next token waits at most for one of them. Sessions that
    have ended don't count, and those of the prompt's own account only as long as their next step is due (`pause_s`).
4.  If no prefill step got a piece (there was no room, or it can't be cut), the next forward begins with one.
5.  Training runs when nobody else waits; but between two steps of those who decode it has one turn, and then it leaves
    the device to the next step, which is due (`pause_s`).

Among equals it goes by turns of clients (`fairness`), and of one client the oldest first.
A session's work keeps its order: only the first of it that waits can be taken. Whenever something waits, something
runs, but for the moment that a burst of messages takes (`device/burst_wait`). In a simulation of clients in lockstep on
2 and 4 servers, waiting for those who were due changed the throughput by -10 to 5 %, and waiting until half of all were
there by +20 % (8 clients) to -25 % (3 clients) on two servers, and by down to -50 % on four.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, zip_longest
from typing import Generic, TypeVar

from swarmllm.server.device.fairness import HOUSE, Account, RoundRobin
from swarmllm.server.device.precedence import Precedence


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
    doubling_tokens: int = 27
    """Tokens that take as long, in one forward with others, as a decode step alone; measured there as well."""
    decoding_s: float = 0.5
    """A session decodes as long as it is open and its last such step is no older. Assumed: a slow chain's time per
    token."""
    others_share: float = 0.1
    """Share of the time that those who come first may wait for others. Beside their steps ride others that take half as
    large a share of a step's time."""
    training_share: float = 0.1
    """Share of the time that training has while others wait all the time."""
    patience_s: float = 1.0
    """Longest wait for training's next turn: where turns take long, they get more than their share."""
    pause_s: float = 0.1
    """How long after a decode step the next one is waited for; whoever has stopped decoding costs training, and prompts
    of the same account, no more than this. Measured beside 50 ms (docs/benchmarks.md), which a token through two busy
    servers sometimes exceeds."""


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
    account: Account = HOUSE
    begun: bool = False
    """Whether a part of it has been taken."""


W = TypeVar("W", bound=Work)


class Scheduler(Generic[W]):
    """The queue and its policy."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        """May be replaced between two calls."""
        self._waiting: dict[W, None] = {}  # in the order of arrival
        self._first, self._others = _Class(), _Class()
        self._running: list[tuple[W, int]] = []
        self._began_at = 0.0
        self._decoded: OrderedDict[str, _Decoded] = OrderedDict()  # by session, the longest ago first
        self._precedence = Precedence(budget.others_share, budget.decoding_s)
        self._trained_at = float("-inf")
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

    def forget(self, session: str) -> None:
        """Note that the session has ended: it decodes no more."""
        self._decoded.pop(session, None)

    def decoding(self, now: float) -> tuple[int, int]:
        """Sessions whose decode steps wait, and all that decode: they, and those that did a moment ago."""
        self._forget_who_stopped(now)
        waiting = {work.session for work in self._waiting if work.priority is Priority.DECODE}
        return len(waiting), len(waiting) + sum(session not in waiting for session in self._decoded)

    def hold_s(self, now: float) -> float:
        """Seconds for which the others have to leave the device to those who come first, though none of them waits."""
        return 0.0 if self._first_waits() else self._precedence.hold_s(now)

    def pause_s(self, now: float) -> float:
        """Seconds for which training should leave the device to decode steps that are due; 0 = not at all."""
        first = self._first_waits()
        stepped_at = max(
            (one.at for one in self._decoded.values() if one.account.comes_first >= first), default=float("-inf")
        )
        if self._trained_at < stepped_at or any(work.priority is not Priority.BATCH for work in self._waiting):
            return 0.0
        return max(0.0, stepped_at + self.budget.pause_s - now)

    def next(self, now: float) -> list[tuple[W, int]]:
        """What to compute next, together, and how many tokens of each; work that can't be packed comes alone.

        Empty only if nothing waits.
        """
        self._forget_who_stopped(now)
        first = [work for work in self._waiting if work.account.comes_first]
        others = [work for work in self._waiting if not work.account.comes_first]
        if first:
            self._precedence.waits_since(min(work.queued_at for work in first), now)
        others_turn = bool(others) and (not first or self._precedence.others_turn(now))
        kind, works, riders = (self._others, others, []) if others_turn else (self._first, first, others)
        alone, decodes, prefills = _ready(works, kind.turns)
        if alone is not None and self._may_run(alone, kind, now, others_wait=bool(decodes or prefills)):
            pieces = [(alone, alone.granule)]
            if alone.priority is Priority.BATCH:
                self._trained_at, kind.has_trained = now, True
        else:
            pieces = self._pack(decodes, prefills, riders, kind, now) if works else []
            kind.has_trained = False
        for work, num_tokens in pieces:
            work.begun = True
            work.num_tokens -= num_tokens
            if not work.num_tokens:
                del self._waiting[work]
        self._running, self._began_at = pieces, now
        return pieces

    def ran(self, now: float) -> None:
        """Note that what `next` gave has been computed."""
        pieces, self._running = self._running, []
        tokens: Counter[Account] = Counter()
        for work, num_tokens in pieces:
            tokens[work.account] += num_tokens
        for account, num_tokens in tokens.items():
            seconds = (now - self._began_at) * num_tokens / tokens.total()
            (self._first if account.comes_first else self._others).turns.charge(account.name, seconds)
        if pieces and pieces[0][0].priority is Priority.BATCH:
            self._turn_s = now - self._began_at
        if pieces:
            self._precedence.ran(any(work.account.comes_first for work, _ in pieces), self._began_at, now)

    def _may_run(self, alone: W, kind: "_Class", now: float, *, others_wait: bool) -> bool:
        if alone.priority is not Priority.BATCH or not others_wait:
            return True
        if kind.has_trained:
            return False
        wait_s = min(self._turn_s / self.budget.training_share, self.budget.patience_s)
        return now - max(self._trained_at, alone.queued_at) >= wait_s

    def _first_waits(self) -> bool:
        return any(work.account.comes_first for work in self._waiting)

    def _pack(
        self, decodes: list[W], prefills: list[W], others: list[W], kind: "_Class", now: float
    ) -> list[tuple[W, int]]:
        room = self.budget.max_tokens
        if self._is_guest((decodes or prefills)[0], now):
            room = min(room, self.budget.doubling_tokens)
        forward: _Forward[W] = _Forward(self.budget.max_sessions, room)
        prefilled = 0
        if kind.prefill_is_owed and prefills:
            owed = prefills.pop(0)
            prefilled = forward.add(owed, self._prefill_room(owed, decodes, now))
        for work in self._of_several(decodes):
            self._step(work, forward, now)
        riding = int(self.budget.others_share / 2 * self.budget.doubling_tokens)
        for work in _ready(others, self._others.turns)[1] if others and decodes and riding else ():
            if work.num_tokens <= riding:
                riding -= self._step(work, forward, now)
        for work in prefills:
            prefilled += forward.add(work, self._prefill_room(work, decodes, now) - prefilled)
        kind.prefill_is_owed = bool(prefills) and not prefilled
        return forward.pieces

    def _step(self, work: W, forward: "_Forward[W]", now: float) -> int:
        """Add a decode step to the forward, if there is room; returns its tokens there."""
        num_tokens = forward.add(work, work.num_tokens)
        if num_tokens and work.session is not None:
            self._decoded[work.session] = _Decoded(now, work.account)
            self._decoded.move_to_end(work.session)
        return num_tokens

    def _of_several(self, decodes: list[W]) -> list[W]:
        """All of one account; one each of several, and then those for which the time of a step more is worth it."""
        accounts = {work.account.name for work in decodes}
        first = any(work.account.comes_first for work in decodes)
        decoding = {one.account.name for one in self._decoded.values() if one.account.comes_first >= first}
        if len(accounts | decoding) <= 1:
            return decodes
        room = 1 + self.budget.doubling_tokens
        taken: list[W] = []
        for idx, work in enumerate(decodes):
            room -= work.num_tokens
            if idx < len(accounts) or room >= 0:
                taken.append(work)
        return taken

    def _prefill_room(self, work: W, decodes: list[W], now: float) -> int:
        """Tokens that this forward may spend on prefill, as far as `work` is concerned."""
        others_decode = bool(decodes) or any(
            session != work.session
            and one.account.comes_first >= work.account.comes_first
            and (one.account != work.account or now < one.at + self.budget.pause_s)
            for session, one in self._decoded.items()
        )
        if others_decode or self._is_guest(work, now):
            return self.budget.max_prefill_tokens_beside_decode
        return self.budget.max_tokens

    def _is_guest(self, work: W, now: float) -> bool:
        """Whether others come before this work, now or in a moment."""
        return not work.account.comes_first and self._precedence.holds(now)

    def _forget_who_stopped(self, now: float) -> None:
        """Forget each session once, whenever it is: however many have been here, they cost nothing now."""
        while self._decoded and next(iter(self._decoded.values())).at < now - self.budget.decoding_s:
            self._decoded.popitem(last=False)


@dataclass(slots=True)
class _Class:
    """Those who come first, or the others."""

    turns: RoundRobin = field(default_factory=RoundRobin)
    prefill_is_owed: bool = False
    has_trained: bool = False
    """Whether its last turn was training's."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    at: float
    account: Account


def _ready(works: Sequence[W], turns: RoundRobin) -> tuple[W | None, list[W], list[W]]:
    """The most urgent work that runs alone, and what sessions want next: decode steps, prefill steps, in turns."""
    order = turns.order({work.account.name for work in works})
    alone: list[W] = []
    decodes: list[W] = []
    prefills: list[W] = []
    seen: set[str] = set()
    for work in works:
        if work.session is None:
            alone.append(work)
        elif work.session not in seen:
            seen.add(work.session)
            (decodes if work.priority is Priority.DECODE else prefills).append(work)
    # What has begun is finished first: it holds memory.
    most_urgent = min(_in_turns(alone, order), key=lambda work: (work.priority, not work.begun), default=None)
    return most_urgent, _in_turns(decodes, order), _in_turns(prefills, order)


def _in_turns(works: Sequence[W], order: Sequence[str]) -> list[W]:
    """One of each account, then the next of each, of which each has its own in the order of arrival."""
    if len(order) < 2:
        return list(works)
    by_account: dict[str, list[W]] = {name: [] for name in order}
    for work in works:
        by_account[work.account.name].append(work)
    return [work for work in chain.from_iterable(zip_longest(*by_account.values())) if work is not None]


class _Forward(Generic[W]):
    """One forward while it is being filled."""

    def __init__(self, max_sessions: int, room: int) -> None:
        self.pieces: list[tuple[W, int]] = []
        self._max_sessions, self._room = max_sessions, room

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
