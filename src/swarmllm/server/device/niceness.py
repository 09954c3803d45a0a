"""A server with `--nice` gives way to its owner's programs: the fewer cores they leave it, the longer it pauses.

After each forward it pauses, so that it computes for the share of the time that is left, and announces that share of
its speed. If nothing was left for a minute, it announces a queue as well, so that clients move their sessions elsewhere
if they can. It is slow at worst: it answers pings meanwhile, and no session is lost. `device_thread` asks when to
compute again. Other programs on a GPU are not observed.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from swarmllm.data_structures import ServerInfo

logger = logging.getLogger(__name__)

LOOK_S = 3.0
"""Seconds between two looks, whose average counts. Assumed: the low priority alone handles shorter loads."""
MIN_SHARE = 0.1
"""Smallest share of the time: ten times slower at worst, where a step may take 300 s
(`ClientConfig.step_timeout_s`)."""
MAX_PAUSE_S = 1.0
"""Longest pause. Longer forwards are slowed down less: a server that is told to stop must be gone within 10 s."""
NOTABLE, FULL = 0.8, 0.9
"""A server begins to give way below the first share, and has its full speed again from the second on. Assumed."""
PAUSED_AFTER_S = 60.0
"""Seconds without any core until a queue is announced. Assumed: a program that computes for a minute goes on for a
while."""
PAUSED_QUEUE_MS = 60_000.0
"""The announced queue: any other server is better, but this one is better than none."""
MAX_MS = 1e6
"""Largest number of milliseconds in a record."""


@dataclass(slots=True)
class Niceness:
    """The state of one server, which computes at full speed until it sees other programs. Times are passed in.

    The device thread and the event loop share it: each field is written by one of them only.
    """

    share: float = 1.0
    """Share of the time that may be computed at present."""
    paused: bool = False
    resumes_at: float = 0.0
    """End of the last pause, on the device thread's clock."""
    _left_at: float | None = None

    def look(self, others_cores: float, num_cores: int, wanted_cores: int, now: float) -> None:
        """Note that other programs kept `others_cores` busy lately; the server would like to use `wanted_cores`."""
        share = (num_cores - others_cores) / max(1, min(wanted_cores, num_cores))
        self.share = 1.0 if share >= (NOTABLE if self.share == 1.0 else FULL) else max(MIN_SHARE, share)
        if share > MIN_SHARE or self._left_at is None:
            self._left_at = now
        self.paused = now - self._left_at >= PAUSED_AFTER_S

    def ran(self, cpu_s: float, took_s: float, now: float) -> None:
        """Note that a forward took `took_s`, and had a core for `cpu_s` of them: other programs had the rest."""
        pause_s = min(cpu_s / self.share - took_s, MAX_PAUSE_S)
        if pause_s > 0:  # or waiting for this forward would look like a pause
            self.resumes_at = now + pause_s

    def pause_s(self, now: float) -> float:
        """Seconds that the device must leave the machine to other programs; 0 = none."""
        return max(0.0, self.resumes_at - now)

    def announced(self, info: ServerInfo) -> ServerInfo:
        """Reduce the measured speeds to the share that is left."""
        if self.share == 1.0:
            return info
        names = ("decode_ms_per_block", "decode_ms_per_block_batch8", "context_ms_per_block_per_1k")
        slower = {name: min(getattr(info, name) / self.share, MAX_MS) for name in names}
        slower |= {"throughput": info.throughput * self.share, "speed_share": self.share}
        if self.paused:
            slower |= {"speed_share": 0.0, "queue_ms": max(info.queue_ms, PAUSED_QUEUE_MS)}
        return info.model_copy(update=slower)


async def give_way(niceness: Niceness, wanted_cores: Callable[[], int], period_s: float) -> None:
    """Look at the machine for ever; the log gets a line when giving way begins and when it ends."""
    num_cores, before = psutil.cpu_count() or 1, _seconds()
    while True:
        await asyncio.sleep(min(LOOK_S, period_s))
        after = _seconds()
        share, others_cores = niceness.share, cores_of_others(before, after)
        before = after
        niceness.look(others_cores, num_cores, wanted_cores(), time.monotonic())
        if (niceness.share < 1.0) != (share < 1.0):
            does = "computing at full speed again" if share < 1.0 else "giving way, computing less"
            logger.info("other programs keep %.1f of %d cores busy: %s", others_cores, num_cores, does)


def cores_of_others(before: tuple[float, ...], after: tuple[float, ...]) -> float:
    """Number of cores that programs of usual priority kept busy in between.

    Programs of lower priority want to give way, too: two such servers on one machine would wait for each other.
    """
    seconds, usual, nice, own = (now - then for now, then in zip(after, before, strict=True))
    # Linux counts our own time as `nice`; other systems count it as usual time.
    return max(0.0, usual - max(0.0, own - nice)) / max(seconds, 1e-3)


def _seconds() -> tuple[float, float, float, float]:
    """Return (clock, seconds of programs of usual priority, of lower priority, of this process)."""
    machine = psutil.cpu_times()
    return time.monotonic(), machine.user, getattr(machine, "nice", 0.0), os.times().user
