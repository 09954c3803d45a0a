"""One product for all packed formats on CUDA: a few inputs by codes that are decoded where they are multiplied.

Launched by `cuda` alone, which imports this module when there is something to multiply: Triton is no dependency of
machines without CUDA. The kernel reads each code once for every 16 or 32 inputs. It waits for no number from the GPU,
so a CUDA graph can hold it. What one input gives doesn't depend on the others: its sums are in the order of columns.

    codes     one in a byte (int8, uint8, float8), or two, whose values are `first`, `first + 1`, … or in a table
    one scale a row, and nothing else    multiplied with the outputs: the codes are exact in 16 bits
    otherwise                            (code - zero) * scale + least in float32, rounded to the inputs' dtype
"""

import triton
import triton.language as tl


@triton.jit
def _of_groups(numbers, at, exists, rows: tl.constexpr, groups: tl.constexpr, columns: tl.constexpr):
    """Numbers of groups `[rows, groups]`, each for all of its columns: `[rows, columns]` in float32."""
    found = tl.load(numbers + at, mask=exists, other=0.0).to(tl.float32)
    if groups == 1:
        return tl.broadcast_to(found, (rows, columns))
    return tl.reshape(tl.broadcast_to(found[:, :, None], (rows, groups, columns // groups)), (rows, columns))


@triton.jit
def _values(codes, table, has_table: tl.constexpr, first: tl.constexpr):
    """What codes of 4 bits stand for, in float32."""
    if has_table:
        return tl.load(table + codes.to(tl.int32)).to(tl.float32)
    return codes.to(tl.float32) + first


# fmt: off
@triton.jit
def product(
    inputs, codes, scale, zero, least, factor, table, outputs, num_inputs, num_rows,
    width: tl.constexpr, group: tl.constexpr, per_byte: tl.constexpr, high_first: tl.constexpr,
    has_table: tl.constexpr, first: tl.constexpr, has_zero: tl.constexpr, has_least: tl.constexpr,
    has_factor: tl.constexpr, divides: tl.constexpr, scales_outputs: tl.constexpr,
    some_inputs: tl.constexpr, some_rows: tl.constexpr, columns: tl.constexpr,
):
    """Outputs of some inputs `[num_inputs, width]` and some rows of the weight, a number of columns at a time."""
    # fmt: on
    rows = tl.program_id(0) * some_rows + tl.arange(0, some_rows)
    row, row_exists = rows.to(tl.int64)[:, None], (rows < num_rows)[:, None]
    number = (tl.program_id(1) * some_inputs + tl.arange(0, some_inputs))[:, None]
    input_at, input_exists = inputs + number.to(tl.int64) * width, number < num_inputs
    num_bytes: tl.constexpr = columns // per_byte
    groups: tl.constexpr = columns // group if columns > group else 1
    sums = tl.zeros([some_inputs, some_rows], tl.float32)
    for start in range(0, width, columns):
        at = (start // per_byte + tl.arange(0, num_bytes))[None, :]
        exists = at < width // per_byte
        found = tl.load(codes + row * (width // per_byte) + at, mask=row_exists & exists, other=0.0)
        if per_byte == 2:
            low, high = _values(found & 15, table, has_table, first), _values(found >> 4, table, has_table, first)
            pairs = tl.join(high, low) if high_first else tl.join(low, high)
            weights = tl.reshape(pairs, (some_rows, columns))
        else:
            weights = found.to(tl.float32)
        if not scales_outputs:
            of_group = (start // group + tl.arange(0, groups))[None, :]
            there, group_at = row_exists & (of_group < width // group), row * (width // group) + of_group
            if has_zero:
                weights -= _of_groups(zero, group_at, there, some_rows, groups, columns)
            steps = _of_groups(scale, group_at, there, some_rows, groups, columns)
            if has_factor:
                factors = tl.load(factor + row, mask=row_exists, other=1.0)
                steps = steps / factors if divides else steps * factors
            weights *= steps
            if has_least:
                weights += _of_groups(least, group_at, there, some_rows, groups, columns)
        column = (start + tl.arange(0, columns))[None, :]
        some = tl.load(input_at + column, mask=input_exists & (column < width), other=0.0)
        sums = tl.dot(some, tl.trans(weights.to(some.dtype)), sums, input_precision="ieee")
    if scales_outputs:
        sums *= tl.load(scale + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[None, :]
    output_at = outputs + number.to(tl.int64) * num_rows + rows[None, :]
    tl.store(output_at, sums.to(outputs.dtype.element_ty), mask=input_exists & (rows < num_rows)[None, :])
