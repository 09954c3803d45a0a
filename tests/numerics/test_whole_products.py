"""Products with weights as they are: torch's own bits, whatever torch's order is; and each order as it is described."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from swarmllm.models.quantization import kernels, whole
from swarmllm.models.quantization.whole import BLOCKS, MANY, MOST_INPUTS, Linear, Order, _How, _multiply, _Whole, hasten

DTYPES = (torch.float32, torch.bfloat16)
LEVELS = [level for level in (3, 4) if kernels.library() is not None and level <= kernels.library().swarmllm_level()]
needs_kernels = pytest.mark.skipif(not LEVELS, reason="this processor has none of the kernels")


def hastened(rows: int, columns: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    generator = torch.Generator().manual_seed(rows + columns)
    module = nn.Linear(columns, rows, bias=bias).to(dtype)
    module.weight.data.copy_(torch.randn(rows, columns, generator=generator))
    hasten([module])
    return module


def taken(module: nn.Linear) -> set[int]:
    """The numbers of inputs that the kernels multiply."""
    found = (key for key, how in whole._found.items() if how is not None and key.shape == module.weight.shape)
    return {key.num_inputs for key in found if key.dtype == module.weight.dtype}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *((512, 512), (128, 1408), (192, 576), (320, 2112), (256, 260), (100, 700), (50, 1501), (1001, 1024)),
        *((64, 1376), (70, 880), (65, 80), (19, 4176), (17, 16464)),
    ],
)
def test_the_bits_are_torchs(
    rows: int, columns: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "SMALLEST", 1)
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    monkeypatch.setattr(whole, "_found", {})
    monkeypatch.setattr(whole, "AT_ONCE", 128)
    module = hastened(rows, columns, dtype, bias=bias)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        numbers = *range(1, MOST_INPUTS + 2), 40, 41, 64, 127, 300
        for num_inputs, seed in itertools.product(numbers, range(3)):
            inputs = torch.randn(num_inputs, columns, generator=generator) * 10.0 ** (seed - 1)
            for shape in ((num_inputs, columns), (1, num_inputs, columns), (num_inputs, 1, columns)):
                given = inputs.to(dtype).view(shape)
                assert torch.equal(module(given), F.linear(given, module.weight, module.bias)), (num_inputs, shape)
        hard = whole.hard_inputs(5, 1, columns).to(dtype)
        for one in hard:  # views, most of which begin elsewhere in a line
            assert torch.equal(module(one), F.linear(one, module.weight, module.bias))


@needs_kernels
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponents", [(-60, -60), (-100, -24), (-24, -100), (-126, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_tiny_numbers(bias: bool, exponents: tuple[int, int], sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruction for bfloat16 takes those below the smallest normal number for 0, sums too. `sign`: which of
    several right orders is taken."""
    monkeypatch.setattr(whole, "SMALLEST", 1)
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    monkeypatch.setattr(whole, "_found", {})
    monkeypatch.setattr(whole, "_known", {})
    monkeypatch.setattr(whole, "_seconds_in_cache", lambda how, *_: sign * how.order)
    module, normal = hastened(96, 3072, torch.bfloat16, bias=bias), torch.finfo(torch.float32).tiny
    of_weight, of_inputs = exponents
    module.weight.data *= 2.0**of_weight
    if bias:
        module.bias.data.copy_(torch.linspace(-normal, normal, 96))
    with torch.inference_mode():
        for num_inputs in range(1, MOST_INPUTS + 1):
            inputs = (torch.randn(num_inputs, 3072) * 2.0**of_inputs).bfloat16()
            assert torch.equal(module(inputs), F.linear(inputs, module.weight, module.bias))
            few = torch.zeros(num_inputs, 3072).bfloat16()
            few[:, [0, 1024, 2048]] = torch.tensor([1.5, -1, 1]).bfloat16() * normal * 2.0**-of_weight
            assert torch.equal(module(few), F.linear(few, module.weight, module.bias)), "sums of blocks"
            signs = module(inputs).view(torch.int16), F.linear(inputs, module.weight, module.bias).view(torch.int16)
            assert torch.equal(*signs), "0 and -0"
            assert torch.full((4,), normal / 2).sum() == 2 * normal, "afterwards they are as they were"
    if kernels.library().swarmllm_has_order(kernels.level(), True, Order.IN_PAIRS) and taken(module):
        orders = {how.order for product, how in whole._found.items() if how and product.num_inputs > 1}
        has_tiles = Order.IN_TILES in orders
        assert orders == {Order.IN_TILES if has_tiles else Order.CHAINED if sign == 1 else Order.IN_PAIRS}


