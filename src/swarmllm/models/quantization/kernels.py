"""Products with weights of few bits on CPUs by `kernels.c`, and their speed.

`kernels.c` is built when swarmllm is installed. If the compiler was missing, or the processor lacks the instructions,
`library()` is None, and torch multiplies. The fastest of the exact ways to multiply on this processor is measured when
it is first needed, in 50 to 150 ms each: a table of processors would be the alternative. Used by all forms of packed
weights.
"""

import ctypes
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmllm.machine_memory import into_huge_pages, reused_heap
from swarmllm.models.quantization.rules import GROUP

logger = logging.getLogger(__name__)

ROUNDED = 32
"""Neighbours in an input that share a scale when they are rounded to 8 bits."""
PIECE_COLUMNS = 512
"""Columns that `int8_products.h` multiplies at a time, row by row; fewer take as long."""
WELL_FILLED = 0.75
"""Share of columns in their pieces from which rounded inputs are faster, row by row. Measured with 576 columns in two
pieces: 128 inputs take 1.3 times as long as exact ones in bfloat16; with 2048 in four, 0.84 times."""
AT_A_TIME = 16
"""Inputs that the kernels multiply by rows which they have decoded once."""
WORTH_A_THREAD = 1 << 20
"""Codes of a matrix. Assumed: below, giving half of them to another thread costs as much as it saves."""
WORTH_ROUNDING = 1 << 16
"""Weights. Assumed: rounding them takes some hundred times as long as multiplying them."""
LINE = 64
"""Bytes of a line of the caches."""
STRIP = 16
"""Rows that are side by side in a strip."""
BY_TILES = 5
"""The version of `strips.h` with products of many inputs by tiles (`strips_tiles.h`)."""
TILE_ROWS = 16
"""Inputs of a tile."""
Q4_0, Q8_0 = 2, 8
"""GGUF's numbers of these kinds of blocks."""
IN_STRIPS = {Q4_0: 2, 3: 2, 6: 2, 7: 2, Q8_0: 3, 12: 2, 13: 2, 14: 3}
"""Kinds of GGUF's blocks that `strips.h` knows, Q4_0 to Q8_0 and Q4_K to Q6_K, and the least version that does."""
_ROUNDED_KINDS = frozenset({8, 12, 13, 14})
_PAIRS, _PLANES = 0, 3
_CODES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 4}
_GGUF = 64
"""Added to GGUF's numbers of kinds."""
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float16: 3, torch.uint8: 4}

REPEATS = 4
"""The fastest run counts: disturbances only ever make a run slower."""
MANY = 128
"""Inputs of a product that is no longer mostly decoding."""
COLD_ROWS = 24 << 10
"""50 MB of codes, too many for a cache, as in a decode step. In a cache both kernels are as fast."""
NO_LIMIT = 1 << 30
SLICE_BYTES = 4 << 20
"""Dequantized rows at a time. Measured (5632×2048 float32, 1 token): 1.5 ms, against 1.7 with 2 MB and 23 with all."""


