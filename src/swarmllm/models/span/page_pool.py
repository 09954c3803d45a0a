"""Keys and values of all sessions of a span in pages of one pool, so that one kernel finds those of every session.

`PagePool` has one tensor of keys and one of values for each block, and a table on the device with a row of page
numbers for each row of a session's batch. A `PageTable` is one session's part of that table, the same for all blocks.
Pages are counted: rows of a batch with the same beginning share pages, and so do sessions with the same prompt. A page
that others use is copied before it is written to.

A page is free when its last user drops it (`PagePool.drop`). Nobody frees the pages of a session by hand: when the last
reference to its `PageTable` is gone, they are noted, and `_collect` frees them before the pool runs out of pages.

`Placed` says where new positions go. `write_pages` and `attend_pages` write to pages and attend to them: on CUDA by
the kernels of `paged_kernels`; otherwise in plain torch, also in tests and when a step is traced (`decode_graphs`).

Used by `span_cache`, `packing` and `paged_attention`. Page 0 and row 0 of the table belong to nobody: steps of a fixed
size write there for positions without a session.
"""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from transformers.cache_utils import DynamicLayer

from swarmllm.errors import CacheFullError

TILE_QUERIES = 64
"""Queries (positions times heads that share keys) of a longer call that one program attends with. Assumed."""

PAGE_TOKENS = 64
"""Positions of a page: a session leases whole pages. Assumed; the same as a page of a shared prompt."""
MOST_ROWS = 1024
"""Most rows of all sessions' batches together."""
MOST_PAGES_OF_ROW = 1 << 14
"""Most pages of one row: a million positions. It bounds the table."""

KeyValueShape = tuple[tuple[int, int], tuple[int, int]]
"""(heads, head size) of the keys and of the values of one block."""


@dataclass(eq=False, slots=True)
class Placed:
    """The places of new positions, on the device."""

    rows: Tensor
    """`[total]` int64: the row of the pool's table."""
    positions: Tensor
    """`[total]` int64: the place in that row."""
    num_short: int
    """The number of positions of calls with few positions, which come first."""
    long_calls: tuple[tuple[int, int], ...] = ()
    """(first, number) of the positions of each other call in the row."""
    _tiles: dict[int, Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[int, int]],
        device: torch.device,
        num_short: int | None = None,
        long_calls: tuple[tuple[int, int], ...] = (),
    ) -> "Placed":
        """From (row, position) of each; one copy to the device."""
        total = len(pairs)
        even = [*pairs, pairs[-1]] if total % 2 else pairs  # kernels are compiled anew for positions at odd addresses
        rows, positions = torch.tensor(even).t().contiguous().to(device, non_blocking=True)[:, :total]
        return cls(rows, positions, total if num_short is None else num_short, long_calls)

    def tiles(self, num_shared: int) -> Tensor | None:
        """`[tiles, 2]` int32: (first, number) of positions of long calls that attend together."""
        if num_shared not in self._tiles:
            self._tiles[num_shared] = self._new_tiles(tile_tokens(num_shared))
        return self._tiles[num_shared]

    def _new_tiles(self, size: int) -> Tensor | None:
        tiles = [
            (first, min(size, start + number - first))
            for start, number in self.long_calls
            for first in range(start, start + number, size)
        ]
        return torch.tensor(tiles, dtype=torch.int32).to(self.rows.device, non_blocking=True) if tiles else None