@needs_kernels
@pytest.mark.parametrize("columns", [512, 528])
def test_sums_of_products_that_are_all_too_small(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is -0, and so is their sum, unless torch adds a 0 at the end."""
    if not whole._has_order(Order.EIGHTS, torch.bfloat16):
        pytest.skip("torch adds in other orders here")
    monkeypatch.setattr(whole, "SMALLEST", 1)
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    monkeypatch.setattr(whole, "_found", {})
    module = hastened(32, columns, torch.bfloat16)
    module.weight.data.fill_(-1e-30)
    with torch.inference_mode():
        for num_inputs in (1, 2, 12, 16, 29):
            inputs = torch.full((num_inputs, columns), 1e-30).bfloat16()
            assert whole.takes(inputs, module.weight)
            expected = F.linear(inputs, module.weight)
            assert torch.equal(module(inputs).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 4, 8, 12, 16, 48])
def test_wherever_a_weight_begins(place: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a file, whose header has any length."""
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    module = nn.Linear(512, 256, bias=False).to(dtype)
    module.weight.data = whole._at(whole.hard_weight(256, 512).to(dtype), place)
    assert module.weight.data_ptr() % whole.LINE == place
    hasten([module])
    with torch.inference_mode():
        for num_inputs in range(1, MOST_INPUTS + 1):
            inputs = whole.hard_inputs(num_inputs, 512).to(dtype)
            assert torch.equal(module(inputs), F.linear(inputs, module.weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_several_threads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    monkeypatch.setattr(whole, "WORTH_A_THREAD", 1)
    before = torch.get_num_threads()
    try:
        for num_threads in (2, 3):
            torch.set_num_threads(num_threads)
            module = nn.Linear(640, 520, bias=False).to(dtype)
            hasten([module], {1, num_threads})
            with torch.inference_mode():
                for num_inputs in range(1, MOST_INPUTS + 1):
                    inputs = torch.randn(num_inputs, 640).to(dtype)
                    assert torch.equal(module(inputs), F.linear(inputs, module.weight))
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> nn.Linear:
    """A module in bfloat16 whose products with few inputs our kernels compute."""
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    monkeypatch.setattr(whole, "_known", {})
    module = hastened(512, 512, torch.bfloat16, bias=True)
    if type(module) is not Linear:
        pytest.skip("torch adds in another order here")
    with torch.no_grad():
        module(torch.randn(2, 512).bfloat16())
    assert any(one is not None for one in whole._known.values()), "looked up from now on"
    monkeypatch.setattr(whole, "_multiply", CountedProducts())
    return module


class CountedProducts:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self, *args: Any) -> Tensor:
        self.number += 1
        return _multiply(*args)


def ours(module: nn.Linear, inputs: Tensor) -> bool:
    """True if our kernels multiply these; the result must be torch's in any case."""
    counting = whole._multiply
    assert isinstance(counting, CountedProducts)
    before = counting.number
    assert torch.equal(module(inputs), F.linear(inputs, module.weight, module.bias))
    return counting.number > before


@needs_kernels
def test_what_torch_multiplies(known: nn.Linear) -> None:
    aligned = torch.randn(2, 512).bfloat16()
    wide = torch.randn(2, 1024).bfloat16()
    with torch.no_grad():
        assert ours(known, aligned)
        for inputs in (wide[:, :512], wide[:, 1::2], aligned[0], aligned[:0], torch.randn(512, 2).bfloat16().T):
            assert not ours(known, inputs)
        assert not ours(known, wide.flatten()[1:1025].view(2, 512)), "within a line of the caches"
        are_many_known = whole.of_inputs(known.weight, MANY, has_bias=True) is not None
        for num_inputs in (MOST_INPUTS + 1, MANY, 300):
            assert ours(known, torch.randn(num_inputs, 512).bfloat16()) == are_many_known
        before = torch.backends.mkldnn.set_flags(_enabled=False)
        try:
            assert not ours(known, aligned)
        finally:
            torch.backends.mkldnn.set_flags(_enabled=before[0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not ours(known, aligned)
    assert not ours(known, aligned), "gradients of weights"
    known.requires_grad_(False)
    assert ours(known, aligned)
    assert not ours(known, aligned.clone().requires_grad_())


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 700), (2, 256), (1, 1024), (1, 1, 256)])
def test_inputs_of_another_width(known: nn.Linear, shape: tuple[int, ...]) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError):
        known(torch.randn(shape).bfloat16())
    with torch.no_grad(), pytest.raises(RuntimeError):
        known(torch.randn(1, 512))


