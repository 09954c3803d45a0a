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

from swarmllm.models.quantization import cuda
from swarmllm.models.quantization.cuda import Matrix
from swarmllm.models.quantization.cuda_products import wait_for_inputs

GATE_COLUMNS = 1024


@triton.jit
def _normalize(X, G, Y, eps, K: tl.constexpr, KP: tl.constexpr, starts_early: tl.constexpr):
    wait_for_inputs(starts_early)
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
    NORM: tl.constexpr, starts_early: tl.constexpr,
):  # fmt: skip
    """HQ heads of queries, H of keys; the first R of the D numbers of each head are rotated."""
    wait_for_inputs(starts_early)
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
def _gate(G, U, Y, g_row, u_row, N, BN: tl.constexpr, starts_early: tl.constexpr):
    wait_for_inputs(starts_early)
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    g = tl.load(G + row * g_row + n, mask=n < N, other=0.0)
    u = tl.load(U + row * u_row + n, mask=n < N, other=0.0)
    tl.store(Y + row * N + n, _silu(g) * u, mask=n < N)


@triton.jit
def _codes(W, row, k, there, K: tl.constexpr, PB: tl.constexpr, NG: tl.constexpr, H: tl.constexpr):
    """`[BN, NG, H]`: some bytes of weights from column k on, as groups."""
    at = k // PB + tl.arange(0, NG)[:, None] * H + tl.arange(0, H)[None, :]
    ok = there[:, None, None] & (at < K // PB)[None]
    return tl.load(W + row[:, None, None] * (K // PB) + at[None], mask=ok, other=0.0)


@triton.jit
def _inputs(X, G, at, r, K: tl.constexpr, NORM: tl.constexpr):
    """Inputs in float32, normalized if NORM."""
    x = tl.load(X + at, mask=at < K, other=0.0)
    if NORM:
        x = tl.load(G + at, mask=at < K, other=0.0) * (x.to(tl.float32) * r).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _floats(codes, table, DECODE: tl.constexpr):
    """Codes of one in a byte, or whole weights, in float32."""
    if DECODE != "":
        return tl.inline_asm_elementwise(DECODE, "=r,=r,=r,=r,r", [codes], dtype=tl.float32, is_pure=True, pack=4)
    else:
        return codes.to(tl.float32)


@triton.jit
def _halves(codes, table, DECODE: tl.constexpr, HIGH_FIRST: tl.constexpr, dtype: tl.constexpr):
    """The values of the two codes in each byte, in float32."""
    if DECODE != "":
        pairs = tl.inline_asm_elementwise(DECODE, "=r,=r,=r,=r,r", [codes], dtype=tl.uint32, is_pure=True, pack=4)
        first = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        second = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    else:
        first = tl.load(table + (codes >> 4 if HIGH_FIRST else codes & 15).to(tl.int32))
        second = tl.load(table + (codes & 15 if HIGH_FIRST else codes >> 4).to(tl.int32))
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _of_groups(at, row, group, there, exists, GROUPS: tl.constexpr):
    """`[BN, NG, 1]`: scales of groups, or what else there is one of for each."""
    ok = there[:, None] & exists[None, :]
    return tl.load(at + row[:, None] * GROUPS + group[None, :], mask=ok, other=0.0).to(tl.float32)[:, :, None]


@triton.jit
def _add_products(
    sums, codes, X, G, S, Z, L, table, r, row, k, there, dtype: tl.constexpr,
    K: tl.constexpr, PB: tl.constexpr, NG: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, DECODE: tl.constexpr,
    HIGH_FIRST: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """`sums` `[BN, NG, H]` and the products of these codes with the inputs from column k on."""
    at = k + (tl.arange(0, NG)[:, None] * H + tl.arange(0, H)[None, :]) * PB
    x = _inputs(X, G, at, r, K, NORM)[None]
    begin = k + tl.arange(0, NG) * (H * PB)
    group, exists = begin // GROUP, begin < K
    if ZERO:
        zero = _of_groups(Z, row, group, there, exists, K // GROUP)
    if PB == 2:
        first, second = _halves(codes, table, DECODE, HIGH_FIRST, dtype)
        y = _inputs(X, G, at + 1, r, K, NORM)[None]
        if ZERO:
            first -= zero
            second -= zero
        products = first * x + second * y
        x += y
    else:
        weights = _floats(codes, table, DECODE)
        if ZERO:
            weights -= zero
        products = weights * x
    if SCALED:
        sums += products * _of_groups(S, row, group, there, exists, K // GROUP)
    else:
        sums += products
    if LEAST:
        sums += _of_groups(L, row, group, there, exists, K // GROUP) * x
    return sums


@triton.jit
def _total(
    sums, S, F, B, row, there, SCALED: tl.constexpr, BY_ROW: tl.constexpr, FACTOR: tl.constexpr,
    DIVIDES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`[BN]`: the complete sums."""
    total = tl.sum(tl.sum(sums, 2), 1)
    if BY_ROW:
        total *= tl.load(S + row, mask=there, other=0.0).to(tl.float32)
    if FACTOR:
        factor = tl.load(F + row, mask=there, other=1.0).to(tl.float32)
        total = total / factor if DIVIDES else total * factor
    if BIAS:
        total += tl.load(B + row, mask=there, other=0.0).to(tl.float32)
    return total


@triton.jit
def _multiply(
    X, G, W, S, Z, L, F, table, B, R, Y, N, eps,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, NG: tl.constexpr, H: tl.constexpr, PB: tl.constexpr,
    GROUP: tl.constexpr, DECODE: tl.constexpr, HIGH_FIRST: tl.constexpr, SCALED: tl.constexpr, BY_ROW: tl.constexpr,
    ZERO: tl.constexpr, LEAST: tl.constexpr, FACTOR: tl.constexpr, DIVIDES: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, starts_early: tl.constexpr,
):  # fmt: skip
    """Y[N] = W[N, K] @ norm(X); GATED: rows N.. of W are "up", and Y = silu(gate) * up.

    A program reads BN rows of W, NG times H bytes of each at a time; PB weights are in a byte, or in what is stored.
    """
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    there, row = rows < N, rows.to(tl.int64)
    BK: tl.constexpr = NG * H * PB
    codes = _codes(W, row, 0, there, K, PB, NG, H)
    if GATED:
        up_codes = _codes(W, row + N, 0, there, K, PB, NG, H)
    wait_for_inputs(starts_early)
    dtype: tl.constexpr = X.dtype.element_ty
    r = 1.0
    if NORM:
        kk = tl.arange(0, KP)
        whole = tl.load(X + kk, mask=kk < K, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / K + eps)
    sums = _add_products(
        tl.zeros([BN, NG, H], tl.float32), codes, X, G, S, Z, L, table, r, row, 0, there, dtype,
        K, PB, NG, H, GROUP, DECODE, HIGH_FIRST, NORM, SCALED, ZERO, LEAST,
    )  # fmt: skip
    if GATED:
        ups = _add_products(
            tl.zeros([BN, NG, H], tl.float32), up_codes, X, G, S, Z, L, table, r, row + N, 0, there, dtype,
            K, PB, NG, H, GROUP, DECODE, HIGH_FIRST, NORM, SCALED, ZERO, LEAST,
        )  # fmt: skip
    for k in range(BK, K, BK):
        more = _codes(W, row, k, there, K, PB, NG, H)
        if GATED:
            more_ups = _codes(W, row + N, k, there, K, PB, NG, H)
        sums = _add_products(
            sums, more, X, G, S, Z, L, table, r, row, k, there, dtype,
            K, PB, NG, H, GROUP, DECODE, HIGH_FIRST, NORM, SCALED, ZERO, LEAST,
        )  # fmt: skip
        if GATED:
            ups = _add_products(
                ups, more_ups, X, G, S, Z, L, table, r, row + N, k, there, dtype,
                K, PB, NG, H, GROUP, DECODE, HIGH_FIRST, NORM, SCALED, ZERO, LEAST,
            )  # fmt: skip
    y = _total(sums, S, F, B, row, there, SCALED, BY_ROW, FACTOR, DIVIDES, BIAS).to(dtype)
    if GATED:
        y = _silu(y) * _total(ups, S, F, B, row + N, there, SCALED, BY_ROW, FACTOR, DIVIDES, BIAS).to(dtype)
    if RESIDUAL:
        y = tl.load(R + rows, mask=there, other=0.0) + y
    tl.store(Y + rows, y, mask=there)


def normalize(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of `[total, hidden]`."""
    size = inputs.shape[-1]
    output = torch.empty_like(inputs)
    _normalize[(len(inputs),)](
        inputs, weight, output, eps, size, triton.next_power_of_2(size), num_warps=8, **cuda.starts_early(inputs)
    )
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
        num_warps=1, **cuda.starts_early(query),
    )  # fmt: skip
    return output


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gate) * up of `[total, inner]`."""
    total, size = gates.shape
    output = torch.empty(total, size, dtype=gates.dtype, device=gates.device)
    grid = total, triton.cdiv(size, GATE_COLUMNS)
    _gate[grid](
        gates, ups, output, gates.stride(0), ups.stride(0), size, GATE_COLUMNS, num_warps=4, **cuda.starts_early(gates)
    )
    return output


def multiply(
    inputs: Tensor,
    weight: Tensor | Matrix,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """`[1, out]`: the product of one position with `weight` `[out, in]`.

    `gated`: `weight` `[2 * out, in]` holds the rows of gate, then those of up. The result is silu(gate) * up. `tile`:
    rows, columns and warps of a program, to compare.
    """
    matrix = weight if isinstance(weight, Matrix) else None
    codes = weight if isinstance(weight, Tensor) else weight.codes
    per_byte = 1 if matrix is None else matrix.per_byte
    num_rows, size = codes.shape[0] // (2 if gated else 1), codes.shape[1] * per_byte
    rows, columns, warps = tile or _tile_of(codes, matrix, gated)
    group = size if matrix is None or matrix.scales_outputs else matrix.group
    together = columns if group == size else min(columns, group & -group)
    given = (None,) * 4 if matrix is None else (matrix.scale, matrix.zero, matrix.least, matrix.factor)
    is_by_row = matrix is not None and group == size and matrix.least is None
    scale, zero, least, factor = parts = [None if part is None else part.contiguous() for part in given]
    table = None if matrix is None else cuda.table_of(matrix, inputs)
    output = torch.empty(1, num_rows, dtype=inputs.dtype, device=inputs.device)
    of_norm, eps = norm or (None, 0.0)
    _multiply[(triton.cdiv(num_rows, rows),)](
        inputs, of_norm, codes.contiguous(), *parts, table, bias, residual, output, num_rows, eps,
        size, triton.next_power_of_2(size), rows, columns // together, together // per_byte, per_byte,
        group, _instructions(codes, matrix, inputs), matrix is not None and matrix.high_first,
        scale is not None and not is_by_row, is_by_row,
        zero is not None, least is not None, factor is not None, matrix is not None and matrix.divides,
        norm is not None, bias is not None, residual is not None, gated,
        num_warps=warps, **cuda.starts_early(inputs),
    )  # fmt: skip
    return output


def _tile_of(codes: Tensor, matrix: Matrix | None, gated: bool) -> tuple[int, int, int]:
    """Rows and columns of the weight that a program reads at a time, and warps.

    The best of 15 on an H200 for 12288, 4096 and 2 × 11008 rows of 4096, and 4096 of 11008.
    """
    if matrix is None:
        return 4, 1024, 4
    is_short = gated if matrix.scales_outputs else len(codes) >= cuda.MANY_ROWS
    return 8, 512 if is_short else 1024, 4


def _instructions(codes: Tensor, matrix: Matrix | None, inputs: Tensor) -> str:
    """Instructions that decode what is stored; "": none are needed, or a table is read."""
    if matrix is None or matrix.values is not None:
        return "" if matrix is None else cuda.instructions_for(matrix, inputs)
    return cuda.bytes_to_floats(codes)
