"""Choose the waiting work that the device computes together in its next forward.

Pure objects over (queue, budget, now), driven by `device_thread`. They know neither tensors nor sessions, only what
these ask for. The rules of `Scheduler`, in this order:

0.  Work of accounts that come first (`Account.comes_first`) is taken before all other work (`Precedence`). Other work
    makes it wait for at most `others_share` of the time; within that share, other work runs when the device is free.
    Low-priority decode steps join a forward of accounts that come first if they add next to nothing to its time.
1.  Work that can't be packed runs alone, in turns. Training has `training_share` of the time even while others wait,
    and one turn per `patience_s`.
2.  Decode steps that are ready go together. If only one account decodes, all of its steps go. If several accounts
    decode, one step of each goes, and then more in turns until the forward takes twice as long as one step alone. So an
    account with many sessions makes nobody else wait.
3.  Prefill steps get the rest of the budget, in pieces. While other sessions decode, or did a moment ago, these pieces
    are small: a client that waits for its next token waits for one piece at most. Sessions that have ended don't count,
    and sessions of the prompt's own account count only until their next step is due (`pause_s`).
4.  If no prefill step got a piece (there was no room, or it can't be cut), the next forward begins with one.
5.  Training runs when nothing else waits. Between two steps of sessions that decode it has one turn; then it leaves the
    device to the next step, which is due (`pause_s`).

Work of equal rank is taken in turns of accounts (`RoundRobin`), and the oldest work of an account first. The work of a
session keeps its order: only its first waiting work can be taken. While anything waits, something runs, except for the
moment that a burst of messages takes (`BurstWait`). In a simulation of clients in lockstep on 2 and 4 servers, waiting
for sessions that were due changed the throughput by -10 to 5 %, and waiting until half of all were there by +20 % (8
clients) to -25 % (3 clients) on two servers, and by down to -50 % on four.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, zip_longest
from typing import Generic, TypeVar

SMOOTHING = 0.1

GAPS = 4.0
"""The wait ends when nothing has come for this many times the usual gap in a burst: e^-4, 2 %, of gaps are longer where
messages come independently of each other."""
MOST_SHARE = 0.5
"""Share of a forward that one gap may take, whatever gaps there were: what waits in vain costs half as much at most as
what it may save."""
TRIES = 16
"""Forwards between two waits where waiting isn't worthwhile: they show whether it has become so."""


@dataclass(frozen=True, slots=True)
class Account:
    """On whom the device's time is spent."""

    name: str
    """A client's peer id; of clients of somebody who serves, the id of that server: all of them have one turn."""
    comes_first: bool = False
    """Whether it may take most of the device from those who don't."""


HOUSE = Account("")
"""What a server does for itself."""


class RoundRobin:
    """Accounts in turns, each with the seconds that it may still take, or owes."""

    def __init__(self) -> None:
        self._balances: OrderedDict[str, float] = OrderedDict()  # whose turn is next, first
        self._quantum_s = 0.02
        """What an account gets with each turn: what it took at a time, smoothed; before that a guess."""

    def __len__(self) -> int:
        return len(self._balances)

    def order(self, waiting: Collection[str]) -> list[str]:
        """Those who wait, whose turn is first to last; whoever owes seconds comes after the others, until turns have
        repaid them."""
        for name in waiting:
            self._balances.setdefault(name, 0.0)
        if waiting and (least_debt := min(-self._balances[name] for name in waiting)) > 0:
            for name in self._balances:  # the turns until one of them owes nothing, at once
                self._balances[name] += least_debt
        for name in [name for name, balance in self._balances.items() if balance >= 0 and name not in waiting]:
            del self._balances[name]  # nobody saves turns up
        while waiting and (first := next(iter(self._balances.items())))[1] < 0:
            self._balances[first[0]] += self._quantum_s
            self._balances.move_to_end(first[0])
        in_turns = [name for name in self._balances if name in waiting]
        return sorted(in_turns, key=lambda name: self._balances[name] < 0)

    def charge(self, name: str, seconds: float) -> None:
        """Note what it has taken."""
        self._quantum_s += SMOOTHING * (seconds - self._quantum_s)
        if name in self._balances:
            self._balances[name] -= seconds


