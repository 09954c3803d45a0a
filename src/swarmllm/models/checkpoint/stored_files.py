"""How a checkpoint's weights lie in files: safetensors or pickles with a config.json, or GGUF.

Used by `Checkpoint`; it gives weights by transformers' names, each as one tensor. Where files disagree, the rules are
those of transformers' `from_pretrained`; `tests/unit/models/test_disagreeing_files` compares each of them:

    which weights     the file that `transformers_weights` of the config names; else model.safetensors, its shards,
                      pytorch_model.bin, its shards
    which shard       the last one that has the tensor, whatever the index says
    which dtype       `dtype` of the config, its `torch_dtype`, that of the index, or that of the first weight in 16 or
                      more bits of the first file
    which config      config.json; if it lists `configuration_files`, the one for this release of transformers
    which encoding    UTF-8 without a byte order mark, for JSON
    which generation  generation_config.json; if it is missing or no JSON, the fields of config.json
    refused           pieces that several devices have saved (shard-…-model-…), and an adapter beside a whole model,
                      both of which transformers would take
    ignored           how attention is computed: each machine chooses it

A checkpoint in GGUF is one file, or several parts of one, with config and weights. A name chooses the file:

    path/to/file.gguf                  owner/repository/file.gguf on the hub
    directory, owner/repository        its only GGUF file, if there are no other weights
    directory:Q4_K_M, owner/repository:Q4_K_M      the one with that in its name, of several
"""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from swarmllm.errors import (
    BlockWeightsNotFoundError,
    ConfigurationError,
    CorruptWeightsError,
    UnsupportedModelError,
)
from swarmllm.files import user_path
from swarmllm.models.architecture import as_config_says
from swarmllm.models.checkpoint import weight_files
from swarmllm.models.checkpoint.manifest import RequiredTensor, partial_files
from swarmllm.models.checkpoint.sources import Source, find_source, first_line
from swarmllm.models.checkpoint.weight_files import StoredPlace
from swarmllm.models.published_formats.gguf import (
    ROPE_FACTORS,
    GgufView,
    GgufWeight,
    Header,
    architecture_of,
    config_of,
    read_header,
)
from swarmllm.models.published_formats.stored_format import LogicalView, StoredFormat

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
MTP_FILE = "mtp.safetensors"
"""File for a head that was trained later: of unexpected tensors in other files transformers would complain."""
LAYOUTS = (
    ("model.safetensors", False),
    ("model.safetensors.index.json", True),
    ("pytorch_model.bin", False),
    ("pytorch_model.bin.index.json", True),
)
"""Files of weights, in transformers' order: (file, is it an index of shards)."""
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Files that transformers prefers to all of these: pieces that several devices have saved, each its own."""

OnRead = Callable[[str, str, torch.Tensor], None]
"""Gets (weight, which of the tensors that it is stored as, that tensor), whenever one has been read."""

SUFFIX = ".gguf"
PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$")
_KIND = re.compile(r"(.+):([\w.-]+)")
_NO_MODEL = re.compile(r"(.*/)?(mmproj|imatrix)[^/]*")
"""Files that aren't models: vision towers, and measurements for rounding (the names of llama.cpp's tools)."""
MOST_NAMED = 12
"""Files that a message names."""


class StoredFiles(ABC):
    """The files of one checkpoint."""

    comes_packed: bool
    """True if some of the weights are stored in few bits."""

    @abstractmethod
    def weight_map(self) -> dict[str, str]:
        """Name of each weight → name of the file that holds it, or most of it."""

    @abstractmethod
    def kept_bits(self, weight: str) -> float | None:
        """Bits of a weight, with its scales, if it can stay packed; None of others. To plan memory by."""

    @abstractmethod
    def tensors(
        self, names: Iterable[str], packed_for: torch.dtype | None, on_read: OnRead | None = None
    ) -> dict[str, Any]:
        """As `Checkpoint.tensors`."""

    @abstractmethod
    def filenames(self) -> list[str]:
        """The files that hold weights."""

    @abstractmethod
    def local(self, filename: str) -> Path | None:
        """The path of such a file; None if it isn't on this machine."""

    @abstractmethod
    def places(self, filename: str) -> list[weight_files.StoredPlace]:
        """The present places of the tensors in such a file, which is on this machine."""

    @abstractmethod
    def stored_as(self, weight: str) -> list[tuple[str, str]]:
        """(file, name in the file) of each tensor that a weight is stored as."""

    @abstractmethod
    def raw_config(self) -> dict[str, Any]:
        """The config as it is written; of a GGUF file, as transformers would write it."""

    @abstractmethod
    def dtype(self) -> torch.dtype | None:
        """The dtype of the weights if the config doesn't say it; None: it can't be told."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The facts that tell local checkpoints of one config apart, for the fingerprint; reads no weights."""

    def generation_config(self) -> GenerationConfig | None:
        """The makers' settings for `generate()`."""
        return None

    def with_file(self, filename: str) -> "StoredFiles | None":
        """The same with the weights of a further file, at which transformers doesn't look; None without it."""
        return None


