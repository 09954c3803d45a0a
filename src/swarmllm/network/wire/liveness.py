"""Decide when to ping the peer of a stream and when to give it up; measure how fast the connection is.

Pure: `wire/stream` reports what happens and when, and asks what to do. Nothing here reads a clock or waits.

    at each check                                   action
    nothing at all was heard for a few intervals    give the peer up
    a caller waits, and a PING isn't answered       give it up, after a shorter time (`AdaptiveTimeout`)
    an unfinished message makes no progress         give it up
    anything else                                   send a PING, and check again an interval later
"""

import math
from collections import deque
from typing import NamedTuple

from swarmllm.network.wire.frames import CHUNK_BYTES

KEEPALIVE_INTERVAL_S = 2.5
KEEPALIVE_MISSES = 3
"""Assumed: a pause of 7.5 s is no garbage collection any more, and users wait less than 10 s for a failover."""
STALL_TIMEOUT_S = 30.0
"""Longest time for an unfinished message to end, or to bring another `PROGRESS_BYTES`."""
PROGRESS_BYTES = CHUNK_BYTES
"""Bytes that an unfinished message must bring in that time. 256 KiB in 30 s is slower than any useful connection."""

ATTENDED_INTERVAL_S = 0.4
"""Seconds between checks while a caller waits for the peer. Each costs a PING and a PONG, if the last was answered."""
LEAST_SILENCE_S = 2.0
"""Shortest silence after which a peer is given up. It must be longer than a quick peer's slowest answer when its
machine suddenly gets busy. Measured on one machine with two cores, with two servers that compute and their client,
and 20 busy processes (load 38): of 161 round trips half took 0.26 s, one in twenty 1.06 s, the slowest 1.37 s; at a
load of 26 0.02, 0.10 and 0.27 s."""
SLOWEST_ROUND_TRIPS = 4
"""A peer is given up after LEAST_SILENCE_S plus this many of the slowest round trips."""
DECAY = 0.95
"""The slowest round trip is forgotten by this factor with each further one. Of 1 s, 0.1 s is left after 45 round trips,
2 minutes in quiet times."""
SLOWEST_LINK_BYTES_PER_S = 125_000.0
"""Assumed speed of an unmeasured connection, 1 Mbit/s. A PING waits behind everything that was sent before it."""
CONFIRMED_BYTES = 32 << 10
"""A PING follows after this many bytes, so that they are known to have arrived. Without it, a step that is answered
soon leaves no PONG, and its bytes seem to be on the way for as long as 1 Mbit/s takes."""
MAX_MARKS = 64
"""Most PINGs whose answers are awaited. The oldest are forgotten."""
SHARE_OF_LINK = 0.25
"""Least share of a connection's measured rate that one stream gets. Assumed."""

MEASURED_BYTES = 256 << 10
"""Messages of this size or more are timed. Assumed: large enough that a busy peer's delay of milliseconds looks like a
hundred Mbit/s, not like ten."""
MEASUREMENTS = 8
"""The best of this many measurements counts, as in the bandwidth filter of BBR (Cardwell et al. 2016): delays make a
connection look slower than it is, and nothing makes it look faster."""
MIN_MEASUREMENTS = 4
SHORTEST_S = 1e-4
"""Shorter times are noise."""


class Look(NamedTuple):
    """The result of a check: what to do."""

    give_up: str | None
    """The reason for giving the peer up, or None."""
    ping: bool
    next_at: float


