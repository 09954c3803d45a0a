"""Products with weights as they are, in float32 or bfloat16, on CPUs: torch's own bits, at the speed of memory.

Blocks that aren't quantized must compute exactly what the local model computes, and the bits of a sum depend on the
order of its additions. For a few inputs, torch's products read memory at a third to two thirds of its speed. `whole.h`
adds in the same order and reads faster. Which order it is depends on the libraries under torch, the processor, the
shape and the number of inputs. So each is tried, when weights are loaded, on numbers of which another order gives
another sum. If none is right, or ours is slower, torch multiplies.

Measured (one thread, 5632×2048 in memory, GB/s of 1, 4 and 8 inputs): bfloat16 24, 22 and 16, torch 12, 13 and 10;
float32 24, 22 and 17, torch 19, 8 and 7. With AVX2 (Zen 4): bfloat16 22, 9 and 5, torch 22, 4.5 and 2.5; float32 24,
26 and 13, torch 19, 7.5 and 6.5. On an Intel processor whose memory gives 17: float32 15, 13 and 11, torch 15, 7 and 5;
bfloat16 17, 14 and 11, torch 10, 7 and 6 (weights of a block of hidden 512). With AMX, 100 MB in bfloat16, partly in a
large cache: 26, 25 and 25, with 16 inputs 24; torch 14, 16 and 16, 14. On AVX2 without instructions for bfloat16
(Zen 2), 10⁹ operations per second in it for 1, 8 and 128 inputs: 15, 45 and 50; torch 8.
"""

import ctypes
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from swarmllm.machine_memory import into_huge_pages
from swarmllm.models.quantization import kernels
from swarmllm.models.quantization.kernels import COLD_ROWS, LINE, WORTH_A_THREAD, empty_at, in_parts, library

MOST_INPUTS = 32
"""Of the order IN_TILES."""
MOST_OF_OTHERS = 16
"""Measured with 24: torch is as fast."""
FEW_OF_EIGHTS, MANY = 4, 40
"""In the order EIGHTS, torch multiplies each input by itself: MANY stand for any number above the few. (It has another
way for a single one.)"""
AT_ONCE = 512
"""Inputs that are in float32 at a time."""
SMALLEST = 1 << 16
"""Numbers of a weight. Assumed: calls take as long as the products of smaller ones."""
LEAST_ROWS = 16
LEAST_COLUMNS = 64
TRIALS = 4
"""Products that are compared. With one, an order was taken for right that wasn't for the last of 50 rows."""
LARGE = 16 << 20
"""Bytes of a weight whose rows are tried often enough in one product, if they repeat."""
LARGEST_TRIED = 256 << 20
"""Bytes. Weights that are larger are tried themselves, by random inputs: a copy may not fit."""
ENOUGH_OUTPUTS = 1 << 18
"""Outputs of random inputs that are compared. Measured in bfloat16: another order changes one in 5000."""
MOST_INPUTS_OF_LARGEST = 4
"""Of weights that are tried themselves, because each trial reads all of them. They are heads of large vocabularies."""
MOST_IN_TILES = 1 << 19
"""Numbers of all inputs, which take 1 MB of a thread's stack, of usually 8."""
MEASURED = (1, 2, 3, 8, MOST_OF_OTHERS, MOST_INPUTS, MANY)
"""Numbers of inputs; others are as fast as the next one."""
FEW_INPUTS, NOT_MUCH_LONGER = 3, 1.2
"""With one thread, so few inputs are ours even if they take longer in the trial: both read memory at its speed, and
recorded steps save a call from Python with ours (others may lose). Measured for one input in float32 on an Intel
processor: 0.86 to 1.15 in the trial, whose weight its large cache holds, and steps 0.82."""
ROUNDS = 8
"""Products of each kind in that trial; the fastest counts."""
CLEAR = 2
"""Times as fast, after which no more are measured."""
SPINNING_S = 0.02
"""Assumed: torch's threads use their cores so long while they wait for work. Measured: ours took twice the time."""
SETTINGS = (torch._C._get_mkldnn_enabled, torch._C._get_float32_matmul_precision)
"""Those of torch that choose among its libraries, or how exact they are."""
IN_CACHE = (256, 1024)
"""Shape of a weight that a cache holds."""
MOST_KNOWN = 100_000
BLOCKS = (192, 256, 384, 512, 1024, 1 << 30)
"""Columns whose sum is added to those of others. MKL has blocks of 192, 256 or 384, oneDNN of 512 for one input and of
1024."""
BLOCKS_IN_TILES = range(1024, 4096, 32)
"""The same of a single input in tiles. Seen for 6144 columns and more: 1536 to 2400, by shape."""
_DTYPES = (torch.float32, torch.bfloat16)
_PLAIN = (Tensor, nn.Parameter)
DIFFERENT_ROWS = 64
"""Rows of the matrix for trials; they repeat."""


