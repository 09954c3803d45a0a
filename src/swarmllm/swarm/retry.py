"""The one retry policy of sessions, forwards and look-ups: when to try again, and which peers to avoid.

Pure: the caller passes the time in, and sleeps itself. The class of an error (`errors`) tells whether trying again can
help and whether the peer is to blame.
"""

import math
from dataclasses import dataclass, field

from swarmllm.errors import (
    BlocksNotServedError,
    CacheFullError,
    MissingBlocksError,
    PeerError,
    ServerOverloadedError,
    SwarmError,
)

FIRST_BACKOFF_S = 0.1
"""Assumed: a server that is restarting, or a DHT record on its way, needs some tenths of a second."""
MAX_BACKOFF_S = 5.0
LOOK_AGAIN_S = 1.0
"""Longest pause when no server is left, so that a returning server is soon found. Assumed."""
MAX_BAN_FACTOR = 16
MAX_REMEMBERED = 1024
"""Peers whose faults are remembered. The longest past ones are forgotten: peer ids cost nothing, and a client runs for
months."""
SAME_CUT_S = 1.0
"""Streams to one peer that are cut within this time have ended together. Assumed."""
CUT_FORGOTTEN_S = 60.0
"""After this time, a cut counts as the first one again, because relays come and go. Assumed."""
MOST_REFUSALS = 3
"""Servers to ask before believing that no server can do a request. Assumed: so many liars are rarely the best servers.
A server without memory for it is asked this often if there is no other."""
FULL_SERVER_PAUSE_S = 1.0
"""Assumed: seconds to pass over a peer that is full or overloaded, without blame."""
LEAST_DIAL_S = 0.7
"""Longer than reaching a near server takes: at most 0.26 s in 240 texts at a load of 14 to 25 on two cores (measured on
one machine)."""
SLOWEST_DIALS = 2
"""A dial may take this many times the slowest recent one, plus `LEAST_DIAL_S`."""
DIAL_DECAY = 0.8
"""The slowest time is forgotten by this factor with each further server that is reached."""


@dataclass
class DialTimes:
    """The longest time to reach a server that others could replace, learned from recent dials.

    A frozen server would take the whole timeout. A server that was left counts as well, so the limit grows if all are
    slow.
    """

    slowest_s: float = 0.5
    """Seconds of the slowest recent dial. Assumed until a server was reached."""

    def took(self, seconds: float) -> None:
        """Note that reaching a server took this long, or that it was left after this time."""
        self.slowest_s = max(seconds, DIAL_DECAY * self.slowest_s)

    def longest_s(self, least_s: float) -> float:
        """The limit in seconds for a server whose distance alone takes `least_s`."""
        return LEAST_DIAL_S + SLOWEST_DIALS * max(self.slowest_s, least_s)


@dataclass
class Retries:
    """The attempts of one operation. Counts failures and says how long to wait before the next try.

    `max_retries` limits the attempts while other servers are left. The time limits them when none is.
    """

    max_retries: int
    timeout_s: float = math.inf
    """When blocks were first found missing."""
    failures: int = 0
    missing_since: float = math.inf
    refused_by: list[str] = field(default_factory=list)
    """Servers that say that nobody can do the request."""

    def next_delay_s(self, error: SwarmError, now: float = 0.0) -> float | None:
        """Seconds to wait before trying again after `error`; None = give up and raise it."""
        if not error.retriable:
            return None
        if isinstance(error, MissingBlocksError):
            if self.missing_since == math.inf:
                self.missing_since = now
                return 0.0 if self.timeout_s else None
            return LOOK_AGAIN_S if now - self.missing_since < self.timeout_s else None
        self.failures += 1
        if self.failures > self.max_retries:
            return None
        if self.failures == 1:
            return 0.0  # another server usually can take over at once
        return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self.failures - 2)))


@dataclass
class PeerHealth:
    """Peers to avoid at present. Bans are short, and a peer that has recovered starts anew."""

    ban_s: float
    _faults: dict[str, int] = field(default_factory=dict)
    _avoid_until: dict[str, float] = field(default_factory=dict)
    _cut_at: dict[str, float] = field(default_factory=dict)
    _quarantined: dict[str, None] = field(default_factory=dict)  # a set in the order of time

    def report(self, error: SwarmError, now: float) -> bool:
        """Note a failure. Only errors that name a peer change anything. False: the peer was avoided already.

        One peer's report about another proves nothing and changes nothing.
        """
        if not isinstance(error, PeerError) or error.peer_id is None or error.is_hearsay:
            return True
        peer_id = error.peer_id
        is_news = peer_id not in self.avoided(now)
        if error.through_relay and self._may_be_the_relay(peer_id, now):
            return is_news
        if error.blames_peer:
            faults = self._faults.get(peer_id, 0)
            if is_news or not faults:  # several requests that fail at the same time are one fault
                faults = self._faults[peer_id] = faults + 1
            pause = self.ban_s * min(MAX_BAN_FACTOR, 2 ** (faults - 1))
        elif isinstance(error, ServerOverloadedError | CacheFullError | BlocksNotServedError):
            pause = FULL_SERVER_PAUSE_S
        else:
            return True
        self._avoid_until[peer_id] = max(now + pause, self._avoid_until.get(peer_id, 0.0))
        if len(self._avoid_until) > MAX_REMEMBERED:
            self.succeeded(min(self._avoid_until, key=self._avoid_until.__getitem__))
        return is_news

    def _may_be_the_relay(self, peer_id: str, now: float) -> bool:
        """True if the cut of a relayed stream says nothing about the peer: the first cut doesn't, the next one does."""
        cut_at = self._cut_at.setdefault(peer_id, now)
        if now - cut_at >= CUT_FORGOTTEN_S:
            cut_at = self._cut_at[peer_id] = now
        if len(self._cut_at) > MAX_REMEMBERED:
            del self._cut_at[next(iter(self._cut_at))]
        return now - cut_at < SAME_CUT_S

    def succeeded(self, peer_id: str) -> None:
        """Note that the peer did its task."""
        if peer_id in self._faults or peer_id in self._avoid_until:
            self._faults.pop(peer_id, None)
            self._avoid_until.pop(peer_id, None)

    def avoided(self, now: float) -> frozenset[str]:
        """Peers not to use at time `now`."""
        paused = {peer_id for peer_id, until in self._avoid_until.items() if until > now}
        return frozenset(paused | self._quarantined.keys())

    def avoided_s(self, now: float) -> dict[str, float]:
        """Seconds left of each ban. A banned peer is used only as a last resort.

        A peer that fails again is banned anew, so several banned peers take turns.
        """
        left = {peer_id: until - now for peer_id, until in self._avoid_until.items()}
        return {peer_id: left_s for peer_id, left_s in left.items() if left_s > 0}

    def blamed(self, now: float) -> frozenset[str]:
        """Avoided peers that were at fault, not only full."""
        return self.avoided(now) & (self._faults.keys() | self._quarantined.keys())

    def quarantine(self, peer_id: str) -> None:
        """Never use the peer again: it was caught lying, and a pause doesn't mend that."""
        self._quarantined[peer_id] = None
        if len(self._quarantined) > MAX_REMEMBERED:
            del self._quarantined[next(iter(self._quarantined))]

    @property
    def quarantined(self) -> frozenset[str]:
        """Peers not to use even as a last resort."""
        return frozenset(self._quarantined)
