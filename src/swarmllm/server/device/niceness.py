"""How a server with `--nice` gives way to its owner's programs: the fewer cores they leave it, the longer it pauses.

After each forward it pauses, so that it computes for the share of the time that is left, and announces that share of
its speed. Where nothing was left for a minute, it announces a queue as well, for which sessions are taken elsewhere if
they can be. It is slow at worst: it answers pings meanwhile, and no session is lost. `device/device_thread` asks when
to compute again. What other programs do on a GPU is not looked at.
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
"""Seconds over which is averaged. Assumed: what takes less is done by the low priority alone."""
MIN_SHARE = 0.1
"""Share of the time: ten times slower at worst, where a step may take 300 s (`ClientConfig.step_timeout_s`)."""
MAX_PAUSE_S = 1.0
"""Longest pause, after a long forward, which is slowed down less: a server that is told to stop must be gone
within 10 s."""
NOTABLE, FULL = 0.8, 0.9
"""Shares below which a server begins to give way, and from which it has its full speed again. Assumed."""
PAUSED_AFTER_S = 60.0
"""Assumed: whoever compiles or encodes for longer than that goes on for a while."""
PAUSED_QUEUE_MS = 60_000.0
"""The queue that is announced then: any other server is better, but this one is better than none."""
MAX_MS = 1e6
"""The most that a record may say."""


@dataclass(slots=True)
class Niceness:
    """The state of one server, which computes at full speed until others are seen. Times are passed in.

    The device thread and the event loop share it: each field is written by one of them only.
    """

    share: float = 1.0
    """Share of the time that may be computed at present."""
    paused: bool = False
    resumes_at: float = 0.0
    """When the last pause ends, on the device_thread's clock."""
    _left_at: float | None = None

    def look(self, others_cores: float, num_cores: int, wanted_cores: int, now: float) -> None:
        """Note that others have kept some cores busy lately; the server would like to use `wanted_cores`."""
        share = (num_cores - others_cores) / max(1, min(wanted_cores, num_cores))
        self.share = 1.0 if share >= (NOTABLE if self.share == 1.0 else FULL) else max(MIN_SHARE, share)
        if share > MIN_SHARE or self._left_at is None:
            self._left_at = now
        self.paused = now - self._left_at >= PAUSED_AFTER_S

    def ran(self, cpu_s: float, took_s: float, now: float) -> None:
        """Note that a forward took `took_s`, and had a core for `cpu_s` of them: the others have had the rest."""
        self.resumes_at = now + min(max(0.0, cpu_s / self.share - took_s), MAX_PAUSE_S)

    def pause_s(self, now: float) -> float:
        """Seconds for which the device has to leave the machine to the others; 0 = not at all."""
        return max(0.0, self.resumes_at - now)

    def announced(self, info: ServerInfo) -> ServerInfo:
        """What is left of the speeds that were measured."""
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
    """Cores that programs of usual priority kept busy in between: those that run at a lower one want to give way, too,
    and two such servers on one machine would wait for each other."""
    seconds, usual, nice, own = (now - then for now, then in zip(after, before, strict=True))
    # Linux counts our own time as `nice`; where the system doesn't tell it apart, it is among the usual.
    return max(0.0, usual - max(0.0, own - nice)) / max(seconds, 1e-3)


def _seconds() -> tuple[float, float, float, float]:
    """(clock, all programs of usual priority, those of lower, this one)."""
    machine = psutil.cpu_times()
    return time.monotonic(), machine.user, getattr(machine, "nice", 0.0), os.times().user
