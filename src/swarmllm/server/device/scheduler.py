"""Choose the waiting work that the device computes together in its next forward.

Pure objects over (queue, budget, now), driven by `device_thread`. They know neither tensors nor sessions, only what
these ask for. The rules of `Scheduler`, in this order:

0.  Work of privileged accounts (`Account.comes_first`) is taken before all other work (`Precedence`). Other work makes
    it wait for at most `others_share` of the time; within that share, other work runs when the device is free. Decode
    steps of other accounts join a forward of privileged ones if they add next to nothing to its time.
1.  Work that can't be packed runs alone, in turns. Training has `training_share` of the time even while others wait,
    and one turn per `patience_s`.
2.  Decode steps that are ready go together. If only one account decodes, all of its steps go. If several accounts
    decode, as many tokens of each go as the one with the fewest has, and then more in turns until the forward takes
    twice as long as that one's steps would take alone. So an account with many sessions makes nobody else wait.
3.  Prefill steps get the rest of the budget, in pieces. While other sessions decode, or did a moment ago, these pieces
    are small: a client that waits for its next token waits for one piece at most. Sessions that have ended don't count,
    and sessions of the prompt's own account count only until their next step is due (`pause_s`).
4.  If no prefill step got a piece (there was no room, or it can't be cut), the next forward begins with one.
5.  Training runs when nothing else waits. Between two steps of sessions that decode it has one turn; then it leaves the
    device to the next step, which is due (`pause_s`).

Work of equal rank is taken in turns of accounts (`RoundRobin`), and the oldest work of an account first. The work of a
session keeps its order: only its first waiting work can be taken. While anything waits, something runs, except for the
moment that a burst of messages takes (`BurstWait`). Longer waits don't pay. In a simulation of clients in lockstep on 2
and 4 servers, waiting for sessions that were due changed the throughput by -10 to +5 %. Waiting for half of all
sessions changed it by +20 % (8 clients) to -25 % (3 clients) on two servers, and by up to -50 % on four.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, zip_longest
from typing import Generic, TypeVar

SMOOTHING = 0.1

GAPS = 4.0
"""The wait ends when no step has come for this many times the usual gap in a burst. If messages come independently of
each other, e^-4 (2 %) of gaps are longer."""
MOST_SHARE = 0.5
"""Largest share of a forward that one gap may take. So a wait in vain costs at most half of what it might have
saved."""
TRIES = 16
"""Forwards without a wait after waits in vain; then one wait shows if waiting is worth it again."""


@dataclass(frozen=True, slots=True)
class Account:
    """The client, or group of clients, that the device's time is spent on."""

    name: str
    """A client's peer id. Clients that belong to a server of the swarm have that server's id, and one turn together."""
    comes_first: bool = False
    """True if it may take most of the device's time from other accounts."""


HOUSE = Account("")
"""The server's own work."""


class RoundRobin:
    """Deficit round robin in seconds of device time: accounts in turns, each with a balance of seconds.

    After Shreedhar and Varghese (1995), but the cost of a forward is charged after it has run, as it isn't known
    before.
    """

    def __init__(self) -> None:
        self._balances: OrderedDict[str, float] = OrderedDict()  # the next turn first
        self._quantum_s = 0.02
        """Seconds that an account gets with each turn: the smoothed time of its calls; a guess before the first one."""

    def __len__(self) -> int:
        return len(self._balances)

    def order(self, waiting: Collection[str]) -> list[str]:
        """Sort the waiting accounts by their turns. Accounts that owe seconds come last, until turns have repaid
        them."""
        for name in waiting:
            self._balances.setdefault(name, 0.0)
        if waiting and (least_debt := min(-self._balances[name] for name in waiting)) > 0:
            for name in self._balances:  # all turns at once, until one account owes nothing
                self._balances[name] += least_debt
        for name in [name for name, balance in self._balances.items() if balance >= 0 and name not in waiting]:
            del self._balances[name]  # turns can't be saved up
        while waiting and (first := next(iter(self._balances.items())))[1] < 0:
            self._balances[first[0]] += self._quantum_s
            self._balances.move_to_end(first[0])
        in_turns = [name for name in self._balances if name in waiting]
        return sorted(in_turns, key=lambda name: self._balances[name] < 0)

    def charge(self, name: str, seconds: float) -> None:
        """Subtract the seconds that it has taken."""
        self._quantum_s += SMOOTHING * (seconds - self._quantum_s)
        if name in self._balances:
            self._balances[name] -= seconds


