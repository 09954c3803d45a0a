"""The byte budget of KV caches: sessions lease their share before the first token, so that memory can't run out later.

Pure accounting, called from the event loop by `sessions/step_runner`; the tensors themselves live in `span/span_cache`,
and grow in pages as they are used (`span/span_cache`).

A session leases all that its `max_length` may take when it is opened, not page by page as it grows. Paging would admit
more sessions at a time, but `generate()` opens sessions no longer than its text can become, so there is little to gain;
and its price is a refusal in the midst of an answer, which the client could only survive by computing the whole text
anew on another server, just when all are full.

When memory runs out all the same, because others on the machine took it, the budget shrinks: what was leased then can't
have been there. It grows again by what sessions give back that were opened since, and is whole while there are none, so
a short lack is soon forgotten.
"""

from dataclasses import dataclass

from swarmllm.errors import CacheFullError, SessionTooLargeError

KEPT_SHARE = 0.75
"""Share that stays of what was leased when memory ran out. Assumed, as is the next."""
LEAST_SHARE = 0.25
"""Share of the capacity that is always offered: else a server that lacked memory could never show that it has some."""


@dataclass
class CacheBudget:
    """Bytes that may be leased in all, and how many are."""

    capacity_bytes: int
    leased_bytes: int = 0
    lacking_bytes: int = 0
    """The part of the capacity that memory has turned out not to hold."""
    num_lacks: int = 0

    @property
    def offered_bytes(self) -> int:
        """All of them while nothing is leased: a session as large as those that were too much may fit by now."""
        return self.capacity_bytes - (self.lacking_bytes if self.leased_bytes else 0)

    @property
    def left_bytes(self) -> int:
        return max(0, self.offered_bytes - self.leased_bytes)

    def shrink(self) -> None:
        """Offer less, as memory ran out; called in the device thread."""
        enough = int(max(LEAST_SHARE * self.capacity_bytes, KEPT_SHARE * self.leased_bytes))
        self.lacking_bytes = max(self.lacking_bytes, self.capacity_bytes - enough)
        self.num_lacks += 1

    def lease(self, num_bytes: int) -> "CacheLease":
        """Set `num_bytes` aside.

        Raises:
            SessionTooLargeError: that much isn't there even while nobody else leases anything.
            CacheFullError: that much is not left.
        """
        lease = CacheLease(self, self.num_lacks)
        lease.resize(num_bytes)
        return lease


@dataclass
class CacheLease:
    """One session's share of the budget."""

    budget: CacheBudget
    num_lacks: int
    """The budget's `num_lacks` when this lease was taken."""
    num_bytes: int = 0
    released: bool = False
    """Whether its session has ended."""

    def resize(self, num_bytes: int) -> None:
        """Ask for `num_bytes` in all; on failure the lease stays as it was.

        Raises:
            SessionTooLargeError: that much isn't there even while nobody else leases anything.
            CacheFullError: that much is not left.
        """
        if num_bytes > self.budget.capacity_bytes:
            raise SessionTooLargeError(
                f"the session needs {num_bytes / 1e6:.1f} MB of KV cache, and this server has "
                f"{self.budget.capacity_bytes / 1e6:.1f} in all: use a smaller max_length or batch"
            )
        more = num_bytes - self.num_bytes
        if more > self.budget.left_bytes:
            raise CacheFullError(
                f"the session needs {more / 1e6:.1f} MB more of KV cache, {self.budget.left_bytes / 1e6:.1f} of "
                f"{self.budget.offered_bytes / 1e6:.1f} MB are free: use a smaller max_length or batch"
            )
        self.budget.leased_bytes += more
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Give everything back; harmless when done twice."""
        self.budget.leased_bytes -= self.num_bytes
        if self.num_lacks == self.budget.num_lacks:
            self.budget.lacking_bytes = max(0, self.budget.lacking_bytes - self.num_bytes)
        self.num_bytes, self.released = 0, True