class _Weight(ctypes.Structure):
    _fields_ = (
        ("columns", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("codes_kind", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        ("divides", ctypes.c_int32),
        ("group_bytes", ctypes.c_int32),
        ("zero_kind", ctypes.c_int32),
        ("rounds_inputs", ctypes.c_int32),
        ("in_strips", ctypes.c_int32),
        ("asks_far", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("least", ctypes.c_void_p),
    )


@functools.cache
def library() -> Any:
    """The compiled `kernels.c`; None where there is none."""
    path = Path(__file__).with_name("_kernels.so")
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("weights of few bits multiply slowly here, since swarmllm was installed without gcc (%s)", error)
        return None
    is_complete = hasattr(found, "swarmllm_attend_heads")  # the last function that has come or changed
    if not is_complete or getattr(found, "swarmllm_weight_bytes", int)() != ctypes.sizeof(_Weight):
        logger.warning(
            "weights of few bits multiply slowly, since %s is of another version: install swarmllm anew", path
        )
        return None
    number, address, matrix = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(_Weight)
    product = (matrix, number, number, address, number, address, number)
    found.swarmllm_multiply.argtypes = found.swarmllm_multiply_rounded.argtypes = (number, *product)
    found.swarmllm_multiply_strips.argtypes = found.swarmllm_multiply_tiles.argtypes = product
    found.swarmllm_put_in_tiles.argtypes = (address, number, number, address)
    found.swarmllm_dequantize.argtypes = (number, matrix, number, number, address, address)
    found.swarmllm_round_inputs.argtypes = (number, address, number, number, address)
    found.swarmllm_round.argtypes = (number, number, address, number, address)
    found.swarmllm_prepare_inputs.argtypes = (matrix, address, number, address)
    found.swarmllm_arrange.argtypes = (number, number, address, number, number, address)
    found.swarmllm_open_strips.argtypes = (number, address, number, number, address)
    whole = (number, address, address, number, number, address, number, address)
    found.swarmllm_multiply_whole.argtypes = whole
    found.swarmllm_attend_heads.argtypes = (number, address, number, number, number)
    found.swarmllm_has_order.argtypes, found.swarmllm_has_order.restype = (number,) * 3, number
    for of_level in ("rounded_bytes", "int8_version", "strips_version", "can_attend_as_torch"):
        choice = getattr(found, f"swarmllm_{of_level}")
        choice.argtypes, choice.restype = (number,), number
    for without_result in (
        "multiply", "dequantize", "round_inputs", "round", "multiply_rounded", "multiply_strips", "prepare_inputs",
        "put_in_tiles", "multiply_tiles", "arrange", "open_strips", "multiply_whole", "attend_heads",
    ):  # fmt: skip
        getattr(found, f"swarmllm_{without_result}").restype = None
    return found


@functools.cache
def level() -> int:
    """The compiled version in use: 4 with AVX-512, 3 with AVX2, 1 otherwise; lower if torch is told so."""
    wished = {"default": 1, "avx2": 3}.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), 4)
    return min(wished, int(library().swarmllm_level()))


@functools.cache
def int8_version() -> int:
    """The compiled version of products with rounded inputs: 3 and 4 use instructions for products of bytes."""
    return int(library().swarmllm_int8_version(level()))


def rounded_bytes(columns: int) -> int:
    """Bytes of a rounded input."""
    return int(library().swarmllm_rounded_bytes(columns))


def strips_version() -> int:
    """The compiled version of products with weights in strips (`strips.h`): 5 with AMX, 4 with AVX-512's VNNI, 3 with
    AVX-VNNI, 2 with AVX2, 0 if there is none."""
    return 0 if library() is None else _strips_version_at(level())


@functools.cache
def _strips_version_at(level: int) -> int:
    return int(library().swarmllm_strips_version(level))


def has_strips(gguf_kind: int | None = None) -> bool:
    """True if this processor multiplies strips of int8 codes, or of GGUF's blocks of a kind."""
    least = IN_STRIPS[Q8_0] if gguf_kind is None else IN_STRIPS.get(gguf_kind)
    return least is not None and strips_version() >= least


def has_tiles(dtype: torch.dtype) -> bool:
    """True if this processor multiplies strips by many inputs of this dtype in tiles (`strips_tiles.h`)."""
    return dtype == torch.bfloat16 and strips_version() == BY_TILES


def into_strips(codes: Tensor, gguf_kind: int | None = None, *, back: bool = False) -> Tensor:
    """Rows `[…, rows, bytes of a row]` of int8 codes, or of GGUF's blocks of a kind, in strips, or back.

    `rows` must be a multiple of `STRIP`, and rows of int8 one of `ROUNDED`. The result has as many bytes.
    """
    if codes.shape[-2] % STRIP:
        raise ValueError(f"{codes.shape[-2]} rows aren't whole strips of {STRIP}")
    kind = _CODES[torch.int8] if gguf_kind is None else _GGUF + gguf_kind
    rows, row_bytes = codes.cpu().contiguous(), codes.shape[-1]
    made, strip_bytes = torch.empty_like(rows), STRIP * row_bytes

    def part(start: int, end: int) -> None:
        offset = start * strip_bytes
        library().swarmllm_arrange(
            kind, back, rows.data_ptr() + offset, end - start, row_bytes, made.data_ptr() + offset
        )

    in_parts(part, rows.numel() // strip_bytes, rows.numel() // WORTH_A_THREAD)
    return made.to(codes.device)


def open_strips(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of int8 in strips `[rows, columns]` as rows in float32 or bfloat16."""
    codes, (rows, columns) = codes.contiguous(), codes.shape
    made, strip = torch.empty(rows, columns, dtype=dtype), STRIP * columns

    def part(start: int, end: int) -> None:
        to = made.data_ptr() + start * strip * dtype.itemsize
        is_wide = dtype == torch.float32
        library().swarmllm_open_strips(is_wide, codes.data_ptr() + start * strip, end - start, columns, to)

    in_parts(part, rows // STRIP, codes.numel() // WORTH_A_THREAD)
    return made


def multiplies_bytes() -> bool:
    """True if this processor multiplies rounded inputs faster than exact ones: it has AVX-VNNI, or AVX-512's VNNI.

    Measured row by row (5632×2048, one thread, Zen 5; ms for 1, 8 and 128 inputs): int8 0.42, 0.79 and 7.4 against
    0.40, 1.3 and 16.5 with exact inputs; q4_k 0.43, 0.96 and 8.9 against 0.44, 1.6 and 19. With AVX2 alone 128 take 29.
    In strips (Zen 4): int8 0.43, 1.1 and 10 against 0.43, 1.5 and 23.
    """
    return library() is not None and int8_version() >= 3


class _Recording(threading.local):
    record: "Callable[[Matrix, Tensor, Tensor], None] | None" = None


_recording = _Recording()
"""A function that this thread's products are told to."""


@contextmanager
def products_recorded(record: "Callable[[Matrix, Tensor, Tensor], None]") -> Iterator[None]:
    """Within: call `record` with the matrix, the inputs and the outputs of each product of this thread."""
    _recording.record = record
    try:
        yield
    finally:
        _recording.record = None


class Matrix:
    """One packed matrix, as the kernels want it."""

    _rows_together = 1

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor | None = None,
        *,
        zero: Tensor | None = None,
        factor: Tensor | None = None,
        divides: bool = False,
        values: tuple[float, ...] | None = None,
        least: Tensor | None = None,
        gguf: tuple[int, int] | None = None,
    ) -> None:
        """`values`: the values of codes, two in a byte. `least`: added to the products of codes with scales; codes
        without `values` are then `KBit`'s. `gguf`: the kind of GGUF's blocks, and the number of weights in a row."""
        groups = codes.shape[1] if scale is None else scale.shape[1]
        if gguf is not None:
            kind, self.columns = _GGUF + gguf[0], gguf[1]
        elif values is not None:
            kind, self.columns = _PAIRS, codes.shape[1] * 2
        elif least is not None:
            kind, self.columns = _PLANES, groups * GROUP
        else:
            kind, self.columns = _CODES[codes.dtype], codes.shape[1]
        self.rows = codes.shape[0]
        in_groups = self.columns % ROUNDED == 0 and (groups == 1 or self.columns // groups % ROUNDED == 0)
        self.takes_rounded = kind >= _GGUF or (
            kind == _CODES[torch.int8] and in_groups and zero is None and least is None
        )
        """True if `multiply_rounded` knows such codes."""
        table = None if values is None else torch.tensor(values)
        # The kernels get addresses only: the tensors must be contiguous, and live as long as this object.
        tensors = (codes, scale, zero, factor, table, least)
        self._tensors = [None if one is None else one.contiguous() for one in tensors]
        self._weight = _Weight(
            self.columns,
            groups,
            kind,
            0 if scale is None else _NUMBERS[scale.dtype],
            divides,
            codes.shape[1] // groups,
            0 if zero is None else _NUMBERS[zero.dtype],
            *(0, 0, 0),
            *(None if one is None else one.data_ptr() for one in self._tensors),
        )

    def multiply(self, inputs: Tensor) -> Tensor:
        """`[tokens, in]` → `[tokens, out]`, both float32."""
        inputs, num_inputs = inputs.contiguous(), inputs.shape[0]
        outputs = inputs.new_empty(num_inputs, self.rows)

        def part(start: int, end: int) -> None:
            library().swarmllm_multiply(
                level(), self._weight, start, end, inputs.data_ptr(), num_inputs, outputs.data_ptr(), self.rows
            )

        self._in_parts(part)
        if _recording.record is not None:
            _recording.record(self, inputs, outputs)
        return outputs

    def multiply_rounded(self, inputs: Tensor) -> Tensor:
        """The same, of inputs that are rounded to 8 bits in groups of `ROUNDED`."""
        inputs, num_inputs = inputs.contiguous(), inputs.shape[0]
        outputs, version = inputs.new_empty(num_inputs, self.rows), int8_version()
        rounded = torch.empty(num_inputs * rounded_bytes(self.columns), dtype=torch.uint8)
        library().swarmllm_round_inputs(version, inputs.data_ptr(), num_inputs, self.columns, rounded.data_ptr())

        def part(start: int, end: int) -> None:
            library().swarmllm_multiply_rounded(
                version, self._weight, start, end, rounded.data_ptr(), num_inputs, outputs.data_ptr(), self.rows
            )

        self._in_parts(part)
        if _recording.record is not None:
            self._weight.rounds_inputs = True
            _recording.record(self, inputs, outputs)
        return outputs

    @property
    def is_faster_rounded(self) -> bool:
        """True if products with rounded inputs are faster on processors that multiply bytes."""
        return self.takes_rounded and self.columns >= WELL_FILLED * PIECE_COLUMNS * -(-self.columns // PIECE_COLUMNS)

    @property
    def floats_of_input(self) -> int:
        """Floats that an input takes as it is multiplied."""
        return rounded_bytes(self.columns) // 4 if self._weight.rounds_inputs else self.columns

    @property
    def address(self) -> int:
        """The address of the matrix as `weight.h` describes it."""
        return ctypes.addressof(self._weight)

    def dequantize(self, start: int, end: int) -> Tensor:
        """Rows in float32."""
        rows = torch.empty(end - start, self.columns)
        library().swarmllm_dequantize(level(), self._weight, start, end, rows.data_ptr(), None)
        return rows

    def _in_parts(self, part: Callable[[int, int], None]) -> None:
        in_parts(part, self.rows, self.rows * self.columns // WORTH_A_THREAD, self._rows_together)


class MatrixInStrips(Matrix):
    """The same of codes that `into_strips` has made."""

    _rows_together = STRIP

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor | None = None,
        *,
        gguf: tuple[int, int] | None = None,
        is_asked_far: bool | None = None,
    ) -> None:
        """`is_asked_far`: in place of `asks_far()`, which is measured."""
        if codes.shape[0] % STRIP:  # the kernels would read beyond the end
            raise ValueError(f"{codes.shape[0]} rows aren't whole strips of {STRIP}")
        if not has_strips(None if gguf is None else gguf[0]):
            raise ValueError("this processor doesn't multiply such weights in strips")
        super().__init__(codes, scale, gguf=gguf)
        self._weight.in_strips = strips_version()
        self._weight.asks_far = asks_far() if is_asked_far is None else is_asked_far
        self._row_bytes = codes.shape[1]

    def multiply(self, inputs: Tensor) -> Tensor:
        return self._multiply(inputs, rounded=False)

    def multiply_rounded(self, inputs: Tensor) -> Tensor:
        return self._multiply(inputs, rounded=True)

    def _multiply(self, inputs: Tensor, *, rounded: bool) -> Tensor:
        self._weight.rounds_inputs = rounded
        inputs, num_inputs = inputs.contiguous(), inputs.shape[0]
        outputs, prepared = inputs.new_empty(num_inputs, self.rows), torch.empty_like(inputs)
        library().swarmllm_prepare_inputs(self._weight, inputs.data_ptr(), num_inputs, prepared.data_ptr())

        def part(start: int, end: int) -> None:
            library().swarmllm_multiply_strips(
                self._weight, start, end, prepared.data_ptr(), num_inputs, outputs.data_ptr(), self.rows
            )

        self._in_parts(part)
        if _recording.record is not None:
            _recording.record(self, inputs, outputs)
        return outputs

    def multiply_many(self, inputs: Tensor) -> Tensor:
        """The same in bfloat16, for many inputs, of at least two strips, on a processor that `has_tiles`. Weights are
        rounded to bfloat16, but for scales of whole rows."""
        inputs, num_inputs = inputs.contiguous(), inputs.shape[0]
        outputs = inputs.new_empty(num_inputs, self.rows)
        tiles = empty_at(torch.Size((-(-num_inputs // TILE_ROWS) * TILE_ROWS, self.columns)), inputs.dtype)
        library().swarmllm_put_in_tiles(inputs.data_ptr(), num_inputs, self.columns, tiles.data_ptr())

        def part(start: int, end: int) -> None:
            library().swarmllm_multiply_tiles(
                self._weight, start, end, tiles.data_ptr(), num_inputs, outputs.data_ptr(), self.rows
            )

        in_parts(part, self.rows, self.rows * self.columns // WORTH_A_THREAD, 2 * STRIP)
        return outputs

    @property
    def is_faster_rounded(self) -> bool:
        return self.takes_rounded  # there are no pieces to fill

    @property
    def floats_of_input(self) -> int:
        return self.columns  # a group of 32 takes 128 bytes

    def dequantize(self, start: int, end: int) -> Tensor:
        first, last = start // STRIP * STRIP, -(-end // STRIP) * STRIP
        rows, room = torch.empty(last - first, self.columns), torch.empty(STRIP * self._row_bytes, dtype=torch.uint8)
        library().swarmllm_dequantize(level(), self._weight, first, last, rows.data_ptr(), room.data_ptr())
        return rows[start - first : end - first]


def empty_at(shape: torch.Size, dtype: torch.dtype, place: int = 0) -> Tensor:
    """An empty tensor that begins at this byte of a line of the caches."""
    room = torch.empty(shape.numel() + LINE // dtype.itemsize, dtype=dtype)
    first = (place - room.data_ptr()) % LINE // dtype.itemsize
    return room[first : first + shape.numel()].view(shape)


def in_parts(part: Callable[[int, int], None], num_rows: int, most: int, unit: int = 1) -> None:
    """Call `part(start, end)` for all rows, over as many threads as torch takes, and at most so many; ctypes lets go of
    Python's lock meanwhile. `unit`: rows that stay together."""
    num_parts = min(torch.get_num_threads(), most)
    if num_parts < 2:
        part(0, num_rows)
        return
    cuts = [num_rows // unit * index // num_parts * unit for index in range(num_parts)] + [num_rows]
    others = [threads().submit(part, *cut) for cut in itertools.pairwise(cuts[1:])]
    part(*cuts[:2])
    for other in others:
        other.result()


def rounds(kind: int) -> bool:
    """True if `round_blocks` makes blocks of this kind of GGUF here."""
    return kind in _ROUNDED_KINDS and library() is not None


def round_blocks(kind: int, rows: Tensor, made: Tensor) -> None:
    """Round rows `[rows, in]` in float32, below 1e18, into blocks of GGUF `[rows, bytes of a row]`, both contiguous."""
    (num_rows, columns), per_row = rows.shape, made.shape[1]

    def part(start: int, end: int) -> None:
        weights, to = rows.data_ptr() + start * columns * 4, made.data_ptr() + start * per_row
        library().swarmllm_round(level(), kind, weights, (end - start) * columns, to)

    in_parts(part, num_rows, rows.numel() // WORTH_ROUNDING)


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Threads that multiply beside the caller's."""
    return ThreadPoolExecutor(thread_name_prefix="kernels")


def computing_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Precision of the products of many inputs of this dtype: theirs, or float32 where it is faster."""
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        return torch.float32 if dtype == torch.float16 or float32_speedup() > 1 else dtype
    return dtype


@functools.cache
def float32_speedup() -> float:
    """The speed of products of codes as float32 on this processor, relative to bfloat16.

    Measured (5632×2048, 128 tokens, one thread): 33 ms against 43 with AVX-512 and its bfloat16, against 240 with AVX2.
    """
    codes = torch.zeros(512, 1024, dtype=torch.int8)
    return _by_torch_s(codes, torch.bfloat16, 64) / _by_torch_s(codes, torch.float32, 64)


def kernels_take(inputs: Tensor, *, in_strips: bool = False) -> bool:
    """True if inputs `[tokens, in]` go through our kernels: they are there, and faster."""
    if inputs.dtype == torch.float64 or library() is None:
        return False
    return inputs.shape[0] <= AT_A_TIME or inputs.shape[0] <= most_inputs(inputs.dtype, in_strips=in_strips)


@functools.cache
def most_inputs(dtype: torch.dtype, *, in_strips: bool = False) -> int:
    """The number of inputs of this dtype up to which our kernels are faster than products with rows decoded for these,
    by torch or by tiles (`strips_tiles.h`).

    The kernels' time grows with the inputs, torch's begins with the decoding. Measured (5632×2048, int8, one thread,
    Zen 5): with AVX-512 the kernels are faster for up to 24 inputs in bfloat16, which has instructions of its own, and
    always in float32, where 128 take 17 ms against 34; with AVX2 for up to 128, which take 30 against 32. `in_strips`
    (Emerald Rapids, bfloat16, Q4_K): always, 128 and 512 take 16 and 71 ms against 26 and 85. Measured with int8; where
    no strips of int8 are known, with Q4_0.
    """
    codes, wide = torch.zeros(2048, 2048, dtype=torch.int8), computing_dtype(dtype, torch.device("cpu"))
    of_int8 = not in_strips or has_strips()
    if of_int8:
        matrix = (MatrixInStrips if in_strips else Matrix)(codes, torch.ones(2048, 1))
    else:
        matrix = MatrixInStrips(torch.zeros(2048, 1152, dtype=torch.uint8), gguf=(Q4_0, 2048))
    if isinstance(matrix, MatrixInStrips) and has_tiles(dtype):
        few_s, many_s = (least_s(_many(matrix, count)) for count in (AT_A_TIME, MANY))
    else:
        step = min(SLICE_BYTES // (2048 * wide.itemsize), 2048)  # as many rows at a time as in blocks
        few_s, many_s = (2048 / step * _by_torch_s(codes[:step], wide, count) for count in (AT_A_TIME, MANY))
    each_s = (many_s - few_s) / (MANY - AT_A_TIME)
    decoding_s = few_s - each_s * AT_A_TIME
    if not of_int8:  # strip by strip: larger ones would take new memory
        decoding_s = 2048 // STRIP * least_s(lambda: matrix.dequantize(0, STRIP))
    for num_inputs in (MANY, AT_A_TIME):  # strips that are opened for many take less time for each
        inputs = torch.zeros(num_inputs, 2048, dtype=wide)
        with reused_heap():
            kernels_s = least_s(lambda: matrix.multiply(inputs.float()).to(wide))  # noqa: B023 - called at once
        more_s = kernels_s / num_inputs - each_s  # for each input
        most = NO_LIMIT if more_s <= 0 else int(decoding_s / more_s)
        if most >= num_inputs:
            return most
    return AT_A_TIME


def most_rows(dtype: torch.dtype, *, in_strips: bool) -> int:
    """The same of rows of recorded steps, which multiply strips by tiles themselves (`step.h`)."""
    return NO_LIMIT if in_strips and has_tiles(dtype) else most_inputs(dtype, in_strips=in_strips)


def _many(matrix: MatrixInStrips, num_inputs: int) -> Callable[[], Tensor]:
    return functools.partial(matrix.multiply_many, torch.zeros(num_inputs, matrix.columns, dtype=torch.bfloat16))


@functools.cache
def torch_multiplies_int8_faster() -> bool:
    """True if `torch._weight_int8pack_mm` is faster than our kernels for a few inputs, or there are none.

    Measured (5632×2048, one thread, Zen 5; 10⁹ weights per second for 1, 4 and 8 inputs): 16, 15 and 8 against 24, 17
    and 11 with AVX-512, 15, 9 and 5 against 22, 10 and 6 with AVX2. ARM, for which torch has a kernel, wasn't tried.
    """
    if library() is None:
        return True
    codes, inputs = torch.ones(COLD_ROWS, 2048, dtype=torch.int8), torch.zeros(1, 2048, dtype=torch.bfloat16)
    matrix, scale = Matrix(codes, torch.ones(COLD_ROWS, 1)), torch.ones(COLD_ROWS, dtype=torch.bfloat16)
    ours_s = least_s(lambda: matrix.multiply(inputs.float()).to(inputs.dtype))
    return least_s(lambda: torch._weight_int8pack_mm(inputs, codes, scale)) < ours_s


@functools.cache
def asks_far() -> bool:
    """True if a product of one input is faster when strips ask for memory far ahead; False without 50 MB to try it.

    Measured (Emerald Rapids, one thread): 2.1 ms with the next bytes alone, 1.8 far ahead; a step of 4 blocks of hidden
    2048 in int8 16.5 and 11.3. On Zen 4 it is the other way round (`strips.h`).
    """
    try:
        # In huge pages, as in blocks. What they are copied from takes no memory, as nothing was written to it.
        codes = into_huge_pages(torch.empty(COLD_ROWS, 2016, dtype=torch.int8)).fill_(1)
    except (OSError, MemoryError, RuntimeError):  # torch raises the last one
        return False
    ways: list[Callable[[Tensor], Tensor]] = []
    for far in (False, True):
        if has_strips():
            columns, scale = 2016, torch.ones(COLD_ROWS, 1)
            ways.append(MatrixInStrips(codes, scale, is_asked_far=far).multiply)
        else:  # exact products with fewer bits have much to compute
            columns, blocks = 3584, codes.view(torch.uint8)
            ways.append(MatrixInStrips(blocks, gguf=(Q4_0, columns), is_asked_far=far).multiply_rounded)
    inputs = torch.ones(1, columns)

    def turn() -> list[float]:
        return [least_s(functools.partial(way, inputs)) for way in ways]

    (near_s, far_s), (near_again_s, far_again_s) = turn(), turn()  # as other programs come and go
    return min(far_s, far_again_s) < min(near_s, near_again_s)


def _by_torch_s(codes: Tensor, dtype: torch.dtype, num_inputs: int) -> float:
    """Seconds of a product by decoded rows. All is in memory that is there: while blocks are loaded, new memory has
    pages of its own, which the system takes longer to provide than this takes (`separate_weights`)."""
    inputs, rows = torch.zeros(num_inputs, codes.shape[1], dtype=dtype), torch.zeros(codes.shape, dtype=dtype)
    outputs = torch.zeros(num_inputs, len(codes), dtype=dtype)
    return least_s(lambda: torch.mm(inputs, rows.copy_(codes).T, out=outputs))


def least_s(do: Callable[[], object]) -> float:
    """Seconds of one thread: several would wait for each other where others use the cores, all ways alike."""
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(REPEATS):
            began_at = time.thread_time()
            do()
            times.append(time.thread_time() - began_at)
    finally:
        torch.set_num_threads(threads)
    return max(min(times), 1e-9)
