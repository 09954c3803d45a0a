"""The rate of one link, learned from the messages that are sent over it anyway. Pure: time is passed in.

Used by `wire/stream`, which lets a PING follow each large message: it is answered when the message has arrived.
"""

from collections import deque

MEASURED_BYTES = 256 << 10
"""Messages of this size or more are timed. Assumed: large enough for the milliseconds that a busy peer takes to answer
to look like a hundred Mbit/s and not like ten."""
MEASUREMENTS = 8
"""The best of this many counts, as for the bandwidth filter of BBR (Cardwell et al. 2016): whatever else delays
a message makes the link look slower than it is, and nothing makes it look faster."""
MIN_MEASUREMENTS = 4
SHORTEST_S = 1e-4
"""Differences below are noise."""


class LinkRate:
    """Takes the times of messages, and of the answers to the PINGs behind them."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[float, int]] = {}  # begin and bytes, by the number of the PING
        self._last_number = 0
        self._delivered_at = 0.0
        self._busy_since = 0.0
        self._busy_bytes = 0  # what has arrived since then, without a pause
        self._rates: deque[float] = deque(maxlen=MEASUREMENTS)

    @property
    def mbps(self) -> float | None:
        """Megabits per second; None before enough messages have arrived."""
        return max(self._rates) if len(self._rates) >= MIN_MEASUREMENTS else None

    def sent(self, began_at: float, num_bytes: int) -> int | None:
        """A message was written, from `began_at` on; the number for the PING behind it, None if it needs none."""
        if num_bytes < MEASURED_BYTES:
            return None
        if len(self._under_way) >= MEASUREMENTS:
            self._under_way.clear()  # the peer doesn't answer
        number = self.next_number()
        self._under_way[number] = began_at, num_bytes
        return number

    def next_number(self) -> int:
        """The number of a PING that measures no round trip: below 0, to be told from those that do."""
        self._last_number -= 1
        return self._last_number

    def answered(self, number: object, now: float, round_trip_s: float | None) -> None:
        """A PING was answered; the round trip is that of an idle link, None if it isn't known yet."""
        message = self._under_way.pop(number, None) if isinstance(number, int) else None
        if message is None:
            return
        began_at, num_bytes = message
        if round_trip_s is not None:
            # Messages that wait for one another count together: an answer that comes late makes the next one seem fast.
            if began_at + round_trip_s > self._delivered_at:
                self._busy_since, self._busy_bytes = began_at + round_trip_s, 0
            self._busy_bytes += num_bytes
            self._rates.append(self._busy_bytes * 8 / 1e6 / max(now - self._busy_since, SHORTEST_S))
        self._delivered_at = now
