"""Notices to somebody who trains, once in the log: how it differs from training the whole model locally.

Called by `stack_forward` at each forward in train mode; knows the hollow blocks as they were before any adapter.
"""

import logging

from transformers import PreTrainedModel

from swarmllm.models.shell.hollow_adapters import BlockAdapters

logger = logging.getLogger(__name__)


class TrainingNotices:
    """One object per model."""

    def __init__(self, adapters: BlockAdapters) -> None:
        self._num_remote = adapters.blocks.num_tensors
        self._left_off = {} if adapters.own_dropout else adapters.rates
        self._told = False

    def tell(self, model: PreTrainedModel) -> None:
        """Log what holds for this model, unless it has been done."""
        if self._told:
            return
        self._told = True
        if self._left_off:
            logger.warning(
                "the blocks of an encoder-decoder compute without their dropout (%s) in training, too; set it to 0 to "
                "train a local model alike",
                ", ".join(f"{name}={rate:g}" for name, rate in sorted(self._left_off.items())),
            )
        own = [parameter for parameter in model.parameters() if parameter.numel()]
        if all(parameter.requires_grad for parameter in own):
            logger.warning(
                "this trains %d of %d tensors: the others belong to the blocks, which servers keep as they are; adapt "
                "those with peft, or freeze what shall not be trained with requires_grad_(False)",
                len(own),
                len(own) + self._num_remote,
            )
