"""Reading single tensors of weight files: safetensors, and pickles through torch's `weights_only` loader.

Called by `checkpoint`; knows files, not models.
"""

import json
import pickle
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, CorruptWeightsError
from swarmllm.machine_memory import memory_ran_out
from swarmllm.models.checkpoint.manifest import RequiredTensor, partial_files
from swarmllm.models.checkpoint.sources import first_line, read_object

MAX_HEADER_BYTES = 100 << 20
"""As in safetensors itself."""


_COMPUTED_IN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point types of safetensors, except those of 8 and fewer bits, in which no model computes."""


@dataclass(frozen=True, order=True)
class StoredPlace:
    """The place of a tensor's bytes in a file."""

    name: str
    start: int
    num_bytes: int


def read_index(path: Path) -> dict[str, str]:
    """Tensor name → file name, from the index of a sharded checkpoint.

    Raises:
        CorruptWeightsError: it is no such index, or names files outside the checkpoint.
    """
    try:
        weight_map = read_object(path)["weight_map"]
        names = {str(name): str(filename) for name, filename in weight_map.items()}
    except (ConfigurationError, KeyError, TypeError, AttributeError) as error:
        raise CorruptWeightsError(f"{path} is not a valid index of weights: {error!r}") from error
    for filename in set(names.values()):
        if Path(filename).name != filename:
            raise CorruptWeightsError(f"{path} refers to {filename!r}, which is not a file in the same directory")
    return names


def tensor_names(path: Path) -> list[str]:
    """Names of all tensors in a file; reads its header only.

    Raises:
        CorruptWeightsError: the file is damaged, or a pickle that would run code.
    """
    if path.suffix == ".safetensors":
        with _safetensors(path) as file:
            return list(file.keys())
    return list(_pickle(path))


def has_header(path: Path) -> bool:
    """True if the names of its tensors can be read without the whole file."""
    return path.suffix == ".safetensors" or zipfile.is_zipfile(path)


def index_dtype(path: Path) -> str | None:
    """The dtype that an index states for all weights; save_pretrained() writes none."""
    about = read_object(path).get("metadata")
    stated = about.get("dtype") if isinstance(about, dict) else None
    return None if stated is None else str(stated)