def tile_tokens(num_shared: int) -> int:
    """Most positions of a tile, if so many heads of queries share one of keys."""
    return max(1, TILE_QUERIES // num_shared)


def write_pages(
    keys: Tensor, values: Tensor, tables: Tensor, placed: Placed, new_keys: Tensor, new_values: Tensor
) -> None:
    """Write new keys and values `[1, heads, total, head]` where they are placed."""
    if _has_kernels(new_keys):
        _kernels().write_pages(keys, values, tables, (placed.rows, placed.positions), new_keys, new_values)
        return
    write_in_torch(keys, values, tables, placed, new_keys, new_values)


def write_in_torch(
    keys: Tensor, values: Tensor, tables: Tensor, placed: Placed, new_keys: Tensor, new_values: Tensor
) -> None:
    """The same in plain torch."""
    page_tokens = keys.shape[2]
    positions = placed.positions
    pages = tables[placed.rows, positions // page_tokens].long()
    for stored, new in ((keys, new_keys), (values, new_values)):
        heads = torch.arange(stored.shape[1], device=stored.device)[:, None]
        stored.index_put_((pages, heads, positions % page_tokens), new[0].to(stored.dtype))


def attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, placed: Placed, scale: float, window: int
) -> Tensor:
    """Attention of `query` `[1, heads, total, head]`: each position attends to its own session up to itself.

    Returns `[1, total, heads, head]`.
    """
    if _has_kernels(query):
        num_shared = query.shape[1] // keys.shape[1]
        places, pages = (placed.rows, placed.positions), (keys, values, tables)
        tiles = placed.tiles(num_shared), tile_tokens(num_shared)
        output: Tensor = _kernels().attend_pages(query, pages, places, placed.num_short, tiles, scale, window)
        return output
    return attend_in_torch(query, keys, values, tables, placed, scale, window)


def attend_in_torch(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, placed: Placed, scale: float, window: int
) -> Tensor:
    """The same in plain torch, with all pages of a row."""
    num_heads, total = query.shape[1:3]
    pages = tables[placed.rows].long()  # [total, pages]
    precision = torch.promote_types(query.dtype, torch.float32)
    of_each = (stored[pages].transpose(1, 2).flatten(2, 3).to(precision) for stored in (keys, values))
    all_keys, all_values = of_each  # [total, heads, positions, head]
    at = torch.arange(all_keys.shape[2], device=keys.device)
    end = placed.positions[:, None]
    visible = at <= end if not window else (at <= end) & (at > end - window)
    shared = query[0].transpose(0, 1).reshape(total, keys.shape[1], num_heads // keys.shape[1], -1).to(precision)
    scores = shared @ all_keys.transpose(2, 3) * scale
    weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
    return (weights @ all_values).reshape(1, total, num_heads, -1).to(query.dtype)


def why_no_kernels(device: torch.device) -> str:
    """The reason why a device has no kernels that read pages; "" if it has."""
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    return "" if find_spec("triton") is not None else "Triton isn't installed: run pip install triton"


_interprets = False
"""True if the kernels run on CPUs, too: in tests, by Triton's interpreter."""


def _has_kernels(tensor: Tensor) -> bool:
    """True if kernels take this tensor; they don't take the stand-ins of a traced step."""
    return (tensor.is_cuda or _interprets) and not isinstance(tensor, FakeTensor)


def _kernels() -> Any:
    from swarmllm.models.span import paged_kernels

    return paged_kernels


class PagePool:
    """Pages of all blocks of a span."""

    def __init__(
        self, shapes: Mapping[int, KeyValueShape], num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shapes` by block; `num_pages` includes page 0."""
        self.shapes, self.num_pages, self.dtype, self.device = dict(shapes), num_pages, dtype, device

        def pages(heads: int, head_dim: int) -> Tensor:
            return torch.zeros(num_pages, heads, PAGE_TOKENS, head_dim, dtype=dtype, device=device)

        self.keys = {block_idx: pages(*keys) for block_idx, (keys, _) in shapes.items()}
        self.values = {block_idx: pages(*values) for block_idx, (_, values) in shapes.items()}
        width = min(num_pages, MOST_PAGES_OF_ROW)
        self.tables = torch.zeros(min(num_pages, MOST_ROWS), width, dtype=torch.int32, device=device)
        """`[rows, pages]`: the pages of each row of a session's batch, in order."""
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._free_rows = list(range(len(self.tables) - 1, 0, -1))
        self.uses = [0] * num_pages
        """The number of users of each page."""
        self._given_back: deque[_Held] = deque()
        """Pages and rows of sessions that are gone, for `_collect`; any thread may have dropped them."""

    @property
    def num_free(self) -> int:
        """Number of pages that nobody uses."""
        self._collect()
        return len(self._free_pages)

    @property
    def page_bytes(self) -> int:
        """Memory of a page in all blocks."""
        return page_bytes(self.shapes, self.dtype)

    def take_page(self) -> int:
        """A page for one user.

        Raises:
            CacheFullError: none is left.
        """
        if not self._free_pages:
            self._collect()
        if not self._free_pages:
            raise CacheFullError(
                "all pages of this server's KV cache are in use: take another server, or a shorter text"
            )
        page = self._free_pages.pop()
        self.uses[page] = 1
        return page

    def take_rows(self, count: int) -> list[int]:
        """Some rows of the table.

        Raises:
            CacheFullError: so many aren't left; none is taken then.
        """
        if len(self._free_rows) < count:
            self._collect()
        if len(self._free_rows) < count:
            raise CacheFullError(f"this server has {len(self.tables) - 1} rows of sessions already: take another one")
        return [self._free_rows.pop() for _ in range(count)]

    def give_back_row(self, row: int) -> None:
        """Mark this row of the table as unused."""
        self._free_rows.append(row)

    def share(self, pages: Sequence[int]) -> None:
        """Count one more user of these pages."""
        for page in pages:
            self.uses[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Count one user less of each of these pages; free those without users."""
        for page in pages:
            self.uses[page] -= 1
            if not self.uses[page]:
                self._free_pages.append(page)

    def is_shared(self, page: int) -> bool:
        return self.uses[page] > 1

    def copy_page(self, page: int) -> int:
        """Replace a shared page by a copy for one user; returns its number."""
        copy = self.take_page()
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor[copy].copy_(tensor[page])
        self.drop([page])
        return copy

    def held(self, pages: Sequence[int] = ()) -> "_Held":
        """An object that notes pages; they come back when its owner is gone (`_Held.belongs_to`)."""
        return _Held(self, list(pages))

    def _collect(self) -> None:
        """Free pages and rows of sessions that are gone."""
        while self._given_back:
            held = self._given_back.popleft()
            self.drop(held.pages)
            for row, pages in held.rows:
                self.drop(pages)
                self._free_rows.append(row)


class _Held:
    """The pages and rows of one owner; they come back when the owner is gone."""

    def __init__(self, pool: PagePool, pages: list[int]) -> None:
        self.pages = pages
        self.rows: list[tuple[int, list[int]]] = []
        """(row of the table, its pages)."""
        self._given_back = pool._given_back

    def belongs_to(self, owner: object) -> None:
        """Give all back when `owner` is dropped. Any thread may drop it, so the device thread collects them later."""
        weakref.finalize(owner, self._given_back.append, self).atexit = False


class SharedPage:
    """One page of a pool, in use as long as this object exists."""

    def __init__(self, pool: PagePool, page: int) -> None:
        self.pool, self.page = pool, page
        pool.share([page])
        pool.held([page]).belongs_to(self)

    @property
    def num_bytes(self) -> int:
        return self.pool.page_bytes


class PageTable:
    """The pages of one session, for each row of its batch; all rows are of one length."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.length = 0
        """Positions that all blocks have seen."""
        self.step = 0
        """The number of changes of its length. A layer's view of a step ends with the next change."""
        self._held = pool.held()
        self._held.belongs_to(self)
        self._placed: tuple[int, int, int, Placed] | None = None
        self._numbers: tuple[int, int, int, Tensor] | None = None

    @property
    def rows(self) -> list[int]:
        """The session's rows of the pool's table."""
        return [row for row, _ in self._held.rows]

    @property
    def num_bytes(self) -> int:
        """Memory of its pages; a page that several rows share counts once."""
        return len({page for _, pages in self._held.rows for page in pages}) * self.pool.page_bytes

    def prepare(self, batch_size: int, end: int) -> None:
        """Make room for the positions `[length, end)` of each row, in pages that nobody else uses.

        Raises:
            CacheFullError: there is no room; what was there is unchanged.
        """
        if len(self._held.rows) < batch_size:
            self._held.rows += [(row, []) for row in self.pool.take_rows(batch_size - len(self._held.rows))]
        num_pages = -(-end // PAGE_TOKENS)
        if num_pages > self.pool.tables.shape[1]:
            raise CacheFullError(f"a text of {end} positions is longer than this server's table of pages")
        first, uses = self.length // PAGE_TOKENS, self.pool.uses
        for row, pages in self._held.rows:
            if len(pages) == num_pages and all(uses[page] == 1 for page in pages[first:]):
                continue  # the usual step
            try:
                for idx in range(first, min(len(pages), num_pages)):
                    if self.pool.is_shared(pages[idx]):
                        pages[idx] = self.pool.copy_page(pages[idx])
                while len(pages) < num_pages:
                    pages.append(self.pool.take_page())
            finally:  # even if there is no room: a later step may find just as many pages as it needs
                self._write(row, pages, first)

    def append_shared(self, page: SharedPage) -> None:
        """Continue a session of one row with another session's page, in place of its own page with the same
        beginning."""
        self.prepare(1, self.length)
        ((row, pages),) = self._held.rows
        self.pool.drop(pages[self.length // PAGE_TOKENS :])
        del pages[self.length // PAGE_TOKENS :]
        self.pool.share([page.page])
        pages.append(page.page)
        self._write(row, pages, len(pages) - 1)

    def shared_page(self, idx: int) -> SharedPage:
        """One full page of a session of one row, for other sessions."""
        return SharedPage(self.pool, self._held.rows[0][1][idx])

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more positions that all blocks have seen; fewer if it is negative."""
        self.length += num_tokens
        self.step += 1
        num_pages = -(-self.length // PAGE_TOKENS)
        if num_tokens < 0:
            for _, pages in self._held.rows:
                self.pool.drop(pages[num_pages:])
                del pages[num_pages:]

    def forget_step(self) -> None:
        """Begin a step again that failed after some blocks have seen it; it overwrites their keys and values."""
        self.step += 1

    def select(self, indices: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order; they share pages until one of them goes on.

        Raises:
            CacheFullError: there are no rows for so many; nothing has changed then.
        """
        old = self._held.rows
        chosen = [list(old[idx][1]) for idx in indices]
        more = self.pool.take_rows(max(0, len(chosen) - len(old)))
        for pages in chosen:
            self.pool.share(pages)
        rows = [row for row, _ in old] + more
        for _, pages in old:
            self.pool.drop(pages)
        for row in rows[len(chosen) :]:
            self.pool.give_back_row(row)
        self._held.rows = list(zip(rows, chosen, strict=False))
        for row, pages in self._held.rows:
            self._write(row, pages, 0)
        self.step += 1
        self._placed = None

    def placed(self, num_tokens: int) -> Placed:
        """The places of the next `num_tokens` of each row, row after row."""
        key = self.step, len(self._held.rows), num_tokens
        if self._placed is None or self._placed[:3] != key:
            positions = range(self.length, self.length + num_tokens)
            pairs = [(row, position) for row in self.rows for position in positions]
            self._placed = (*key, Placed.of(pairs, self.pool.device))
        return self._placed[3]

    def gather(self, tensor: Tensor, start: int, end: int) -> Tensor:
        """`[rows, heads, end - start, head]` of a block's keys or values."""
        first = start // PAGE_TOKENS
        found = tensor[self._pages(first, -(-end // PAGE_TOKENS))].transpose(1, 2)
        return found.reshape(*found.shape[:2], -1, found.shape[-1]).narrow(2, start - first * PAGE_TOKENS, end - start)

    def _pages(self, first: int, end: int) -> Tensor:
        """`[rows, end - first]`: numbers of pages on the device, copied once for blocks in a row that see the same."""
        key = self.step, first, end
        if self._numbers is None or self._numbers[:3] != key:
            numbers = torch.tensor([pages[first:end] for _, pages in self._held.rows])
            self._numbers = (*key, numbers.to(self.pool.device, non_blocking=True))
        return self._numbers[3]

    def _write(self, row: int, pages: Sequence[int], first: int) -> None:
        """Write the numbers of a row's pages to the device, from page `first` on."""
        self._numbers = None
        if len(pages) > first:
            self.pool.tables[row, first : len(pages)] = torch.tensor(pages[first:], dtype=torch.int32)


class PagedLayer(DynamicLayer):
    """A block's keys and values in pages, for the model's own attention: a cache layer that returns copies of them.

    It serves blocks with a sliding window as well: nothing is dropped, but it returns only what the window shows.
    """

    def __init__(self, table: PageTable, block_idx: int, window: int = 0) -> None:
        """`window`: positions that the block sees, its own included; 0: all."""
        super().__init__()
        self.table, self.block_idx = table, block_idx
        self.is_sliding = bool(window)
        self.sliding_window = window
        self._step, self._new = -1, 0

    @property
    def length(self) -> int:
        """Positions that this block has seen: perhaps one step more than other blocks."""
        return self.table.length + (self._new if self._step == self.table.step else 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, new, head]`; return all keys and values that a query may see."""
        table, pool = self.table, self.table.pool
        batch_size, new, start = key_states.shape[0], key_states.shape[-2], self.table.length
        table.prepare(batch_size, start + new)
        self.is_initialized, self._step, self._new = True, table.step, new
        keys, values = pool.keys[self.block_idx], pool.values[self.block_idx]
        flat = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (key_states, value_states))
        write_pages(keys, values, pool.tables, table.placed(new), *flat)
        if not start:
            return key_states, value_states
        first = max(0, start - self.sliding_window + 1) if self.is_sliding else 0
        return table.gather(keys, first, start + new), table.gather(values, first, start + new)

    def part(self, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Copies of the keys and values of positions `[start, end)`; None if this block keeps none of its own."""
        pool = self.table.pool
        keys, values = pool.keys[self.block_idx], pool.values[self.block_idx]
        return self.table.gather(keys, start, end), self.table.gather(values, start, end)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that `update` will return."""
        length = self.table.length
        first = max(0, length - self.sliding_window + 1) if self.is_sliding else 0
        return length - first + query_length, first

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: the table forgets positions for all blocks at once (`SpanCache.rollback`)."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do nothing: the table selects rows for all blocks at once (`SpanCache.select_batch`)."""


def page_bytes(shapes: Mapping[int, KeyValueShape], dtype: torch.dtype) -> int:
    """Memory of a page in all blocks."""
    numbers = sum(heads * head_dim for pair in shapes.values() for heads, head_dim in pair)
    return PAGE_TOKENS * numbers * dtype.itemsize
