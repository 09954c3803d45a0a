"""Notices to somebody who trains, once in the log: how it differs from training the whole model locally.

Called by `stack_forward` at each forward in train mode; knows the hollow blocks as they were before any adapter.
"""

import logging

from torch import nn
from transformers import PreTrainedModel

from swarmllm.models.shell.hollow_blocks import HollowBlocks

logger = logging.getLogger(__name__)


class TrainingNotices:
    """One object per model."""

    def __init__(self, blocks: HollowBlocks) -> None:
        self._num_remote = blocks.num_tensors
        self._dropout = _dropout(blocks)
        self._told = False

    def tell(self, model: PreTrainedModel) -> None:
        """Log what holds for this model, unless it has been done."""
        if self._told:
            return
        self._told = True
        if self._dropout:
            rates = ", ".join(f"{name}={rate:g}" for name, rate in sorted(self._dropout.items()))
            logger.warning(
                "the blocks compute without their dropout (%s) in training, too, because gradients are computed from "
                "the inputs again; set it to 0 to train a local model alike",
                rates,
            )
        own = [parameter for parameter in model.parameters() if parameter.numel()]
        if all(parameter.requires_grad for parameter in own):
            logger.warning(
                "this trains %d of %d tensors: the others belong to the blocks, which servers keep as they are; adapt "
                "those with peft, or freeze what shall not be trained with requires_grad_(False)",
                len(own),
                len(own) + self._num_remote,
            )


def _dropout(blocks: HollowBlocks) -> dict[str, float]:
    """The rates above 0, by the names of modules and attributes."""
    found: dict[str, float] = {}
    for path, module in blocks.named_modules():
        if isinstance(module, nn.Dropout):
            found[path.rpartition(".")[2]] = module.p
        found |= {name: rate for name, rate in vars(module).items() if "drop" in name and isinstance(rate, float)}
    return {name: rate for name, rate in found.items() if rate > 0}
