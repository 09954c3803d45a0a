"""The fingerprint of a checkpoint: servers announce it, clients look it up.

It covers the config (without fields that differ between copies of one model), and

- from the hub (or a directory of its cache): the commit, which covers every byte;
- from another directory, sharded: the index, and the size of each shard;
- from another directory, one file, GGUF or not: its list of tensors with types and shapes;
- from either kind of directory, samples of all tensors: more of those outside the blocks, some KB of each other one.

So two fine-tunes of one model in local directories, for example merged adapters, are different models to a swarm. They
have different keys in its DHT, and their clients and servers refuse each other. Samples cost servers and clients some
thousand reads of 2 KB. Each of them has all files of the directory, or the sizes would differ. Samples miss a few
changed numbers in a large tensor, or a damaged file; these show when blocks are read (`BlockDigests`).
"""

import hashlib
import json
from functools import lru_cache
from typing import Any

import torch

from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.skeleton import client_tensor_names

VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype"})
"""Config fields that differ between copies of the same model."""
SAMPLED_ROWS = 16
"""Assumed: rows at the start of each tensor outside the blocks; any training of it changes nearly all of them."""


@lru_cache(8)  # a process has one or two checkpoints, and asks more than once
def fingerprint(checkpoint: Checkpoint) -> str:
    """32 hex digits that tell checkpoints apart; the first call opens all files of a local directory.

    Raises:
        CorruptWeightsError: one of them is damaged.
    """
    digest = hashlib.sha256()

    def add(kind: str, value: Any) -> None:
        digest.update(f"{kind}\0{json.dumps(value, sort_keys=True, separators=(',', ':'))}\0".encode())

    add("config", _without_volatile(checkpoint.raw_config()))
    if checkpoint.revision is not None:
        add("commit", checkpoint.revision)
        return digest.hexdigest()[:32]
    for kind, value in checkpoint.identity().items():
        add(kind, value)
    add("samples", [*checkpoint.opened_files.samples().values()])  # files may have other names
    digest.update(_sample(checkpoint))
    return digest.hexdigest()[:32]


def _sample(checkpoint: Checkpoint) -> bytes:
    digest = hashlib.sha256()
    for name, lazy in sorted(checkpoint.tensors(client_tensor_names(checkpoint)).items()):
        tensor = lazy[:SAMPLED_ROWS] if _ndim(lazy) else lazy[...]
        digest.update(name.encode())
        # A last axis of 1 can be viewed as bytes in every layout, also those of pickled checkpoints.
        digest.update(tensor.unsqueeze(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _ndim(lazy: Any) -> int:
    return lazy.ndim if isinstance(lazy, torch.Tensor) else len(lazy.get_shape())


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(item) for key, item in value.items() if key not in VOLATILE}
    return [_without_volatile(item) for item in value] if isinstance(value, list) else value
