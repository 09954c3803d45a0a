"""A checkpoint on the hub or in a directory: its config, its index, its tokenizer, and access to single tensors.

A file is downloaded or opened only when one of its tensors is asked for. So a server touches the shards of its blocks,
and a client those of embeddings, norm and head. Foreign errors (safetensors, pickle, transformers) become ours here.
Called by `span/loading` and `shell/loading`; knows no network of our own.

`OpenedFiles` keeps samples of the files from the moment when the checkpoint was opened. They are compared with those of
other machines (`fingerprint`), and with the same files later: a process that runs for weeks must not load blocks of new
files together with blocks of old ones.
"""

import copy
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.configuration_utils import get_configuration_file

from swarmllm.data_structures import MAX_BLOCKS
from swarmllm.errors import ConfigurationError, CorruptWeightsError, UnsupportedModelError
from swarmllm.models.architecture import as_config_says, check_supported, num_blocks
from swarmllm.models.checkpoint.manifest import partial_files
from swarmllm.models.checkpoint.sources import Source, first_line, read_json, read_object, require_room
from swarmllm.models.checkpoint.stored_files import CONFIG, ConfigAndWeights, GgufFiles, OnRead, StoredFiles, locate
from swarmllm.models.checkpoint.weight_files import StoredPlace
from swarmllm.models.published_formats import format_of

