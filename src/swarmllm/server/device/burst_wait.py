"""Whether the device holds a forward back for a moment, because more decode steps are on their way.

Sessions that a server has computed together reach the next one as a burst of messages. An idle device that started with
the first of them would split the group: two forwards, which read the weights twice. So it waits as long as they keep
coming, and no longer than the second forward would take; and it stops waiting where that has mostly been in vain. How
long a forward takes, and how soon the steps of a burst follow each other, is seen on this machine.

Pure: `device/device_thread` passes the time in, in seconds.
"""

GAPS = 4.0
"""The wait ends when nothing has come for this many times the usual gap in a burst: e^-4, 2 %, of gaps are longer where
messages come independently of each other."""
MOST_SHARE = 0.5
"""Share of a forward that one gap may take, whatever gaps there were: what waits in vain costs half as much at most as
what it may save."""
TRIES = 16
"""Forwards between two waits where waiting isn't worthwhile: they show whether it has become so."""
SMOOTHING = 0.1


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
