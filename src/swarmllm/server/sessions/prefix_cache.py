"""Pages of prompts that have been computed, for sessions that begin with the same inputs.

A page holds the keys, values and outputs of `PAGE_TOKENS` positions, and is found by a hash of all inputs up to its
last position (`sessions/shared_prefix`). The least recently used pages go when the budget is full. Only the device
thread touches it. The tensors' contents are nothing to this module.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swarmllm.models.span.page_pool import SharedPage

PAGE_TOKENS = 64
"""Assumed: short enough for most system prompts to fill some, long enough for a page's bookkeeping to be nothing."""


@dataclass(frozen=True, eq=False, slots=True)
class Page:
    """What computing `PAGE_TOKENS` positions gave; nobody writes into it."""

    keys_values: SharedPage | tuple[tuple[Tensor, Tensor] | None, ...]
    """Keys and values of each block, `[1, heads, page, head]`; None for a block that uses those of another. Or a page
    of the pool where sessions have theirs."""
    outputs: Tensor
    """`[…, 1, page, …]`."""

    @property
    def num_bytes(self) -> int:
        if isinstance(self.keys_values, SharedPage):
            return self.outputs.nbytes + self.keys_values.num_bytes
        pairs = [pair for pair in self.keys_values if pair is not None]
        return self.outputs.nbytes + sum(tensor.nbytes for pair in pairs for tensor in pair)


class PrefixCache:
    """Pages by hash, within a byte budget."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.num_reused_tokens = 0
        """Positions that didn't have to be computed, so far."""
        self._pages: OrderedDict[bytes, Page] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def find(self, digests: Sequence[bytes]) -> list[Page]:
        """The pages of a prefix, up to the first that is missing."""
        found: list[Page] = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            found.append(page)
        self._used(digests[: len(found)])
        return found

    def keep(self, pages: Sequence[tuple[bytes, Page]]) -> None:
        """Take in pages of one prefix, in order; what is too much goes, and what doesn't fit at all isn't kept."""
        for digest, page in pages:
            if digest not in self._pages and page.num_bytes <= self.capacity_bytes:
                self._pages[digest] = page
                self.num_bytes += page.num_bytes
        self._used([digest for digest, _ in pages])
        while self.num_bytes > self.capacity_bytes:
            _, page = self._pages.popitem(last=False)
            self.num_bytes -= page.num_bytes

    def clear(self) -> None:
        """Drop all pages."""
        self._pages.clear()
        self.num_bytes = 0

    def _used(self, digests: Sequence[bytes]) -> None:
        """Note that they were used, the last one first: without the pages before it, a page is of no use."""
        for digest in reversed(digests):
            if digest in self._pages:
                self._pages.move_to_end(digest)
