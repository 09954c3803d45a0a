"""How many bytes a second pass through: a bucket that fills at a rate, from which all take in turn."""

import asyncio
from weakref import WeakValueDictionary

BURST_S = 0.25
"""Seconds of the rate that may pass at once after a pause: a decode step never waits where others are quiet."""


class ByteBucket:
    """Hosts take turns, and those of one host among themselves: so a flood from one slows others by one piece each."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._turn = asyncio.Lock()
        self._turn_of_host: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._free_at = 0.0
        self.num_bytes = 0
        """That have passed since the start."""

    def lock_of(self, host: str) -> asyncio.Lock:
        """To be given to `take` by whoever passes bytes on for this host."""
        return self._turn_of_host.setdefault(host, asyncio.Lock())

    async def take(self, num_bytes: int, of_host: asyncio.Lock) -> None:
        """Return when that many may pass."""
        async with of_host, self._turn:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now - BURST_S) + num_bytes / self._bytes_per_s
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)
        self.num_bytes += num_bytes
