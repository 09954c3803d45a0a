"""How many of this machine's cores other programs keep busy; told to `server/courtesy` by a server with `--nice`.

Programs that run at a lowered priority themselves don't count: they want to give way too, and two such servers on one
machine would wait for each other. What other programs do on a GPU is not looked at.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import psutil

from swarmllm.server.courtesy import Courtesy

logger = logging.getLogger(__name__)

LOOK_S = 3.0
"""Over so long is averaged. Assumed: what takes less is done by the low priority alone."""


class MachineLoad:
    """Of all programs but this one and those that it has started."""

    def __init__(self) -> None:
        self.num_cores = psutil.cpu_count() or 1
        this = psutil.Process()
        self._own = [this, *this.children(recursive=True)]
        self._before = self._read()

    def others_cores(self) -> float:
        """Cores that the others kept busy since the last call, on average."""
        before, self._before = self._before, self._read()
        seconds, usual, nice, own_user, own_system = (
            now - then for now, then in zip(self._before, before, strict=True)
        )
        # Linux counts our own time as `nice`; what a system doesn't count there is among the usual.
        busy_s = usual - own_system - max(0.0, own_user - nice)
        return min(max(0.0, busy_s / max(seconds, 1e-3)), float(self.num_cores))

    def _read(self) -> tuple[float, float, float, float, float]:
        """(clock, usual, nice, own user, own system), seconds."""
        machine = psutil.cpu_times()
        usual = sum(getattr(machine, name, 0.0) for name in ("user", "system", "irq", "softirq"))
        user = system = 0.0
        for process in self._own:
            try:
                times = process.cpu_times()
            except psutil.Error:  # it has ended
                continue
            user, system = user + times.user, system + times.system
        return time.monotonic(), usual, getattr(machine, "nice", 0.0), user, system


async def give_way(courtesy: Courtesy, wanted_cores: Callable[[], int], period_s: float) -> None:
    """Keep `courtesy` informed, for ever; the log gets a line when giving way begins and when it ends."""
    machine = await asyncio.to_thread(MachineLoad)
    while True:
        await asyncio.sleep(min(LOOK_S, period_s))
        share, paused, others_cores = courtesy.share, courtesy.paused, machine.others_cores()
        courtesy.look(others_cores, machine.num_cores, wanted_cores(), time.monotonic())
        busy = f"other programs keep {others_cores:.1f} of {machine.num_cores} cores busy"
        if courtesy.paused > paused:
            logger.info("%s for long: announcing a pause, so that sessions go elsewhere if they can", busy)
        elif courtesy.share < share == 1.0:
            logger.info("%s: giving way, computing %.0f %% of the time or less", busy, 100 * courtesy.share)
        elif courtesy.share == 1.0 > share:
            logger.info("%s: computing at full speed again", busy)
