"""The encoder of a model that hears, as servers have it: its blocks alone, one after the other.

Of sound, the client makes what enters the first block, and the padding that blocks shall not see. Between the blocks of
such an encoder nothing happens (`refused_architectures.HEARING`), so its own forward isn't needed for them.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

ROTATION = "rotary_emb"
"""What transformers calls the module that makes `position_embeddings`."""


def keep_blocks_alone(stack: PreTrainedModel, blocks: str) -> None:
    """Let the encoder's forward take embeddings and run the blocks, which it has under that name, on them."""
    for name, _ in list(stack.named_children()):
        if name not in (blocks, ROTATION):
            delattr(stack, name)
    cls = type(stack)
    taken = inspect.signature(getattr(stack, blocks)[0].forward).parameters

    def forward(self: PreTrainedModel, inputs_embeds: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        hidden = inputs_embeds
        given: dict[str, Any] = {
            "attention_mask": create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden, attention_mask=attention_mask
            )
        }
        if "position_embeddings" in taken:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            given |= {"position_ids": positions, "position_embeddings": getattr(self, ROTATION)(hidden, positions)}
        for block in getattr(self, blocks):
            hidden = block(hidden, **given)
        return hidden

    def get_input_embeddings(self: PreTrainedModel) -> nn.Module:
        found: nn.Module = self.embeddings
        return found

    def set_input_embeddings(self: PreTrainedModel, value: nn.Module) -> None:
        self.embeddings = value

    members = {"forward": forward, "__module__": cls.__module__}
    members |= {"get_input_embeddings": get_input_embeddings, "set_input_embeddings": set_input_embeddings}
    stack.__class__ = type(cls.__name__, cls.__bases__, members)  # which has nothing of what was deleted
