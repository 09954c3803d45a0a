"""Weights in strips (`strips.h`) beside the same ones row by row, by each version that runs here."""

import math
import socket
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_levels import LEVELS
from torch import Tensor

from swarmllm.models.parallel.exchange import Link
from swarmllm.models.quantization import kernels, whole
from swarmllm.models.quantization.decoded import FORMS, KINDS
from swarmllm.models.quantization.packed import InStrips, Int8, LlmInt8, Packed
from swarmllm.models.quantization.weight import PackedView
from swarmllm.models.quantization.whole import Order, _How, _multiply, _Whole

CPU = torch.device("cpu")
INT8 = None
KINDS_IN_STRIPS = [INT8, *sorted(kernels.IN_STRIPS)]


OF_LEVELS = {kernels.library().swarmllm_strips_version(one) for one in LEVELS} - {0}
VERSIONS = sorted(OF_LEVELS | {2 for level in LEVELS if level == 3} | {4 for version in OF_LEVELS if version > 4})
"""Not all up to the last: processors with AVX-512's VNNI may lack AVX-VNNI."""


def known_kinds() -> list[tuple[int, int | None]]:
    """Versions that run here, with the kinds that they know."""
    found: list[tuple[int, int | None]] = []
    for version in VERSIONS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "strips_version", lambda version=version: version)
            found += [(version, kind) for kind in KINDS_IN_STRIPS if kernels.has_strips(kind)]
    return found


KNOWN = known_kinds()
only_with_strips = pytest.mark.skipif(not KNOWN, reason="this processor doesn't multiply strips")
only_with_int8 = pytest.mark.skipif(not kernels.has_strips(), reason="this processor has no strips of int8")


@pytest.fixture(params=KNOWN, ids=str)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """A kind that is in strips, with a version that knows it."""
    version, found = request.param
    monkeypatch.setattr(kernels, "strips_version", lambda: version)
    return found