class Precedence:
    """The privileged accounts (`comes_first`): are they here, and how long may other work make them wait?"""

    def __init__(self, others_share: float, here_s: float) -> None:
        self._others_share, self._here_s = others_share, here_s
        self._came_at = self._left_at = float("-inf")
        self._others_from = float("-inf")
        """Time at which the other accounts have repaid the waiting that they caused."""
        self._others_last: tuple[float, float] | None = None
        """Begin and end of the other accounts' last forward, until its cost is known."""
        self._others_s = 0.0
        """Duration of that forward."""

    def holds(self, now: float) -> bool:
        """True if privileged work ran or waited within the last `here_s` seconds."""
        return now < self._left_at + self._here_s

    def hold_s(self, now: float) -> float:
        """Seconds that other accounts must wait, although the device is idle."""
        return max(0.0, min(self._others_from, self._left_at + self._here_s) - now)

    def others_turn(self, now: float) -> bool:
        """True if other accounts have their turn although privileged work waits."""
        return now >= max(self._others_from, self._came_at + self._others_s / self._others_share)

    def waits_since(self, queued_at: float, now: float) -> None:
        """Note that privileged work waits."""
        if not self.holds(now):
            self._came_at = self._left_at = now
        if self._others_last is not None:
            (began_at, ended_at), self._others_last = self._others_last, None
            waited_s = ended_at - max(began_at, queued_at)
            if waited_s > 0:
                self._others_from = ended_at + waited_s / self._others_share

    def ran(self, first: bool, began_at: float, ended_at: float) -> None:
        """Note a forward of privileged accounts (`first`), or of the others."""
        if first:
            self._left_at, self._others_last = ended_at, None
        else:
            self._others_last, self._others_s = (began_at, ended_at), ended_at - began_at


class BurstWait:
    """Decide if an idle device waits a moment, because more decode steps are on their way.

    Sessions that a server has computed together reach the next one as a burst of messages. A device that starts with
    the first of them would split the group: two forwards, which read the weights twice. So it waits while messages keep
    coming, at most for the time of the second forward, and stops waiting if it has mostly waited in vain. The time of a
    forward and the gaps in a burst are observed on this machine. The first forward doesn't wait.
    """

    def __init__(self) -> None:
        self._forward_s = 0.0
        """Smoothed time of a forward of decode steps."""
        self._gap_s: float | None = None
        """Smoothed time between two steps of a burst."""
        self._share = 1.0
        """Smoothed share of waits that were not in vain."""
        self._left_out = 0
        self._began_at: float | None = None
        self._last_at = 0.0
        self._came = False

    @property
    def pause_s(self) -> float:
        """Seconds to wait for the next step of a burst."""
        most_s = MOST_SHARE * self._forward_s
        return most_s if self._gap_s is None else min(most_s, GAPS * self._gap_s)

    @property
    def _is_worthwhile(self) -> bool:
        """True if the saved forwards take longer than the waits in vain."""
        return self._share * self._forward_s >= (1 - self._share) * self.pause_s

    def wait_s(self, now: float) -> float:
        """Seconds to wait for one more step before the next forward; 0 = not at all."""
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
        """Note the time of a forward of decode steps alone."""
        self._forward_s += (SMOOTHING if self._forward_s else 1.0) * (forward_s - self._forward_s)


