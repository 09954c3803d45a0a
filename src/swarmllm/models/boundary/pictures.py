"""Inputs of a text model besides embeddings, in a model with vision: as tensors that travel, and back.

    masks of several kinds         a dict with a mask for each kind of block (Gemma 3: positions of a picture attend to
                                   each other) → `attention_mask` and `mask_kinds`
    values added between blocks    outputs of inner blocks of the tower, at the positions of pictures (Qwen3-VL: one
                                   list entry for each of the first blocks, Granite: a dict by block) → `deepstack`,
                                   `deepstack_mask` and `deepstack_at`

The names of arguments are read from the signature of the text model's forward. `shell/stack_forward` packs,
`span/block_span` unpacks.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BlockInputs

_DEEPSTACK, _MASKS = "deepstack", ("visual_pos_masks", "vision_mask")


@dataclass(frozen=True)
class DeepstackArguments:
    """The two arguments of a text model's forward for values that are added between its blocks."""

    features: str
    mask: str
    by_block: bool
    """True if the features are a dict by block, added before it; False if a list, added after each of the first
    blocks."""

    @classmethod
    def of(cls, stack: nn.Module) -> "DeepstackArguments | None":
        """The arguments that the forward of `stack` takes; None: it takes none."""
        parameters = inspect.signature(stack.forward).parameters
        features = next((name for name in parameters if name.startswith(_DEEPSTACK)), None)
        mask = next((name for name in _MASKS if name in parameters), None)
        if features is None or mask is None:
            return None
        return cls(features, mask, "dict" in str(parameters[features].annotation))

    def pack(self, kwargs: Mapping[str, Any], num_blocks: int) -> dict[str, Tensor]:
        """The tensors to send for these arguments; gradients flow to the arguments.

        Raises:
            ConfigurationError: something would be added after the last block, where no server does it.
        """
        features, mask = kwargs.get(self.features), kwargs.get(self.mask)
        if features is None or mask is None:
            return {}
        levels = features if isinstance(features, dict) else dict(enumerate(features))
        if not levels:
            return {}
        if max(levels) >= num_blocks - (not self.by_block):
            raise ConfigurationError(
                f"this model adds features of pictures after block {max(levels)} of {num_blocks}, where no server can"
            )
        where = mask if mask.ndim == 2 else mask[..., 0]
        first = next(iter(levels.values()))
        whole = first.new_zeros(*where.shape, len(levels), first.shape[-1])
        stacked = torch.stack([level.to(first) for level in levels.values()], dim=1)
        return {
            "deepstack": whole.masked_scatter(where[..., None, None], stacked),
            "deepstack_mask": mask if mask.ndim == 2 else mask[..., :1],
            "deepstack_at": torch.tensor(list(levels)),
        }

    def unpack(self, inputs: BlockInputs) -> dict[str, Any]:
        """The arguments again."""
        if inputs.deepstack is None or inputs.deepstack_mask is None or inputs.deepstack_at is None:
            return {}
        mask = inputs.deepstack_mask
        found = inputs.deepstack[mask if mask.ndim == 2 else mask[..., 0]]
        levels = {int(block): found[:, level] for level, block in enumerate(inputs.deepstack_at)}
        return {self.features: levels if self.by_block else list(levels.values()), self.mask: mask}


def mask_names(config: PreTrainedConfig) -> list[str]:
    """The kinds of blocks that have a mask of their own, as the text model's config names them."""
    return sorted({*(getattr(config, "layer_types", None) or ())})


def pack_masks(masks: Mapping[str, Tensor | None], config: PreTrainedConfig) -> dict[str, Tensor]:
    """The tensors to send for a dict of masks; a kind without a mask hides only later positions.

    Raises:
        ConfigurationError: a mask has another form.
    """
    names = mask_names(config)
    given = {name: mask for name, mask in masks.items() if mask is not None and name in names}
    if any(mask.ndim != 4 or mask.shape[1] != 1 for mask in given.values()):
        raise ConfigurationError("masks by kinds of blocks must be of [batch, 1, seq, past + seq] each")
    if not given:
        return {}
    kinds = torch.tensor([names.index(name) for name in given])
    return {"attention_mask": torch.cat(list(given.values()), dim=1), "mask_kinds": kinds}


def unpack_masks(inputs: BlockInputs, config: PreTrainedConfig, cache: Cache | None) -> Any:
    """The mask as the text model takes it: for each kind of block as wide as the keys that its blocks have."""
    mask = inputs.attention_mask
    if mask is None or mask.ndim != 4:
        return mask
    if mask.dtype == torch.bool and config._attn_implementation == "eager":
        smallest = torch.finfo(inputs.hidden_states.dtype).min
        mask = torch.zeros(mask.shape, dtype=inputs.hidden_states.dtype, device=mask.device).masked_fill(
            ~mask, smallest
        )
    if inputs.mask_kinds is None:
        return mask
    names, types = mask_names(config), list(config.layer_types)
    masks: dict[str, Tensor | None] = dict.fromkeys(names)
    for place, kind in enumerate(inputs.mask_kinds.tolist()):
        one = mask[:, place : place + 1]
        if cache is not None:
            length, offset = cache.get_mask_sizes(inputs.seq_len, types.index(names[kind]))
            one = one[..., offset : offset + length]
        masks[names[kind]] = one
    return masks