class Liveness:
    """Signs of life of one stream's peer. Times are seconds of the event loop's clock."""

    def __init__(self, now: float, stall_timeout_s: float) -> None:
        self.round_trip_s: float | None = None
        """Smoothed time from PING to PONG; None before the first one."""
        self.least_round_trip_s: float | None = None
        self.num_pings = 0
        """Number of PINGs that measure round trips. The last one has this number."""
        self.last_heard_at = now
        self.timeout = AdaptiveTimeout()
        self._progress = Progress(now)
        self._stall_timeout_s = stall_timeout_s
        self._interval_s, self._misses = KEEPALIVE_INTERVAL_S, KEEPALIVE_MISSES
        self._ping_sent_at = 0.0
        self._look_due_at = math.inf

    def watch(self, now: float, interval_s: float, misses: int) -> None:
        """Begin to check, or change the intervals."""
        self._interval_s, self._misses = interval_s, misses
        self.last_heard_at = now
        self._progress.restart(now)

    def attend(self) -> bool:
        """Note that a caller waits for the peer, until `relax`. Returns True if it is the first: then check at once."""
        self.timeout.num_waiting += 1
        return self.timeout.num_waiting == 1

    def relax(self) -> None:
        """Note that one caller fewer waits."""
        self.timeout.num_waiting -= 1

    def pinged(self, now: float) -> int:
        """Note that a PING is sent now; return its number."""
        self.num_pings += 1
        self._ping_sent_at = now
        self.timeout.pinged(now)
        self.timeout.mark(self.num_pings)
        return self.num_pings

    def answered(self, number: object, now: float) -> float | None:
        """Note a PONG; return the seconds of the round trip if it answers the last PING."""
        self.timeout.restart(now)
        self.timeout.arrived(number)
        if number != self.num_pings:
            return None
        sample = now - self._ping_sent_at
        self.timeout.answered(sample)
        self.least_round_trip_s = min(sample, self.least_round_trip_s or sample)
        # RFC 6298, section 2: TCP's smoothing
        self.round_trip_s = sample if self.round_trip_s is None else 0.875 * self.round_trip_s + 0.125 * sample
        return sample

    def look(
        self,
        now: float,
        num_messages: int,
        unfinished_bytes: int,
        *,
        is_reading: bool = True,
        mbps: float | None = None,
    ) -> Look:
        """Check the peer, which has sent this many messages and this many bytes of an unfinished one.

        `is_reading`: whether this process reads. `mbps`: the rate of the connection, if it is known.
        """
        late_s = now - self._look_due_at
        is_late = late_s > ATTENDED_INTERVAL_S / 2
        if not is_reading or self._progress.goes_on(num_messages, unfinished_bytes):
            self.timeout.restart(now)
        elif is_late:
            self.timeout.delay(now, late_s)
        if late_s > self._interval_s or not is_reading:
            # This process was stopped or busy, or didn't read, so it could not see what the peer sent.
            self.last_heard_at = now
            self._progress.restart(now)
        is_waiting = self.timeout.num_waiting > 0
        interval_s = min(self._interval_s, ATTENDED_INTERVAL_S) if is_waiting else self._interval_s
        silent_s, ends_at = now - self.last_heard_at, self.timeout.ends_at(mbps)
        stalled_s = self._progress.stalled_s(num_messages, unfinished_bytes, now)
        give_up = None
        if silent_s > self._interval_s * (self._misses - 0.5):
            give_up = f"gave no sign of life for {silent_s:.1f} s"
        elif now >= ends_at and not is_late:  # else this process may read an answer just after this check
            give_up = f"did not answer for {self.timeout.silent_s(now):.1f} s"
        elif stalled_s > self._stall_timeout_s:
            give_up = f"stopped within a message for {stalled_s:.0f} s"
        self._look_due_at = max(now, min(now + interval_s, ends_at))
        return Look(give_up, not (is_waiting and self.timeout.ping_is_under_way), self._look_due_at)


class Progress:
    """Detects whether the unfinished message of a stream makes progress."""

    def __init__(self, now: float) -> None:
        self._num_messages = self._num_bytes = 0
        self._last = 0, 0
        self._since = now

    def restart(self, now: float) -> None:
        """Count from now on: the peer's bytes could not be seen, and that isn't its fault."""
        self._since = now

    def goes_on(self, num_messages: int, num_bytes: int) -> bool:
        """True if anything has come since the last call of `stalled_s`."""
        return (num_messages, num_bytes) != self._last

    def stalled_s(self, num_messages: int, num_bytes: int, now: float) -> float:
        """Seconds without progress, given the number of complete messages and the bytes of the unfinished one."""
        self._last = num_messages, num_bytes
        if not num_bytes or num_messages != self._num_messages or num_bytes - self._num_bytes >= PROGRESS_BYTES:
            self._num_messages, self._num_bytes, self._since = num_messages, num_bytes, now
        return now - self._since


