"""What those who come second may cost those who come first: part of what `scheduler` goes by.

Pure: times are passed in, in seconds.
"""


class Precedence:
    """Whether those who come first are here, and what the others may cost them."""

    def __init__(self, others_share: float, here_s: float) -> None:
        self._others_share, self._here_s = others_share, here_s
        self._came_at = self._left_at = float("-inf")
        self._others_from = float("-inf")
        """When the others have made good what they cost."""
        self._others_last: tuple[float, float] | None = None
        """When the others' last forward began and ended, until it is known what it cost."""
        self._others_s = 0.0
        """How long it took."""

    def holds(self, now: float) -> bool:
        """Whether those who come first have been here a moment ago, as somebody who decodes was."""
        return now < self._left_at + self._here_s

    def hold_s(self, now: float) -> float:
        """Seconds for which the others have to leave the device alone though nobody else waits."""
        return max(0.0, min(self._others_from, self._left_at + self._here_s) - now)

    def others_turn(self, now: float) -> bool:
        """Whether the others go on although somebody waits who comes first."""
        return now >= max(self._others_from, self._came_at + self._others_s / self._others_share)

    def waits_since(self, queued_at: float, now: float) -> None:
        """Note that somebody waits who comes first."""
        if not self.holds(now):
            self._came_at = self._left_at = now
        if self._others_last is not None:
            (began_at, ended_at), self._others_last = self._others_last, None
            waited_s = ended_at - max(began_at, queued_at)
            if waited_s > 0:
                self._others_from = ended_at + waited_s / self._others_share

    def ran(self, first: bool, began_at: float, ended_at: float) -> None:
        """Note a forward of theirs, or of the others."""
        if first:
            self._left_at, self._others_last = ended_at, None
        else:
            self._others_last, self._others_s = (began_at, ended_at), ended_at - began_at