class Order(IntEnum):
    """As in `whole.h`."""

    CHAINED = 0
    FOURS = 1
    FOURS_LATE = 2
    EIGHTS = 3
    TWOS = 4
    IN_LANES = 5
    IN_LANES_LATE = 6
    IN_PAIRS = 7
    IN_TILES = 8


TAKE_FLOATS = (Order.EIGHTS, Order.IN_PAIRS)
"""Orders that take inputs in float32, whatever the weights are."""
IN_BLOCKS = (Order.CHAINED, Order.TWOS, Order.IN_PAIRS)


class _How(NamedTuple):
    order: Order
    block: int = 0
    """Columns whose sum is added to those of others; for those `IN_BLOCKS`, and IN_TILES."""


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
    settings: tuple[Any, ...]

    @classmethod
    def of(cls, weight: Tensor, num_inputs: int, has_bias: bool, num_threads: int) -> "_Product":
        place = weight.data_ptr() % LINE  # which can matter to torch
        like = _like(num_inputs, weight.dtype)
        return cls(place, weight.shape, weight.dtype, like, has_bias, num_threads, _settings())


def _like(num_inputs: int, dtype: torch.dtype) -> int:
    """The number of inputs that is tried in place of so many."""
    if _has_order(Order.EIGHTS, dtype):  # of bfloat16, where it is the only one
        most = FEW_OF_EIGHTS
    else:
        most = MOST_INPUTS if _has_order(Order.IN_TILES, dtype) else MOST_OF_OTHERS
    return num_inputs if num_inputs <= most else MANY


def _has_order(order: Order, dtype: torch.dtype) -> bool:
    found = library()
    return found is not None and bool(found.swarmllm_has_order(kernels.level(), dtype == torch.bfloat16, order))


def _settings() -> tuple[Any, ...]:
    return tuple(get() for get in SETTINGS)


class Linear(nn.Linear):
    """nn.Linear, faster for a few inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        parameters = self._parameters  # `self.weight` takes as long as a small product
        weight = parameters.get("weight")  # or a module stands there
        return super().forward(inputs) if weight is None else linear(inputs, weight, parameters["bias"])


def hasten(modules: Iterable[nn.Module], threads: Iterable[int] | None = None) -> None:
    """Let large `nn.Linear`s on a CPU among the modules multiply few inputs faster, with the same bits, where it is
    known how.

    `threads`: numbers of torch's threads that may be used; default: the present one.
    """
    numbers = sorted(set(threads or (torch.get_num_threads(),)))
    for module in modules:
        weight = module._parameters.get("weight")
        if type(module) is not nn.Linear or weight is None or not weight.is_cpu or weight.numel() < SMALLEST:
            continue
        if find_orders(weight.detach(), has_bias=module.bias is not None, threads=numbers):
            module.__class__ = Linear


def likely_threads() -> set[int]:
    """Numbers of threads of which a server may choose one (`device/throughput`)."""
    most = torch.get_num_threads()
    return {1, min(most, max(2, most // 2)), most}


def find_orders(weight: Tensor, *, has_bias: bool = False, threads: Iterable[int] = (1,)) -> bool:
    """Find out how torch multiplies by such a weight `[out, in]`, for `linear`; True if that is known for some number
    of inputs."""
    if library() is None or weight.data_ptr() % weight.itemsize:
        return False
    numbers = {_like(num_inputs, weight.dtype) for num_inputs in range(1, MANY + 1)}
    if weight.nbytes > LARGEST_TRIED:
        numbers = {number for number in numbers if number <= MOST_INPUTS_OF_LARGEST or number == MANY}
    products = [
        _Product.of(weight, num_inputs, has_bias, num_threads)
        for num_threads in threads
        for num_inputs in sorted(numbers)
    ]
    _find(products, weight)
    return any(_found[product] is not None for product in products)


def linear(inputs: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with its bits: `[…, in]`, `[out, in]`, `[out]` → `[…, out]`."""
    whole = _whole(inputs, weight, bias)
    return F.linear(inputs, weight, bias) if whole is None else _multiply(inputs, whole, bias)


