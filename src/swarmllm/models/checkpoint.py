"""A checkpoint on the hub or in a directory: its config, its index, and access to single tensors.

Files are downloaded or opened only when a tensor in them is asked for, so a server touches the shards of its blocks and
a client those of the embeddings, norm and head. Foreign errors (huggingface_hub, safetensors, pickle) become ours here.
Called by `block_span` and `client_shell`; knows no network of our own.
"""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, UnsupportedModelError
from swarmllm.models import weight_files
from swarmllm.models.architecture import check_supported, num_blocks
from swarmllm.models.fingerprint import fingerprint
from swarmllm.models.quantization import FULL_PRECISION, Quantization

CONFIG = "config.json"
LAYOUTS = (
    ("model.safetensors.index.json", True),
    ("model.safetensors", False),
    ("pytorch_model.bin.index.json", True),
    ("pytorch_model.bin", False),
)
"""What weights are looked for, in this order: (file, whether it is an index of shards)."""

_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)")


class Checkpoint:
    """Read access to one checkpoint."""

    def __init__(self, source: "Source", config: PreTrainedConfig) -> None:
        self._source = source
        self.config = config
        self.name = source.name
        """The hub id or directory, as this machine knows it."""
        self.public_name = source.public_name
        """What the swarm is told: the hub id, or a directory's own name without the path to it."""
        self.num_blocks = num_blocks(config)

    @property
    def revision(self) -> str | None:
        """The hub's commit, if the checkpoint comes from there (also through a directory of its cache)."""
        return self._source.commit

    @cached_property
    def fingerprint(self) -> str:
        """Tells checkpoints apart; see `models/fingerprint` for what it covers."""
        return fingerprint(self)

    @cached_property
    def layout(self) -> tuple[str, bool]:
        """(weights file or index, whether it is an index).

        Raises:
            BlockWeightsNotFoundError: the checkpoint has no weights in a known format.
        """
        for filename, is_index in LAYOUTS:
            if self._source.path(filename, required=False) is not None:
                return filename, is_index
        raise BlockWeightsNotFoundError(f"{self.name} has no weights: neither {' nor '.join(f for f, _ in LAYOUTS)}")

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        filename, is_index = self.layout
        if not is_index:
            return dict.fromkeys(weight_files.tensor_names(self.file(filename)), filename)
        return weight_files.read_index(self.file(filename))

    def weight_map(self) -> dict[str, str]:
        """Name of each tensor → name of the file that holds it; reads the index, or the header of a single file."""
        return self._weight_map

    def file(self, filename: str) -> Path:
        """A local path of the file, downloaded if needed.

        Raises:
            BlockWeightsNotFoundError: the checkpoint lacks it.
        """
        path = self._source.path(filename, required=True)
        assert path is not None  # required=True raises instead
        return path

    def file_size(self, filename: str) -> int | None:
        """Bytes of a file of a local checkpoint, without opening it; None on the hub."""
        return self._source.size(filename)

    def tensors(self, names: Iterable[str]) -> dict[str, Any]:
        """Lazy tensors (`lazy[...]` reads) of the given names; opens only the files that hold them.

        Raises:
            BlockWeightsNotFoundError: a file or tensor is missing.
            CorruptWeightsError: a file is damaged.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._weight_map[name], []).append(name)
        found: dict[str, Any] = {}
        for filename, wanted in sorted(by_file.items()):
            found.update(weight_files.lazy_tensors(self.file(filename), wanted))
        return found

    def stored_dtype(self) -> torch.dtype:
        """The dtype that the config declares; float32 if it declares none (transformers' rule for dtype="auto")."""
        dtype = getattr(self.config, "dtype", None) or torch.float32
        return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."))

    def block_bytes(self, dtype: torch.dtype | None = None, quantization: Quantization = FULL_PRECISION) -> list[int]:
        """Bytes that each block takes in memory (dtype None = as stored), computed from the config alone."""
        from swarmllm.models.skeleton import block_bytes

        return block_bytes(self.config, dtype or self.stored_dtype(), quantization)

    def raw_config(self) -> dict[str, Any]:
        """config.json as it is written."""
        return dict(json.loads(self.file(CONFIG).read_text()))

    def generation_config(self) -> GenerationConfig | None:
        """generation_config.json, if there is one."""
        path = self._source.path("generation_config.json", required=False)
        return None if path is None else GenerationConfig.from_pretrained(str(path.parent), path.name)


def open_checkpoint(
    name_or_path: str, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
) -> Checkpoint:
    """Open a checkpoint of the hub or of a local directory; reads its config only.

    Raises:
        ConfigurationError: there is no such checkpoint, or it can't be reached.
        UnsupportedModelError: transformers or swarmllm can't run this architecture.
    """
    source = find_source(str(name_or_path), revision=revision, token=token, cache_dir=cache_dir)
    path = source.path(CONFIG, required=False)
    if path is None:
        raise ConfigurationError(f"{source.name} has no {CONFIG}, so it is no checkpoint of transformers")
    try:
        config = AutoConfig.from_pretrained(str(path.parent), trust_remote_code=False)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    except (ValueError, KeyError, OSError) as error:  # transformers: unknown or inconsistent config
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{source.name} brings code of its own, which swarmllm never runs: use a checkpoint of an architecture "
                "that transformers has"
            ) from None
        raise UnsupportedModelError(f"transformers can't read {path}: {_first_line(error)}") from error
    config._name_or_path = source.name
    check_supported(config)
    return Checkpoint(source, config)


