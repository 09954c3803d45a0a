"""Adapters as peft stores them: adapter_config.json and adapter_model.safetensors, in a directory or on the hub.

Servers that offer some to every client read them (`server/adapters`). Only changes of linear modules inside blocks can
be served. Everything is checked before any of it is used, and no pickle is ever opened.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarmllm.data_structures import Patch, Span
from swarmllm.errors import BlockWeightsNotFoundError, ConfigurationError, CorruptWeightsError, WeightsMismatchError
from swarmllm.models.adapters.peft_layers import SAFE_INITS
from swarmllm.models.architecture import blocks_class, find_blocks
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import on_meta
from swarmllm.models.checkpoint.sources import Source, find_source, read_object

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
CARD = "README.md"
DIGEST_LENGTH = 12
"""Hex digits that tell versions of an adapter apart; 48 bits are enough against accidents."""
MAX_NAME_LENGTH = 96

UNUSUAL = ("use_dora", "use_qalora", "alora_invocation_tokens", "layer_replication", "lora_bias")
"""Settings that change an adapter's computation, or the blocks of the model."""
KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "LORA": {"lora": ("lora_A.weight", "lora_B.weight")},
    "IA3": {"ia3": ("ia3_l",)},
    "LOHA": {"loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
}
"""Tensors of one module in the order of a patch, by peft's type."""


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    """An adapter of this base model. Its description has been read and checked; its values are read on demand."""

    name: str
    """The hub id or the directory's own name, and a digest of its contents: `name@digest`."""
    patches: tuple[Patch, ...]
    """The patches for all blocks of the model."""
    _keys: tuple[tuple[str, ...], ...]
    _path: Path

    def values(self, span: Span) -> tuple[tuple[Patch, ...], Tensor]:
        """The patches for the blocks of `span` and their values, flat, in float32: the arguments of `adapters.checked`.

        peft computes with adapters in float32, also on a model of half precision.
        """
        chosen = [i for i, patch in enumerate(self.patches) if patch.block in span]
        with _opened(self._path) as file:
            parts = [file.get_tensor(key).to(torch.float32).flatten() for i in chosen for key in self._keys[i]]
        flat = torch.cat(parts) if parts else torch.empty(0)
        return tuple(self.patches[i] for i in chosen), flat


def open_adapter(
    name_or_path: str, checkpoint: Checkpoint, *, token: str | None = None, cache_dir: str | None = None
) -> StoredAdapter:
    """The adapter of a directory or hub repository, for the blocks of `checkpoint`; reads all of it once.

    Raises:
        ConfigurationError: there is none, or servers can't compute with it.
        BlockWeightsNotFoundError: its weights are missing, or a pickle.
        CorruptWeightsError: its files can't be read.
        WeightsMismatchError: it was made for another base model.
    """
    source = find_source(name_or_path, revision=None, token=token, cache_dir=cache_dir)
    config = _read_config(source)
    weights = source.path(WEIGHTS, required=False)
    if weights is None:
        if source.path(PICKLE, required=False) is not None:
            raise BlockWeightsNotFoundError(
                f"the adapter {source.name} is a pickle, which could run any code: save it as safetensors"
            )
        raise BlockWeightsNotFoundError(f"the adapter {source.name} lacks {WEIGHTS}")
    _check_base(source, config, checkpoint)
    _check_config(source, config)
    with _opened(weights) as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - it is no dict
    found = list(_patches(source, config, shapes, names_of_block_list(checkpoint)))
    if not found:
        raise ConfigurationError(f"the adapter {source.name} changes nothing")
    if max(patch.block for patch, _ in found) >= checkpoint.num_blocks:
        raise WeightsMismatchError(
            f"the adapter {source.name} is for more blocks than the {checkpoint.num_blocks} of {checkpoint.public_name}"
        )
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    with weights.open("rb") as stream:
        digest.update(hashlib.file_digest(stream, "sha256").digest())
    name = f"{source.public_name}@{digest.hexdigest()[:DIGEST_LENGTH]}"
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise ConfigurationError(f"the adapter's name {source.public_name!r} is too long or not printable: rename it")
    return StoredAdapter(name, tuple(patch for patch, _ in found), tuple(keys for _, keys in found), weights)


