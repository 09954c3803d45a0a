"""The kernel for packed weights on CUDA, in Triton's interpreter, which runs it on a CPU; `tests/gpu` has it on a GPU.

Triton is 190 MB to download, and no dependency where there is no GPU: `make test-kernels` installs it.
"""

import ast
import importlib.util
import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_published_weights import KEPT_BITS, kept
from torch import Tensor
from torch.nn.functional import silu

import swarmllm
from swarmllm.models.quantization import cuda
from swarmllm.models.quantization.decoded import E2M1, FP4, INT4, NF4, UINT4, nibbles
from swarmllm.models.quantization.nf4 import Nf4
from swarmllm.models.quantization.packed import Int8, Packed

SOURCES = Path(swarmllm.__file__).parent
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3}
"""The interpreter takes bfloat16 for whole numbers in products."""


interpreted = pytest.mark.lane("triton")


def weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def inputs(num_inputs: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_inputs, columns, generator=torch.Generator().manual_seed(num_inputs)).to(dtype)


def check(packed: Packed, num_inputs: int, dtype: torch.dtype) -> None:
    matrix, given = packed.cuda_matrix(), inputs(num_inputs, packed.shape[1], dtype)
    assert matrix is not None
    assert cuda.takes(given, matrix)
    expected, residual = given.double() @ packed.dequantize().double().T, inputs(num_inputs, packed.shape[0], dtype)
    for found, wanted in (
        (cuda.multiply(given, matrix), expected),
        (cuda.multiply(given, matrix, residual=residual), expected + residual.double()),
    ):
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert (found.double() - wanted).norm() <= TOLERANCES[dtype] * wanted.norm()
    check_single(given[:1], matrix, packed.dequantize().double())


def check_single(given: Tensor, matrix: cuda.Matrix, weights: Tensor) -> None:
    """The kernel for one input, with all that it does besides."""
    from swarmllm.models.span import fused_kernels

    dtype, half = given.dtype, len(weights) // 2
    norm, residual = inputs(2, given.shape[1], dtype)[1], inputs(1, len(weights), dtype)
    norm /= float(weights.norm(dim=1).mean())  # gates near 0, where silu is no more than a curve
    normal = fused_kernels.normalize(given, norm, 1e-5).double()
    gates, ups = (normal @ weights[: 2 * half].T).chunk(2, -1)
    for found, expected in (
        (fused_kernels.multiply(given, matrix), given.double() @ weights.T),
        (fused_kernels.multiply(given, matrix, residual=residual), given.double() @ weights.T + residual.double()),
        (fused_kernels.multiply(given, matrix, norm=(norm, 1e-5)), normal @ weights.T),
        (fused_kernels.multiply(given, _rows(matrix, 2 * half), norm=(norm, 1e-5), gated=True), silu(gates) * ups),
    ):
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= 2 * TOLERANCES[dtype] * expected.norm()