ADAPTER_CONFIG = "adapter_config.json"
_MOST = (
    (re.compile(r"(layers?|depths?|blocks|labels|stages|experts|codebooks|levels|modules)$"), MAX_BLOCKS),
    (re.compile(r"vocab"), 1 << 24),
    (re.compile(r"position|length|ctx|chunk|window"), 1 << 27),
    (re.compile(r"size|dim|heads|embd|d_model|d_ff|rank|inner|width|kernel|channels"), 1 << 20),
    (re.compile(r""), 1 << 53),
)
"""Limits of numbers with these names: some hundred times those of models. Assumed. Modules and tables of that size are
made before the weights, which wouldn't fit them, are read."""
SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model types that aren't transformers' own, although their architectures are."""

SPOT_BYTES = 2048
SPOTS = 4
"""Fewest samples of each tensor, so that queries, keys and values in one tensor have one each. A fine-tune changes most
numbers of a tensor that it changes: with 4096 numbers in bfloat16, a change by a hundredth is missed once in 10^17
times."""
BYTES_PER_SPOT = 16 << 20
"""Larger tensors have more samples: some hold the experts of a block, and a fine-tune may change a few of these."""

Stamp = tuple[int, int, int]

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Checkpoint:
    """Read access to one checkpoint."""

    def __init__(self, source: Source, config: PreTrainedConfig, files: StoredFiles, filename: str = "") -> None:
        """`filename` is a part of its name, if the directory or repository has several checkpoints."""
        self._source, self._files = source, files
        self._stored_names: Mapping[str, str] = {}
        self.config = config
        """The config without anything about the storage of weights: tensors read from here are complete weights."""
        self.comes_packed = files.comes_packed
        """True if weights are stored in few bits, and may stay so."""
        self.name = f"{source.name}/{filename}" if filename else source.name
        """The hub id or directory (with the file, if it is GGUF), as this machine knows it."""
        self.public_name = source.public_name
        """The name that the swarm is told: the hub id, or the name of a directory or file without the path to it."""
        if filename:
            self.public_name = f"{source.public_name}/{source.folder}{filename}" if source.commit else filename
        config._name_or_path = self.name
        self.num_blocks = num_blocks(config)
        self.opened_files = OpenedFiles(files)
        """The files of weights as they were when they were first seen."""

    @property
    def revision(self) -> str | None:
        """The hub's commit, if the checkpoint comes from there (also through a directory of its cache)."""
        return self._source.commit

    @property
    def repository(self) -> tuple[str, str]:
        """(hub id, folder in the repository, with a slash at its end) of a checkpoint with a commit."""
        name = self._source.public_name
        return name, self._source.folder

    @property
    def place(self) -> str:
        """A value of `--model` that works in every directory of this machine: the hub id, or the whole path."""
        is_local = self._source.is_local and self._source.commit is None
        return str(Path(self.name).absolute()) if is_local else self.public_name

    def file_beside(self, filename: str) -> Path | None:
        """Another file of the checkpoint, if it has it."""
        return self._source.path(filename, required=False)

    def weight_map(self) -> dict[str, str]:
        """Name of each weight → name of the file that holds it; reads the index, or the header of a single file.

        A weight in few bits counts as one tensor, wherever its scales are.

        Raises:
            BlockWeightsNotFoundError: the checkpoint has no weights in a known format.
        """
        weight_map = self._files.weight_map()
        return weight_map | {name: weight_map[stored] for name, stored in self._stored_names.items()}

    def weight_files(self) -> list[str]:
        """Names of the files that hold weights."""
        return self._files.filenames()

    def stored_as(self, weight: str) -> list[tuple[str, str]]:
        """(file, name in the file) of each tensor that a weight is stored as."""
        return self._files.stored_as(self._stored_names.get(weight, weight))

    def places(self, filename: str) -> list[StoredPlace]:
        """The places of the tensors in a file of weights, which is on this machine.

        Raises:
            CorruptWeightsError: it is damaged.
        """
        return self._files.places(filename)

    def kept_bits(self, weight: str) -> float | None:
        """Bits of a weight, with its scales, if it can stay packed; None of others."""
        return self._files.kept_bits(self._stored_names.get(weight, weight))

    def tensors(
        self, names: Iterable[str], *, packed_for: torch.dtype | None = None, on_read: OnRead | None = None
    ) -> dict[str, Any]:
        """Lazy tensors (`lazy[...]` reads) of the given names; opens only the files that hold them.

        Weights in few bits are dequantized to float32. For blocks that compute in `packed_for`, they stay packed if
        possible. `on_read` gets every tensor as it is stored.

        Raises:
            BlockWeightsNotFoundError: a file or tensor is missing.
            CorruptWeightsError: a file is damaged.
        """
        wanted = {self._stored_names.get(name, name): name for name in names}
        if on_read is None or not self._stored_names:
            found = self._files.tensors(wanted, packed_for, on_read)
        else:
            found = self._files.tensors(wanted, packed_for, lambda name, *read: on_read(wanted[name], *read))
        return {wanted.get(stored, stored): tensor for stored, tensor in found.items()}

    def with_file(self, filename: str) -> "Checkpoint | None":
        """The same checkpoint with the weights of one more of its files, which may be missing: None."""
        files = self._files.with_file(filename)
        if files is None:
            return None
        more = copy.copy(self)
        more._files = files
        return more

    def with_names(self, config: PreTrainedConfig, stored_names: Mapping[str, str]) -> "Checkpoint":
        """The same weights for another config, some under other names as well (new name → name in the files)."""
        other = copy.copy(self)
        other.config, other.num_blocks = config, num_blocks(config)
        other._stored_names = stored_names
        return other

    def identity(self) -> dict[str, Any]:
        """The facts that tell local checkpoints of one config apart; reads no weights."""
        return self._files.identity()

    def stored_dtype(self) -> torch.dtype:
        """The dtype that the config declares, or else that of the weights: transformers' rule for dtype="auto".

        Raises:
            UnsupportedModelError: no model computes in the one that the config declares.
            WeightsError: it declares none, and the weights can't be read.
        """
        dtype = getattr(self.config, "dtype", None) or self._files.dtype() or torch.float32
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise UnsupportedModelError(f"{self.name} is in {dtype}, in which blocks can't compute: give another dtype")
        return dtype

    def json_file(self, filename: str) -> Any:
        """The content of another JSON file of the directory or repository; None if it isn't there.

        Raises:
            ConfigurationError: it is no JSON.
        """
        path = self._source.path(filename, required=False)
        return None if path is None else read_json(path)

    def raw_config(self) -> dict[str, Any]:
        """The content of config.json, or of a GGUF file's header in its place."""
        return self._files.raw_config()

    def generation_config(self) -> GenerationConfig | None:
        """The makers' settings for `generate()`, if the checkpoint has some."""
        return self._files.generation_config()


