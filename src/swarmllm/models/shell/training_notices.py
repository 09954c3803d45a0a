"""Notices to somebody who trains, once in the log: how it differs from training the whole model locally.

Called by `stack_forward` at each forward in train mode; knows the hollow blocks as they were before any adapter.
"""

import logging

import torch
from transformers import PreTrainedModel

from swarmllm.models.adapters.block_adapter import AUTOCAST
from swarmllm.models.shell.hollow_adapters import BlockAdapters

logger = logging.getLogger(__name__)


class TrainingNotices:
    """One object per model."""

    def __init__(self, adapters: BlockAdapters) -> None:
        self._num_remote = adapters.blocks.num_tensors
        self._told = False

    def tell(self, model: PreTrainedModel) -> None:
        """Log what holds for this model, unless it has been done."""
        if self._told:
            return
        self._told = True
        device = model.device.type
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        if torch.is_autocast_enabled(device) and dtype not in AUTOCAST:
            logger.warning(
                "autocast to %s stays here: servers compute the blocks in their own dtype, so losses differ from a "
                "local model's by what %s rounds; with bfloat16 (bf16=True) they don't",
                dtype,
                dtype,
            )
        own = [parameter for parameter in model.parameters() if parameter.numel()]
        if all(parameter.requires_grad for parameter in own):
            logger.warning(
                "this trains %d of %d tensors: the others belong to the blocks, which servers keep as they are; adapt "
                "those with peft, or freeze what shall not be trained with requires_grad_(False). A trainer that needs "
                "a reference and is given none (DPO without peft) loads the whole model onto this machine: give it "
                "ref_model=, this model opened from the swarm a second time",
                len(own),
                len(own) + self._num_remote,
            )
