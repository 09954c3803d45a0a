"""Keys and values that a client trains and puts before every text, in each block: prefix tuning.

After Li & Liang 2021 (arXiv:2101.00190). peft's `PrefixTuningConfig` trains them, and hands them to the model as a
cache that is already filled, the same for each row. Here they are read from it, and travel to the servers once, like
any other adapter (`adapters/block_adapter`, `prefix`); the servers begin the caches of sessions and batches with them.
The positions of a session are those of the text; its cache tells transformers both together. Called by `stack_forward`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from swarmllm.data_structures import Patch
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters.block_adapter import MAX_PROMPTS
from swarmllm.models.architecture import is_encoder, text_config
from swarmllm.models.boundary.phantom_cache import PhantomCache

LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Kinds of caches that hold nothing but keys and values."""


class TunedPrefixCache(PhantomCache):
    """The past of a batch without a session: only a length."""

    def __init__(self, config: PreTrainedConfig, num_prefix: int) -> None:
        super().__init__(config)
        self.num_prefix = num_prefix

    @property
    def length(self) -> int:
        return self.num_prefix

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


class TunedPrefix:
    """The keys and values `[heads, prefix, head]` by block, as parts of the trainer's graph."""

    def __init__(self, pairs: dict[int, tuple[Tensor, Tensor]], num_prefix: int) -> None:
        self._pairs = pairs
        self._num_prefix = num_prefix

    def __len__(self) -> int:
        return self._num_prefix

    @classmethod
    def read(cls, cache: Any, model: PreTrainedModel, batch_size: int) -> "TunedPrefix":
        """Read what `cache`, given for a batch of `batch_size` rows, holds for the blocks of `model`.

        Raises:
            ConfigurationError: it is no prefix, or the model can't have one.
        """
        name = type(model).__name__
        config = text_config(model.config)
        layers = cache.layers if isinstance(cache, DynamicCache) else []
        if not any(layer.is_initialized for layer in layers):
            raise ConfigurationError(
                f"the keys and values live on the servers, so a {type(cache).__name__} can't be used as "
                "past_key_values; leave it out, or continue an inference_session()"
            )
        if is_encoder(config):
            raise ConfigurationError(f"{name} is an encoder, which keeps no keys and values: use peft's prompt tuning")
        if model.tuned_prompts is not None:
            raise ConfigurationError("tuning_mode and peft's prefix tuning don't go together")
        num_blocks = int(config.num_hidden_layers)
        num_owners = num_blocks - (getattr(config, "num_kv_shared_layers", 0) or 0)  # the others take theirs
        if any(type(layer) not in LAYERS for layer in DynamicCache(config=config).layers[:num_owners]):
            raise ConfigurationError(f"some blocks of {name} keep other things than keys and values: use peft's LoRA")
        if len(layers) < num_owners or not all(layer.is_initialized for layer in layers[:num_owners]):
            raise ConfigurationError(f"a prefix must have keys and values for each of the {num_blocks} blocks")
        num_prefix = max(layer.get_seq_length() for layer in layers[:num_owners])
        if not 1 <= num_prefix <= MAX_PROMPTS:
            raise ConfigurationError(f"a prefix may have 1 to {MAX_PROMPTS} positions, not {num_prefix}")
        pairs = [_pair(layer, batch_size, num_prefix) for layer in layers[:num_owners]]
        return cls(dict(enumerate(pairs)), num_prefix)

    def patches(self) -> Iterator[tuple[Patch, list[Tensor]]]:
        """The prefix as changes of blocks."""
        for block_idx, pair in self._pairs.items():
            shapes = tuple(tuple(tensor.shape) for tensor in pair)
            yield Patch(block=block_idx, path="", kind="prefix", shapes=shapes), list(pair)


def _pair(layer: Any, batch_size: int, num_prefix: int) -> tuple[Tensor, Tensor]:
    """The keys and values `[heads, prefix, head]` of one block."""
    pair: list[Tensor] = []
    for tensor in (layer.keys, layer.values):
        # What a sliding window has dropped already, no position behind the prefix will see.
        dropped = num_prefix - tensor.shape[-2] if isinstance(layer, DynamicSlidingWindowLayer) else 0
        if tensor.shape[0] != batch_size or layer.get_seq_length() != num_prefix:
            raise ConfigurationError(
                f"a prefix must be [batch, heads, positions, head size], of {batch_size} rows and {num_prefix} "
                f"positions in each block, not {list(tensor.shape)}"
            )
        if not torch.equal(tensor, tensor[:1].expand_as(tensor)) and bool(tensor.isfinite().all()):
            raise ConfigurationError("a prefix must be the same for all rows of a batch")
        pair.append(functional.pad(tensor[0], (0, 0, dropped, 0)) if dropped else tensor[0])
    return pair[0], pair[1]


def text_mask(mask: Tensor, num_prefix: int) -> Tensor:
    """A mask without the prefix's columns, which servers put back: `[batch, prefix + seq]` → `[batch, seq]` of 0 and 1.

    Raises:
        ConfigurationError: it isn't that.
    """
    if mask.ndim != 2 or not bool(mask[:, :num_prefix].all()):
        raise ConfigurationError(
            "behind a prefix, attention_mask must be [batch, prefix + seq], and see all of the prefix"
        )
    return (mask[:, num_prefix:] != 0).to(torch.int64)  # peft makes a mask of floats