class Priority(IntEnum):
    """Lower runs first."""

    DECODE = 0
    """A client waits for the next token."""
    PREFILL = 1
    SESSIONLESS = 2
    """Forward and backward without a session (training, above all), and loading of blocks."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one forward, and shares of time."""

    max_sessions: int = 64
    max_tokens: int = 1024
    """Assumed: longer forwards gain nothing per token on any CPU, and delay the next step."""
    max_prefill_tokens_beside_decode: int = 8
    """Tokens of prompts in a forward with decode steps; `throughput` measures the best number."""
    doubling_tokens: int = 27
    """Number of tokens that take as long, in one forward with others, as a decode step alone; also measured there."""
    decoding_s: float = 0.5
    """Seconds after its last decode step in which an open session still counts as decoding. Assumed: the time per token
    of a slow chain."""
    others_share: float = 0.1
    """Share of the time that privileged work may wait for other work. Decode steps of other accounts may add half as
    large a share to the time of privileged steps."""
    training_share: float = 0.1
    """Share of the time for training while other work waits all the time."""
    patience_s: float = 1.0
    """Longest wait for training's next turn; if its turns are long, training gets more than its share."""
    pause_s: float = 0.1
    """Seconds after a decode step in which the next one is expected. A client that has stopped decoding delays
    training, and prompts of its own account, by at most this time. Compared with 50 ms (docs/benchmarks.md), which a
    token through two busy servers sometimes exceeds."""


@dataclass(eq=False, slots=True, kw_only=True)
class Work:
    """Work that waits for the device."""

    num_tokens: int
    """Tokens still to be computed; the scheduler subtracts the tokens of each piece."""
    granule: int
    """Size of the smallest piece in tokens; all pieces are multiples of it. `num_tokens` if the work can't be cut."""
    priority: Priority
    queued_at: float = 0.0
    """Seconds, on the clock of `now`."""
    session: str | None = None
    """The step's session; None: it can't be packed with other work."""
    account: Account = HOUSE
    begun: bool = False
    """True when a piece of it has been taken."""


W = TypeVar("W", bound=Work)


