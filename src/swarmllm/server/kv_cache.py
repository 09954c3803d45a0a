"""The byte budget of KV caches: sessions lease their share before the first token, so that memory can't run out later.

Pure accounting, called from the event loop by `server/sessions`; the tensors themselves live in `models/span_cache`,
and grow in pages as they are used (`models/growing_layer`).

A session leases all that its `max_length` may take when it is opened, not page by page as it grows. Paging would admit
more sessions at a time, but `generate()` opens sessions no longer than its text can become, so there is little to gain;
and its price is a refusal in the midst of an answer, which the client could only survive by computing the whole text
anew on another server, just when all are full.
"""

from dataclasses import dataclass

from swarmllm.errors import CacheFullError


@dataclass
class CacheBudget:
    """Bytes that may be leased in all, and how many are."""

    capacity_bytes: int
    leased_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        return self.capacity_bytes - self.leased_bytes

    def lease(self, num_bytes: int) -> "CacheLease":
        """Set `num_bytes` aside.

        Raises:
            CacheFullError: so much is not left.
        """
        lease = CacheLease(self)
        lease.resize(num_bytes)
        return lease


@dataclass
class CacheLease:
    """One session's share of the budget."""

    budget: CacheBudget
    num_bytes: int = 0

    def resize(self, num_bytes: int) -> None:
        """Ask for `num_bytes` in all; on failure the lease stays as it was.

        Raises:
            CacheFullError: so much is not left.
        """
        more = num_bytes - self.num_bytes
        if more > self.budget.left_bytes:
            raise CacheFullError(
                f"the session needs {more / 1e6:.1f} MB more of KV cache, {self.budget.left_bytes / 1e6:.1f} of "
                f"{self.budget.capacity_bytes / 1e6:.1f} MB are free: use a smaller max_length or batch"
            )
        self.budget.leased_bytes += more
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Give everything back; harmless when done twice."""
        self.budget.leased_bytes -= self.num_bytes
        self.num_bytes = 0
