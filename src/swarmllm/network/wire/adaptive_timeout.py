"""The longest silence of a peer while somebody waits for it: by how punctual it was of late, here and now.

Pure: part of `wire/liveness`. A frozen peer can't be told from a slow one but by time. A constant that is safe on a
machine with twenty busy processes is long on a quiet one; so the slowest of the last round trips says how long is long,
and whatever makes this process late counts for the peer, too.

Silence is a PING without an answer. A PING of the peer is no answer: it shows that we hear the peer, and not that the
peer hears us, which a link that carries nothing one way would break.
"""

import math

INTERVAL_S = 0.4
"""Seconds between looks at a peer for whom somebody waits; each costs a PING and a PONG, if the last was answered."""
LEAST_S = 2.0
"""Longer than a quick peer's slowest answer when its machine gets busy all at once. Measured on one machine with two
cores, two servers that compute and their client, beside 20 busy processes and others' tests (load 38): of 161 round
trips half took 0.26 s, one in twenty 1.06 s, the slowest 1.37 s; at a load of 26 0.02, 0.10 and 0.27 s."""
ROUND_TRIPS = 4
"""Silence lasts too long after LEAST_S and this many of the slowest round trips."""
DECAY = 0.95
"""The slowest round trip fades by this factor with each further one: of 1 s, 0.1 s are left after 45, in quiet times
2 minutes."""
SLOWEST_LINK_BYTES_PER_S = 125_000.0
"""A PING waits behind what was sent before it, wherever that lies. Assumed where nothing was measured: 1 Mbit/s."""
CONFIRMED_BYTES = 32 << 10
"""A PING follows whenever this much was sent since the last one, so that what has arrived is known to have. Without it
a step that is answered soon leaves no PONG, and its bytes seem to be under way for as long as 1 Mbit/s takes."""
MAX_MARKS = 64
"""PINGs whose answers tell what has arrived; of more, the oldest are forgotten."""
SHARE_OF_LINK = 0.25
"""The least share of the measured rate of a link that one stream has. Assumed."""


class AdaptiveTimeout:
    """The limit for one stream. Times are seconds of the event loop's clock."""

    def __init__(self) -> None:
        self.num_waiting = 0
        """Callers that wait for the peer."""
        self.ping_is_under_way = False
        self._silent_since = 0.0
        """When the first PING was sent that isn't answered; later if this process was late."""
        self._slowest_s: float | None = None
        self._sent = self._arrived = self._marked = 0
        """Bytes in all; between the first two those that may still be under way."""
        self._marks: dict[int, int] = {}
        """Bytes that were sent before each PING, by its number."""

    def restart(self, now: float) -> None:
        """Count silence from now on: the peer answered something, or this process doesn't take what comes."""
        self._silent_since = now

    def delay(self, now: float, late_s: float) -> None:
        """This process was late, so it saw an answer later; and the peer may be on the same machine."""
        self._silent_since = min(now, self._silent_since + 2 * late_s)

    def sent(self, num_bytes: int) -> None:
        """Something was sent, a PING included."""
        self._sent += num_bytes

    @property
    def unmarked_bytes(self) -> int:
        """Bytes that were sent behind the last PING."""
        return self._sent - self._marked

    def mark(self, number: int) -> None:
        """A PING of this number is sent now, of whatever kind: all that was sent so far comes before it."""
        self._marked = self._marks[number] = self._sent
        if len(self._marks) > MAX_MARKS:
            del self._marks[next(iter(self._marks))]

    def arrived(self, number: object) -> None:
        """The PING of this number was answered, so what was sent before it has arrived."""
        mark = self._marks.get(number) if isinstance(number, int) else None
        if mark is not None:
            self._arrived = mark
            self._marks = {other: later for other, later in self._marks.items() if later > mark}

    def pinged(self, now: float) -> None:
        """A PING that is to show how punctual the peer is was sent."""
        if not self.ping_is_under_way:
            self.ping_is_under_way, self._silent_since = True, now

    def answered(self, round_trip_s: float) -> None:
        """The last such PING was answered."""
        self.ping_is_under_way = False
        self._slowest_s = max(round_trip_s, DECAY * (self._slowest_s or 0.0))

    def silent_s(self, now: float) -> float:
        """Seconds since the peer should have answered something."""
        return now - self._silent_since

    def ends_at(self, mbps: float | None = None) -> float:
        """The time at which a peer that answers nothing more has been silent for too long for those who wait.

        `mbps`: the rate of the link, if it is known.
        """
        if not self.num_waiting or not self.ping_is_under_way or self._slowest_s is None:
            return math.inf
        bytes_per_s = max(SLOWEST_LINK_BYTES_PER_S, SHARE_OF_LINK * (mbps or 0.0) * 1e6 / 8)
        under_way_s = (self._sent - self._arrived) / bytes_per_s
        return self._silent_since + LEAST_S + ROUND_TRIPS * self._slowest_s + under_way_s