class AdaptiveTimeout:
    """The limit on a peer's silence while callers wait for it. Times are seconds of the event loop's clock.

    Depends on how punctual the peer was lately. Only time tells a frozen peer from a slow one. A constant that is safe
    on a machine with twenty busy processes is long on a quiet one. So the slowest of the last round trips sets the
    limit, and a delay of this process counts for the peer, too.

    Silence means an unanswered PING. The peer's own PINGs are no answer: they show that we hear the peer, not that it
    hears us, and a connection may carry nothing in one direction.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        """Callers that wait for the peer."""
        self.ping_is_under_way = False
        self._silent_since = 0.0
        """Time of the first unanswered PING; later if this process was late."""
        self._slowest_s: float | None = None
        self._sent = self._arrived = self._marked = 0
        """Bytes sent, arrived, and sent before the last PING. Bytes between arrived and sent may still be on the
        way."""
        self._marks: dict[int, int] = {}
        """Bytes that were sent before each PING, by its number."""

    def restart(self, now: float) -> None:
        """Count silence from now on: the peer answered, or this process doesn't read."""
        self._silent_since = now

    def delay(self, now: float, late_s: float) -> None:
        """Note that this process was late by this much: answers look late, and the peer may be on the same machine."""
        self._silent_since = min(now, self._silent_since + 2 * late_s)

    def sent(self, num_bytes: int) -> None:
        """Note that bytes were sent, PINGs included."""
        self._sent += num_bytes

    @property
    def unmarked_bytes(self) -> int:
        """Bytes sent after the last PING."""
        return self._sent - self._marked

    @property
    def unconfirmed_bytes(self) -> int:
        """Bytes that may still be on the way: sent after the last PING that was answered."""
        return self._sent - self._arrived

    def mark(self, number: int) -> None:
        """Note that a PING with this number is sent now: everything sent so far comes before it."""
        self._marked = self._marks[number] = self._sent
        if len(self._marks) > MAX_MARKS:
            del self._marks[next(iter(self._marks))]

    def arrived(self, number: object) -> None:
        """Note that this PING was answered: everything sent before it has arrived."""
        mark = self._marks.get(number) if isinstance(number, int) else None
        if mark is not None:
            self._arrived = mark
            self._marks = {other: later for other, later in self._marks.items() if later > mark}

    def pinged(self, now: float) -> None:
        """Note that a PING was sent that measures how punctual the peer is."""
        if not self.ping_is_under_way:
            self.ping_is_under_way, self._silent_since = True, now

    def answered(self, round_trip_s: float) -> None:
        """Note the answer to the last such PING."""
        self.ping_is_under_way = False
        self._slowest_s = max(round_trip_s, DECAY * (self._slowest_s or 0.0))

    def silent_s(self, now: float) -> float:
        """Seconds since the peer should have answered."""
        return now - self._silent_since

    def ends_at(self, mbps: float | None = None) -> float:
        """The time at which the peer is given up if it answers nothing more.

        `mbps`: the rate of the connection, if it is known.
        """
        if not self.num_waiting or not self.ping_is_under_way or self._slowest_s is None:
            return math.inf
        bytes_per_s = max(SLOWEST_LINK_BYTES_PER_S, SHARE_OF_LINK * (mbps or 0.0) * 1e6 / 8)
        under_way_s = self.unconfirmed_bytes / bytes_per_s
        return self._silent_since + LEAST_SILENCE_S + SLOWEST_ROUND_TRIPS * self._slowest_s + under_way_s


class LinkRate:
    """The rate of one connection, learned from messages and from the answers to the PINGs behind them."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[float, int]] = {}  # begin and bytes, by the number of the PING
        self._last_number = 0
        self._delivered_at = 0.0
        self._busy_since = 0.0
        self._busy_bytes = 0  # bytes that have arrived since then without a pause
        self._rates: deque[float] = deque(maxlen=MEASUREMENTS)

    @property
    def mbps(self) -> float | None:
        """Megabits per second; None until enough messages have arrived."""
        return max(self._rates) if len(self._rates) >= MIN_MEASUREMENTS else None

    def sent(self, began_at: float, num_bytes: int) -> int | None:
        """Note a message written from `began_at` on. Returns the number for the PING behind it; None if it needs
        none."""
        if num_bytes < MEASURED_BYTES:
            return None
        if len(self._under_way) >= MEASUREMENTS:
            self._under_way.clear()  # the peer doesn't answer
        number = self.next_number()
        self._under_way[number] = began_at, num_bytes
        return number

    def next_number(self) -> int:
        """The number of a PING that doesn't measure round trips. It is below 0, to tell it from those that do."""
        self._last_number -= 1
        return self._last_number

    def answered(self, number: object, now: float, round_trip_s: float | None) -> None:
        """Note an answered PING. `round_trip_s`: that of an idle connection; None if it isn't known yet."""
        message = self._under_way.pop(number, None) if isinstance(number, int) else None
        if message is None:
            return
        began_at, num_bytes = message
        if round_trip_s is not None:
            # Messages that wait for each other count together, because a late answer makes the next one look fast.
            if began_at + round_trip_s > self._delivered_at:
                self._busy_since, self._busy_bytes = began_at + round_trip_s, 0
            self._busy_bytes += num_bytes
            self._rates.append(self._busy_bytes * 8 / 1e6 / max(now - self._busy_since, SHORTEST_S))
        self._delivered_at = now