def takes(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """True if `linear` multiplies these faster than torch."""
    return _whole(inputs, weight, bias) is not None


def knows(weight: Tensor, num_inputs: int) -> bool:
    """True if `linear` multiplies so many inputs by such a weight, with a bias and without, as far as it was tried."""
    num_threads = torch.get_num_threads()
    both = (_Product.of(weight, num_inputs, has_bias, num_threads) for has_bias in (False, True))
    tried = [_found[product] for product in both if product in _found]
    return bool(tried) and None not in tried


def at_line(inputs: Tensor) -> Tensor:
    """The same inputs at the begin of a line, where `linear` takes them."""
    if type(inputs) is not Tensor:  # some have no place in memory
        return inputs
    return inputs if inputs.data_ptr() % LINE == 0 and inputs.is_contiguous() else _at(inputs, 0)


def _whole(inputs: Tensor, weight: Any, bias: Tensor | None) -> _Whole | None:
    """The weight, as `whole.h` multiplies it by such inputs; None: torch should."""
    if torch.compiler.is_compiling() or type(inputs) is not Tensor or type(weight) not in _PLAIN:
        return None
    shape, dtype = weight.shape, weight.dtype
    if len(shape) != 2 or inputs.ndim < 2 or inputs.shape[-1] != shape[1] or inputs.dtype != dtype:
        return None
    num_inputs = inputs.numel() // max(shape[1], 1)
    if not num_inputs or is_watched(inputs, weight, bias):
        return None
    if not (inputs.is_cpu and weight.is_cpu and inputs.is_contiguous() and weight.is_contiguous()):
        return None
    if inputs.data_ptr() % LINE or (bias is not None and (bias.dtype != dtype or bias.shape != shape[:1])):
        return None
    return of_inputs(weight, num_inputs, has_bias=bias is not None)


def of_inputs(weight: Tensor, num_inputs: int, *, has_bias: bool) -> _Whole | None:
    """The weight, as `whole.h` multiplies it by so many inputs; None: torch should."""
    shape, dtype, num_inputs = weight.shape, weight.dtype, min(num_inputs, MANY)
    address, num_threads, now = weight.data_ptr(), torch.get_num_threads(), _settings()
    try:
        return _known[address, shape, dtype, num_inputs, has_bias, num_threads, now]
    except KeyError:
        pass
    product = _Product.of(weight, num_inputs, has_bias, num_threads)
    how = _found.get(product)
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    whole = None if how is None else _Whole.of(weight, how)
    _known[address, shape, dtype, num_inputs, has_bias, num_threads, now] = whole
    return whole


def most_inputs(modules: Iterable[nn.Module]) -> int:
    """Inputs up to which recorded steps multiply by the weights of `Linear`s among the modules, and not torch."""
    linears = [one for one in modules if isinstance(one, Linear)]
    for most in (kernels.NO_LIMIT, MOST_INPUTS):
        ours = [of_inputs(one.weight, most, has_bias=one.bias is not None) for one in linears]
        if ours and None not in ours:
            return most
    return MOST_OF_OTHERS


def is_watched(*tensors: Tensor | None) -> bool:
    """True if torch needs to see an operation on these: for gradients, or because it records or transforms it."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        return True
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
    )


_known: dict[tuple[Any, ...], _Whole | None] = {}
"""By what `_Product` consists of, with the address of the weight: no other look-up is as fast."""


def _multiply(inputs: Tensor, whole: _Whole, bias: Tensor | None) -> Tensor:
    rows, columns = whole.rows, whole.columns
    num_inputs = inputs.numel() // columns
    outputs = torch.empty((*inputs.shape[:-1], rows), dtype=inputs.dtype)
    wide_bias = None if bias is None else bias.detach().float().contiguous()
    at_bias = None if wide_bias is None else wide_bias.data_ptr()
    flat, made = inputs.view(-1, columns), outputs.view(-1, rows)
    for begin in range(0, num_inputs, AT_ONCE):
        some = flat[begin : begin + AT_ONCE]
        taken = some.float() if whole.order in TAKE_FLOATS else some
        to = at_bias, taken.data_ptr(), len(some), made[begin:].data_ptr()
        bytes_read = rows * columns * inputs.itemsize * len(some)
        in_parts(functools.partial(_multiply_part, whole, to), rows, bytes_read // WORTH_A_THREAD, LEAST_ROWS)
    return outputs


def _multiply_part(whole: _Whole, to: tuple[int | None, int, int, int], start: int, end: int) -> None:
    at_bias, *others = to
    library().swarmllm_multiply_whole(kernels.level(), ctypes.addressof(whole), at_bias, start, end, *others)


# ---------------------------------------------------------------------- trials

_found: dict[_Product, _How | None] = {}
"""The order of torch; None: torch is to multiply."""


@torch.no_grad()
def _find(products: Sequence[_Product], weight: Tensor) -> None:
    """Find out how torch computes these products of a weight, or of one like it."""
    new = [product for product in products if product not in _found]
    if not new:
        return
    if not any(map(_candidates, new)):
        _found.update(dict.fromkeys(new))
        return
    is_hard = weight.nbytes <= LARGEST_TRIED
    tried = _hard_copy(new[0]) if is_hard else weight
    before = torch.get_num_threads()
    for product in new:
        if torch.get_num_threads() != product.num_threads:
            torch.set_num_threads(product.num_threads)
        try:
            _found[product] = _order_of(product, tried, is_hard=is_hard)
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)


def _order_of(product: _Product, weight: Tensor, *, is_hard: bool) -> _How | None:
    (rows, columns), dtype, candidates = product.shape, product.dtype, _candidates(product)
    if not candidates:
        return None
    if is_hard:
        trials = 1 if weight.nbytes >= LARGE and rows % DIFFERENT_ROWS == 0 else TRIALS
        inputs = hard_inputs(trials, product.num_inputs, columns)
    else:
        trials = -(-ENOUGH_OUTPUTS // (rows * product.num_inputs))
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(trials, product.num_inputs, columns, generator=generator)
    bias = torch.linspace(-1, 1, rows).to(dtype) if product.has_bias else None
    first_bias = None if bias is None else bias[:DIFFERENT_ROWS]
    for some in inputs.to(dtype):
        some_inputs = some.clone()  # at the begin of a line
        expected = F.linear(some_inputs, weight, bias)
        for part, part_bias in ((weight[:DIFFERENT_ROWS], first_bias), (weight, bias)):  # most fail in the first rows
            wanted = expected[:, : len(part)]
            candidates = [
                how
                for how in candidates
                if torch.equal(_multiply(some_inputs, _Whole.of(part, how), part_bias), wanted)
            ]
        if not candidates:
            return None
    measured = next(num for num in MEASURED if num >= product.num_inputs)
    found = candidates[0]
    if len(candidates) > 1 and measured > 1:  # a single input takes the time in which memory is read
        found = min(candidates, key=lambda how: _seconds_in_cache(how, measured, dtype))
    return found if _is_faster(dtype, measured, found, product.num_threads) else None


def _candidates(product: _Product) -> list[_How]:
    rows, columns = product.shape
    if rows < LEAST_ROWS or columns < LEAST_COLUMNS or product.dtype not in _DTYPES:
        return []
    known = set(Order) if product.num_inputs <= MOST_OF_OTHERS else {Order.IN_TILES, Order.EIGHTS}
    if product.num_inputs == MANY:
        known.discard(Order.IN_TILES)
    if product.num_inputs * columns > MOST_IN_TILES:
        known.discard(Order.IN_TILES)
    orders = {
        order
        for order in known
        if columns % multiple_of(order, product.dtype) == 0 and _has_order(order, product.dtype)
    }
    blocks = {order: [0] for order in orders}
    in_blocks = sorted({min(block, -(-columns // 2) * 2) for block in BLOCKS})  # longer ones are the whole row
    blocks.update(dict.fromkeys(orders.intersection(IN_BLOCKS), in_blocks))
    is_tried_by_copy = rows * columns * product.dtype.itemsize <= LARGEST_TRIED  # otherwise all would pass for long
    blocks[Order.IN_TILES] = [columns, *(BLOCKS_IN_TILES if product.num_inputs == 1 and is_tried_by_copy else ())]
    return [_How(order, block) for order in sorted(orders) for block in blocks[order]]


def multiple_of(order: Order, dtype: torch.dtype) -> int:
    """What divides the numbers of columns that such an order has."""
    return {Order.EIGHTS: 16, Order.IN_TILES: 32, Order.TWOS: 2}.get(order, 2 if dtype == torch.bfloat16 else 1)


def hard_weight(rows: int, columns: int) -> Tensor:
    """`[rows, columns]`, to be multiplied by `hard_inputs`: large products cancel, so that the sum consists of what was
    rounded off on the way, which is another in each order."""
    generator = torch.Generator().manual_seed(columns)
    some = torch.randn(rows, columns, generator=generator)
    left, right = _pairs(columns)
    exponents = torch.randint(2, 14, (rows, len(left)), generator=generator)
    some[:, left] = torch.randn(rows, len(left), generator=generator) * 2.0**exponents
    some[:, right] = -some[:, left]
    return some


def _hard_copy(product: _Product) -> Tensor:
    """A hard weight of the same shape in the same place of a line. Its rows repeat."""
    (rows, columns), dtype = product.shape, product.dtype
    some = hard_weight(min(rows, DIFFERENT_ROWS), columns).to(dtype)
    copy = empty_at(product.shape, dtype, product.place)
    for start in range(0, rows, DIFFERENT_ROWS):
        part = copy[start : start + DIFFERENT_ROWS]
        part.copy_(some[: len(part)])
    return copy


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
    return empty_at(tensor.shape, tensor.dtype, place).copy_(tensor)


@functools.cache
def _seconds_in_cache(how: _How, num_inputs: int, dtype: torch.dtype) -> float:
    """Seconds of ours for a weight that a cache holds."""
    weight, inputs = torch.ones(IN_CACHE, dtype=dtype), torch.ones(num_inputs, IN_CACHE[1], dtype=dtype)
    whole = _Whole.of(weight, how)
    return min(_seconds(_multiply, inputs, whole, None) for _ in range(ROUNDS))


@functools.cache
def _is_faster(dtype: torch.dtype, num_inputs: int, how: _How, num_threads: int) -> bool:
    """True if ours is faster than torch's, or nearly so for few inputs, with its present number of threads, on weights
    that hardly any cache holds."""
    # In huge pages, as in blocks. What they are copied from takes no memory, as nothing was written to it.
    weight = into_huge_pages(torch.empty(COLD_ROWS // dtype.itemsize, 2048, dtype=dtype)).fill_(1)
    inputs = torch.ones(num_inputs, 2048, dtype=dtype)
    ours: list[float] = []
    torchs: list[float] = []
    # One thread: in turns, as other programs come and go. Several: all of ours before torch's threads are awake.
    rounds, products = (ROUNDS, 1) if num_threads == 1 else (1, ROUNDS)
    if num_threads > 1:
        time.sleep(SPINNING_S)
    for _ in range(rounds):
        ours += [_seconds(_multiply, inputs, _Whole.of(weight, how), None) for _ in range(products)]
        torchs += [_seconds(F.linear, inputs, weight) for _ in range(products)]
        if max(ours) * CLEAR < min(torchs):
            break
    allowed = NOT_MUCH_LONGER if num_threads == 1 and num_inputs <= FEW_INPUTS else 1
    return min(ours) < allowed * min(torchs)


def _seconds(function: Callable[..., object], *args: Any) -> float:
    """Seconds by the clock: several threads take less of them."""
    began_at = time.perf_counter()
    function(*args)
    return time.perf_counter() - began_at
