"""One product for all packed formats on CUDA: a few inputs by codes that are decoded where they are multiplied.

Only `cuda` launches it, and imports this module when there is something to multiply: machines without CUDA need no
Triton. The kernel reads each code once for every 16 or 32 inputs. It waits for no number from the GPU, so a CUDA graph
can hold it. The result for one input doesn't depend on the others: its sums are in the order of columns.

    codes     one in a byte (int8, uint8, float8), or two, which stand for the 16 values of a table
    weights   (code - zero) * scale + least; a group of columns shares scale, zero and least
    product   of a group: scale * (inputs · codes - zero * sum of inputs) + least * sum of inputs, in float32

So inputs are multiplied by the codes themselves, which 16 bits hold exactly, except for the values of nf4 and fp4.
"""

import triton
import triton.language as tl

# fmt: off


@triton.jit
def wait_for_inputs(starts_early: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start early.

    A kernel that starts early (`cuda.starts_early`) may run before the one before it has ended. Until it has called
    this, it may read weights, and nothing that a kernel writes. The kernel for one position (`span/fused_kernels`) does
    so: 27 % less for a block's four products in bfloat16 on an H200.
    """
    if starts_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def of_pairs(
    codes, table, decode: tl.constexpr, high_first: tl.constexpr, dtype: tl.constexpr, rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Bytes `[rows, columns / 2]` → values `[rows, columns]`, by instructions or by the table."""
    if decode != "":
        pairs = tl.inline_asm_elementwise(decode, "=r,=r,=r,=r,r", [codes], dtype=tl.uint32, is_pure=True, pack=4)
        first = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        second = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    else:
        first = tl.load(table + (codes >> 4 if high_first else codes & 15).to(tl.int32)).to(dtype)
        second = tl.load(table + (codes & 15 if high_first else codes >> 4).to(tl.int32)).to(dtype)
    return tl.reshape(tl.join(first, second), (rows, columns))


# Triton would compile anew for 1 input, and for multiples of 16: in the midst of serving, or of a CUDA graph's capture.
@triton.jit(do_not_specialize=["num_inputs"])
def product(
    inputs, codes, scale, zero, least, factor, table, residual, outputs, num_inputs, num_rows,
    width: tl.constexpr, group: tl.constexpr, per_byte: tl.constexpr, high_first: tl.constexpr, decode: tl.constexpr,
    has_zero: tl.constexpr, has_least: tl.constexpr, has_factor: tl.constexpr, divides: tl.constexpr,
    some_inputs: tl.constexpr, some_rows: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr,
    adds: tl.constexpr, starts_early: tl.constexpr,
):
    """Outputs of some inputs `[num_inputs, width]` and some rows of the weight, a number of columns at a time."""
    wait_for_inputs(starts_early)
    rows = tl.program_id(0) * some_rows + tl.arange(0, some_rows)
    dtype: tl.constexpr = inputs.dtype.element_ty
    row_exists, row, group_at = rows < num_rows, rows.to(tl.int64)[:, None], rows.to(tl.int64) * (width // group)
    number = (tl.program_id(1) * some_inputs + tl.arange(0, some_inputs))[:, None]
    input_at, input_exists = inputs + number.to(tl.int64) * width, number < num_inputs
    sums = tl.zeros([some_inputs, some_rows], tl.float32)
    for start in range(0, width, columns * unroll):
        for part in tl.static_range(unroll):
            begin = start + part * columns
            at = (begin // per_byte + tl.arange(0, columns // per_byte))[None, :]
            exists = row_exists[:, None] & (at < width // per_byte)
            found = tl.load(codes + row * (width // per_byte) + at, mask=exists, other=0.0)
            if per_byte == 2:
                values = of_pairs(found, table, decode, high_first, dtype, some_rows, columns)
            else:
                values = found.to(dtype)
            column = (begin + tl.arange(0, columns))[None, :]
            some = tl.load(input_at + column, mask=input_exists & (column < width), other=0.0)
            if group == width and not has_zero and not has_least:
                sums = tl.dot(some, tl.trans(values), sums, input_precision="ieee")
            else:
                there = row_exists & (begin < width)
                of_group = group_at + begin // group
                steps = tl.load(scale + of_group, mask=there, other=0.0).to(tl.float32)[None, :]
                products = tl.dot(some, tl.trans(values), input_precision="ieee")
                if has_zero or has_least:
                    total = tl.sum(some.to(tl.float32), axis=1)[:, None]
                if has_zero:
                    products -= tl.load(zero + of_group, mask=there, other=0.0).to(tl.float32)[None, :] * total
                sums += products * steps
                if has_least:
                    sums += tl.load(least + of_group, mask=there, other=0.0).to(tl.float32)[None, :] * total
    if group == width and not has_zero and not has_least:
        sums *= tl.load(scale + rows, mask=row_exists, other=0.0).to(tl.float32)[None, :]
    if has_factor:
        factors = tl.load(factor + rows, mask=row_exists, other=1.0)[None, :]
        sums = sums / factors if divides else sums * factors
    place = number.to(tl.int64) * num_rows + rows[None, :]
    is_output = input_exists & row_exists[None, :]
    if adds:
        sums = sums.to(dtype) + tl.load(residual + place, mask=is_output, other=0.0)
    tl.store(outputs + place, sums.to(dtype), mask=is_output)
