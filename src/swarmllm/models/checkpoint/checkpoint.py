"""A checkpoint on the hub or in a directory: its config, its index, and access to single tensors.

Files are downloaded or opened only when a tensor in them is asked for, so a server touches the shards of its blocks and
a client those of the embeddings, norm and head. Foreign errors (safetensors, pickle, transformers) become ours here.
Called by `span/loading` and `shell/loading`; knows no network of our own.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from swarmllm.errors import ConfigurationError, UnsupportedModelError
from swarmllm.models.architecture import check_supported, num_blocks
from swarmllm.models.checkpoint.gguf_files import GgufFiles
from swarmllm.models.checkpoint.gguf_names import locate
from swarmllm.models.checkpoint.opened_files import OpenedFiles
from swarmllm.models.checkpoint.sources import Source, first_line
from swarmllm.models.checkpoint.stored_files import CONFIG, ConfigAndWeights, OnRead, StoredFiles
from swarmllm.models.published_formats.choice import stored_format

SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model types that aren't transformers' own, although their architectures are."""


class Checkpoint:
    """Read access to one checkpoint."""

    def __init__(self, source: Source, config: PreTrainedConfig, files: StoredFiles, filename: str = "") -> None:
        """`filename` is a part of its name, where the source has several checkpoints."""
        self._source, self._files = source, files
        self._stored_names: Mapping[str, str] = {}
        self.config = config
        """Without a word of how the weights are stored: what is read from here is put together already."""
        self.comes_packed = files.comes_packed
        """Whether weights are stored in few bits, and may stay so."""
        self.name = f"{source.name}/{filename}" if filename else source.name
        """The hub id or directory (with the file, if it is GGUF), as this machine knows it."""
        self.public_name = source.public_name
        """What the swarm is told: the hub id, or a directory's or file's own name without the path to it."""
        if filename:
            self.public_name = f"{source.public_name}/{source.folder}{filename}" if source.commit else filename
        self.num_blocks = num_blocks(config)
        self.opened_files = OpenedFiles(files)
        """The files of weights as they were when they were first seen."""

    @property
    def revision(self) -> str | None:
        """The hub's commit, if the checkpoint comes from there (also through a directory of its cache)."""
        return self._source.commit

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

    def kept_bits(self, weight: str) -> float | None:
        """Bits of a weight, with its scales, if it can stay packed; None of others."""
        return self._files.kept_bits(self._stored_names.get(weight, weight))

    def tensors(
        self, names: Iterable[str], *, packed_for: torch.dtype | None = None, on_read: OnRead | None = None
    ) -> dict[str, Any]:
        """Lazy tensors (`lazy[...]` reads) of the given names; opens only the files that hold them.

        Weights in few bits are dequantized to float32, or stay packed where that can be, for blocks that compute in
        `packed_for`. `on_read` sees everything as it is stored.

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
        """What tells local checkpoints of one config apart; reads no weights."""
        return self._files.identity()

    def stored_dtype(self) -> torch.dtype:
        """The dtype that the config declares; float32 if it declares none (transformers' rule for dtype="auto")."""
        dtype = getattr(self.config, "dtype", None) or torch.float32
        return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."))

    def json_file(self, filename: str) -> Any:
        """What a further file of the directory or repository says; None if it isn't there.

        Raises:
            ConfigurationError: it is no JSON.
        """
        path = self._source.path(filename, required=False)
        try:
            return None if path is None else json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{path} is not valid JSON: {error}") from None

    def raw_config(self) -> dict[str, Any]:
        """config.json as it is written, or what a GGUF file says in its place."""
        return self._files.raw_config()

    def generation_config(self) -> GenerationConfig | None:
        """What the makers advise for `generate()`, if the checkpoint says it."""
        return self._files.generation_config()


def open_checkpoint(
    name_or_path: str, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
) -> Checkpoint:
    """Open a checkpoint of the hub or of a local directory, or a GGUF file (`gguf_names`); reads its config only.

    Raises:
        ConfigurationError: there is no such checkpoint, or it can't be reached.
        WeightsError: a GGUF file is missing or damaged.
        UnsupportedModelError: transformers or swarmllm can't run this architecture.
    """
    source, gguf_file = locate(str(name_or_path), revision=revision, token=token, cache_dir=cache_dir)
    if gguf_file is not None:
        files = GgufFiles(source, gguf_file)
        return _checked(Checkpoint(source, files.config, files, gguf_file))
    path = source.path(CONFIG, required=False)
    if path is None:
        raise ConfigurationError(
            f"{source.name} has no {CONFIG}, so it is no checkpoint of transformers, and there is no GGUF file"
        )
    raw, config = _read_config(source.name, path)
    form = stored_format(raw) or stored_format(_described_beside(source))
    for part in (config, *(getattr(config, name) for name in config.sub_configs if hasattr(config, name))):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # or transformers would look for its own quantizers
    return _checked(Checkpoint(source, config, ConfigAndWeights(source, form)))


def _described_beside(source: Source) -> dict[str, Any]:
    """What ModelOpt says of its weights; in config.json its earlier releases don't."""
    path = source.path("hf_quant_config.json", required=False)
    found = {} if path is None else json.loads(path.read_text()).get("quantization") or {}
    return {"quantization_config": {**found, "quant_method": "modelopt"}} if found else {}


def _read_config(name: str, path: Path) -> tuple[dict[str, Any], PreTrainedConfig]:
    """As it is written, and as transformers reads it."""
    try:
        raw = json.loads(path.read_text())
        if (same := SAME_AS.get(raw.get("model_type"))) is None:
            config = AutoConfig.from_pretrained(str(path.parent), trust_remote_code=False)
        else:
            config = AutoConfig.for_model(same, **{key: value for key, value in raw.items() if key != "model_type"})
        return raw, config
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    except (ValueError, KeyError, OSError) as error:  # transformers: unknown or inconsistent config
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{name} brings code of its own, which swarmllm never runs: use a checkpoint of an architecture "
                "that transformers has"
            ) from None
        raise UnsupportedModelError(f"transformers can't read {path}: {first_line(error)}") from error


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    checkpoint.config._name_or_path = checkpoint.name
    check_supported(checkpoint.config)
    return checkpoint