def open_checkpoint(
    name_or_path: str, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
) -> Checkpoint:
    """Open a checkpoint of the hub or of a local directory, or a GGUF file (`stored_files`); reads its config only.

    Raises:
        ConfigurationError: there is no such checkpoint, or it can't be reached.
        WeightsError: a GGUF file is missing or damaged.
        UnsupportedModelError: transformers or swarmllm can't run this architecture.
    """
    source, gguf_file = locate(str(name_or_path), revision=revision, token=token, cache_dir=cache_dir)
    if gguf_file is not None:
        files = GgufFiles(source, gguf_file)
        return Checkpoint(source, _supported(files.config, source.name), files, gguf_file)
    raw, path = _config_file(source)
    config = _read_config(source.name, raw, path)
    with as_config_says(source.name):
        form = format_of(raw) or format_of(_described_beside(source))
    for part in (config, *(getattr(config, name) for name in config.sub_configs if hasattr(config, name))):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # or transformers would look for its own quantizers
    return Checkpoint(source, _supported(config, source.name), ConfigAndWeights(source, raw, form))


def _config_file(source: Source) -> tuple[dict[str, Any], Path]:
    """The content of the config file that transformers reads, and the path of config.json.

    Raises:
        ConfigurationError: there is none, or it is no JSON.
        UnsupportedModelError: there is an adapter in the same place.
    """
    path = source.path(CONFIG, required=False)
    if path is None:
        raise ConfigurationError(
            f"{source.name} has no {CONFIG}, so it is no checkpoint of transformers, and there is no GGUF file"
        )
    raw = read_object(path)
    if "configuration_files" in raw:  # one for each of some releases of transformers
        with as_config_says(source.name):
            raw = read_object(source.file(get_configuration_file(raw["configuration_files"])))
    if source.is_local and source.path(ADAPTER_CONFIG, required=False) is not None:
        raise UnsupportedModelError(
            f"{source.name} holds an adapter ({ADAPTER_CONFIG}) that transformers would put on the model: move its "
            "files to another directory, and name that by --adapters or merge it by `swarmllm adapters merge`"
        )
    return raw, path


def _described_beside(source: Source) -> dict[str, Any]:
    """ModelOpt's description of its weights; its earlier releases don't write it into config.json."""
    path = source.path("hf_quant_config.json", required=False)
    found = {} if path is None else read_object(path).get("quantization") or {}
    return {"quantization_config": {**found, "quant_method": "modelopt"}} if found else {}


def _read_config(name: str, raw: dict[str, Any], path: Path) -> PreTrainedConfig:
    """Read it as transformers does, but without its choice of code for attention and experts.

    Raises:
        UnsupportedModelError: transformers can't, or only with code from the checkpoint.
    """
    model_type = str(raw.get("model_type"))
    if "auto_map" in raw and model_type not in CONFIG_MAPPING and model_type not in SAME_AS:
        raise UnsupportedModelError(
            f"{name} brings code of its own, which swarmllm never runs: use a checkpoint of an architecture "
            "that transformers has"
        )
    _check_sizes(raw, path)
    with as_config_says(name):
        if (same := SAME_AS.get(model_type)) is None:
            config = AutoConfig.from_pretrained(str(path.parent), trust_remote_code=False)
        else:
            config = AutoConfig.for_model(same, **{key: value for key, value in raw.items() if key != "model_type"})
        # These could name a kernel of the hub, whose code would run, or change transformers' classes for all models.
        config._attn_implementation = config._experts_implementation = None
        vars(config).pop("fusion_config", None)
    return config


def _check_sizes(value: dict[str, Any] | list[Any], path: Path, name: str = "") -> None:
    """Refuse sizes by which transformers would build for hours, or fill the memory.

    Raises:
        UnsupportedModelError: there is one.
    """
    for key, item in value.items() if isinstance(value, dict) else ((name, item) for item in value):
        if isinstance(item, (dict, list)):
            _check_sizes(item, path, key)
        elif isinstance(item, (int, float)):
            most = next(most for names, most in _MOST if names.search(key))
            if not abs(item) <= most and not math.isinf(item):
                raise UnsupportedModelError(f"{path} says {key} = {item:.8g}, but models have at most {most}")