class Precedence:
    """Whether those who come first are here, and what the others may cost them."""

    def __init__(self, others_share: float, here_s: float) -> None:
        self._others_share, self._here_s = others_share, here_s
        self._came_at = self._left_at = float("-inf")
        self._others_from = float("-inf")
        """When the others have made good what they cost."""
        self._others_last: tuple[float, float] | None = None
        """When the others' last forward began and ended, until it is known what it cost."""
        self._others_s = 0.0
        """How long it took."""

    def holds(self, now: float) -> bool:
        """Whether those who come first have been here a moment ago, as somebody who decodes was."""
        return now < self._left_at + self._here_s

    def hold_s(self, now: float) -> float:
        """Seconds for which the others have to leave the device alone though nobody else waits."""
        return max(0.0, min(self._others_from, self._left_at + self._here_s) - now)

    def others_turn(self, now: float) -> bool:
        """Whether the others go on although somebody waits who comes first."""
        return now >= max(self._others_from, self._came_at + self._others_s / self._others_share)

    def waits_since(self, queued_at: float, now: float) -> None:
        """Note that somebody waits who comes first."""
        if not self.holds(now):
            self._came_at = self._left_at = now
        if self._others_last is not None:
            (began_at, ended_at), self._others_last = self._others_last, None
            waited_s = ended_at - max(began_at, queued_at)
            if waited_s > 0:
                self._others_from = ended_at + waited_s / self._others_share

    def ran(self, first: bool, began_at: float, ended_at: float) -> None:
        """Note a forward of theirs, or of the others."""
        if first:
            self._left_at, self._others_last = ended_at, None
        else:
            self._others_last, self._others_s = (began_at, ended_at), ended_at - began_at


class BurstWait:
    """The state of one device, which waits for nobody before its first forward."""

    def __init__(self) -> None:
        self._forward_s = 0.0
        """Time of a forward of decode steps, smoothed."""
        self._gap_s: float | None = None
        """Time between two steps of a burst, smoothed."""
        self._share = 1.0
        """Share of waits that were not in vain, smoothed."""
        self._left_out = 0
        self._began_at: float | None = None
        self._last_at = 0.0
        self._came = False

    @property
    def pause_s(self) -> float:
        """How long to wait for the next step of a burst."""
        most_s = MOST_SHARE * self._forward_s
        return most_s if self._gap_s is None else min(most_s, GAPS * self._gap_s)

    @property
    def _is_worthwhile(self) -> bool:
        """Whether the forwards that are saved take longer than the waits in vain."""
        return self._share * self._forward_s >= (1 - self._share) * self.pause_s

    def wait_s(self, now: float) -> float:
        """How long to wait for one more step before the next forward; 0 = not at all."""
        if self._began_at is None:
            if not self._is_worthwhile and self._left_out < TRIES:
                return 0.0
            self._began_at = self._last_at = now
        return max(0.0, min(self._last_at + self.pause_s, self._began_at + self._forward_s) - now)

    def came(self, now: float) -> None:
        """Note that a step has come."""
        if self._began_at is not None:
            gap_s = now - self._last_at
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + SMOOTHING * (gap_s - self._gap_s)
            self._came, self._last_at = True, now

    def begins(self) -> None:
        """Note that the forward begins."""
        if self._began_at is None:
            self._left_out += 1
            return
        self._share += SMOOTHING * (self._came - self._share)
        self._left_out, self._began_at, self._came = 0, None, False

    def took(self, forward_s: float) -> None:
        """Note how long a forward of decode steps alone has taken."""
        self._forward_s += (SMOOTHING if self._forward_s else 1.0) * (forward_s - self._forward_s)


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
    """Tokens of prompts beside decode steps; `device/throughput` measures how many are worth it."""
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
    queued_at: float = 0.0
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