def first_floating_dtype(path: Path) -> torch.dtype | None:
    """The dtype of the first tensor that a model can compute in, in transformers' order; None: there is no such one.

    Raises:
        CorruptWeightsError: the file is damaged, or a pickle that would run code.
    """
    if path.suffix == ".safetensors":
        with _safetensors(path) as file:
            stated = (file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118 - not a dict
            found = (_COMPUTED_IN.get(name) for name in stated)
            return next((dtype for dtype in found if dtype is not None), None)
    dtypes = (tensor.dtype for tensor in _pickle(path).values() if isinstance(tensor, torch.Tensor))
    return next((dtype for dtype in dtypes if dtype in _COMPUTED_IN.values()), None)


def lazy_tensors(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """The named tensors as memory-mapped, lazily read ones (`lazy[...]` gives the tensor).

    In a partial directory, tensors with missing pieces raise BlockWeightsNotFoundError when they are read.

    Raises:
        BlockWeightsNotFoundError: the file lacks one of them.
        CorruptWeightsError: the file is damaged, or a pickle that would run code.
    """
    tensors = dict.fromkeys(tensor_names(path)) if path.suffix == ".safetensors" else _pickle(path)
    names = list(names)
    if missing := [name for name in names if name not in tensors]:
        raise BlockWeightsNotFoundError(f"{path} lacks {missing[0]} (and {len(missing) - 1} more tensors)")
    if path.suffix != ".safetensors":
        return {name: tensors[name] for name in names}
    found = {name: _LazyTensor(path, name) for name in names}
    if (here := partial_files(path.parent)) is None:
        return found
    place_of = {place.name: place for place in _safetensors_places(path)}
    return {
        name: RequiredTensor(
            lazy, partial(here.require, path.name, place_of[name].start, place_of[name].num_bytes, f"the tensor {name}")
        )
        for name, lazy in found.items()
    }


class _LazyTensor:
    """A tensor of a safetensors file, which stays mapped only while the tensor that was read from it lives.

    So a tensor that is converted while it is loaded doesn't keep its shard in memory until the last one is.
    Looks like safetensors' own slices, for transformers' loader.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def __getitem__(self, index: Any) -> torch.Tensor:
        with _safetensors(self._path) as file:
            tensor: torch.Tensor = file.get_slice(self._name)[index]
        return tensor

    def get_shape(self) -> list[int]:
        with _safetensors(self._path) as file:
            return list(file.get_slice(self._name).get_shape())

    def get_dtype(self) -> str:
        with _safetensors(self._path) as file:
            return str(file.get_slice(self._name).get_dtype())


class LazyNote:
    """The text that the header of a safetensors file has under a name, as a tensor of its bytes; empty if there is
    none."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def __getitem__(self, _: Any) -> torch.Tensor:
        with _safetensors(self._path) as file:
            text = (file.metadata() or {}).get(self._name, "")
        return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (MemoryError, RuntimeError) as error:
        if memory_ran_out(error):
            raise _lack_of_memory(path, error) from error
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptWeightsError(
            f"{path} is damaged or incomplete ({error}); delete it and download it again"
        ) from error


def _pickle(path: Path) -> dict[str, Any]:
    """A `.bin` file; the formats of before torch 1.6 are no zip files and can't be memory-mapped."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CorruptWeightsError(f"{path} is refused: it is damaged, or holds more than tensors") from error
    except (MemoryError, RuntimeError, EOFError, OSError, ValueError) as error:
        if memory_ran_out(error):
            raise _lack_of_memory(path, error) from error
        raise CorruptWeightsError(f"{path} is damaged or incomplete; delete it and download it again") from error
    if not isinstance(tensors, dict):
        raise CorruptWeightsError(f"{path} holds a {type(tensors).__name__} instead of named tensors")
    return tensors


def _lack_of_memory(path: Path, error: BaseException) -> ConfigurationError:
    return ConfigurationError(
        f"memory ran out while {path} was opened ({first_line(error)}): load fewer blocks, or end other programs"
    )


def headers(path: Path) -> list[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of each tensor of a file, sorted.

    Raises:
        CorruptWeightsError: the file is damaged, or a pickle that would run code.
    """
    if path.suffix == ".safetensors":
        with _safetensors(path) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return sorted((name, str(lazy.get_dtype()), list(lazy.get_shape())) for name, lazy in slices.items())
    return sorted((name, str(tensor.dtype), list(tensor.shape)) for name, tensor in _pickle(path).items())


def places(path: Path) -> list[StoredPlace]:
    """The places of a file's tensors; for pickles by names that only the pickle itself explains.

    Raises:
        CorruptWeightsError: the file is damaged.
    """
    try:
        if path.suffix == ".safetensors":
            return _safetensors_places(path)
        if not zipfile.is_zipfile(path):
            return [StoredPlace("", 0, path.stat().st_size)]
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return [_zipped_place(entry, file) for entry in archive.infolist()]
    except (ValueError, KeyError, TypeError, OverflowError, OSError, struct.error, zipfile.BadZipFile) as error:
        raise CorruptWeightsError(
            f"{path} is damaged or incomplete ({error}); delete it and download it again"
        ) from error


def _zipped_place(entry: zipfile.ZipInfo, file: BinaryIO) -> StoredPlace:
    """The name without its first folder, which torch names after the file. The tensor's bytes follow its header."""
    file.seek(entry.header_offset + 26)
    name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    start = entry.header_offset + 30 + name_bytes + extra_bytes
    return StoredPlace(entry.filename.partition("/")[2], start, entry.compress_size)


def _safetensors_places(path: Path) -> list[StoredPlace]:
    size = path.stat().st_size
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < num_bytes <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError("it has no header")
        header = json.loads(file.read(num_bytes))
    begin, found = 8 + num_bytes, []
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= size - begin:
                raise ValueError(f"{name[:100]} is outside the file")
            found.append(StoredPlace(name, begin + first, last - first))
    return found
