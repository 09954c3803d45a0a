"""Heads for multi-token prediction, as checkpoints have them: an ordinary block after the last one, and its inputs.

DeepSeek-AI 2024 (DeepSeek-V3, section 2.2): the hidden state of a position and the embedding of the token after it,
each after a norm of its own, are joined and projected to one hidden state. A block of the model's own architecture and
a norm follow. Then the model's head predicts the token after the next. Checkpoints differ only in names, which are in
the one table below, and in the order in which the two are joined. Embeddings and head are the model's own, even if the
checkpoint repeats them.

`client/speculative_generation` loads it: `MtpWeights.checkpoint` is the same checkpoint of a model with one block more.
"""

import copy
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from swarmllm.models.architecture import blocks_class, find_blocks, text_config
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.skeleton import on_meta

BESIDE = "mtp.safetensors"
"""File for a head that was trained later: of unexpected tensors in other files transformers would complain."""
FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class MtpLayout:
    """The names of a head's tensors; `{}` stands for the number of the model's blocks."""

    block: str
    """Prefix of the block's tensors; the rest of their names is as in other blocks."""
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False
    """True if the hidden state comes before the embedding where they are joined."""


LAYOUTS = (
    MtpLayout(  # DeepSeek-V3, GLM-4.5 and others of transformers' `num_nextn_predict_layers`
        block="model.layers.{}.",
        token_norm="model.layers.{}.enorm.weight",
        hidden_norm="model.layers.{}.hnorm.weight",
        projection="model.layers.{}.eh_proj.weight",
        final_norm="model.layers.{}.shared_head.norm.weight",
    ),
    MtpLayout(  # Qwen3-Next, Qwen3.5
        block="mtp.layers.0.",
        token_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        projection="mtp.fc.weight",
        final_norm="mtp.norm.weight",
    ),
    MtpLayout(  # MiMo
        block="model.mtp_layers.0.",
        token_norm="model.mtp_layers.0.token_layernorm.weight",
        hidden_norm="model.mtp_layers.0.hidden_layernorm.weight",
        projection="model.mtp_layers.0.input_proj.weight",
        final_norm="model.mtp_layers.0.final_layernorm.weight",
        hidden_first=True,
    ),
)
"""A head with several blocks predicts several tokens; only its first block is used, again and again."""


@dataclass(frozen=True)
class MtpWeights:
    """A head of a checkpoint, not yet loaded."""

    checkpoint: Checkpoint
    """The checkpoint of the model with the head's block after its last one."""
    block_idx: int
    layout: MtpLayout
    """With the names as they are."""


def find_mtp_weights(checkpoint: Checkpoint) -> MtpWeights | None:
    """The head of a checkpoint, also if it is in a file of its own; None if there is none."""
    found = _layout_of(checkpoint)
    if found is None:
        more = checkpoint.with_file(BESIDE)
        found = None if more is None else _layout_of(more)
        if more is None or found is None:
            return None
        checkpoint = more
    config, block_idx = _with_one_more(checkpoint.config), checkpoint.num_blocks
    model = on_meta(blocks_class(config), config)
    blocks = find_blocks(model).blocks
    prefix = f"{next(name for name, part in model.named_modules() if part is blocks)}.{block_idx}."
    names = {
        prefix + name.removeprefix(found.block): name
        for name in checkpoint.weight_map()
        if name.startswith(found.block) and found.block != prefix
    }
    return MtpWeights(checkpoint.with_names(config, names), block_idx, found)


def _layout_of(checkpoint: Checkpoint) -> MtpLayout | None:
    if checkpoint.config.is_encoder_decoder:
        return None
    names = checkpoint.weight_map()
    for layout in LAYOUTS:
        filled: dict[str, Any] = {
            field: value.format(checkpoint.num_blocks) if isinstance(value, str) else value
            for field, value in vars(layout).items()
        }
        found = MtpLayout(**filled)
        if {found.token_norm, found.hidden_norm, found.projection, found.final_norm} <= names.keys():
            return found
    return None


def _with_one_more(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the model with one block more. Lists with an entry for each block repeat the last one. But a head's
    block attends to the whole text if some block does (Qwen3-Next mixes in blocks that don't)."""
    longer = copy.deepcopy(config)
    text = text_config(longer)
    count = int(text.num_hidden_layers)
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == count}
    text.num_hidden_layers = count + 1
    for name, value in lists.items():
        setattr(text, name, [*value, FULL_ATTENTION if FULL_ATTENTION in value else value[-1]])
    return longer
