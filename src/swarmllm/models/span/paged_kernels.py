"""Triton kernels of `page_pool`: keys and values written to pages, and attention to them.

    _write      writes each new position's keys and values to its place
    _attend     some queries of one session that share keys, and some of its pages: flash attention
    _join       joins the results of all groups of pages of one query

For a single position, SPLITS programs for each head of keys attend to some of the session's pages each. The split
depends on the session's length alone. Longer calls attend in tiles of queries. Imported only where there is CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from swarmllm.models.quantization.cuda import starts_early
from swarmllm.models.quantization.cuda_products import wait_for_inputs

Places = tuple[Tensor, Tensor]
"""The row of the table, and the position in it, of each new position."""
LEAST = -1e30
"""Used instead of minus infinity, because the difference of two infinities is NaN."""
KEYS_OF_TILE = 32
"""Keys that a program reads at a time for a single position; twice as many for a tile of queries. Assumed."""
LARGE_KEY_BYTES = 256
"""Larger keys are read fewer at a time: the multiprocessor's shared memory must hold them twice, with the queries."""
PROGRAMS = 256
"""Programs wanted for a single session: about two for each multiprocessor of a large GPU."""


@triton.jit
def _write(
    K, V, NEW_K, NEW_V, TABLES, ROWS, POSITIONS,
    table_width, k_head, k_token, v_head, v_token,
    H: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    starts_early: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(starts_early)
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(POSITIONS + token)
    row = tl.load(ROWS + token).to(tl.int64)
    page = tl.load(TABLES + row * table_width + position // PAGE).to(tl.int64)
    at = (page * H + head) * PAGE + position % PAGE
    dk, dv = tl.arange(0, DKP), tl.arange(0, DVP)
    token = token.to(tl.int64)
    key = tl.load(NEW_K + head * k_head + token * k_token + dk, mask=dk < DK, other=0.0)
    tl.store(K + at * DK + dk, key.to(K.dtype.element_ty), mask=dk < DK)
    value = tl.load(NEW_V + head * v_head + token * v_token + dv, mask=dv < DV, other=0.0)
    tl.store(V + at * DV + dv, value.to(V.dtype.element_ty), mask=dv < DV)


@triton.jit
def _is_visible(key, query, end, WINDOW: tl.constexpr):
    """True where the query at one position sees the key at another."""
    visible = (key <= query) & (key < end)
    if WINDOW > 0:
        visible = visible & (key > query - WINDOW)
    return visible


@triton.jit
def _attend(
    Q, K, V, TABLES, ROWS, POSITIONS, TILES, Y, PART, TOP, SUM,
    scale, table_width, q_head, q_token,
    H: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    TILED: tl.constexpr, START: tl.constexpr, starts_early: tl.constexpr,
):  # fmt: skip
    """H heads of keys, G of queries for each; BM queries at a time, BN keys."""
    wait_for_inputs(starts_early)
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, number = tile, 1
    if TILED:
        first, number = tl.load(TILES + 2 * tile), tl.load(TILES + 2 * tile + 1)
    start, row = tl.load(POSITIONS + first), tl.load(ROWS + first).to(tl.int64)
    m = tl.arange(0, BM)
    token, query_head, real = m // G, head * G + m % G, m // G < number
    dk, dv, n = tl.arange(0, DKP), tl.arange(0, DVP), tl.arange(0, BN)
    at_query = (first + token).to(tl.int64) * q_token + query_head * q_head
    q = tl.load(Q + at_query[:, None] + dk[None, :], mask=real[:, None] & (dk < DK)[None, :], other=0.0)
    position, end = start + token, start + number
    low = tl.maximum(start - WINDOW + 1, 0) // BN if WINDOW > 0 else 0
    tiles = tl.cdiv(end, BN) - low
    per_split = tl.cdiv(tiles, SPLITS)
    top, total = tl.full([BM], START, tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DVP], tl.float32)
    for i in range(low + split * per_split, low + tl.minimum((split + 1) * per_split, tiles)):
        j = i * BN + n
        page = tl.load(TABLES + row * table_width + (i * BN) // PAGE).to(tl.int64)
        at = (page * H + head) * PAGE + (i * BN) % PAGE + n
        there = j < end
        k = tl.load(K + at[None, :] * DK + dk[:, None], mask=there[None, :] & (dk < DK)[:, None], other=0.0)
        x = tl.dot(q, k, input_precision="ieee") * scale
        x = tl.where(_is_visible(j[None, :], position[:, None], end, WINDOW), x, -float("inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        p = tl.exp(x - new_top[:, None])
        fade = tl.exp(top - new_top)
        v = tl.load(V + at[:, None] * DV + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(p, 1)
        top = new_top
    at_result = (first + token).to(tl.int64) * (H * G) + query_head
    wide = real[:, None] & (dv < DV)[None, :]
    if SPLITS == 1:
        y = (acc / total[:, None]).to(Y.dtype.element_ty)
        tl.store(Y + at_result[:, None] * DV + dv[None, :], y, mask=wide)
    else:
        at_part = at_result * SPLITS + split
        tl.store(PART + at_part[:, None] * DVP + dv[None, :], acc, mask=wide)
        tl.store(TOP + at_part, top, mask=real)
        tl.store(SUM + at_part, total, mask=real)


@triton.jit
def _join(PART, TOP, SUM, Y, DV: tl.constexpr, DVP: tl.constexpr, SPLITS: tl.constexpr, starts_early: tl.constexpr):
    wait_for_inputs(starts_early)
    at = tl.program_id(0).to(tl.int64)
    d, split = tl.arange(0, DVP), tl.arange(0, SPLITS)
    top = tl.load(TOP + at * SPLITS + split)
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(SUM + at * SPLITS + split) * weight, 0)
    part = tl.load(PART + (at * SPLITS + split)[:, None] * DVP + d[None, :])
    y = tl.sum(part * weight[:, None], 0) / total
    tl.store(Y + at * DV + d, y.to(Y.dtype.element_ty), mask=d < DV)


def write_pages(
    keys: Tensor, values: Tensor, tables: Tensor, places: Places, new_keys: Tensor, new_values: Tensor
) -> None:
    """Write new keys and values `[1, heads, total, head]` to their places."""
    heads, page_tokens, key_dim = keys.shape[1:]
    value_dim = values.shape[-1]
    new_keys, new_values = _last_axis_whole(new_keys), _last_axis_whole(new_values)
    _write[(new_keys.shape[2], heads)](
        keys, values, new_keys, new_values, tables, *places,
        tables.shape[1], *new_keys.stride()[1:3], *new_values.stride()[1:3],
        heads, key_dim, _padded(key_dim), value_dim, _padded(value_dim), page_tokens,
        num_warps=1, **starts_early(keys),
    )  # fmt: skip


def attend_pages(
    query: Tensor,
    pages: tuple[Tensor, Tensor, Tensor],
    places: Places,
    num_short: int,
    tiles: tuple[Tensor | None, int],
    scale: float,
    window: int,
) -> Tensor:
    """Attention of `query` `[1, heads, total, head]`, of each to its own session up to itself.

    `pages` are keys, values and table; the first `num_short` attend each by itself, the others in `tiles`
    `[tiles, 2]`, given with the most positions of a tile. Returns `[1, total, heads, head]`.
    """
    num_heads, total = query.shape[1:3]
    output = torch.empty(1, total, num_heads, pages[1].shape[-1], dtype=query.dtype, device=query.device)
    query = _last_axis_whole(query)
    if num_short:
        _attend_each(query, pages, places, num_short, output, scale, window)
    of_tiles, tokens = tiles
    if of_tiles is not None:
        none = (output,) * 3
        _launch(
            query, pages, places, of_tiles, output, none, scale, window, grid=len(of_tiles), splits=1, tokens=tokens
        )
    return output


def num_splits(num_key_heads: int) -> int:
    """Programs for the keys of one head, for one position: the same number in any company."""
    return max(8, min(32, int(triton.next_power_of_2(PROGRAMS // num_key_heads))))


def _attend_each(
    query: Tensor,
    pages: tuple[Tensor, Tensor, Tensor],
    places: Places,
    num_short: int,
    output: Tensor,
    scale: float,
    window: int,
) -> None:
    """Attention of the positions of short calls, each by itself."""
    num_heads, value_dim, splits = query.shape[1], output.shape[-1], num_splits(pages[0].shape[1])
    shape = num_short * num_heads, splits
    part = torch.empty(*shape, _padded(value_dim), dtype=torch.float32, device=query.device)
    top, total = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    parts = part, top, total
    _launch(query, pages, places, places[0], output, parts, scale, window, grid=num_short, splits=splits)
    _join[(num_short * num_heads,)](
        *parts, output, value_dim, _padded(value_dim), splits, num_warps=1, **starts_early(query)
    )


def _launch(
    query: Tensor,
    pages: tuple[Tensor, Tensor, Tensor],
    places: Places,
    tiles: Tensor,
    output: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    scale: float,
    window: int,
    *,
    grid: int,
    splits: int,
    tokens: int = 1,
) -> None:
    keys, _, tables = pages
    heads, page_tokens, key_dim = keys.shape[1:]
    shared, value_dim = query.shape[1] // heads, output.shape[-1]
    is_tiled = splits == 1
    is_large = _padded(key_dim) * keys.element_size() > LARGE_KEY_BYTES
    num_keys = KEYS_OF_TILE * (2 if is_tiled and not is_large else 1)
    _attend[(grid, heads, splits)](
        query, *pages, *places, tiles, output, *parts,
        scale, tables.shape[1], *query.stride()[1:3],
        heads, shared, key_dim, _padded(key_dim), value_dim, _padded(value_dim),
        page_tokens, max(16, triton.next_power_of_2(tokens * shared)), num_keys, splits, window,
        is_tiled, LEAST,
        num_warps=4, num_stages=1 if is_large else 2, **starts_early(query),
    )  # fmt: skip


def _padded(size: int) -> int:
    """The next size that `tl.dot` takes."""
    return max(16, int(triton.next_power_of_2(size)))


def _last_axis_whole(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
