"""Keys and values in pages: where new ones go, writing them, and attention to them.

On CUDA the work is done by the kernels of `paged_kernels`; the functions here say the same in plain torch, for other
devices, for tests, and for looking whether a step needs the host (`decode_graphs`). Used by `page_pool` and
`paged_attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

TILE_QUERIES = 64
"""Queries (positions times heads that share keys) of a longer call that attend together. Assumed."""


@dataclass(eq=False, slots=True)
class Placed:
    """Where new positions go, on the device."""

    rows: Tensor
    """`[total]` int64: the row of the pool's table."""
    positions: Tensor
    """`[total]` int64: the place in that row."""
    num_short: int
    """The first ones, of calls with few positions."""
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
        """For (row, position) of each; one copy to the device."""
        both = torch.tensor(pairs).t().contiguous().to(device, non_blocking=True)
        return cls(both[0], both[1], len(pairs) if num_short is None else num_short, long_calls)

    def tiles(self, num_shared: int) -> Tensor | None:
        """`[tiles, 2]` int32: (first, number) of positions of long calls that attend together."""
        if num_shared not in self._tiles:
            self._tiles[num_shared] = self._new_tiles(max(1, TILE_QUERIES // num_shared))
        return self._tiles[num_shared]

    def _new_tiles(self, size: int) -> Tensor | None:
        tiles = [
            (first, min(size, start + number - first))
            for start, number in self.long_calls
            for first in range(start, start + number, size)
        ]
        return torch.tensor(tiles, dtype=torch.int32).to(self.rows.device, non_blocking=True) if tiles else None


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
    """Attention of `query` `[1, heads, total, head]`, of each to its own session up to itself.

    Returns `[1, total, heads, head]`.
    """
    if _has_kernels(query):
        tiles = placed.tiles(query.shape[1] // keys.shape[1])
        places = placed.rows, placed.positions
        pages = keys, values, tables
        output: Tensor = _kernels().attend_pages(query, pages, places, placed.num_short, tiles, scale, window)
        return output
    return attend_in_torch(query, keys, values, tables, placed, scale, window)


def attend_in_torch(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, placed: Placed, scale: float, window: int
) -> Tensor:
    """The same in plain torch, with all pages that there may be."""
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
    """Why a device has no kernels that read pages; "" if it has."""
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    return "" if find_spec("triton") is not None else "Triton isn't installed: run pip install triton"


_interprets = False
"""Whether the kernels run on CPUs too: in tests, by Triton's interpreter."""


def _has_kernels(tensor: Tensor) -> bool:
    """Whether there are kernels for it: not for a tensor that stands for one when a step is traced."""
    return (tensor.is_cuda or _interprets) and not isinstance(tensor, FakeTensor)


def _kernels() -> Any:
    from swarmllm.models.span import paged_kernels

    return paged_kernels
