"""A checkpoint in GGUF: one file, or several parts of one, with config and weights. Which file a name means:

    path/to/file.gguf                  owner/repository/file.gguf on the hub
    directory, owner/repository        the one that it holds, if there are no other weights
    directory:Q4_K_M, owner/repository:Q4_K_M      the one that is named so among several

Used by `checkpoint`.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from swarmllm.errors import ConfigurationError, CorruptWeightsError, UnsupportedModelError
from swarmllm.files import user_path
from swarmllm.models.checkpoint.sources import Source, find_source, first_line
from swarmllm.models.checkpoint.stored_files import CONFIG, LAYOUTS, OnRead, StoredFiles
from swarmllm.models.checkpoint.weight_files import StoredPlace
from swarmllm.models.published_formats.gguf import ROPE_FACTORS, GgufView, GgufWeight, architecture_of, config_of
from swarmllm.models.published_formats.gguf_header import Header, read_header

SUFFIX = ".gguf"
PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$")
_KIND = re.compile(r"(.+):([\w.-]+)")
_NO_MODEL = re.compile(r"(.*/)?(mmproj|imatrix)[^/]*")
"""Files beside models: what looks at images, and what was measured for rounding (llama.cpp's tools call them so)."""
MOST_NAMED = 12
"""Files that a message names."""


class GgufFiles(StoredFiles):
    """What a GGUF file holds, as transformers would have it."""

    def __init__(self, source: Source, filename: str) -> None:
        """Reads the header, and factors of the rotation if there are any.

        Raises:
            BlockWeightsNotFoundError: there is no such file.
            CorruptWeightsError: it, or a part of it, is damaged.
            UnsupportedModelError: it holds what swarmllm can't read.
        """
        self._source, self._filename = source, filename
        headers = [read_header(source.file(part)) for part in _parts(filename)]
        header = Header(headers[0].settings, {name: one for part in headers for name, one in part.tensors.items()})
        if header.settings.get("split.count", 1) not in (0, len(headers)):
            raise CorruptWeightsError(
                f"{filename} is one of {header.settings['split.count']} parts: name the first of them, "
                "…-00001-of-0000N.gguf, and keep the others beside it"
            )
        factors = header.tensors.get(ROPE_FACTORS)
        read = None if factors is None else GgufWeight(factors, None, None, 0.0, None)[...]
        try:
            self._fields = config_of(header, read)
            fields = dict(self._fields)
            self.config: PreTrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
        except (UnsupportedModelError, CorruptWeightsError):
            raise
        except Exception as error:  # transformers' code on numbers of a stranger
            raise CorruptWeightsError(f"{filename} describes no model ({first_line(error)})") from error
        self._tensors = header.tensors
        self._view = GgufView(architecture_of(header), header.tensors, self.config)
        self.comes_packed = any(self._view.kept_bits(weight) for weight in self._view.stored)

    def weight_map(self) -> dict[str, str]:
        return {weight: tensor.path.name for weight, (tensor, _) in self._view.stored.items()}

    def kept_bits(self, weight: str) -> float | None:
        return self._view.kept_bits(weight)

    def tensors(
        self, names: Iterable[str], packed_for: torch.dtype | None, on_read: OnRead | None = None
    ) -> dict[str, Any]:
        return self._view.tensors(names, packed_for, on_read)

    def filenames(self) -> list[str]:
        return _parts(self._filename)

    def local(self, filename: str) -> Path | None:
        return self._source.local(filename)

    def places(self, filename: str) -> list[StoredPlace]:
        """Read anew, as there may be another file by now."""
        header = read_header(self._source.file(filename))
        return [StoredPlace(name, one.start, one.num_bytes) for name, one in header.tensors.items()]

    def raw_config(self) -> dict[str, Any]:
        """With the name of a file that has a commit: another one of the same commit may be another model."""
        if self._source.commit is None:
            return self._fields
        return {**self._fields, "gguf_file": f"{self._source.folder}{self._filename}"}

    def dtype(self) -> torch.dtype | None:
        return None  # the config that is made of the header has it

    def identity(self) -> dict[str, Any]:
        """The list of tensors, whatever the file is called."""
        return {"headers": sorted((name, one.kind, one.shape) for name, one in self._tensors.items())}


def _parts(filename: str) -> list[str]:
    """Names of all parts of the file that this one begins."""
    part = PART.search(filename)
    if part is None:
        return [filename]
    if part[1] != "00001":
        raise ConfigurationError(f"{filename} is a part of a GGUF file: name the first one, …-00001-of-{part[2]}.gguf")
    return [f"{filename[: part.start()]}-{index:05}-of-{part[2]}.gguf" for index in range(1, int(part[2]) + 1)]


def locate(
    name_or_path: str, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
) -> tuple[Source, str | None]:
    """The directory or repository, and the GGUF file of it that is meant; None if it holds weights of transformers.

    Raises:
        ConfigurationError: there is no such place, or not one such file.
    """
    place, filename, kind = _split(name_or_path)
    source = find_source(place, revision=revision, token=token, cache_dir=cache_dir)
    if filename is None and (kind is not None or not _has_other_weights(source)):
        filename = _only_one(source, kind)
    return source, filename


def _split(name_or_path: str) -> tuple[str, str | None, str | None]:
    """(directory or repository, GGUF file in it, what is in such a file's name)."""
    path = user_path(name_or_path)
    if name_or_path.endswith(SUFFIX) and not path.is_dir():
        if path.is_file() or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") < 2:
            return str(path.parent), path.name, None
        owner, repository, filename = name_or_path.split("/", 2)
        return f"{owner}/{repository}", filename, None
    if not path.exists() and (named := _KIND.fullmatch(name_or_path)):
        return named[1], None, named[2]
    return name_or_path, None, None


def _has_other_weights(source: Source) -> bool:
    if source.is_local:
        return any(source.local(filename) is not None for filename, _ in LAYOUTS)
    return source.path(CONFIG, required=False) is not None and any(
        source.path(filename, required=False) is not None for filename, _ in LAYOUTS
    )


def _only_one(source: Source, kind: str | None) -> str | None:
    """Raises ConfigurationError unless there is one; without `kind`, there may also be none."""
    found = sorted(
        name
        for name in source.filenames(SUFFIX)
        if not _NO_MODEL.fullmatch(name) and (not (part := PART.search(name)) or part[1] == "00001")
    )
    wanted = found
    if kind is not None:
        in_name = re.compile(rf"(^|[./_-]){re.escape(kind.lower())}($|[./-])")
        wanted = [name for name in found if in_name.search(name.lower())]
    if len(wanted) == 1:
        return wanted[0]
    if not wanted and kind is None:
        return None
    several = wanted or found
    if not several:
        raise ConfigurationError(f"{source.name} holds no GGUF files, so none of {kind}")
    some = f"{len(wanted) or 'no'} GGUF files" + (f" of {kind}" if kind else "")
    raise ConfigurationError(
        f"{source.name} holds {some}: name one of them, such as {source.name}/{several[0]} ({_listed(several)})"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
