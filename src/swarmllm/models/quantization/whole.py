"""Products with weights as they are, in float32 or bfloat16, on CPUs: torch's own bits, at the speed of memory.

Blocks that aren't quantized must compute exactly what the local model computes, and the bits of a sum depend on the
order of its additions. For a few inputs, torch's products read memory at a third to two thirds of its speed. `whole.h`
adds in the same order and reads faster. Which order it is depends on the libraries under torch, the processor, the
shape and the number of inputs. So each is tried, when weights are loaded, on numbers of which another order gives
another sum. If none is right, or ours isn't faster, torch multiplies.

Measured (one thread, 5632×2048 in memory, GB/s of 1, 4 and 8 inputs): bfloat16 24, 22 and 16, torch 12, 13 and 10;
float32 24, 22 and 17, torch 19, 8 and 7. With AVX2 (Zen 4): bfloat16 22, 9 and 5, torch 22, 4.5 and 2.5; float32 24,
26 and 13, torch 19, 7.5 and 6.5.
"""

import ctypes
import functools
import threading
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.kernels import COLD_ROWS, WORTH_A_THREAD, in_parts, least_s, library

MOST_INPUTS = 16
"""Measured with 24: torch is as fast."""
SMALLEST = 1 << 16
"""Numbers of a weight. Assumed: calls take as long as the products of smaller ones."""
LARGEST_TRIED = 256 << 20
"""Bytes. Weights that are larger are tried themselves, by random inputs: a copy may not fit."""
LEAST_ROWS = 16
LINE = 64
"""Bytes. Where an input begins in a line of the caches can matter to torch, so others are torch's."""
TRIALS = 4
"""Products that are compared. With one, an order was taken for right that wasn't for the last of 50 rows."""
LARGE = 16 << 20
"""Bytes of a weight whose rows are tried often enough in one product, if they repeat."""
MEASURED = (1, 2, 3, 8, MOST_INPUTS)
"""Numbers of inputs; others are as fast as the next one."""
MOST_KNOWN = 100_000
BLOCKS = (192, 384, 512, 1024, 1 << 30)
"""Columns whose sum is added to those of others. MKL has blocks of 192, oneDNN of 512 for one input and of 1024."""
_DTYPES = (torch.float32, torch.bfloat16)
DIFFERENT_ROWS = 64
"""Rows of the matrix for trials; they repeat."""


class _Order(IntEnum):
    """As in `whole.h`."""

    CHAINED = 0
    FOURS = 1
    FOURS_LATE = 2
    EIGHTS = 3


class _How(NamedTuple):
    order: _Order
    block: int = 0
    """Columns whose sum is added to those of others; for `CHAINED`."""


class _Whole(ctypes.Structure):
    """A weight and how it is multiplied, as in `whole.h`."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("is_bfloat16", ctypes.c_int64),
        ("order", ctypes.c_int64),
        ("block", ctypes.c_int64),
    )

    @classmethod
    def of(cls, weight: Tensor, how: _How) -> "_Whole":
        return cls(weight.data_ptr(), *weight.shape, weight.dtype == torch.bfloat16, *how)


class _Product(NamedTuple):
    """All that the order may depend on."""

    place: int
    """Where the weight begins in a line of the caches."""
    shape: torch.Size
    """Of the weight."""
    dtype: torch.dtype
    num_inputs: int
    has_bias: bool
    num_threads: int

    @classmethod
    def of(cls, weight: Tensor, num_inputs: int, has_bias: bool, num_threads: int) -> "_Product":
        return cls(weight.data_ptr() % LINE, weight.shape, weight.dtype, num_inputs, has_bias, num_threads)


class Linear(nn.Linear):
    """nn.Linear, faster for a few inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        parameters = self._parameters  # `self.weight` takes as long as a small product
        weight = parameters.get("weight")  # or a module stands there
        return super().forward(inputs) if weight is None else linear(inputs, weight, parameters["bias"])


def hasten(modules: Iterable[nn.Module], *, meanwhile: bool = False) -> None:
    """Let all large `nn.Linear`s on a CPU among the modules multiply few inputs faster, with the same bits.

    `meanwhile`: return before the orders are found. Until then, torch multiplies.
    """
    if library() is None:
        return
    weights = []
    for module in modules:
        weight = module._parameters.get("weight")
        if type(module) is nn.Linear and weight is not None and weight.is_cpu and weight.numel() >= SMALLEST:
            module.__class__ = Linear
            weights.append((weight.detach(), module.bias is not None))
    if meanwhile:
        threading.Thread(target=_find_all, args=(weights, torch.get_num_threads()), daemon=True).start()
    else:
        _find_all(weights, torch.get_num_threads())