@needs_kernels
def test_a_bias_of_another_kind(known: nn.Linear) -> None:
    inputs = torch.randn(2, 512).bfloat16()
    with torch.no_grad():
        for bias in (torch.randn(1).bfloat16(), torch.randn(512, 2).bfloat16()[:, 0]):
            assert torch.equal(whole.linear(inputs, known.weight, bias), F.linear(inputs, known.weight, bias))
        with pytest.raises(RuntimeError):
            whole.linear(inputs, known.weight, torch.randn(512))


@needs_kernels
def test_torch_sees_products_that_it_records(known: nn.Linear) -> None:
    inputs = torch.randn(2, 512).bfloat16()
    with torch.no_grad():
        graph = make_fx(known)(inputs).graph
        assert any("addmm" in str(node.target) for node in graph.nodes)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert known(mode.from_tensor(inputs)).shape == (2, 512)
        with forward_ad.dual_level():
            dual = known(forward_ad.make_dual(inputs, torch.ones_like(inputs)))
            assert forward_ad.unpack_dual(dual).tangent is not None
        assert torch.func.vmap(known)(inputs[:, None]).shape == (2, 1, 512)
        assert torch.equal(torch.export.export(known, (inputs,)).module()(inputs), known(inputs))


@needs_kernels
def test_gradients_are_torchs(known: nn.Linear) -> None:
    inputs = torch.randn(2, 512).bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(known(inputs).square().sum(), inputs)
    (expected,) = torch.autograd.grad(F.linear(inputs, known.weight, known.bias).square().sum(), inputs)
    assert torch.equal(grad, expected)
    known(inputs.detach()).sum().backward()
    assert known.weight.grad is not None


@needs_kernels
def test_numbers_of_threads(known: nn.Linear) -> None:
    """Orders are tried with the numbers that are given; with others, torch multiplies."""
    before = torch.get_num_threads()
    inputs = torch.randn(2, 512).bfloat16()
    try:
        torch.set_num_threads(before + 1)
        with torch.no_grad():
            assert not ours(known, inputs)
            whole.find_orders(known.weight.detach(), has_bias=True, threads=(before, before + 1))
            assert torch.get_num_threads() == before + 1
            ours(known, inputs)
    finally:
        torch.set_num_threads(before)


def test_a_weight_that_changes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading and other spans put other memory under the same module."""
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    module, inputs = hastened(256, 512, torch.bfloat16), torch.randn(1, 512).bfloat16()
    with torch.inference_mode():
        for _ in range(3):
            module.weight.data = torch.randn(256, 512).bfloat16()
            assert torch.equal(module(inputs), F.linear(inputs, module.weight))
        module.weight.data.mul_(2)
        assert torch.equal(module(inputs), F.linear(inputs, module.weight))
        module.weight.data = torch.randn(128, 512)
        assert torch.equal(module(inputs.float()), F.linear(inputs.float(), module.weight))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_tried_themselves(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of large ones may not fit. Random numbers must tell as much as hard ones."""
    monkeypatch.setattr(whole, "_is_faster", lambda *_: True)
    found = []
    for largest, seed in ((whole.LARGEST_TRIED, 0), *((0, seed) for seed in range(4))):
        monkeypatch.setattr(whole, "_found", {})
        monkeypatch.setattr(whole, "LARGEST_TRIED", largest)
        weight = torch.randn(256, 2816, generator=torch.Generator().manual_seed(seed)).to(dtype)
        whole.find_orders(whole._at(weight, 0))
        few = whole.MOST_INPUTS_OF_LARGEST
        found.append({key.num_inputs: how for key, how in whole._found.items() if key.num_inputs <= few})
    assert found == found[:1] * 5