class Source:
    """Where the files of a checkpoint or adapter come from."""

    name: str
    public_name: str
    commit: str | None = None

    def path(self, filename: str, *, required: bool) -> Path | None:
        raise NotImplementedError

    def size(self, filename: str) -> int | None:
        raise NotImplementedError


class _Directory(Source):
    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self._directory = directory
        snapshot = _SNAPSHOT.search(directory.absolute().as_posix())
        self.commit = snapshot[2] if snapshot else None
        self.public_name = snapshot[1].replace("--", "/") if snapshot else directory.absolute().name

    def path(self, filename: str, *, required: bool) -> Path | None:
        path = self._directory / filename
        if path.is_file():
            return path
        if required:
            raise BlockWeightsNotFoundError(f"{self._directory} lacks {filename}; copy it there or download it again")
        return None

    def size(self, filename: str) -> int | None:
        path = self._directory / filename
        return path.stat().st_size if path.is_file() else -1


class _Hub(Source):
    def __init__(self, repo_id: str, revision: str | None, token: str | None, cache_dir: str | None) -> None:
        self.name = self.public_name = repo_id
        self._options: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        self._known: dict[str, Path | None] = {}

    def path(self, filename: str, *, required: bool) -> Path | None:
        if filename not in self._known:
            self._known[filename] = self._download(filename)
        path = self._known[filename]
        if path is None and required:
            raise BlockWeightsNotFoundError(f"{self.name} on the hub lacks {filename}, or it can't be downloaded now")
        return path

    def size(self, filename: str) -> int | None:
        return None

    def _download(self, filename: str) -> Path | None:
        try:
            path = Path(hf_hub_download(self.name, filename, **self._options))
        except RepositoryNotFoundError as error:
            raise ConfigurationError(
                f"{self.name!r} is neither a directory nor a model that you may read on the hub "
                "(a private or gated one needs --token)"
            ) from error
        except LocalEntryNotFoundError as error:
            if self.commit is not None and is_offline_mode():  # what has been downloaded is all there is
                return None
            raise ConfigurationError(
                f"{self.name!r} is no directory, and the hub can't be reached to look for a model of that name"
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise ConfigurationError(f"{self.name!r} can't be read from the hub: {_first_line(error)}") from error
        snapshot = _SNAPSHOT.search(path.parent.as_posix())
        self.commit = snapshot[2] if snapshot else None
        if self.commit:  # all further files from the very same commit, even if the branch moves meanwhile
            self._options["revision"] = self.commit
        return path


def find_source(name_or_path: str, *, revision: str | None, token: str | None, cache_dir: str | None) -> Source:
    """A directory, or else a repository of the hub.

    Raises:
        ConfigurationError: it looks like a directory, but there is none.
    """
    directory = Path(name_or_path).expanduser()
    if directory.is_dir():
        return _Directory(directory)
    looks_like_a_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if looks_like_a_path or directory.exists():
        raise ConfigurationError(f"the directory {name_or_path!r} does not exist")
    return _Hub(name_or_path, revision, token, cache_dir)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
