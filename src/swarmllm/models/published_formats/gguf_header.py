"""The header of a GGUF file: settings, and where each tensor is. Nothing of the tensors is read.

transformers takes the bytes apart; what is checked here is that they can be true, before anybody relies on them.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.integrations.gguf import reader

from swarmllm.errors import CorruptWeightsError, UnsupportedModelError
from swarmllm.models.quantization.gguf_blocks import KINDS, WHOLE

MOST_ENTRIES = 1 << 20
"""Tensors or settings of a file; the largest models have some 2000 and 100."""
MOST_DIMENSIONS = 4
"""As ggml has it."""
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor is, and how it is stored."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """As torch counts dimensions: the last one is that of neighbours."""
    kind: int
    start: int
    """Its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        if self.kind in WHOLE:
            return math.prod(self.shape) * WHOLE[self.kind].itemsize
        _, weights, size = KINDS[self.kind]
        return math.prod(self.shape) // weights * size


@dataclass(frozen=True)
class Header:
    """All that a file says before its tensors."""

    settings: Mapping[str, Any]
    """Lists of strings by their length only."""
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> Header:
    """The header of one file.

    Raises:
        CorruptWeightsError: it is damaged, incomplete, or no GGUF.
        UnsupportedModelError: it holds numbers in a form that nobody here can read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if mapped[:4] == b"GGUF" and max(struct.unpack_from("<QQ", mapped, 8)) > MOST_ENTRIES:
                raise ValueError(f"more than {MOST_ENTRIES} tensors or settings")
            settings, count, position = reader._read_metadata(mapped, str(path))
            entries, position = reader._read_tensor_table(mapped, count, position)
            alignment = settings.get("general.alignment", DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
                raise ValueError(f"an alignment of {alignment}")
            begin = -(-position // alignment) * alignment
            tensors = {entry[0]: _checked(path, entry, begin, alignment, len(mapped)) for entry in entries}
            if len(tensors) < len(entries):
                raise ValueError("two tensors of one name")
    except UnsupportedModelError:
        raise
    except (ValueError, struct.error, OverflowError, MemoryError, OSError) as error:
        raise CorruptWeightsError(
            f"{path} is no GGUF file, or damaged or incomplete ({error}); delete it and download it again"
        ) from error
    return Header(settings, tensors)


def _checked(path: Path, entry: tuple[Any, ...], begin: int, alignment: int, file_size: int) -> StoredTensor:
    name, shape, kind, offset = entry
    if kind not in WHOLE and kind not in KINDS:
        raise UnsupportedModelError(
            f"{path} holds tensors of GGUF's type {kind}, which swarmllm can't read: use a file of the model in one of "
            f"F32, F16, BF16, {', '.join(sorted(known for known, *_ in KINDS.values()))}"
        )
    if not 0 < len(shape) <= MOST_DIMENSIONS or 0 in shape:
        raise ValueError(f"{name[:100]!r} has the shape {shape[:9]}")
    if kind in KINDS and shape[-1] % KINDS[kind][1]:
        raise ValueError(f"rows of {name[:100]!r} are no whole blocks")
    found = StoredTensor(path, name, tuple(shape), kind, begin + offset)
    if offset % alignment or found.start + found.num_bytes > file_size:
        raise ValueError(f"{name[:100]!r} is outside the file, or between its places")
    return found