def row_by_row(kind: int | None, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> Packed:
    """Random weights: any bytes with sane scales."""
    if kind is INT8:
        return Int8.quantize(torch.randn(rows, columns, generator=generator).to(dtype))
    name, weights, size = KINDS[kind]
    codes = torch.randint(0, 256, (rows, columns // weights, size), generator=generator, dtype=torch.uint8)
    scales = torch.randn(rows, columns // weights, 2, generator=generator).half().view(torch.uint8)
    if name == "Q6_K":
        codes[..., -2:] = scales[..., :2]
    else:
        has_least = name.endswith(("1", "4_K", "5_K"))
        codes[..., : 4 if has_least else 2] = scales[..., : 4 if has_least else 2]
    return FORMS[kind](codes.flatten(1), dtype)


def block(kind: int | None) -> int:
    return kernels.ROUNDED if kind is INT8 else KINDS[kind][1]


def most_error(inputs: Tensor, weight: Tensor) -> Tensor:
    """What rounding explains: of each group of inputs, half a step of the largest one; and of floats that are added."""
    groups = inputs.abs().unflatten(-1, (-1, 32)).amax(-1)
    sizes = weight.abs().unflatten(-1, (-1, 32)).sum(-1)
    return groups @ sizes.T * 2.0**-22


@only_with_strips
@settings(max_examples=150, deadline=None)
@given(
    known=st.sampled_from(KNOWN),
    strips=st.integers(1, 5),
    blocks=st.sampled_from([1, 2, 3, 4, 15, 16, 17, 33]),  # 512 columns of many inputs are opened at once
    num_inputs=st.integers(1, 37) | st.integers(126, 132),  # and multiplied by 128 at most
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e24]),
    spread=st.floats(0, 4),
    seed=st.integers(0, 1 << 30),
)
def test_they_are_the_same_weights_and_products(
    known: tuple[int, int | None],
    strips: int,
    blocks: int,
    num_inputs: int,
    dtype: torch.dtype,
    size: float,
    spread: float,
    seed: int,
) -> None:
    version, kind = known
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "strips_version", lambda: version)
        generator = torch.Generator().manual_seed(seed)
        columns = blocks * block(kind)
        rows = row_by_row(kind, strips * kernels.STRIP, columns, generator, torch.float32)
        found = rows.for_device(CPU)
        assert isinstance(found, InStrips)
        assert sum(one.nbytes for one in found.tensors().values()) == sum(one.nbytes for one in rows.tensors().values())
        assert torch.equal(found._as_rows().codes, rows.codes)
        assert torch.equal(found.dequantize(), rows.dequantize())
        some = 1, min(20, len(rows.codes))
        assert torch.equal(found._matrix().dequantize(*some), rows._matrix().dequantize(*some))
        unlike = torch.randn(num_inputs, columns, generator=generator).mul(spread).exp()
        inputs = torch.randn(num_inputs, columns, generator=generator).mul(unlike).mul(size).to(dtype).float()
        weight = rows.dequantize().double()
        products = found._matrix().multiply(inputs)
        assert ((products - inputs.double() @ weight.T).abs() <= most_error(inputs.double(), weight)).all()
        rounded = found._matrix().multiply_rounded(inputs)
        of_rows = rows._matrix().multiply_rounded(inputs)
        assert ((rounded - of_rows).abs() <= most_error(inputs.double(), weight)).all()
        for alone in (0, num_inputs - 1):
            one = inputs[alone : alone + 1]
            assert torch.equal(found._matrix().multiply(one), products[alone : alone + 1])
            assert torch.equal(found._matrix().multiply_rounded(one), rounded[alone : alone + 1])


def test_rounded_inputs_are_faster_for_all_shapes(kind: int | None) -> None:
    """Row by row, those whose columns fill pieces badly are not."""
    columns = block(kind) * (18 if block(kind) == 32 else 3)
    rows = row_by_row(kind, 32, columns, torch.Generator().manual_seed(0), torch.float32)
    assert rows.for_device(CPU).can_round_inputs(faster=True)
    assert rows.can_round_inputs(faster=True) == (columns == 768)


def test_numbers_that_are_none_and_zeros_stay_with_their_input(kind: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = row_by_row(kind, 32, 512, generator, torch.float32).for_device(CPU)
    inputs = torch.randn(9, 512, generator=generator)
    expected = matrix.multiply(inputs)
    for idx, (value, is_number) in enumerate([(float("nan"), False), (float("inf"), False), (-0.0, True)]):
        inputs[2 * idx, 77 if not is_number else slice(None)] = value
    found = matrix.multiply(inputs)
    assert found[[0, 2]].isnan().all()
    assert (found[4] == 0).all()
    assert torch.equal(found[[1, 3, 5, 6, 7, 8]], expected[[1, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("is_asked_far", [True, False])
def test_what_is_asked_for_ahead_changes_no_product(
    kind: int | None, is_asked_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = row_by_row(kind, 48, 2 * block(kind), generator, torch.float32).for_device(CPU)
    inputs = torch.randn(1, weight.shape[1], generator=generator)
    expected = weight._matrix().multiply(inputs)
    monkeypatch.setattr(kernels, "asks_far", lambda: is_asked_far)
    assert weight._matrix()._weight.asks_far == is_asked_far
    assert torch.equal(weight._matrix().multiply(inputs), expected)


@only_with_strips
@pytest.mark.parametrize(
    "seconds", [[1.0, 2.0, 3.0, 2.0], [4.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 1.0]]
)
def test_the_faster_way_is_found_in_turns(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of each way counts; far ahead is the second and the fourth."""
    measured = iter(seconds)

    def least_s(do: Callable[[], object]) -> float:
        do()
        return next(measured)

    monkeypatch.setattr(kernels, "least_s", least_s)
    kernels.asks_far.cache_clear()
    try:
        assert kernels.asks_far() == (min(seconds[1::2]) < min(seconds[::2]))
    finally:
        kernels.asks_far.cache_clear()


@only_with_strips
def test_without_memory_to_try_it_nothing_is_asked_for_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(tensor: Tensor) -> Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kernels, "into_huge_pages", no_memory)
    kernels.asks_far.cache_clear()
    try:
        assert not kernels.asks_far()
    finally:
        kernels.asks_far.cache_clear()


@only_with_strips
@pytest.mark.parametrize(
    ("kernels_s", "most"),
    [([12.0], kernels.NO_LIMIT), ([13.3056], 253), ([16.0, 2.1072], 31), ([16.0, 4.8], kernels.AT_A_TIME)],
)
def test_the_number_of_inputs_for_kernels_follows_their_times(
    kernels_s: list[float], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 128 inputs, and for 16 if torch is faster at 128. It takes 0.1 for each, and 1 to decode the rows, which is
    measured strip by strip where no strips of int8 are known."""
    measured = iter(kernels_s if kernels.has_strips() else [kernels.STRIP / 2048, *kernels_s])
    monkeypatch.setattr(kernels, "asks_far", lambda: False)
    monkeypatch.setattr(kernels, "_by_torch_s", lambda codes, _, count: len(codes) / 2048 * (1 + 0.1 * count))
    monkeypatch.setattr(kernels, "least_s", lambda _: next(measured))
    assert kernels.most_inputs.__wrapped__(torch.float32, in_strips=True) == most
    assert next(measured, None) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_many_inputs_by_tiles(kind: int | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of products with the rows, decoded to bfloat16, in the order of `whole_tiles.h`."""
    if kernels.strips_version() < kernels.BY_TILES:
        assert not kernels.has_tiles(torch.bfloat16)
        pytest.skip("not in this version")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(kernels, "WORTH_A_THREAD", 1)
    generator = torch.Generator().manual_seed(7)
    for rows, columns in ((32, block(kind)), (48, 2 * block(kind)), (112, 1024), (32, 3072), (160, 256)):
        weight = row_by_row(kind, rows, columns, generator, torch.bfloat16)
        strips, scale = weight.for_device(CPU), weight._output_scale()
        decoded = whole._at(weight._rows(0, rows, torch.float32).bfloat16(), 0)
        for num_inputs in (1, 15, 16, 17, 40, 255, 256, 257, 290):
            inputs = torch.randn(num_inputs, columns, generator=generator).bfloat16()
            inputs[0] = 0
            ones = torch.eye(columns, dtype=torch.bfloat16)[:num_inputs]
            got = strips._multiply_by_rows(inputs)
            if scale is None:
                expected = [
                    _multiply(some.clone(), _Whole.of(decoded, _How(Order.IN_TILES, columns)), None)
                    for some in inputs.split(32)
                ]
                assert torch.equal(got, torch.cat(expected)), (rows, columns, num_inputs)
            else:  # rounded once
                products = (inputs.double() @ decoded.double().T * scale.double()).float()
                assert torch.allclose(got.float(), products, rtol=2**-8, atol=1e-4)
                assert torch.equal(strips._multiply_by_rows(ones), (decoded.T * scale)[:num_inputs])
    inputs[3, 5], inputs[4, 6] = math.nan, math.inf
    got = strips._multiply_by_rows(inputs)
    assert got[3].isnan().all()
    assert not got[4].isfinite().any()
    assert got[[0, 1, 2, 5]].isfinite().all()


@only_with_int8
def test_all_three_digits_are_exact() -> None:
    """Each row takes one column, and 24 bits have room for all these numbers."""
    generator = torch.Generator().manual_seed(2)
    matrix = Int8(torch.eye(64, dtype=torch.int8), torch.ones(64), torch.float32).for_device(CPU)
    largest = 127 * (65536 + 256 + 1)
    inputs = torch.randint(-largest, largest + 1, (9, 64), generator=generator).float()
    inputs[0, :4] = torch.tensor([largest, -largest, 1, -1])
    inputs[1] /= 2.0**100
    inputs[2, 1:32] /= 2**20  # whose last bits are rounded away
    found = matrix.multiply(inputs)
    assert torch.equal(found[[0, 1, 3, 4, 5, 6, 7, 8]], inputs[[0, 1, 3, 4, 5, 6, 7, 8]])
    assert ((found[2] - inputs[2]).abs() <= 0.5).all()
    short = torch.randn(9, 64, generator=generator).bfloat16().float()
    short = short.where(short.abs() > 2**-10, 1.0)
    assert torch.equal(matrix.multiply(short), short)


def test_the_largest_sums_have_room(kind: int | None) -> None:
    """AVX2 adds up products of bytes in 16 bits."""
    rows = row_by_row(kind, 48, 2 * block(kind), torch.Generator().manual_seed(8), torch.float32)
    scales = rows.codes.clone()
    for byte in (0, 0xFF, 0x0F, 0xF0):
        rows.codes.view(torch.uint8).fill_(byte if kind is not INT8 else max(byte, 1))
        if kind is not INT8:  # where scales are, as they were
            size = KINDS[kind][2]
            numbers = slice(-2, None) if kind == 14 else slice(0, 16 if kind in (12, 13) else 4)
            blocks = (len(rows.codes), -1, size)
            rows.codes.view(blocks)[..., numbers] = scales.view(blocks)[..., numbers]
        matrix, weight = rows.for_device(CPU)._matrix(), rows.dequantize().double()
        for digits in ((127, 127, 127), (127, -128, -128), (-127, 127, 127), (-127, -128, -128), (127, 0, -128)):
            number = digits[0] * 65536 + digits[1] * 256 + digits[2]
            inputs = torch.full((19, rows.shape[1]), float(number))
            expected, explained = inputs.double() @ weight.T, 8 * most_error(inputs.double(), weight)  # all the largest
            assert ((matrix.multiply(inputs) - expected).abs() <= explained).all()
            assert ((matrix.multiply_rounded(inputs) - expected).abs() <= explained).all()


def test_parts(kind: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole strips stay strips; other rows, and columns, are those of the same weights."""
    generator = torch.Generator().manual_seed(3)
    rows = row_by_row(kind, 96, 4 * block(kind), generator, torch.bfloat16)
    strips = rows.for_device(CPU)
    for start, end, is_whole in ((16, 48, True), (0, 96, True), (5, 48, False), (16, 17, False)):
        assert isinstance(strips.rows(start, end), InStrips) == is_whole
        assert torch.equal(strips.rows(start, end).dequantize(), rows.rows(start, end).dequantize())
        assert torch.equal(strips._rows(start, end, torch.float32), rows._rows(start, end, torch.float32))
    for each in (48, 32, 24):
        assert torch.equal(strips.split(each).dequantize(), rows.split(each).dequantize())
        assert torch.equal(strips.split(each)[1].dequantize(), rows.split(each)[1].dequantize())
    cut = strips.columns(block(kind), 3 * block(kind))
    assert torch.equal(cut.dequantize(), rows.columns(block(kind), 3 * block(kind)).dequantize())
    inputs = torch.randn(7, rows.shape[1], generator=generator).bfloat16()
    expected = strips.linear(inputs)
    monkeypatch.setattr(kernels, "WORTH_A_THREAD", 1)
    for threads in (2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(strips.linear(inputs), expected)


def test_several_matrices(kind: int | None) -> None:
    """Experts, also where weights are put together: what stays in strips has whole ones."""
    generator = torch.Generator().manual_seed(5)
    rows = [row_by_row(kind, 32, 2 * block(kind), generator, torch.float32) for _ in range(3)]
    strips = [PackedView(one.for_device(CPU)) for one in rows]
    whole = [one.dequantize() for one in rows]
    for dim in (0, 1, 2):
        assert torch.equal(dequantized(torch.stack(strips, dim)), torch.stack(whole, dim))
    for dim in (0, 1):
        assert torch.equal(dequantized(torch.cat(strips, dim)), torch.cat(whole, dim))
    assert isinstance(torch.stack(strips).packed, InStrips)
    assert isinstance(torch.cat(strips).packed, InStrips)
    experts = torch.stack([PackedView(one) for one in rows]).packed.for_device(CPU)
    assert isinstance(experts, InStrips)
    inputs = torch.randn(5, rows[0].shape[1], generator=generator)
    for idx, one in enumerate(strips):
        assert torch.equal(experts[idx].linear(inputs), one.packed.linear(inputs))
    rounding = PackedView(rows[0].for_device(CPU).as_rounding())
    assert rounding.packed.rows(1, 32).rounds_inputs
    assert rounding.packed.columns(0, block(kind)).rounds_inputs


def dequantized(weight: PackedView | Tensor) -> Tensor:
    return weight.dequantize()


def test_to_another_process(kind: int | None) -> None:
    matrix = row_by_row(kind, 32, block(kind), torch.Generator().manual_seed(6), torch.float32).for_device(CPU)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=Link(ours, 1, CPU).send, args=(matrix,))
        sender.start()
        found = Link(theirs, 0, CPU).receive()
        sender.join()
    assert type(found) is type(matrix)
    assert torch.equal(found.dequantize(), matrix.dequantize())


@only_with_int8
def test_rows_that_are_no_whole_strips_are_refused() -> None:
    for make in (kernels.into_strips, lambda codes: kernels.MatrixInStrips(codes, torch.ones(24, 1))):
        with pytest.raises(ValueError, match="24 rows aren't whole strips of 16"):
            make(torch.ones(24, 32, dtype=torch.int8))


@only_with_int8
def test_what_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    for rows, columns in ((24, 64), (32, 48)):
        matrix = Int8.quantize(torch.randn(rows, columns, generator=generator))
        assert matrix.for_device(CPU) is matrix
    weight = torch.randn(32, 64, generator=generator)
    assert type(LlmInt8.quantize(weight).for_device(CPU)) is LlmInt8
    strips = Int8.quantize(weight).for_device(CPU)
    assert strips.for_device(CPU) is strips
    monkeypatch.setattr(kernels, "strips_version", lambda: 2)
    assert type(Int8.quantize(weight).for_device(CPU)) is Int8


def test_strips_are_only_made_where_they_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert type(Int8.quantize(torch.ones(32, 64)).for_device(CPU)) is Int8


@pytest.mark.skipif(len(VERSIONS) < 2, reason="one version runs here")
@pytest.mark.parametrize("of", sorted(kernels.IN_STRIPS.keys() - {8, 14}), ids=str)
def test_all_processors_compute_the_same(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: the server that takes another's place may have another processor."""
    generator = torch.Generator().manual_seed(7)
    columns = 2048 // block(of) * block(of) + block(of)
    rows = row_by_row(of, 48, columns, generator, torch.float32)
    for num_inputs in (1, 2, 3, 6, 65):
        inputs = torch.randn(num_inputs, columns, generator=generator)
        inputs *= torch.randn(num_inputs, columns, generator=generator).mul(3).exp()
        found = []
        for version in VERSIONS:
            monkeypatch.setattr(kernels, "strips_version", lambda version=version: version)
            matrix = rows.for_device(CPU)._matrix()
            found.append(torch.stack([matrix.multiply(inputs), matrix.multiply_rounded(inputs)]))
        assert all(torch.equal(one, found[0]) for one in found)


@only_with_strips
def test_unknown_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "strips_version", lambda: 2)
    for gguf in (None, (8, 32), (14, 256), (10, 256)):
        with pytest.raises(ValueError, match="doesn't multiply such weights in strips"):
            kernels.MatrixInStrips(torch.ones(16, 210, dtype=torch.int8), torch.ones(16, 1), gguf=gguf)
