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
MEASURED_BATCH = 8
"""Rows of `DecodeTimes.ms_per_block_batch8`."""
MOST_PACE = 100.0
"""What no busy machine explains any more."""
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


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """What decode steps were measured to take when the blocks were loaded, as `ServerInfo` announces it."""

    ms_per_block: float
    ms_per_block_batch8: float = 0.0
    """0 = not measured, here and below."""
    context_ms_per_block_per_1k: float = 0.0

    def step_ms(self, num_blocks: int, num_rows: int, context_tokens: int) -> float:
        """Of that many rows, which have so many tokens in the cache together."""
        per_row = max(0.0, self.ms_per_block_batch8 - self.ms_per_block) / (MEASURED_BATCH - 1)
        ms = self.ms_per_block + per_row * (num_rows - 1) + self.context_ms_per_block_per_1k * context_tokens / 1000
        return num_blocks * ms


class LoadMeter:
    """Counts forwards of sessions."""

    def __init__(self) -> None:
        self._queue_ms = self._batch_size = self._last_forward_at = 0.0
        self._num_steps = self._num_tokens = self._num_forwards = self.num_failures = 0
        self._step_s: deque[float] = deque(maxlen=LAST_STEPS)
        self._times: DecodeTimes | None = None
        self.pace = 1.0
        """Smoothed time of real decode steps, as a multiple of what they were measured to take."""

    def expect(self, times: DecodeTimes) -> None:
        """Compare decode steps with these from now on."""
        self._times, self.pace = times, 1.0

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
        self._compare(pieces, (ended_at - now) * 1e3)

    def _compare(self, pieces: Sequence[Piece], took_ms: float) -> None:
        if self._times is None:
            return
        steps = [call.step for call, _ in pieces if call.priority is Priority.DECODE and call.step is not None]
        spans = {step.num_blocks for step in steps}
        if len(steps) < len(pieces) or len(spans) != 1:
            return  # a prompt was computed beside them, or other blocks
        rows, contexts = sum(step.num_tokens for step in steps), sum(step.context_tokens for step in steps)
        expected_ms = self._times.step_ms(spans.pop(), rows, contexts)
        if expected_ms > 0:
            self.pace = min(max(_smoothed(self.pace, took_ms / expected_ms), 1 / MOST_PACE), MOST_PACE)


def _smoothed(before: float, newest: float) -> float:
    return before + SMOOTHING * (newest - before)