def _rows(matrix: cuda.Matrix, number: int) -> cuda.Matrix:
    parts = {name: getattr(matrix, name) for name in ("codes", "scale", "zero", "least", "factor")}
    return replace(matrix, **{name: None if part is None else part[:number] for name, part in parts.items()})


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (40, 64), (70, 320), (1, 16)])
@pytest.mark.parametrize("num_inputs", [1, 16, 17, 64])
def test_int8(num_inputs: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Also where rows, columns and inputs don't fill the last program's."""
    check(Int8.quantize(weight(rows, columns, torch.float32)), num_inputs, dtype)


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (40, 64), (70, 320)])
@pytest.mark.parametrize("num_inputs", [1, 33])
def test_nf4(num_inputs: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    check(Nf4.quantize(weight(rows, columns, torch.float32), tiled=False), num_inputs, dtype)


@interpreted
@pytest.mark.parametrize("name", [name for name, bits in KEPT_BITS.items() if bits])
def test_published_formats(name: str) -> None:
    """Groups of usual sizes are multiplied packed; weights with others are dequantized first."""
    packed = kept(name, torch.float32)
    matrix = packed.cuda_matrix()
    assert matrix is not None
    if cuda.takes(inputs(1, packed.shape[1], torch.float32), matrix):
        check(packed, 5, torch.float32)
    else:
        assert matrix.group not in (32, 64, 128, 256)


def matrix_of(
    group: int, parts: str, values: tuple[float, ...], high_first: bool, groups: int = 3
) -> tuple[cuda.Matrix, Tensor]:
    """A matrix with these parts, and what it is in float64."""
    rows = 33
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 256, (rows, group * groups // 2), dtype=torch.uint8, generator=generator)
    scale, zero, least = (torch.rand(rows, groups, generator=generator) + 0.5 for _ in range(3))
    factor, divides = torch.rand(rows, generator=generator) + 0.5, "divisor" in parts
    matrix = cuda.Matrix(
        codes=codes,
        scale=scale.bfloat16(),
        zero=zero if "zero" in parts else None,
        least=least if "least" in parts else None,
        factor=factor if "factor" in parts or divides else None,
        divides=divides,
        values=values,
        high_first=high_first,
    )
    weights = torch.tensor(values)[nibbles(codes, low_first=not high_first).int()].double().view(rows, groups, -1)
    steps = scale.bfloat16().double()
    if matrix.zero is not None:
        weights = weights - zero.double()[..., None]
    if matrix.factor is not None:
        steps = steps / factor[:, None] if divides else steps * factor[:, None]
    weights = weights * steps[..., None]
    if matrix.least is not None:
        weights = weights + least.double()[..., None]
    return matrix, weights.flatten(1)


@interpreted
@pytest.mark.parametrize("group", [32, 64, 128, 256, 384])
@pytest.mark.parametrize("parts", ["", "zero", "least", "factor", "divisor", "zero least"])
def test_all_that_a_matrix_may_have(group: int, parts: str) -> None:
    for values, high_first, groups in itertools.product((INT4, UINT4, NF4), (False, True), (1, 3)):
        matrix, weights = matrix_of(group, parts, values, high_first, groups)
        given = inputs(3, weights.shape[1], torch.float32)
        expected = given.double() @ weights.T
        assert cuda.takes(given, matrix)
        assert (cuda.multiply(given, matrix).double() - expected).norm() <= 1e-6 * expected.norm()
        check_single(given[:1], matrix, weights)


def test_groups_of_16_are_left_to_the_table() -> None:
    """As nvfp4 has them."""
    matrix, weights = matrix_of(16, "", INT4, False)
    assert not cuda.takes(inputs(3, weights.shape[1], torch.float32), matrix)


def float_of(bits: int) -> float:
    number: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return number


def float_bits(number: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits


def run(instructions: str, word: int) -> list[int]:
    """The values that such instructions leave in `$0` to `$3`, as NVIDIA's manual of PTX describes each."""
    registers = {"$4": word}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand.replace("0f", "0x"), 0)

    for line in instructions.splitlines():
        name, _, operands = line.rstrip(";").partition(" ")
        if "." not in name or name == ".reg":
            continue
        target, *others = operands.split(", ")
        first, second, *third = map(value, others)
        match name:
            case "and.b32":
                registers[target] = first & second
            case "or.b32":
                registers[target] = first | second
            case "shr.b32":
                registers[target] = first >> second
            case "xor.b32":
                registers[target] = first ^ second
            case "sub.f32":
                registers[target] = float_bits(float_of(first) - float_of(second))
            case "prmt.b32":
                given = (first | second << 32).to_bytes(8, "little")
                selectors = [third[0] >> 4 * place & 15 for place in range(4)]
                assert max(selectors) < 8, "the highest bit would spread a byte's sign"
                registers[target] = int.from_bytes(bytes(given[one] for one in selectors), "little")
            case _:
                raise NotImplementedError(name)
    return [registers[f"${place}"] for place in range(4)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", [INT4, UINT4, NF4, FP4, E2M1], ids=["int4", "uint4", "nf4", "fp4", "e2m1"])
@pytest.mark.parametrize("high_first", [False, True])
def test_instructions_that_decode(values: tuple[float, ...], high_first: bool, dtype: torch.dtype) -> None:
    """Each byte in each place of a word gives the two values that it stands for."""
    instructions = cuda.decoding(values, dtype, high_first)
    codes = torch.arange(256, dtype=torch.uint8).view(64, 4)
    codes = torch.cat([codes.roll(shift, 1) for shift in range(4)])
    found = [run(instructions, int.from_bytes(bytes(word), "little")) for word in codes.tolist()]
    as_values = torch.tensor(found, dtype=torch.int64).to(torch.int32).view(dtype).view(len(codes), 8)
    expected = torch.tensor(values, dtype=torch.float64).to(dtype)[nibbles(codes, low_first=not high_first).int()]
    assert torch.equal(as_values.view(torch.int16), expected.view(torch.int16))


def test_instructions_that_make_bytes_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte in each place of a word."""
    monkeypatch.setattr(cuda, "_is_on_gpu", lambda _: True)
    words = torch.stack([torch.arange(256).roll(shift) for shift in range(4)], -1).to(torch.uint8)
    for dtype in (torch.int8, torch.uint8):
        instructions = cuda.bytes_to_floats(words.view(dtype))
        found = [run(instructions, int.from_bytes(bytes(word), "little")) for word in words.tolist()]
        assert torch.equal(torch.tensor(found).to(torch.int32).view(torch.float32), words.view(dtype).float())
    assert not cuda.bytes_to_floats(words.bfloat16())


def test_what_the_kernel_leaves_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_compiles_for", lambda *_: True)
    matrix = Int8.quantize(torch.randn(4, 96)).cuda_matrix()
    assert cuda.takes(inputs(cuda.MOST_INPUTS, 96, torch.float16), matrix)
    assert not cuda.takes(inputs(cuda.MOST_INPUTS + 1, 96, torch.float16), matrix)
    assert not cuda.takes(inputs(1, 96, torch.float64), matrix)
    of_groups = {
        group: cuda.Matrix(codes=torch.zeros(4, 960), scale=torch.ones(4, 960 // group)) for group in (8, 48, 64)
    }
    assert [group for group, one in of_groups.items() if cuda.takes(inputs(1, 960, torch.float16), one)] == [64]


@pytest.mark.parametrize(
    ("found", "capability", "float8", "others"),
    [(None, (9, 0), False, False), ("triton", (7, 5), False, False), ("triton", (8, 0), False, True)],
)
def test_gpus_that_triton_does_not_compile_for(
    found: str | None, capability: tuple[int, int], float8: bool, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(cuda, "_multiplies_on", lambda _: True)
    compiles = cuda._compiles_for.__wrapped__
    assert (compiles(torch.device("cuda"), True), compiles(torch.device("cuda"), False)) == (float8, others)


def test_without_a_compiler_weights_are_dequantized_and_the_owner_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(cuda, "multiply", fails)
    assert cuda._multiplies_on.__wrapped__(torch.device("cpu")) is False
    assert "install gcc" in caplog.text
    assert "(Failed to find C compiler.)" in caplog.text
    monkeypatch.setattr(cuda, "multiply", lambda *_: None)
    assert cuda._multiplies_on.__wrapped__(torch.device("cpu")) is True


def imported(path: Path) -> Iterator[str]:
    """Names of modules that come with this one: not those within functions."""

    def within(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield child.module or ""
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from within(child)

    return within(ast.parse(path.read_text()))


def test_triton_comes_only_with_what_runs_on_cuda() -> None:
    """Not when clients and servers are imported, nor with any module that they import for other reasons."""
    modules = {
        ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts).removesuffix(".__init__"): set(imported(path))
        for path in SOURCES.rglob("*.py")
    }
    need = {name for name, names in modules.items() if any(one.split(".")[0] == "triton" for one in names)}
    assert "swarmllm.models.quantization.cuda_products" in need
    while more := {name for name, names in modules.items() if names & need} - need:
        need |= more
    entries = ("client.distributed_model", "server.server", "models.span.loading", "models.quantization.packed")
    assert not need & {f"swarmllm.{name}" for name in entries}
    assert len(need) < 10, "kernels, and what only calls them"
