"""Products with weights of few bits on CPUs, by `kernels.c`, which is built when swarmllm is installed.

Where there was no compiler, everything works without it, some ten times slower. Used by `packed` and `published`.
"""

import ctypes
import functools
import itertools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.quantization.rules import GROUP

logger = logging.getLogger(__name__)

AT_A_TIME = 16
"""Inputs that the kernels multiply by rows which they have decoded once."""
WORTH_A_THREAD = 1 << 20
"""Codes. Assumed: below, handing half of them to another thread costs what it saves."""
_PAIRS, _PLANES = 0, 3
_CODES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 4}
_GGUF = 64
"""Added to GGUF's numbers of kinds."""
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float16: 3, torch.uint8: 4}


class _Weight(ctypes.Structure):
    _fields_ = (
        ("columns", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("codes_kind", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        ("divides", ctypes.c_int32),
        ("group_bytes", ctypes.c_int32),
        ("zero_kind", ctypes.c_int32),
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
    if getattr(found, "swarmllm_weight_bytes", int)() != ctypes.sizeof(_Weight):
        logger.warning(
            "weights of few bits multiply slowly, since %s is of another version: install swarmllm anew", path
        )
        return None
    found.swarmllm_multiply.argtypes = (
        ctypes.c_int64, ctypes.POINTER(_Weight), ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
        ctypes.c_void_p, ctypes.c_int64,
    )  # fmt: skip
    found.swarmllm_dequantize.argtypes = (
        ctypes.c_int64, ctypes.POINTER(_Weight), ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    )  # fmt: skip
    found.swarmllm_multiply.restype = found.swarmllm_dequantize.restype = None
    return found


@functools.cache
def level() -> int:
    """Which of the compiled versions is used: 4 with AVX-512, 3 with AVX2, 1 otherwise, and where torch is told so."""
    wished = {"default": 1, "avx2": 3}.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), 4)
    return min(wished, int(library().swarmllm_level()))


class Matrix:
    """One packed matrix, as the kernels want it."""

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
        """`values`: of codes of which two are in a byte. `least`: added to the products of codes with scales; codes
        without `values` are then `kbit`'s. `gguf`: of rows of GGUF's blocks, their kind and how many weights a row has.
        """
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
        table = None if values is None else torch.tensor(values)
        # The kernels see addresses only: what is behind them must be in one piece, and live as long as this.
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
        return outputs

    def dequantize(self, start: int, end: int) -> Tensor:
        """Rows in float32."""
        rows = torch.empty(end - start, self.columns)
        library().swarmllm_dequantize(level(), self._weight, start, end, rows.data_ptr())
        return rows

    def _in_parts(self, part: Any) -> None:
        """Over as many threads as torch takes; ctypes lets go of Python's lock meanwhile."""
        num_parts = min(torch.get_num_threads(), self.rows * self.columns // WORTH_A_THREAD)
        if num_parts < 2:
            part(0, self.rows)
            return
        cuts = [self.rows * index // num_parts for index in range(num_parts + 1)]
        others = [_threads().submit(part, *cut) for cut in itertools.pairwise(cuts[1:])]
        part(*cuts[:2])
        for other in others:
            other.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="kernels")
