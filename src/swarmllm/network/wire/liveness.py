"""Whether the peer of a stream still lives: when to look, when to ping it, when to give it up.

Pure: `wire/stream` says what happens and when, and asks what to do. Nothing here reads a clock or waits.

    at a look                                       what is to be done
    nothing at all was heard for a few intervals    give the peer up
    somebody waits, and a PING isn't answered       the same, after a shorter time (`wire/adaptive_timeout`)
    a message begun makes no progress               the same
    anything else                                   a PING, and another look an interval later
"""

import math
from typing import NamedTuple

from swarmllm.network.wire import adaptive_timeout
from swarmllm.network.wire.adaptive_timeout import AdaptiveTimeout
from swarmllm.network.wire.frames import CHUNK_BYTES

KEEPALIVE_INTERVAL_S = 2.5
KEEPALIVE_MISSES = 3
"""Assumed: a stop of 7.5 s is no garbage collection any more, and users wait less than 10 s for a failover."""
STALL_TIMEOUT_S = 30.0
"""Longest time for the end of a message begun, or for another `PROGRESS_BYTES` of it."""
PROGRESS_BYTES = CHUNK_BYTES
"""Bytes that a message begun must bring in that time if it doesn't end, in however many frames: 256 KiB in 30 s is
slower than any link worth using."""


class Look(NamedTuple):
    """The result of a look at a peer: what to do."""

    give_up: str | None
    """The reason, if the peer is to be given up."""
    ping: bool
    next_at: float


class Liveness:
    """Signs of life of one stream's peer. Times are seconds of the event loop's clock."""

    def __init__(self, now: float, stall_timeout_s: float) -> None:
        self.round_trip_s: float | None = None
        """Smoothed time from PING to PONG; None before the first one."""
        self.least_round_trip_s: float | None = None
        self.num_pings = 0
        """PINGs that measure round trips; the last one has this number."""
        self.last_heard_at = now
        self.timeout = AdaptiveTimeout()
        self._progress = Progress(now)
        self._stall_timeout_s = stall_timeout_s
        self._interval_s, self._misses = KEEPALIVE_INTERVAL_S, KEEPALIVE_MISSES
        self._ping_sent_at = 0.0
        self._look_due_at = math.inf

    def watch(self, now: float, interval_s: float, misses: int) -> None:
        """Looks begin, or go on with other numbers."""
        self._interval_s, self._misses = interval_s, misses
        self.last_heard_at = now
        self._progress.restart(now)

    def attend(self) -> bool:
        """Note that somebody waits for the peer, until `relax`; whether a look is due now, as nobody did before."""
        self.timeout.num_waiting += 1
        return self.timeout.num_waiting == 1

    def relax(self) -> None:
        """Note that one fewer waits."""
        self.timeout.num_waiting -= 1

    def pinged(self, now: float) -> int:
        """A PING is sent now; returns its number."""
        self.num_pings += 1
        self._ping_sent_at = now
        self.timeout.pinged(now)
        self.timeout.mark(self.num_pings)
        return self.num_pings

    def answered(self, number: object, now: float) -> float | None:
        """A PONG has come; returns the seconds of the round trip if it belongs to the last PING."""
        self.timeout.restart(now)
        self.timeout.arrived(number)
        if number != self.num_pings:
            return None
        sample = now - self._ping_sent_at
        self.timeout.answered(sample)
        self.least_round_trip_s = min(sample, self.least_round_trip_s or sample)
        # RFC 6298, section 2: the same smoothing as TCP's
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
        """Judge the peer, which has sent this many messages and this much of the next one.

        `is_reading`: whether this process takes what comes. `mbps`: the rate of the link, if it is known.
        """
        late_s = now - self._look_due_at
        is_late = late_s > adaptive_timeout.INTERVAL_S / 2
        if not is_reading or self._progress.goes_on(num_messages, unfinished_bytes):
            self.timeout.restart(now)
        elif is_late:
            self.timeout.delay(now, late_s)
        if late_s > self._interval_s or not is_reading:
            # This process was stopped or busy, or doesn't take what came: what the peer sent could not be seen.
            self.last_heard_at = now
            self._progress.restart(now)
        is_waiting = self.timeout.num_waiting > 0
        interval_s = min(self._interval_s, adaptive_timeout.INTERVAL_S) if is_waiting else self._interval_s
        silent_s, ends_at = now - self.last_heard_at, self.timeout.ends_at(mbps)
        stalled_s = self._progress.stalled_s(num_messages, unfinished_bytes, now)
        give_up = None
        if silent_s > self._interval_s * (self._misses - 0.5):
            give_up = f"gave no sign of life for {silent_s:.1f} s"
        elif now >= ends_at and not is_late:  # else an answer may have come that is read after this look
            give_up = f"did not answer for {self.timeout.silent_s(now):.1f} s"
        elif stalled_s > self._stall_timeout_s:
            give_up = f"stopped within a message for {stalled_s:.0f} s"
        self._look_due_at = max(now, min(now + interval_s, ends_at))
        return Look(give_up, not (is_waiting and self.timeout.ping_is_under_way), self._look_due_at)


class Progress:
    """Whether the message that has begun on a stream goes on."""

    def __init__(self, now: float) -> None:
        self._num_messages = self._num_bytes = 0
        self._last = 0, 0
        self._since = now

    def restart(self, now: float) -> None:
        """Begin to count anew: what the peer sent could not be seen, and that isn't its fault."""
        self._since = now

    def goes_on(self, num_messages: int, num_bytes: int) -> bool:
        """Whether anything has come since `stalled_s` was asked last."""
        return (num_messages, num_bytes) != self._last

    def stalled_s(self, num_messages: int, num_bytes: int, now: float) -> float:
        """Seconds without progress, where this many messages are complete and the next one has this many bytes."""
        self._last = num_messages, num_bytes
        if not num_bytes or num_messages != self._num_messages or num_bytes - self._num_bytes >= PROGRESS_BYTES:
            self._num_messages, self._num_bytes, self._since = num_messages, num_bytes, now
        return now - self._since