class ConfigAndWeights(StoredFiles):
    """transformers' own layouts. Where files disagree, its rules decide: `tests/unit/models/test_disagreeing_files`."""

    def __init__(
        self, source: Source, config: Mapping[str, Any], form: StoredFormat | None, beside: str | None = None
    ) -> None:
        """`config` as it is written. `beside`: one more file of weights, which the index doesn't know."""
        self._source, self._config, self._form, self._beside = source, config, form, beside
        self.comes_packed = form is not None

    @cached_property
    def layout(self) -> tuple[str, bool]:
        """(weights file or index, is it an index).

        Raises:
            BlockWeightsNotFoundError: the checkpoint has no weights in a known format.
            UnsupportedModelError: they are in files that swarmllm doesn't read.
        """
        name = self._source.name
        if self._source.is_local and any(map(_DISTRIBUTED.fullmatch, self._source.filenames(".safetensors"))):
            raise UnsupportedModelError(
                f"{name} has files shard-…-model-…, which several devices have saved together: save the model once "
                "more with save_pretrained() on one"
            )
        for filename, is_index in self._named() or LAYOUTS:
            if self._source.path(filename, required=False) is not None:
                if self._form is not None and self._form.described and ".safetensors" not in filename:
                    raise UnsupportedModelError(
                        f"the weights of {name} are pickled objects of {type(self._form).__name__}, which "
                        "swarmllm doesn't open: use a checkpoint in safetensors, as recent releases save it"
                    )
                return filename, is_index
        looked_for = ", ".join(filename for filename, _ in self._named() or LAYOUTS)
        raise BlockWeightsNotFoundError(f"{name} has no weights: neither {looked_for} nor a GGUF file")

    def _named(self) -> tuple[tuple[str, bool], ...]:
        """The one file that config.json names. It comes before all others."""
        filename = self._config.get("transformers_weights")
        if filename is None:
            return ()
        if not isinstance(filename, str) or Path(filename).name != filename or ".safetensors" not in filename:
            raise UnsupportedModelError(
                f"transformers_weights in {CONFIG} of {self._source.name} must name a safetensors file in its "
                f"directory, or an index of such files, not {str(filename)[:80]!r}"
            )
        return ((filename, filename.endswith(".index.json")),)

    def dtype(self) -> torch.dtype | None:
        return self._dtype

    @cached_property
    def _dtype(self) -> torch.dtype | None:
        """The dtype that the index states, or else that of the first plain tensor of the first file.

        Raises:
            BlockWeightsNotFoundError, CorruptWeightsError: these can't be read.
            UnsupportedModelError: the index states no dtype of torch.
        """
        filename, is_index = self.layout
        if is_index:
            index = self._file(filename)
            if (stated := weight_files.index_dtype(index)) is not None:
                found = getattr(torch, stated, None)
                if not isinstance(found, torch.dtype):
                    raise UnsupportedModelError(f"{index} states dtype {stated[:40]!r}, which torch hasn't")
                return found
            filename = min(weight_files.read_index(index).values(), default=filename)
        return weight_files.first_floating_dtype(self._file(filename))

    @cached_property
    def _view(self) -> LogicalView | None:
        """The weights, if some are stored as several tensors each."""
        return None if self._form is None else LogicalView(self._form, self._stored)

    @cached_property
    def _weight_map(self) -> Mapping[str, str]:
        if self._view is None:
            return self._stored
        return {weight: self._stored[name] for weight, name in self._view.names().items()}

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Name of each stored tensor → name of its file."""
        filename, is_index = self.layout
        if is_index:
            found = self._in_shards(weight_files.read_index(self._file(filename)))
        else:
            found = dict.fromkeys(weight_files.tensor_names(self._file(filename)), filename)
        if self._beside is not None:
            found |= dict.fromkeys(weight_files.tensor_names(self._file(self._beside)), self._beside)
        return found

    def _in_shards(self, index: dict[str, str]) -> dict[str, str]:
        """The shard of each tensor: the last shard that has it, whatever the index says, as in transformers.

        For shards that are missing or damaged, and for pickles that would have to be read whole, the index counts.
        """
        found = dict(index)
        if not self._source.is_local:  # a repository's are downloaded one by one, when their blocks are asked for
            return found
        for shard in sorted(set(index.values())):
            path = self._source.local(shard)
            with suppress(CorruptWeightsError):  # code that needs it raises the error
                if path is not None and weight_files.has_header(path):
                    found |= dict.fromkeys(weight_files.tensor_names(path), shard)
        return found

    def weight_map(self) -> dict[str, str]:
        """Reads the index, or the header of a single file."""
        return dict(self._weight_map)

    def kept_bits(self, weight: str) -> float | None:
        if self._form is None or self._view is None or not self._view.is_packed(weight):
            return None
        return self._form.kept_bits()

    def tensors(
        self, names: Iterable[str], packed_for: torch.dtype | None, on_read: OnRead | None = None
    ) -> dict[str, Any]:
        names = list(names)
        if self._view is None:
            return self._read({name: name for name in names}, on_read)
        stored = {one: name for name in names for one in self._view.stored([name])}
        described = self._note if self._form is not None and self._form.described else None
        return self._view.tensors(names, self._read(stored, on_read), packed_for, described)

    def _note(self, weight: str) -> weight_files.LazyNote:
        return weight_files.LazyNote(self._file(self._weight_map[weight]), weight)

    def _read(self, weight_of: Mapping[str, str], on_read: OnRead | None) -> dict[str, Any]:
        by_file: dict[str, list[str]] = {}
        for name in weight_of:
            by_file.setdefault(self._stored[name], []).append(name)
        found: dict[str, Any] = {}
        for filename, wanted in sorted(by_file.items()):
            found.update(weight_files.lazy_tensors(self._file(filename), wanted))
        if on_read is None:
            return found
        return {name: _watched(lazy, partial(on_read, weight_of[name], name)) for name, lazy in found.items()}

    def filenames(self) -> list[str]:
        return sorted(set(self._stored.values()))

    def local(self, filename: str) -> Path | None:
        return self._source.local(filename)

    def places(self, filename: str) -> list[weight_files.StoredPlace]:
        return weight_files.places(self._file(filename))

    def stored_as(self, weight: str) -> list[tuple[str, str]]:
        names = [weight] if self._view is None else self._view.stored([weight])
        return [(self._stored[name], name) for name in names]

    def raw_config(self) -> dict[str, Any]:
        return dict(self._config)

    def identity(self) -> dict[str, Any]:
        """The index and the size of each shard; of one file, its list of tensors with types and shapes."""
        filename, is_index = self.layout
        weight_map = self.weight_map()
        if is_index:
            sizes = {shard: self._source.size(shard) for shard in sorted(set(weight_map.values()))}
            return {"tensors": weight_map, "sizes": sizes}
        return {"tensors": weight_map, "headers": weight_files.headers(self._file(filename))}

    def generation_config(self) -> GenerationConfig | None:
        """The settings in generation_config.json; or else those in config.json, where older models have them.

        Raises:
            ConfigurationError: the file can't be used.
            UnsupportedModelError: config.json can't.
        """
        path = self._source.path(GENERATION_CONFIG, required=False)
        try:
            if path is not None:
                return GenerationConfig.from_pretrained(str(path.parent), path.name)
        except OSError as error:  # so transformers says that it is no JSON, and goes on
            logger.warning("%s is not read: %s", path, first_line(error))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            reason = first_line(error)
            raise ConfigurationError(f"{path} can't be used: {reason}: correct the file or delete it") from None
        config = self._file(CONFIG)
        with as_config_says(self._source.name):
            return GenerationConfig.from_pretrained(str(config.parent), config.name, _from_model_config=True)

    def with_file(self, filename: str) -> StoredFiles | None:
        if self._source.path(filename, required=False) is None:
            return None
        return ConfigAndWeights(self._source, self._config, self._form, filename)

    def _file(self, filename: str) -> Path:
        return self._source.file(filename)


def _watched(lazy: Any, on_read: Callable[[torch.Tensor], None]) -> Any:
    if not isinstance(lazy, torch.Tensor):
        return _WatchedTensor(lazy, on_read)
    on_read(lazy)  # a pickle's tensors, which transformers takes as they are
    return lazy


class _WatchedTensor:
    """A lazy tensor that tells when all of it has been read, for transformers' loader."""

    def __init__(self, lazy: Any, on_read: Callable[[torch.Tensor], None]) -> None:
        self._lazy, self._on_read = lazy, on_read

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._lazy[index]
        if index is Ellipsis:
            self._on_read(tensor)
        return tensor

    def get_shape(self) -> list[int]:
        return list(self._lazy.get_shape())

    def get_dtype(self) -> str:
        return str(self._lazy.get_dtype())


