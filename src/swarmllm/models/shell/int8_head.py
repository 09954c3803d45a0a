"""The head with weights of 8 bits, for tokens that are only chosen: `ClientConfig(head="int8")`.

The head of a large vocabulary reads more memory for a token than a block does. `round_head` gives it a class that
multiplies by a copy with half of the bytes, in the format of servers with `--quant_type int8`. The head's own weight
stays as it is: embeddings may share it, checkpoints hold it, and training changes it. So forwards that record gradients
multiply by the head's own weight. The copy is made when it is first needed, and made again when the weight has changed.
Called by `client/distributed_model`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmllm.errors import ConfigurationError
from swarmllm.models.quantization.packed import Int8, Packed

SAMPLE = 64
"""At least so many weights are compared, because torch doesn't count all changes: peft merges adapters into
`weight.data`."""


class Int8Head(nn.Linear):
    """A linear layer that multiplies by a rounded copy of its weight where no gradients are recorded."""

    def forward(self, input: Tensor) -> Tensor:
        """`[…, hidden]` → `[…, vocabulary]`."""
        if torch.is_grad_enabled():
            return super().forward(input)
        return self._copy().linear(input, self.bias)

    def _copy(self) -> Packed:
        weight = self.weight
        count = 0 if weight.is_inference() else weight._version
        about = (weight.data_ptr(), count, weight.shape, weight.dtype, weight.device)
        sample = weight.detach().reshape(-1)[:: max(1, weight.numel() // SAMPLE)]
        known: tuple[Any, Tensor, Packed] | None = self.__dict__.get("copy")
        if known is None or known[0] != about or not torch.equal(known[1], sample):
            packed = Int8.quantize(weight.detach()).for_device(weight.device)
            # In __dict__, so that it is neither saved nor moved. Replaced as a whole: other threads may run the head.
            self.__dict__["copy"] = known = about, sample.clone(), packed
        return known[2]


def round_head(model: PreTrainedModel) -> None:
    """Let the head of the model multiply by weights of 8 bits.

    Raises:
        ConfigurationError: it has no head for tokens, or none that is a plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        kind = "no head for tokens" if head is None else f"a {type(head).__name__} for its head"
        raise ConfigurationError(f"head='int8' is for linear heads, and this model has {kind}: leave it out")
    head.__class__ = Int8Head
