"""Triton kernels for `fused_step`: the operations of a Llama-like block.

For several positions, torch computes the matrix products, and these kernels all other operations except attention. For
one position, they compute matrix products as well.

    _normalize   RMS norm
    _rotate      rotation of queries and keys, after their own norm if they have one; writes keys and values to pages
    _gate        silu(gate) * up
    _multiply    a weight times one position; optionally the norm before it, and the gate or the residual after it

They round where transformers' own code rounds, so results differ only by the order of sums. Imported only where there
is CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_COLUMNS = 1024
MULTIPLY_TILE = (4, 1024, 4)
"""Rows and columns of the weight that a program reads at a time, and warps: the best of seven for 4096 x 4096 to 11008
on an H200."""


@triton.jit
def _normalize(X, G, Y, eps, K: tl.constexpr, KP: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    x = tl.load(X + row * K + k, mask=k < K, other=0.0)
    f = x.to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(f * f, 0) / K + eps)
    y = tl.load(G + k, mask=k < K, other=0.0) * (f * r).to(x.dtype)
    tl.store(Y + row * K + k, y, mask=k < K)


@triton.jit
def _rotated(X, G, COS, SIN, eps, d, other, real, turned, sign, D: tl.constexpr, NORM: tl.constexpr):
    """Rotate one head. If NORM, normalize it first."""
    x = tl.load(X + d, mask=real, other=0.0)
    y = tl.load(X + other, mask=real, other=0.0)
    if NORM:
        f = x.to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(f * f, 0) / D + eps)
        x = tl.load(G + d, mask=real, other=0.0) * (f * r).to(x.dtype)
        y = tl.load(G + other, mask=real, other=0.0) * (y.to(tl.float32) * r).to(y.dtype)
    cos = tl.load(COS + d, mask=turned, other=1.0)
    sin = tl.load(SIN + d, mask=turned, other=0.0)
    return x * cos + (y.to(tl.float32) * sign).to(x.dtype) * sin


@triton.jit
def _rotate(
    Q, K, V, COS, SIN, GQ, GK, PAGES_K, PAGES_V, TABLES, ROWS, POSITIONS, Y,
    eps, table_width, q_token, k_token, v_token, cos_token,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """HQ heads of queries, H of keys; the first R of the D numbers of each head are rotated."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DP)
    real, turned = d < D, d < R
    other = tl.where(d < R // 2, d + R // 2, tl.where(turned, d - R // 2, d))
    sign = tl.where(d < R // 2, -1.0, 1.0)
    cos, sin = COS + token * cos_token, SIN + token * cos_token
    if head < HQ:
        q = _rotated(Q + token * q_token + head * D, GQ, cos, sin, eps, d, other, real, turned, sign, D, NORM)
        tl.store(Y + (token * HQ + head) * D + d, q, mask=real)
    else:
        head -= HQ
        k = _rotated(K + token * k_token + head * D, GK, cos, sin, eps, d, other, real, turned, sign, D, NORM)
        position = tl.load(POSITIONS + token)
        row = tl.load(ROWS + token).to(tl.int64)
        page = tl.load(TABLES + row * table_width + position // PAGE).to(tl.int64)
        at = ((page * H + head) * PAGE + position % PAGE) * D
        tl.store(PAGES_K + at + d, k, mask=real)
        v = tl.load(V + token * v_token + head * D + d, mask=real, other=0.0)
        tl.store(PAGES_V + at + d, v, mask=real)


@triton.jit
def _silu(x):
    f = x.to(tl.float32)
    return (f / (1.0 + tl.exp(-f))).to(x.dtype)


@triton.jit
def _gate(G, U, Y, g_row, u_row, N, BN: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    g = tl.load(G + row * g_row + n, mask=n < N, other=0.0)
    u = tl.load(U + row * u_row + n, mask=n < N, other=0.0)
    tl.store(Y + row * N + n, _silu(g) * u, mask=n < N)


@triton.jit
def _multiply(
    X, G, W, B, R, Y, N, eps, K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Y[N] = W[N, K] @ norm(X); GATED: rows N.. of W are "up", and Y = silu(gate) * up."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    there = rows < N
    r = 1.0
    if NORM:
        kk = tl.arange(0, KP)
        whole = tl.load(X + kk, mask=kk < K, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / K + eps)
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    at = W + rows.to(tl.int64)[:, None] * K
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        x = tl.load(X + ks, mask=ks < K, other=0.0)
        if NORM:
            g = tl.load(G + ks, mask=ks < K, other=0.0)
            x = g * (x.to(tl.float32) * r).to(x.dtype)
        f = x.to(tl.float32)
        ok = there[:, None] & (ks[None, :] < K)
        acc += tl.load(at + ks[None, :], mask=ok, other=0.0).to(tl.float32) * f[None, :]
        if GATED:
            up += tl.load(at + N * K + ks[None, :], mask=ok, other=0.0).to(tl.float32) * f[None, :]
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(B + rows, mask=there, other=0.0).to(tl.float32)
    y = total.to(Y.dtype.element_ty)
    if GATED:
        total = tl.sum(up, 1)
        if BIAS:
            total += tl.load(B + N + rows, mask=there, other=0.0).to(tl.float32)
        y = _silu(y) * total.to(Y.dtype.element_ty)
    if RESIDUAL:
        y = tl.load(R + rows, mask=there, other=0.0) + y
    tl.store(Y + rows, y, mask=there)


def normalize(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of `[total, hidden]`."""
    size = inputs.shape[-1]
    output = torch.empty_like(inputs)
    _normalize[(len(inputs),)](inputs, weight, output, eps, size, triton.next_power_of_2(size), num_warps=8)
    return output


def rotate(
    states: tuple[Tensor, Tensor, Tensor],
    cos_sin: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    pages: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotate queries and keys, and write keys and values to the pages. Returns the queries `[total, heads, head]`.

    `states`: queries, keys and values, each `[total, heads * head]`. `cos_sin`: each `[total, rotated]`. `norms`: the
    weights of the norms of queries' and keys' heads, and epsilon. `pages`: keys, values and the table of pages.
    `places`: the table's row for each token, and the token's position in that row.
    """
    query, key, value = states
    keys, values, tables = pages
    heads, page_tokens, head_dim = keys.shape[1:]
    num_heads, total = query.shape[1] // head_dim, len(query)
    output = torch.empty(total, num_heads, head_dim, dtype=query.dtype, device=query.device)
    cos, sin = cos_sin
    of_query, of_key, eps = norms or (query, key, 0.0)
    _rotate[(total, num_heads + heads)](
        query, key, value, cos, sin, of_query, of_key, keys, values, tables, *places, output,
        eps, tables.shape[1], query.stride(0), key.stride(0), value.stride(0), cos.stride(0),
        num_heads, heads, head_dim, triton.next_power_of_2(head_dim), cos.shape[-1], page_tokens, norms is not None,
        num_warps=1,
    )  # fmt: skip
    return output


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gate) * up of `[total, inner]`."""
    total, size = gates.shape
    output = torch.empty(total, size, dtype=gates.dtype, device=gates.device)
    grid = total, triton.cdiv(size, GATE_COLUMNS)
    _gate[grid](gates, ups, output, gates.stride(0), ups.stride(0), size, GATE_COLUMNS, num_warps=4)
    return output


def multiply(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """`[1, out]`: the product of one position with `weight` `[out, in]`.

    `gated`: `weight` `[2 * out, in]` holds the rows of gate, then those of up. The result is silu(gate) * up.
    """
    num_rows, size = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    output = torch.empty(1, num_rows, dtype=inputs.dtype, device=inputs.device)
    of_norm, eps = norm or (inputs, 0.0)
    rows, columns, warps = MULTIPLY_TILE
    _multiply[(triton.cdiv(num_rows, rows),)](
        inputs, of_norm, weight, inputs if bias is None else bias, inputs if residual is None else residual, output,
        num_rows, eps, size, triton.next_power_of_2(size), rows, columns,
        norm is not None, bias is not None, residual is not None, gated,
        num_warps=warps,
    )  # fmt: skip
    return output
