"""How a server with `--nice` gives way to its owner's programs: the more cores they want, the longer it pauses.

    full speed    the cores that the others leave are enough
    giving way    a pause after each forward, so that only a share of the time is computed, MIN_SHARE at least
    paused        giving way as far as that goes, for PAUSED_AFTER_S: announced as a queue so long that sessions are
                  taken elsewhere; those that can't be had elsewhere are served on at MIN_SHARE

Pure: `server/machine_load` says what the machine does, `server/executor` asks when to compute again, `server/server`
announces what is left of the speed. A server is slow at worst, and never out of reach: it answers pings meanwhile, and
no session is lost.
"""

from dataclasses import dataclass

from swarmllm.data_structures import ServerInfo

MIN_SHARE = 0.1
"""Of the time: ten times slower at worst, where a step may take 300 s (`ClientConfig.step_timeout_s`)."""
MAX_PAUSE_S = 1.0
"""After a long forward, which is slowed down less: a server that is told to stop has to be gone within 10 s."""
NOTABLE = 0.8
"""Share below which a server at full speed begins to give way. Assumed: a desktop that is used a little stays above."""
FULL = 0.9
"""Share from which it has its full speed again: what it could gain by a pause isn't worth one."""
PAUSED_AFTER_S = 60.0
"""Assumed: whoever compiles or encodes for longer than that goes on for a while."""
PAUSE_ENDS_AT = 0.3
"""Share from which it isn't paused any more."""
PAUSED_QUEUE_MS = 60_000.0
"""Announced while paused: any other server is better, but this one is better than none."""
MAX_MS = 1e6
"""A record may not say more."""


def share_left(others_cores: float, num_cores: int, wanted_cores: int) -> float:
    """Of the time in which a server that computes on `wanted_cores` finds them free, MIN_SHARE to 1."""
    wanted = max(1, min(wanted_cores, num_cores))
    return min(1.0, max(MIN_SHARE, (num_cores - others_cores) / wanted))


@dataclass(slots=True)
class Courtesy:
    """The state of one server; without a look at its machine it computes at full speed.

    The device thread and the event loop share it: each field is written by one of them only.
    """

    share: float = 1.0
    """Of the time that may be computed at present."""
    paused: bool = False
    resumes_at: float = 0.0
    """When the last pause ends, on the executor's clock."""
    _least_since: float | None = None

    def look(self, others_cores: float, num_cores: int, wanted_cores: int, now: float) -> None:
        """Others have kept so many of the cores busy lately; the server would like to use `wanted_cores`."""
        share = share_left(others_cores, num_cores, wanted_cores)
        self.share = 1.0 if share >= (NOTABLE if self.share == 1.0 else FULL) else share
        if share > MIN_SHARE:
            self._least_since = None
        elif self._least_since is None:
            self._least_since = now
        if self._least_since is not None and now - self._least_since >= PAUSED_AFTER_S:
            self.paused = True
        elif share >= PAUSE_ENDS_AT:
            self.paused = False

    def ran(self, cpu_s: float, took_s: float, now: float) -> None:
        """A forward has ended. It took so long, of which it had a core for so long: the others have had the rest."""
        self.resumes_at = now + min(max(0.0, cpu_s / self.share - took_s), MAX_PAUSE_S)

    def pause_s(self, now: float) -> float:
        """For how long the device has to leave the machine to the others; 0 = not at all."""
        return max(0.0, self.resumes_at - now)

    def announced(self, info: ServerInfo) -> ServerInfo:
        """What is left of the speeds that were measured."""
        if self.share == 1.0:
            return info
        slower = {
            name: min(getattr(info, name) / self.share, MAX_MS)
            for name in ("decode_ms_per_block", "decode_ms_per_block_batch8", "context_ms_per_block_per_1k")
        }
        return info.model_copy(
            update={
                **slower,
                "throughput": info.throughput * self.share,
                "queue_ms": max(info.queue_ms, PAUSED_QUEUE_MS) if self.paused else info.queue_ms,
                "speed_share": 0.0 if self.paused else self.share,
            }
        )
