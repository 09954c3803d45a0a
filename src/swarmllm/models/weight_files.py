"""Reading single tensors of weight files: safetensors, and pickles through torch's `weights_only` loader.

Called by `checkpoint`; knows files, not models.
"""

import json
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from swarmllm.errors import BlockWeightsNotFoundError, CorruptWeightsError


def read_index(path: Path) -> dict[str, str]:
    """Tensor name → file name, from the index of a sharded checkpoint.

    Raises:
        CorruptWeightsError: it is no such index, or names files outside the checkpoint.
    """
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        names = {str(name): str(filename) for name, filename in weight_map.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CorruptWeightsError(f"{path} is not a valid index of weights: {error!r}") from error
    for filename in set(names.values()):
        if Path(filename).name != filename:
            raise CorruptWeightsError(f"{path} refers to {filename!r}, which is not a file beside it")
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


def lazy_tensors(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """The named tensors as memory-mapped, lazily read ones (`lazy[...]` gives the tensor).

    Raises:
        BlockWeightsNotFoundError: the file lacks one of them.
        CorruptWeightsError: the file is damaged, or a pickle that would run code.
    """
    tensors = dict.fromkeys(tensor_names(path)) if path.suffix == ".safetensors" else _pickle(path)
    names = list(names)
    if missing := [name for name in names if name not in tensors]:
        raise BlockWeightsNotFoundError(f"{path} lacks {missing[0]} (and {len(missing) - 1} more tensors)")
    if path.suffix == ".safetensors":
        return {name: _LazyTensor(path, name) for name in names}
    return {name: tensors[name] for name in names}


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


def _safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
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
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CorruptWeightsError(f"{path} is damaged or incomplete; delete it and download it again") from error
    if not isinstance(tensors, dict):
        raise CorruptWeightsError(f"{path} holds a {type(tensors).__name__} instead of named tensors")
    return tensors


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
