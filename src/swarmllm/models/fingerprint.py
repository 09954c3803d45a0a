"""What makes two checkpoints the same: servers announce it, clients look it up.

Covered: the config (without fields that differ between copies of one model), and

- from the hub (or a directory of its cache): the commit, which covers every byte;
- from another directory, sharded: the index, the size of each shard, and a sample of tensors outside the blocks;
- from another directory, one file: its list of tensors with types and shapes, and the same sample.

Not covered: the contents of the blocks themselves in a local directory. Client and servers must be able to compute the
same value, and a client never opens a shard that only holds blocks. Two fine-tunes of one model with equal embeddings,
norm and head (merged adapters, for instance) look the same as local directories: load them from the hub, by commit.
"""

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from swarmllm.models import weight_files

if TYPE_CHECKING:
    from swarmllm.models.checkpoint import Checkpoint

VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype"})
"""Config fields that differ between copies of the same model."""
SAMPLED_ROWS = 16
"""Assumed: rows at the start of each tensor outside the blocks; any training of it changes nearly all of them."""


def fingerprint(checkpoint: "Checkpoint") -> str:
    """32 hex digits."""
    digest = hashlib.sha256()

    def add(kind: str, value: Any) -> None:
        digest.update(f"{kind}\0{json.dumps(value, sort_keys=True, separators=(',', ':'))}\0".encode())

    add("config", _without_volatile(checkpoint.raw_config()))
    if checkpoint.revision is not None:
        add("commit", checkpoint.revision)
        return digest.hexdigest()[:32]
    filename, is_index = checkpoint.layout
    weight_map = checkpoint.weight_map()
    add("tensors", weight_map)
    if is_index:
        add("sizes", {shard: checkpoint.file_size(shard) for shard in sorted(set(weight_map.values()))})
    else:
        add("headers", weight_files.headers(checkpoint.file(filename)))
    digest.update(_sample(checkpoint))
    return digest.hexdigest()[:32]


def _sample(checkpoint: "Checkpoint") -> bytes:
    from swarmllm.models.skeleton import client_tensor_names

    digest = hashlib.sha256()
    for name, lazy in sorted(checkpoint.tensors(client_tensor_names(checkpoint)).items()):
        tensor = lazy[:SAMPLED_ROWS] if _ndim(lazy) else lazy[...]
        digest.update(name.encode())
        # A last axis of 1 can be viewed as bytes in every layout, those of pickled checkpoints included.
        digest.update(tensor.unsqueeze(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _ndim(lazy: Any) -> int:
    return lazy.ndim if isinstance(lazy, torch.Tensor) else len(lazy.get_shape())


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(item) for key, item in value.items() if key not in VOLATILE}
    return [_without_volatile(item) for item in value] if isinstance(value, list) else value