def _supported(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    config._name_or_path = name
    check_supported(config)
    return config


class OpenedFiles:
    """The files of a checkpoint, and their content when they were first seen."""

    def __init__(self, files: StoredFiles) -> None:
        self._files = files
        self._seen: dict[str, tuple[Stamp, str]] = {}

    def samples(self) -> dict[str, str | None]:
        """For each file a hash of samples of all its tensors; None for one that isn't on this machine.

        Raises:
            CorruptWeightsError: one is damaged.
        """
        for filename in self._files.filenames():
            path = self._files.local(filename)
            if filename not in self._seen and path is not None:
                self._seen[filename] = _stamp(path), self._sample(filename, path)
        return {name: self._seen[name][1] if name in self._seen else None for name in self._files.filenames()}

    def changed(self) -> list[str]:
        """Files that hold something else than when they were seen first, or are gone; new ones are seen now.

        Raises:
            CorruptWeightsError: a new one is damaged.
        """
        self.samples()
        return [filename for filename in self._seen if not self._is_as_seen(filename)]

    def _is_as_seen(self, filename: str) -> bool:
        stamp, sample = self._seen[filename]
        path = self._files.local(filename)
        if path is None:
            return False
        try:
            now = _stamp(path)
            if partial_files(path.parent) is not None:  # more pieces come, each verified
                return now[1] == stamp[1]
            if now != stamp and self._sample(filename, path) == sample:  # only touched, or copied again
                self._seen[filename] = now, sample
                return True
        except (CorruptWeightsError, OSError):
            return False
        return now == stamp

    def _sample(self, filename: str, path: Path) -> str:
        return _sample(path, self._files.places(filename))


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _sample(path: Path, places: Iterable[StoredPlace]) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for place in sorted(places):
            digest.update(f"{place.name}\0{place.num_bytes}\0".encode())
            for start, num_bytes in spots(place):
                file.seek(start)
                digest.update(file.read(num_bytes))
    return digest.hexdigest()


def spots(place: StoredPlace) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes), in the middle of equal parts of the place."""
    count = max(SPOTS, place.num_bytes // BYTES_PER_SPOT)
    if place.num_bytes <= count * SPOT_BYTES:
        yield place.start, place.num_bytes
        return
    for index in range(count):
        yield place.start + (2 * index + 1) * place.num_bytes // (2 * count) - SPOT_BYTES // 2, SPOT_BYTES


def resolve_dtype(checkpoint: Checkpoint, dtype: str | torch.dtype) -> torch.dtype:
    """`"auto"` = as the checkpoint is stored, `"bfloat16"`, `"torch.bfloat16"`, or a dtype.

    Raises:
        ConfigurationError: no floating-point dtype of this name is supported.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype)
    if dtype == "auto":
        return checkpoint.stored_dtype()
    name = dtype.removeprefix("torch.")
    if name not in _NAMES:
        raise ConfigurationError(f"dtype {dtype!r} is not supported; use auto, {', '.join(_NAMES)}")
    return _NAMES[name]


def load_tokenizer(name_or_path: str, **options: Any) -> Any:
    """transformers' tokenizer; `options` (revision, token, cache_dir) go to its `from_pretrained`.

    Raises:
        ConfigurationError: there is none that transformers can load.
    """
    source: Source | None = None
    try:
        source, gguf_file = locate(name_or_path, **options)
        if gguf_file is None:
            return AutoTokenizer.from_pretrained(source.name, trust_remote_code=False, **options)
        # Not by AutoTokenizer, which would want the package gguf for the config of most architectures.
        return PreTrainedTokenizerFast.from_pretrained(source.name, gguf_file=gguf_file, **options)
    except Exception as error:  # noqa: BLE001 - tokenizers raise bare Exceptions about files of strangers
        if source is None or not source.is_local:
            require_room(name_or_path, error, options.get("cache_dir"))
        raise ConfigurationError(
            f"{name_or_path} has no tokenizer that transformers can load: {first_line(error)}"
        ) from None
