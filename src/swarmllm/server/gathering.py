"""Whether the device holds a forward back for a moment, because more decode steps are on their way.

Sessions that a server has computed together reach the next one as a burst of messages, some tenths of a millisecond
apart. An idle device that started with the first of them would split the group: two forwards, which read the weights
twice. So it waits as long as they keep coming; and it stops waiting where that has mostly been in vain.

Where others want the device's core (another server, the clients), a forward that isn't computed leaves it to them, and
two small ones cost all of them more than a large one. There it waits for half of those who decode, up to a forward's
time: while it computes for one half, the next server computes for the other. Measured on two cores, hidden 512: 8
clients of two servers get 15 % more, 16 of them 13 %, 32 20 %, 8 of four servers 30 %; of one server nothing.

Pure: `server/executor` passes the time in, in seconds.
"""

PAUSE_S = 0.0015
"""Measured on two servers (hidden 512, 4 blocks, one CPU thread): beside 0.7 ms, with which bursts still fell apart, 4
clients get 20 to 30 % more, 8 some 5 %."""
MOST_S = 0.004
"""For a burst. Measured: about a forward (hidden 512, 4 blocks, one CPU thread). To wait longer than that can't pay."""
WORTHWHILE = 0.25
"""Share of waits in which another step has to come. A second forward costs about four pauses."""
TRIES = 16
"""Where it isn't worthwhile, every so many forwards show whether it has become so."""
SMOOTHING = 0.1
MANY = 6
"""Sessions that decode. Fewer come as one burst: 4 clients of two servers get 3 sessions into a forward (measured)."""
CONTESTED_PER_S = 200.0
"""Times that the device's thread has lost its core to others, per second of its forwards. Measured: 640 with 8 clients
and two servers on two cores, 80 with one client."""
LONGEST_S = 0.02
"""For half of those who decode: no longer than this, however long a forward takes. Assumed."""


class Gathering:
    """The state of one device."""

    def __init__(self) -> None:
        self._share = 1.0
        """Of waits that were not in vain, smoothed."""
        self._left_out = 0
        self._began_at: float | None = None
        self._last_at = 0.0
        self._came = False
        self._forward_s = 0.0
        """What a forward takes, smoothed."""
        self._lost_per_s = 0.0

    def wait_s(self, now: float, *, num_here: int = 1, num_decoding: int = 2) -> float:
        """How long to wait for one more step before the next forward; 0 = not at all.

        `num_here` sessions of the `num_decoding` ones wait for it; if there is something else to be computed meanwhile,
        pass 0 for the latter.
        """
        halves = self._lost_per_s >= CONTESTED_PER_S and num_decoding >= MANY
        if halves and 2 * num_here >= num_decoding:
            return 0.0
        if self._began_at is None:
            if self._share < WORTHWHILE and self._left_out < TRIES:
                return 0.0
            self._began_at = self._last_at = now
        if halves:
            return max(0.0, self._began_at + min(self._forward_s, LONGEST_S) - now)
        return max(0.0, min(self._last_at + PAUSE_S, self._began_at + MOST_S) - now)

    def came(self, now: float) -> None:
        """A step has come."""
        if self._began_at is not None:
            self._came, self._last_at = True, now

    def ran(self) -> None:
        """The forward begins."""
        if self._began_at is None:
            self._left_out += 1
            return
        self._share += SMOOTHING * (self._came - self._share)
        self._left_out, self._began_at, self._came = 0, None, False

    def computed(self, seconds: float, num_lost: int) -> None:
        """The forward has ended; its thread lost the core so many times meanwhile."""
        self._forward_s += SMOOTHING * (seconds - self._forward_s)
        self._lost_per_s += SMOOTHING * (num_lost / max(seconds, 1e-6) - self._lost_per_s)