class GgufFiles(StoredFiles):
    """The content of a GGUF file in transformers' form."""

    def __init__(self, source: Source, filename: str) -> None:
        """Read the header, and factors of the rotation if there are any.

        Raises:
            BlockWeightsNotFoundError: there is no such file.
            CorruptWeightsError: it, or a part of it, is damaged.
            UnsupportedModelError: swarmllm can't read its content.
        """
        self._source, self._filename = source, filename
        headers = [read_header(source.file(part)) for part in parts_of_gguf(filename)]
        header = Header(headers[0].settings, {name: one for part in headers for name, one in part.tensors.items()})
        if header.settings.get("split.count", 1) not in (0, len(headers)):
            raise CorruptWeightsError(
                f"{filename} is one of {header.settings['split.count']} parts: name the first of them, "
                "…-00001-of-0000N.gguf, and keep the others in the same directory"
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
        names = list(names)
        found = self._view.tensors(names, packed_for, on_read)
        required = {}
        for name in names:
            one, _ = self._view.stored[name]
            if (here := partial_files(one.path.parent)) is None:
                return found
            need = partial(here.require, one.path.name, one.start, one.num_bytes, f"the tensor {one.name}")
            required[name] = RequiredTensor(found[name], need)
        return required

    def stored_as(self, weight: str) -> list[tuple[str, str]]:
        tensor, _ = self._view.stored[weight]
        return [(tensor.path.name, tensor.name)]

    def filenames(self) -> list[str]:
        return parts_of_gguf(self._filename)

    def local(self, filename: str) -> Path | None:
        return self._source.local(filename)

    def places(self, filename: str) -> list[StoredPlace]:
        """Read anew, as there may be another file by now."""
        header = read_header(self._source.file(filename))
        return [StoredPlace(name, one.start, one.num_bytes) for name, one in header.tensors.items()]

    def raw_config(self) -> dict[str, Any]:
        """The config, with the file's name if it has a commit: another file of that commit may be another model."""
        if self._source.commit is None:
            return self._fields
        return {**self._fields, "gguf_file": f"{self._source.folder}{self._filename}"}

    def dtype(self) -> torch.dtype | None:
        return None  # the config that is made of the header has it

    def identity(self) -> dict[str, Any]:
        """The list of tensors, whatever the file is called."""
        return {"headers": sorted((name, one.kind, one.shape) for name, one in self._tensors.items())}


def parts_of_gguf(filename: str) -> list[str]:
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
    place, filename, kind = split_place(name_or_path)
    source = find_source(place, revision=revision, token=token, cache_dir=cache_dir)
    if filename is None and (kind is not None or not _has_other_weights(source)):
        filename = only_gguf(source.name, source.filenames(SUFFIX), kind)
    return source, filename


def split_place(name_or_path: str) -> tuple[str, str | None, str | None]:
    """(directory or repository, GGUF file in it, a part of such a file's name)."""
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


def only_gguf(name: str, filenames: Iterable[str], kind: str | None) -> str | None:
    """The only GGUF model among the files of a place; `kind`: the one with that in its name.

    Raises:
        ConfigurationError: there is not one; without `kind`, there may also be none.
    """
    wanted = found = _models_among(filenames)
    if kind is not None:
        in_name = re.compile(rf"(^|[./_-]){re.escape(kind.lower())}($|[./-])")
        wanted = [one for one in found if in_name.search(one.lower())]
    if len(wanted) == 1:
        return wanted[0]
    if not wanted and kind is None:
        return None
    several = wanted or found
    if not several:
        raise ConfigurationError(f"{name} holds no GGUF files, so none of {kind}")
    some = f"{len(wanted) or 'no'} GGUF files" + (f" of {kind}" if kind else "")
    raise ConfigurationError(f"{name} holds {some}: name one of them, such as {name}/{several[0]} ({_listed(several)})")


def gguf_models(directory: Path) -> list[str]:
    """The GGUF files in a directory that are models, or the first parts of models."""
    return _models_among([path.name for path in directory.glob(f"*{SUFFIX}") if path.is_file()])


def _models_among(filenames: Iterable[str]) -> list[str]:
    return sorted(
        name
        for name in filenames
        if name.endswith(SUFFIX)
        and not _NO_MODEL.fullmatch(name)
        and (not (part := PART.search(name)) or part[1] == "00001")
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