def test_what_stays_as_it_is() -> None:
    small, other = nn.Linear(8, 8), nn.Embedding(1024, 512)
    hasten([small, other])
    assert (type(small), type(other)) == (nn.Linear, nn.Embedding)


# ---------------------------------------------------------------------- each order, as `whole.h` describes it

Numbers = np.ndarray


def rounded(values: Numbers) -> Numbers:
    return values.astype(np.float32)


def chained(products: Numbers, block: int) -> Numbers:
    """Products that are exact in float64; sums are rounded once."""
    total = np.zeros(len(products), np.float32)
    for begin in range(0, products.shape[1], block):
        part = np.zeros(len(products), np.float32)
        for column in range(begin, min(begin + block, products.shape[1])):
            part = rounded(part.astype(np.float64) + products[:, column])
        total = rounded(total + part)
    return total


def swapped(products: Numbers) -> Numbers:
    """Of each pair of columns, the instruction for bfloat16 adds the second one first."""
    return products.reshape(len(products), -1, 2)[..., ::-1].reshape(products.shape)


def halved(sums: list[Numbers]) -> Numbers:
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [rounded(one + other) for one, other in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def in_turn(products: Numbers, begin: int, end: int, num_sums: int, first: Numbers | None = None) -> Numbers:
    sums = [np.zeros(len(products), np.float32) for _ in range(num_sums)]
    if first is not None:
        sums[0] = first
    for column in range(begin, end):
        place = (column - begin) % num_sums
        sums[place] = rounded(sums[place].astype(np.float64) + products[:, column])
    return halved(sums)


def fours(products: Numbers, head: int) -> Numbers:
    first = None
    for column in range(head):
        first = rounded(products[:, column] if first is None else first + products[:, column])
    body = head + (products.shape[1] - head) // 4 * 4
    total = in_turn(products, head, body, 4, first)
    for column in range(body, products.shape[1]):
        total = rounded(total + products[:, column])
    return total


def twos(products: Numbers, block: int) -> Numbers:
    """As `chained`, but with two sums in turn in each block."""
    total = np.zeros(len(products), np.float32)
    for begin in range(0, products.shape[1], block):
        end = min(begin + block, products.shape[1])
        total = rounded(total + in_turn(products, begin, end, 2))
    return total


def in_lanes(products: Numbers, lanes: int) -> Numbers:
    sums = [in_turn(products[:, lane::lanes], 0, len(products[0, lane::lanes]), 1) for lane in range(lanes)]
    if lanes == 8:
        one, other, third, last = (rounded(sums[2 * pair] + sums[2 * pair + 1]) for pair in range(4))
        return rounded(rounded(one + third) + rounded(other + last))
    left = sums[:4]
    for quarter in range(4, 16, 4):
        left = [rounded(one + other) for one, other in zip(left, sums[quarter : quarter + 4], strict=True)]
    return rounded(rounded(left[0] + left[1]) + rounded(left[2] + left[3]))


def in_lanes_late(products: Numbers, lanes: int) -> Numbers:
    end = 1 + (products.shape[1] - 1) // lanes * lanes
    total = in_turn(products, 1, end, lanes, rounded(products[:, 0]))
    return in_turn(products, end, products.shape[1], lanes, total) if end < products.shape[1] else total


def eights(products: Numbers) -> Numbers:
    body = products.shape[1] // 64 * 64
    sums = [
        [in_turn(products[:, 8 * which + lane : body : 64], 0, body // 64, 1) for lane in range(8)]
        for which in range(8)
    ]
    by_lane = [halved([sums[which][lane] for which in range(8)]) for lane in range(8)]
    return rounded(halved(by_lane) + in_turn(products, body, products.shape[1], 8))


def in_tiles(products: Numbers, block: int) -> Numbers:
    columns = products.shape[1]
    parts = [twos(products[:, begin : min(begin + block, columns)], 32) for begin in range(0, columns, block)]
    return functools.reduce(lambda one, other: rounded(one + other), parts)


CASES: list[tuple[_How, torch.dtype, Callable[[Numbers], Numbers]]] = [
    *(
        (_How(Order.CHAINED, block), torch.float32, functools.partial(chained, block=block))
        for block in (*BLOCKS[:3], 1 << 30)
    ),
    *(
        (_How(order, block), torch.bfloat16, lambda products, block=block: chained(swapped(products), block))
        for order in (Order.CHAINED, Order.IN_PAIRS)
        for block in (512, 1024)
    ),
    *(
        (_How(Order.IN_TILES, block), torch.bfloat16, lambda products, block=block: in_tiles(products, block))
        for block in (96, 1024, 1 << 30)
    ),
    (_How(Order.FOURS), torch.float32, lambda products: fours(rounded(products), 0)),
    (_How(Order.FOURS_LATE), torch.float32, lambda products: fours(rounded(products), 4)),
    (_How(Order.EIGHTS), torch.bfloat16, eights),
    *((_How(Order.TWOS, block), torch.float32, functools.partial(twos, block=block)) for block in (192, 256, 1 << 30)),
    (_How(Order.IN_LANES), torch.float32, lambda products: in_lanes(products, 16 if kernels.level() == 4 else 8)),
    (_How(Order.IN_LANES_LATE), torch.float32, lambda products: in_lanes_late(products, 16)),
]
FUSED = (Order.CHAINED, Order.TWOS, Order.IN_LANES, Order.IN_LANES_LATE)
"""Orders that round a product and a sum at once."""


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].order.name.lower()}-{case[0].block}-{case[1]}"[:-2])
@pytest.mark.parametrize(
    ("rows", "columns"), [(16, 64), (35, 704), (64, 1280), (27, 336), (27, 334), (24, 65), (19, 333)]
)
def test_each_order(
    case: tuple[_How, torch.dtype, Callable[[Numbers], Numbers]],
    rows: int,
    columns: int,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how, dtype, reference = case
    if not kernels.library().swarmllm_has_order(level, dtype == torch.bfloat16, how.order):
        pytest.skip("not at this level")
    monkeypatch.setattr(kernels, "level", lambda: level)
    weight = whole._at(whole.hard_weight(rows, columns).to(dtype), 0)
    if columns % whole.multiple_of(how.order, dtype):
        pytest.skip("such columns have no such order")
    if how.order in FUSED and dtype == torch.float32:
        weight = weight.bfloat16().float()  # so that products are exact
    for num_inputs in range(1, MOST_INPUTS + 1):
        inputs = whole.hard_inputs(num_inputs, columns).bfloat16().to(dtype)
        for bias in (None, torch.linspace(-1, 1, rows).to(dtype)):
            got = _multiply(inputs, _Whole.of(weight, how), bias)
            for row, input_row in zip(got, inputs, strict=True):
                assert torch.equal(row, expected(reference, weight, input_row, bias, how)), (num_inputs, bias is None)


def expected(
    reference: Callable[[Numbers], Numbers], weight: Tensor, inputs: Tensor, bias: Tensor | None, how: _How
) -> Tensor:
    products = weight.double().numpy() * inputs.double().numpy()
    if bias is not None and how.order in (Order.CHAINED, Order.TWOS) and weight.dtype == torch.float32:
        # MKL begins with the bias: the first block is added to it.
        first, rest = products[:, : how.block], products[:, how.block :]
        total = torch.from_numpy(reference(first)) + bias
        for begin in range(0, rest.shape[1], how.block):
            total = total + torch.from_numpy(reference(rest[:, begin : begin + how.block]))
        return total
    total = torch.from_numpy(reference(products))
    return (total if bias is None else total + bias.float()).to(weight.dtype)
