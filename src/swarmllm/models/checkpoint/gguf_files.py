"""A checkpoint in GGUF: one file, or several parts of one, with config and weights.

Which file, `gguf_names` says. Used by `checkpoint`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from swarmllm.errors import ConfigurationError, CorruptWeightsError, UnsupportedModelError
from swarmllm.models.checkpoint.gguf_names import PART
from swarmllm.models.checkpoint.sources import Source, first_line
from swarmllm.models.checkpoint.stored_files import OnRead, StoredFiles
from swarmllm.models.checkpoint.weight_files import StoredPlace
from swarmllm.models.published_formats.gguf import ROPE_FACTORS, GgufView, GgufWeight, architecture_of, config_of
from swarmllm.models.published_formats.gguf_header import Header, read_header


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