def names_of_block_list(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The names of the block list in the classes for several tasks: `model.layers`, or only `layers`."""
    model = on_meta(blocks_class(checkpoint.config), checkpoint.config)
    blocks = find_blocks(model).blocks
    name = next(name for name, part in model.named_modules() if part is blocks)
    prefix = f"{model.base_model_prefix}."
    return (name, name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)


def _read_config(source: Source) -> dict[str, Any]:
    path = source.path(CONFIG, required=False)
    if path is None:
        raise ConfigurationError(f"{source.name} is no adapter of peft: it has no {CONFIG}")
    try:
        return read_object(path)
    except ConfigurationError as error:
        raise CorruptWeightsError(str(error)) from None


def _check_base(source: Source, config: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Compares the fingerprint if the card names one, else the base model's name: its path may be another here."""
    base = str(config.get("base_model_name_or_path") or "")
    named = fingerprint_of_card(source)
    if named is not None:
        own = fingerprint(checkpoint)
        if named != own:
            raise WeightsMismatchError(
                f"the adapter {source.name} was trained on {base or 'another model'} (fingerprint {named[:12]}), "
                f"this server holds {checkpoint.public_name} ({own[:12]})"
            )
    elif base and Path(base).name != Path(checkpoint.public_name).name:
        raise WeightsMismatchError(
            f"the adapter {source.name} was trained on {base}, this server holds {checkpoint.public_name}: if these "
            f"are the same, say so in base_model_name_or_path of its {CONFIG}"
        )


def fingerprint_of_card(source: Source) -> str | None:
    """The base's, as `model_tags` writes it into cards; None: the card doesn't say it."""
    path = source.path(CARD, required=False)
    if path is None:
        return None
    match = re.search(r"fingerprint:([0-9a-f]{32})", path.read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else None


def _check_config(source: Source, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind not in KINDS:
        raise ConfigurationError(
            f"the adapter {source.name} is {kind}, which servers can't apply: they take {', '.join(KINDS)}"
        )
    unusual = [name for name in UNUSUAL if config.get(name)]
    if config.get("init_lora_weights") not in SAFE_INITS:
        unusual.append(f"init_lora_weights={config['init_lora_weights']!r}")
    if unusual:
        raise ConfigurationError(f"the adapter {source.name} needs {unusual[0]}, which servers can't apply")


def _patches(
    source: Source, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], blocks: tuple[str, ...]
) -> Iterator[tuple[Patch, tuple[str, ...]]]:
    """Each patch and the tensors that it is made of."""
    ((kind, suffixes),) = KINDS[config["peft_type"]].items()
    modules: dict[tuple[str, tuple[int, str]], dict[str, str]] = {}
    for key in sorted(shapes):
        suffix = next((suffix for suffix in suffixes if key.endswith(f".{suffix}")), None)
        module = key.removeprefix("base_model.model.").removesuffix(f".{suffix}")
        inside = _inside_block(module, blocks)
        if suffix is None or inside is None:
            raise ConfigurationError(
                f"the adapter {source.name} also holds {key}, which is no change of a linear module inside a block: "
                "let clients load it with peft instead"
            )
        modules.setdefault((module, inside), {})[suffix] = key
    for (module, inside), keys in sorted(modules.items()):
        if len(keys) != len(suffixes):
            raise WeightsMismatchError(f"the adapter {source.name} lacks some of {', '.join(suffixes)} for {module}")
        ordered = tuple(keys[suffix] for suffix in suffixes)
        yield _patch(source, config, kind, module, inside, tuple(shapes[key] for key in ordered)), ordered


def _patch(
    source: Source,
    config: dict[str, Any],
    kind: str,
    module: str,
    inside: tuple[int, str],
    shapes: tuple[tuple[int, ...], ...],
) -> Patch:
    scale = 1.0
    if kind == "ia3":
        kind = "ia3_in" if shapes[0][0] == 1 and shapes[0] != (1, 1) else "ia3_out"  # peft's kind for feed-forwards
        shapes = ((math.prod(shapes[0]),),)
    else:
        rank = _of_module(config, "rank_pattern", module, config.get("r"))
        stored = shapes[0][0] if kind == "lora" else shapes[0][-1]
        if stored != rank:
            raise WeightsMismatchError(
                f"the adapter {source.name} has rank {stored} at {module}, but {rank} by its {CONFIG}"
            )
        alpha = _of_module(config, "alpha_pattern", module, config.get("lora_alpha", config.get("alpha")))
        if not isinstance(alpha, (int, float)):
            raise CorruptWeightsError(f"{CONFIG} of the adapter {source.name} lacks its alpha")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    fields: dict[str, Any] = {"block": inside[0], "path": inside[1], "kind": kind, "shapes": shapes}
    try:
        return Patch(**fields, scale=float(scale))
    except ValidationError as error:
        raise WeightsMismatchError(
            f"the adapter {source.name} can't be applied to {module}: {error.errors()[0]['msg']}"
        ) from error


def _inside_block(module: str, blocks: tuple[str, ...]) -> tuple[int, str] | None:
    """(block index, path inside the block); None: it is outside."""
    for name in blocks:
        if match := re.fullmatch(rf"{re.escape(name)}\.(\d+)\.(.+)", module):
            return int(match[1]), match[2]
    return None


def _of_module(config: dict[str, Any], pattern: str, module: str, default: Any) -> Any:
    """peft's rule: the first pattern that matches the end of the module's name."""
    for key, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise CorruptWeightsError(f"{path} can't be read as safetensors: {error}") from error