def find_orders(weight: Tensor, *, has_bias: bool = False, most_threads: int = 1) -> None:
    """Find out how torch multiplies by such a weight `[out, in]`, for `linear`."""
    if library() is None:
        return
    products = [
        _Product.of(weight, num_inputs, has_bias, num_threads)
        for num_threads in {1, most_threads}  # some servers measure how many are best
        for num_inputs in range(1, MOST_INPUTS + 1)
    ]
    _find(products, weight)


def _find_all(weights: Iterable[tuple[Tensor, bool]], most_threads: int) -> None:
    for weight, has_bias in weights:
        find_orders(weight, has_bias=has_bias, most_threads=most_threads)


def linear(inputs: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with its bits: `[…, in]`, `[out, in]`, `[out]` → `[…, out]`."""
    whole = _whole(inputs, weight, bias)
    return F.linear(inputs, weight, bias) if whole is None else _multiply(inputs, whole, bias)


def takes(inputs: Tensor, weight: Tensor) -> bool:
    """True if `linear` multiplies these faster than torch."""
    return _whole(inputs, weight, None) is not None


def _whole(inputs: Tensor, weight: Any, bias: Tensor | None) -> _Whole | None:
    """The weight, as `whole.h` multiplies it by such inputs; None: torch should."""
    if not isinstance(weight, Tensor):
        return None
    shape, dtype = weight.shape, weight.dtype
    num_inputs = inputs.numel() // max(shape[-1], 1)
    if not 0 < num_inputs <= MOST_INPUTS or inputs.dtype != dtype or inputs.data_ptr() % LINE:
        return None
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (inputs, weight, bias)):
        return None
    if not (inputs.is_cpu and weight.is_cpu and inputs.is_contiguous() and weight.is_contiguous()):
        return None
    if kernels.is_recording() or torch.is_autocast_enabled("cpu"):
        return None
    address, has_bias, num_threads = weight.data_ptr(), bias is not None, torch.get_num_threads()
    try:
        return _known[address, shape, dtype, num_inputs, has_bias, num_threads]
    except KeyError:
        pass
    if inputs.ndim < 2 or weight.ndim != 2 or (bias is not None and bias.dtype != dtype):
        return None
    product = _Product.of(weight, num_inputs, has_bias, num_threads)
    if product not in _found:  # perhaps it will be
        return None
    how = _found[product]
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    whole = None if how is None else _Whole.of(weight, how)
    _known[address, shape, dtype, num_inputs, has_bias, num_threads] = whole
    return whole


_known: dict[tuple[Any, ...], _Whole | None] = {}
"""By what `_Product` consists of, with the address of the weight: no other look-up is as fast."""


def _multiply(inputs: Tensor, whole: _Whole, bias: Tensor | None) -> Tensor:
    rows, columns = whole.rows, whole.columns
    num_inputs = inputs.numel() // columns
    outputs = torch.empty((*inputs.shape[:-1], rows), dtype=inputs.dtype)
    wide_bias = None if bias is None else bias.detach().float()
    at_inputs, at_outputs = inputs.data_ptr(), outputs.data_ptr()
    at_bias = None if wide_bias is None else wide_bias.data_ptr()

    def part(start: int, end: int) -> None:
        room = torch.empty(MOST_INPUTS * columns) if whole.order == _Order.EIGHTS else outputs
        library().swarmllm_multiply_whole(
            kernels.level(),
            ctypes.addressof(whole),
            at_bias,
            start,
            end,
            at_inputs,
            num_inputs,
            at_outputs,
            room.data_ptr(),
        )

    in_parts(part, rows, rows * columns // WORTH_A_THREAD, LEAST_ROWS)
    return outputs


# ---------------------------------------------------------------------- trials

_found: dict[_Product, _How | None] = {}
"""The order of torch; None: torch is to multiply."""


@torch.no_grad()
def _find(products: Sequence[_Product], weight: Tensor) -> None:
    """Find out how torch computes these products of a weight, or of one like it."""
    new = [product for product in products if product not in _found]
    if not new:
        return
    (rows, columns), dtype = weight.shape, weight.dtype
    hard = None
    if weight.nbytes <= LARGEST_TRIED and dtype in _DTYPES:
        hard = _at(hard_weight(rows, columns).to(dtype), new[0].place)
    before = torch.get_num_threads()
    for product in new:
        torch.set_num_threads(product.num_threads)
        try:
            _found[product] = _order_of(product, weight if hard is None else hard, is_hard=hard is not None)
        finally:
            torch.set_num_threads(before)


def _order_of(product: _Product, weight: Tensor, *, is_hard: bool) -> _How | None:
    (rows, columns), dtype, candidates = product.shape, product.dtype, _candidates(product)
    if not candidates:
        return None
    trials = 1 if weight.nbytes >= LARGE and rows % DIFFERENT_ROWS == 0 else TRIALS
    inputs = hard_inputs(trials, product.num_inputs, columns)
    if not is_hard:
        inputs = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(-1, 1, rows).to(dtype) if product.has_bias else None
    for some in inputs.to(dtype):
        some_inputs = some.clone()  # at the begin of a line
        expected = F.linear(some_inputs, weight, bias)
        candidates = [
            how for how in candidates if torch.equal(_multiply(some_inputs, _Whole.of(weight, how), bias), expected)
        ]
        if not candidates:
            return None
    measured = next(num for num in MEASURED if num >= product.num_inputs)
    return candidates[0] if _is_faster(dtype, measured, candidates[0].order) else None


def _candidates(product: _Product) -> list[_How]:
    (rows, columns), is_bfloat16 = product.shape, product.dtype == torch.bfloat16
    if rows < LEAST_ROWS or product.dtype not in _DTYPES:
        return []
    orders = {
        order
        for order in _Order
        if columns % {_Order.CHAINED: 2 if is_bfloat16 else 1, _Order.EIGHTS: 64}.get(order, 1) == 0
        and library().swarmllm_knows_order(kernels.level(), is_bfloat16, order)
    }
    blocks = {min(block, -(-columns // 2) * 2) for block in BLOCKS}  # those that are longer than a row are the same
    return [
        _How(order, block) for order in sorted(orders) for block in (sorted(blocks) if order == _Order.CHAINED else [0])
    ]


def hard_weight(rows: int, columns: int) -> Tensor:
    """`[rows, columns]`, to be multiplied by `hard_inputs`: large products cancel, so that the sum consists of what was
    rounded off on the way, which is another in each order."""
    generator = torch.Generator().manual_seed(columns)
    some = torch.randn(min(rows, DIFFERENT_ROWS), columns, generator=generator)
    left, right = _pairs(columns)
    exponents = torch.randint(2, 14, (len(some), len(left)), generator=generator)
    some[:, left] = torch.randn(len(some), len(left), generator=generator) * 2.0**exponents
    some[:, right] = -some[:, left]
    return some.repeat(-(-rows // len(some)), 1)[:rows]


def hard_inputs(*shape: int) -> Tensor:
    """`[…, columns]`."""
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(shape[-2]))
    left, right = _pairs(shape[-1])
    inputs[..., right] = inputs[..., left]
    return inputs


def _pairs(columns: int) -> tuple[Tensor, Tensor]:
    mixed = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return mixed[: columns // 3], mixed[columns // 3 : columns // 3 * 2]


def _at(tensor: Tensor, place: int) -> Tensor:
    """A copy that begins at this place of a line."""
    room = torch.empty(tensor.numel() + 2 * LINE, dtype=tensor.dtype)
    first = (place - room.data_ptr()) % LINE // tensor.itemsize
    return room[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)


@functools.cache
def _is_faster(dtype: torch.dtype, num_inputs: int, order: _Order) -> bool:
    """True if ours is faster than torch's with weights that no cache holds."""
    weight = torch.ones(COLD_ROWS // dtype.itemsize, 2048, dtype=dtype)
    inputs, whole = torch.ones(num_inputs, 2048, dtype=dtype), _Whole.of(weight, _How(order, max(BLOCKS)))
    torch_s = least_s(lambda: F.linear(inputs, weight))
    return least_s(lambda: _multiply(inputs, whole, None)) < torch_s
