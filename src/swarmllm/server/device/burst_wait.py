"""Whether the device holds a forward back for a moment, because more decode steps are on their way.

Sessions that a server has computed together reach the next one as a burst of messages, some tenths of a millisecond
apart. An idle device that started with the first of them would split the group: two forwards, which read the weights
twice. So it waits as long as they keep coming; and it stops waiting where that has mostly been in vain.

Pure: `device/device_thread` passes the time in, in seconds.
"""

PAUSE_S = 0.0015
"""Measured on two servers (hidden 512, 4 blocks, one CPU thread): beside 0.7 ms, with which bursts still fell apart, 4
clients get 20 to 30 % more, 8 some 5 %."""
MOST_S = 0.004
"""Longest wait for a burst. Measured: about a forward (hidden 512, 4 blocks, one CPU thread). To wait longer
can't pay."""
WORTHWHILE = 0.25
"""Share of waits in which another step has to come. A second forward costs about four pauses."""
TRIES = 16
"""Forwards between two waits where waiting isn't worthwhile: they show whether it has become so."""
SMOOTHING = 0.1


class BurstWait:
    """The state of one device."""

    def __init__(self) -> None:
        self._share = 1.0
        """Share of waits that were not in vain, smoothed."""
        self._left_out = 0
        self._began_at: float | None = None
        self._last_at = 0.0
        self._came = False

    def wait_s(self, now: float) -> float:
        """How long to wait for one more step before the next forward; 0 = not at all."""
        if self._began_at is None:
            if self._share < WORTHWHILE and self._left_out < TRIES:
                return 0.0
            self._began_at = self._last_at = now
        return max(0.0, min(self._last_at + PAUSE_S, self._began_at + MOST_S) - now)

    def came(self, now: float) -> None:
        """Note that a step has come."""
        if self._began_at is not None:
            self._came, self._last_at = True, now

    def ran(self) -> None:
        """Note that the forward begins."""
        if self._began_at is None:
            self._left_out += 1
            return
        self._share += SMOOTHING * (self._came - self._share)
        self._left_out, self._began_at, self._came = 0, None, False
