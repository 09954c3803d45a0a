"""The longest silence of a peer while somebody waits for it: by how punctual it was of late, here and now.

Pure: part of `wire/liveness`. A frozen peer can't be told from a slow one but by time. A constant that is safe on a
machine with twenty busy processes is long on a quiet one; so the slowest of the last round trips says how long is long,
and whatever makes this process late counts for the peer, too.
"""

import math

INTERVAL_S = 0.4
"""Seconds between looks at a peer for whom somebody waits; each costs a PING and a PONG, if the last was answered."""
LEAST_S = 2.0
"""Longer than a quick peer's slowest answer when its machine gets busy all at once. Measured on one machine with two
cores, two servers that compute and their client, beside 20 busy processes and others' tests (load 38): of 161 round
trips half took 0.26 s, one in twenty 1.06 s, the slowest 1.37 s; at a load of 26 0.02, 0.10 and 0.27 s."""
ROUND_TRIPS = 20
"""Silence lasts too long after this many of the slowest round trips, and LEAST_S."""
DECAY = 0.95
"""The slowest round trip fades by this factor with each further one: of 1 s, 0.1 s are left after 45, in quiet times
2 minutes."""
SLOWEST_LINK_BYTES_PER_S = 125_000.0
"""A PING waits behind what was sent before it, wherever that lies. Assumed: 1 Mbit/s."""


class AdaptiveTimeout:
    """The limit for one stream. Times are seconds of the event loop's clock."""

    def __init__(self) -> None:
        self.num_waiting = 0
        """Callers that wait for the peer."""
        self.ping_is_under_way = False
        self._since = 0.0
        self._slowest_s: float | None = None
        self._before_ping = self._after_ping = 0
        """Bytes that may still be under way."""

    def restart(self, now: float) -> None:
        """Count silence from now on: somebody begins to wait, or this process got no turn to hear anything."""
        self._since = now

    def sent(self, num_bytes: int) -> None:
        """Something was sent, a PING included."""
        self._after_ping += num_bytes

    def pinged(self) -> None:
        """Whatever was sent so far comes before the PING."""
        self.ping_is_under_way = True
        self._before_ping, self._after_ping = self._before_ping + self._after_ping, 0

    def answered(self, round_trip_s: float) -> None:
        """A PONG came: all that was sent before its PING has arrived."""
        self.ping_is_under_way = False
        self._before_ping = 0
        self._slowest_s = max(round_trip_s, DECAY * (self._slowest_s or 0.0))

    def ends_at(self, last_heard_at: float) -> float:
        """The time at which a peer that says nothing more has been silent for too long for those who wait."""
        if not self.num_waiting or self._slowest_s is None:
            return math.inf
        under_way_s = (self._before_ping + self._after_ping) / SLOWEST_LINK_BYTES_PER_S
        return max(last_heard_at, self._since) + max(LEAST_S, ROUND_TRIPS * self._slowest_s) + under_way_s