class Scheduler(Generic[W]):
    """The queue and its policy."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        """May be replaced between two forwards."""
        self._waiting: dict[W, None] = {}  # in the order of arrival
        self._first, self._others = _Class(), _Class()
        self._running: list[tuple[W, int]] = []
        self._began_at = 0.0
        self._decoded: OrderedDict[str, _Decoded] = OrderedDict()  # by session, the longest ago first
        self._precedence = Precedence(budget.others_share, budget.decoding_s)
        self._trained_at = float("-inf")
        self._turn_s = 0.02
        """Duration of training's last turn; a guess before the first one."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: W) -> None:
        """Queue work."""
        self._waiting[work] = None

    def discard(self, work: W) -> None:
        """Remove work that was cancelled; harmless if it has been taken already."""
        self._waiting.pop(work, None)

    def forget(self, session: str) -> None:
        """Note that the session has ended: it decodes no more."""
        self._decoded.pop(session, None)

    def decoding(self, now: float) -> tuple[int, int]:
        """Count the sessions whose decode steps wait, and all decoding sessions: these, and those that stepped a moment
        ago."""
        self._forget_stopped(now)
        waiting = {work.session for work in self._waiting if work.priority is Priority.DECODE}
        return len(waiting), len(waiting) + sum(session not in waiting for session in self._decoded)

    def hold_s(self, now: float) -> float:
        """Seconds that other accounts must leave the device to privileged accounts, although no privileged work
        waits."""
        return 0.0 if self._first_waits() else self._precedence.hold_s(now)

    def pause_s(self, now: float) -> float:
        """Seconds that training should leave the device to decode steps that are due; 0 = none."""
        first = self._first_waits()
        stepped_at = max(
            (one.at for one in self._decoded.values() if one.account.comes_first >= first), default=float("-inf")
        )
        if self._trained_at < stepped_at or any(work.priority is not Priority.SESSIONLESS for work in self._waiting):
            return 0.0
        return max(0.0, stepped_at + self.budget.pause_s - now)

    def next(self, now: float) -> list[tuple[W, int]]:
        """Choose the work to compute together next, with the number of tokens of each; work that can't be packed comes
        alone.

        Empty only if nothing waits.
        """
        self._forget_stopped(now)
        first = [work for work in self._waiting if work.account.comes_first]
        others = [work for work in self._waiting if not work.account.comes_first]
        if first:
            self._precedence.waits_since(min(work.queued_at for work in first), now)
        others_turn = bool(others) and (not first or self._precedence.others_turn(now))
        kind, works, riders = (self._others, others, []) if others_turn else (self._first, first, others)
        alone, decodes, prefills = _ready(works, kind.turns)
        if alone is not None and self._may_run(alone, kind, now, others_wait=bool(decodes or prefills)):
            pieces = [(alone, alone.granule)]
            if alone.priority is Priority.SESSIONLESS:
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
        """Note that the work which `next` chose has been computed."""
        pieces, self._running = self._running, []
        tokens: Counter[Account] = Counter()
        for work, num_tokens in pieces:
            tokens[work.account] += num_tokens
        for account, num_tokens in tokens.items():
            seconds = (now - self._began_at) * num_tokens / tokens.total()
            (self._first if account.comes_first else self._others).turns.charge(account.name, seconds)
        if pieces and pieces[0][0].priority is Priority.SESSIONLESS:
            self._turn_s = now - self._began_at
        if pieces:
            self._precedence.ran(any(work.account.comes_first for work, _ in pieces), self._began_at, now)

    def _may_run(self, alone: W, kind: "_Class", now: float, *, others_wait: bool) -> bool:
        if alone.priority is not Priority.SESSIONLESS or not others_wait:
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
            self._decoded[work.session] = _Decoded(now, work.account, num_tokens)
            self._decoded.move_to_end(work.session)
        return num_tokens

    def _of_several(self, decodes: list[W]) -> list[W]:
        """Choose decode steps: all if there is one account; else as many tokens of each as the one with the fewest has,
        and more while the time is worth it."""
        waiting = {work.session for work in decodes}
        first = any(work.account.comes_first for work in decodes)
        tokens: Counter[str] = Counter()
        for session, one in self._decoded.items():
            if one.account.comes_first >= first and session not in waiting:
                tokens[one.account.name] += one.num_tokens
        for work in decodes:
            tokens[work.account.name] += work.num_tokens
        if len(tokens) <= 1:
            return decodes
        fewest = min(tokens.values())
        # A token alone takes as long as `doubling_tokens` of them, so n tokens take as long as doubling_tokens - 1 + n.
        room = 2 * fewest + self.budget.doubling_tokens - 1
        taken: list[W] = []
        of_account: Counter[str] = Counter()
        for work in decodes:
            name = work.account.name
            room -= work.num_tokens
            if room >= 0 or not of_account[name] or of_account[name] + work.num_tokens <= fewest:
                taken.append(work)
                of_account[name] += work.num_tokens
        return taken

    def _prefill_room(self, work: W, decodes: list[W], now: float) -> int:
        """Tokens of prefill that this forward may hold, as far as `work` is concerned."""
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
        """True if privileged accounts come before this work, now or in a moment."""
        return not work.account.comes_first and self._precedence.holds(now)

    def _forget_stopped(self, now: float) -> None:
        """Forget sessions that stopped decoding; each is forgotten once, so the number of past sessions costs
        nothing."""
        while self._decoded and next(iter(self._decoded.values())).at < now - self.budget.decoding_s:
            self._decoded.popitem(last=False)


@dataclass(slots=True)
class _Class:
    """State of the privileged accounts, or of the others."""

    turns: RoundRobin = field(default_factory=RoundRobin)
    prefill_is_owed: bool = False
    has_trained: bool = False
    """True if its last turn was one of training."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    at: float
    account: Account
    num_tokens: int


def _ready(works: Sequence[W], turns: RoundRobin) -> tuple[W | None, list[W], list[W]]:
    """Find the most urgent work that runs alone, and the next decode and prefill step of each session, in turns of
    accounts."""
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
    # Work that has begun is finished first: it holds memory.
    most_urgent = min(_in_turns(alone, order), key=lambda work: (work.priority, not work.begun), default=None)
    return most_urgent, _in_turns(decodes, order), _in_turns(prefills, order)


def _in_turns(works: Sequence[W], order: Sequence[str]) -> list[W]:
    """Sort work in turns: the oldest of each account, then the next of each."""
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
        """Add up to this many tokens of `work`, and return their number. The first work gets at least its smallest
        piece."""
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
