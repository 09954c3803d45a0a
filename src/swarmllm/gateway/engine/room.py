"""Room for what requests take while they are under way: who finds too little waits in line, callers in turn.

Memory of pictures and sounds is taken here before they are unpacked (`responder`, `audio_routes`), and places to fetch
pictures are (`remote_pictures`). Lives in the event loop.
"""

import asyncio
from collections import Counter, OrderedDict, deque

from swarmllm.api import total_memory_bytes
from swarmllm.gateway.errors import RETRY_AFTER_S, ApiError

MEMORY_SHARE = 1 / 4
"""Of the memory that this process may use, for all pictures and sounds. Assumed: answers need the rest."""


def default_bytes() -> int:
    """Memory for pictures and sounds if nothing else is said."""
    return int(total_memory_bytes() * MEMORY_SHARE)


class Taken:
    """Some of a room; `free` gives it back, from the event loop."""

    def __init__(self, room: "Room", caller: str, amount: int) -> None:
        self._room, self._caller = room, caller
        self.amount = amount

    def keep(self, amount: int) -> None:
        """It turned out to be that much; nobody waits for more, since it is there already."""
        self._room.change(self._caller, amount - self.amount)
        self.amount = amount

    def shrink(self, amount: int) -> None:
        """No more than that is needed any more."""
        self.keep(min(self.amount, amount))

    def free(self) -> None:
        """Harmless if it has been freed."""
        self.keep(0)


class Room:
    """Of `size` in all, and `of_one` for one caller at a time; `most` may wait."""

    def __init__(self, size: int, *, most: int, of_one: int | None = None) -> None:
        self.size = size
        self._of_one = size if of_one is None else of_one
        self._most = most
        self._left = size
        self._of: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        """By caller; the one whose turn is next comes first."""

    async def take(self, amount: int, caller: str) -> Taken:
        """That much for `caller`, when there is room; `amount` is not larger than `size`.

        Raises:
            ApiError: too many wait already.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append((amount, turn))
        self._admit()
        if not turn.done() and sum(map(len, self._waiting.values())) > self._most:
            self._forget(caller, (amount, turn))
            raise ApiError(
                429,
                "too many requests with pictures or sounds wait already: try again later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at the same time
                self.change(caller, -amount)
            else:
                self._forget(caller, (amount, turn))
            raise
        return Taken(self, caller, amount)

    def change(self, caller: str, amount: int) -> None:
        """`caller` has so much more, or less."""
        self._left -= amount
        self._of[caller] += amount
        if not self._of[caller]:
            del self._of[caller]
        self._admit()

    def _admit(self) -> None:
        """All whose turn it is. Who has as much as one may have is passed over; who finds too little is not."""
        for caller in list(self._waiting):
            amount, turn = self._waiting[caller][0]
            if self._of[caller] and self._of[caller] + amount > self._of_one:
                continue
            if amount > self._left:
                return
            self._forget(caller, (amount, turn))
            if caller in self._waiting:
                self._waiting.move_to_end(caller)
            turn.set_result(None)
            self.change(caller, amount)  # looks for the next one
            return

    def _forget(self, caller: str, one: tuple[int, "asyncio.Future[None]"]) -> None:
        line = self._waiting.get(caller)
        if line is not None and one in line:
            line.remove(one)
            if not line:
                del self._waiting[caller]
