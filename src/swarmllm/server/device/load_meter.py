"""How busy the device thread is, and what it has done so far: counted there, read by announcements and metrics.

Pure: times are passed in, in seconds.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from swarmllm.server.device.calls import Piece
from swarmllm.server.device.scheduler import Priority

LAST_STEPS = 512
"""Steps that the 95th percentile is of. Assumed: some minutes of one text, some seconds of many."""
SMOOTHING = 0.1
"""Share of the newest forward in the smoothed numbers."""
FORGET_QUEUE_S = 10.0
"""An idle server's last queue says nothing about the next step: its time halves in this many seconds."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the device thread is, and what it has done so far."""

    queue_ms: float
    """Smoothed time that a session's step waited for its turn."""
    batch_size: float
    """Smoothed number of sessions per forward."""
    num_steps: int
    num_tokens: int
    num_forwards: int
    """Forwards of sessions; training's batches are not counted."""
    num_failures: int
    """Calls that failed, training's as well."""


class LoadMeter:
    """Counts forwards of sessions."""

    def __init__(self) -> None:
        self._queue_ms = self._batch_size = self._last_forward_at = 0.0
        self._num_steps = self._num_tokens = self._num_forwards = self.num_failures = 0
        self._step_s: deque[float] = deque(maxlen=LAST_STEPS)

    def load(self, now: float) -> Load:
        """The load as of now."""
        idle_s = max(0.0, now - self._last_forward_at)
        queue_ms = self._queue_ms * 0.5 ** (idle_s / FORGET_QUEUE_S)
        return Load(
            queue_ms, self._batch_size, self._num_steps, self._num_tokens, self._num_forwards, self.num_failures
        )

    def step_ms_p95(self) -> float:
        """Within which 95 % of the last 512 decode steps were ready; 0 if there was none."""
        last = sorted(self._step_s.copy())  # a copy in one go, since the device thread goes on counting
        return last[int(0.95 * (len(last) - 1))] * 1e3 if last else 0.0

    def count(self, pieces: Sequence[Piece], now: float, since: float, ended_at: float) -> None:
        """A forward of these pieces began `now` and has ended; nobody has waited for us from before `since`."""
        waited_ms = sum(max(0.0, now - max(call.queued_at, since)) for call, _ in pieces) / len(pieces) * 1e3
        self._queue_ms = _smoothed(self.load(now).queue_ms, waited_ms)
        self._batch_size = _smoothed(self._batch_size or len(pieces), len(pieces))
        self._num_steps += sum(not call.num_tokens for call, _ in pieces)
        self._num_tokens += sum(num_tokens for _, num_tokens in pieces)
        self._num_forwards += 1
        self._step_s.extend(
            ended_at - max(call.queued_at, since) for call, _ in pieces if call.priority == Priority.DECODE
        )
        self._last_forward_at = now


def _smoothed(before: float, newest: float) -> float:
    return before + SMOOTHING * (newest - before)
